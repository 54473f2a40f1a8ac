"""The engine without a server: `python examples/engine.py [--model MODEL]`.

A batch of prompts, a stream, output that follows a JSON schema, and many requests from asyncio; by default with the model that
comes with jaxserve.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from jaxserve import Engine

GREEDY = {"temperature": 0, "max_new_tokens": 24}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def batch(engine: Engine) -> None:
    """All prompts at once: the engine makes batches of them as rows become free."""
    prompts = ["The capital of France is", "The capital of Japan is", "1, 2, 3,"]
    for prompt, reply in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        print(f"{prompt!r} -> {reply['text']!r} ({reply['meta_info']['completion_tokens']} tokens)")


def stream(engine: Engine) -> None:
    """Each part holds the text so far; leaving the loop early would abort the request."""
    shown = ""
    for part in engine.generate("1, 2, 3,", GREEDY, stream=True):
        print(part["text"].removeprefix(shown), end="", flush=True)
        shown = part["text"]
    print()


def constrained(engine: Engine) -> None:
    reply = engine.generate("A person as JSON: ", {**GREEDY, "max_new_tokens": 100, "json_schema": PERSON})
    print("A person:", json.loads(reply["text"]))


async def many(engine: Engine, count: int) -> None:
    """Any number of coroutines may wait; the scheduler runs what fits."""
    replies = await asyncio.gather(*(engine.async_generate(f"{i}, {i + 1},", GREEDY) for i in range(count)))
    print(f"{len(replies)} replies from asyncio, {sum(r['meta_info']['completion_tokens'] for r in replies)} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="A folder, a name on the Hugging Face Hub, or demo.")
    options = parser.parse_args()
    with Engine(model_path=options.model) as engine:
        batch(engine)
        stream(engine)
        constrained(engine)
        asyncio.run(many(engine, 50))


if __name__ == "__main__":  # the engine starts processes, which import this file again on some platforms
    main()
