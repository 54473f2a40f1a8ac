"""OpenAI's client against a jaxserve server: `python examples/openai_client.py [--url URL] [--api-key KEY] [--model NAME]`.

A chat answer, a streamed one, a completion with logprobs, and output that follows a JSON schema.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import openai

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def chat(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=64)
    print("chat:", reply.choices[0].message.content, f"[{reply.usage.completion_tokens} tokens]")


def stream(client: openai.OpenAI, model: str) -> None:
    print("stream: ", end="")
    chunks = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=64, stream=True)
    for chunk in chunks:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def complete(client: openai.OpenAI, model: str) -> None:
    reply = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=1)
    choice = reply.choices[0]
    print("completion:", repr(choice.text), [round(logprob, 2) for logprob in choice.logprobs.token_logprobs])


def constrained(client: openai.OpenAI) -> None:
    """`response_format` is not served yet; /generate, SGLang's own endpoint, takes json_schema, regex and ebnf."""
    sampling = {"temperature": 0, "max_new_tokens": 100, "json_schema": CITY}
    server = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    reply: Any = server.post("/generate", cast_to=object, body={"text": "The capital as JSON: ", "sampling_params": sampling})
    print("constrained:", json.loads(reply["text"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none", help="The server's --api-key, if it has one.")
    parser.add_argument("--model", default="default", help='A name from /v1/models, or "default".')
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key=options.api_key)
    try:
        chat(client, options.model)
        stream(client, options.model)
        complete(client, options.model)
        constrained(client)
    except openai.APIConnectionError:
        sys.exit(f"No server answers at {options.url}. Start one with: jaxserve serve demo")


if __name__ == "__main__":
    main()
