"""LangChain's ChatOpenAI against a jaxserve server: `python examples/langchain_chat.py [--url URL] [--api-key KEY]`.

Needs `pip install langchain-openai`. A prompt template in a chain, a stream, and a batch. Tools and `with_structured_output`
need what jaxserve does not serve yet (docs/sglang.md).
"""

from __future__ import annotations

import argparse
import sys

import openai
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

PROMPT = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])


def ask(model: ChatOpenAI) -> None:
    chain = PROMPT | model
    answer = chain.invoke({"country": "Japan"})
    print("invoke:", answer.text, f"[{answer.usage_metadata['output_tokens']} tokens]")
    print("stream: ", end="")
    for part in chain.stream({"country": "France"}):
        print(part.text, end="", flush=True)
    print()
    answers = chain.batch([{"country": country} for country in ("Italy", "Spain", "Norway")])
    print("batch:", [one.text for one in answers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none", help="The server's --api-key, if it has one.")
    parser.add_argument("--model", default="default", help='A name from /v1/models, or "default".')
    options = parser.parse_args()
    model = ChatOpenAI(
        base_url=options.url, api_key=options.api_key, model=options.model, temperature=0, max_tokens=64, stream_usage=True
    )
    try:
        ask(model)
    except openai.APIConnectionError:
        sys.exit(f"No server answers at {options.url}. Start one with: jaxserve serve demo")


if __name__ == "__main__":
    main()
