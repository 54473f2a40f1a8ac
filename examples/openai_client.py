"""OpenAI's client against a jaxserve server: `python examples/openai_client.py [--url URL] [--api-key KEY] [--model NAME]`.

A chat answer, a streamed one, a completion with logprobs, an answer that follows a JSON schema, and a call of a tool.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import openai

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
PERSON_QUESTION = [{"role": "user", "content": "Extract name and age as JSON: Maria is 34 years old."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER_QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
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


def constrained(client: openai.OpenAI, model: str) -> None:
    """The answer matches a JSON schema."""
    asked: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    reply = client.chat.completions.create(model=model, messages=PERSON_QUESTION, max_tokens=100, response_format=asked)
    print("constrained:", json.loads(reply.choices[0].message.content or ""))


def call(client: openai.OpenAI, model: str) -> None:
    """A call of a tool that must come; whether to call can be left to the model with --tool-call-parser."""
    tool: Any = {"type": "function", "function": WEATHER}
    reply = client.chat.completions.create(
        model=model, messages=WEATHER_QUESTION, max_tokens=100, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    for wanted in reply.choices[0].message.tool_calls or []:
        if wanted.type == "function":
            print("call:", wanted.function.name, json.loads(wanted.function.arguments))


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
        constrained(client, options.model)
        call(client, options.model)
    except openai.APIConnectionError:
        sys.exit(f"No server answers at {options.url}. Start one with: jaxserve serve demo")


if __name__ == "__main__":
    main()
