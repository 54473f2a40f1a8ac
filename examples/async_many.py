"""A hundred chat requests, so many at a time: `python examples/async_many.py [--url URL] [--requests 100] [--at-once 32]`.

The server batches what it has; a bound on this side keeps its queue short and this process's sockets few.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import openai


async def ask(client: openai.AsyncOpenAI, model: str, free: asyncio.Semaphore, number: int) -> int:
    """The number of tokens answered."""
    messages = [{"role": "user", "content": f"What comes after {number}?"}]
    async with free:
        reply = await client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32)
    return reply.usage.completion_tokens


async def ask_all(options: argparse.Namespace) -> None:
    free = asyncio.Semaphore(options.at_once)
    started_s = time.perf_counter()
    # The client retries what was refused with 503 (a full queue), each time after a longer pause.
    async with openai.AsyncOpenAI(base_url=options.url, api_key=options.api_key, max_retries=5) as client:
        tokens = await asyncio.gather(*(ask(client, options.model, free, i) for i in range(options.requests)))
    total_s = time.perf_counter() - started_s
    print(f"{len(tokens)} answers, {sum(tokens)} tokens in {total_s:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none", help="The server's --api-key, if it has one.")
    parser.add_argument("--model", default="default", help='A name from /v1/models, or "default".')
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=32)
    options = parser.parse_args()
    try:
        asyncio.run(ask_all(options))
    except openai.APIConnectionError:
        sys.exit(f"No server answers at {options.url}. Start one with: jaxserve serve demo")


if __name__ == "__main__":
    main()
