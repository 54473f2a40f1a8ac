"""A file of requests to a file of replies: `python examples/batch_file.py requests.jsonl replies.jsonl [--url URL]`.

Lines are those of OpenAI's batch API:

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}
    {"custom_id": "1", "response": {"status_code": 200, "body": {...}}, "error": null}

Replies are written as they come, in any order. Run it again after an interruption: what has its reply is not asked again. A
refused request (4xx) is a reply, too; one that the server could not serve now (503, or no server) stops the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx


def answered(output: Path) -> set[str]:
    """The ids that have their reply. A line that an interruption left half written is cut off."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        output.write_bytes(whole)
    return {json.loads(line)["custom_id"] for line in whole.splitlines()}


async def work(client: httpx.AsyncClient, requests: Iterator[dict[str, Any]], output: TextIO) -> int:
    """Asks one request after the other until none is left; returns how many."""
    count = 0
    for request in requests:
        reply = await client.request(request.get("method", "POST"), request["url"], json=request["body"])
        if reply.status_code >= 500:
            sys.exit(f"The server answered {reply.status_code} to {request['custom_id']}: {reply.text}\nRun this again.")
        response = {"status_code": reply.status_code, "body": reply.json()}
        line = {"custom_id": request["custom_id"], "response": response, "error": None}
        output.write(json.dumps(line) + "\n")
        output.flush()
        count += 1
    return count


async def run(options: argparse.Namespace) -> None:
    done = answered(options.replies)
    lines = [json.loads(line) for line in options.requests.read_text().splitlines() if line.strip()]
    left = iter([request for request in lines if request["custom_id"] not in done])  # all workers take from it
    headers = {"Authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=None) as client:
        with options.replies.open("a") as output:
            counts = await asyncio.gather(*(work(client, left, output) for _ in range(options.at_once)))
    print(f"{sum(counts)} requests answered, {len(done)} had been before")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("replies", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="Without /v1: the lines have it.")
    parser.add_argument("--api-key", default="none", help="The server's --api-key, if it has one.")
    parser.add_argument("--at-once", type=int, default=32)
    options = parser.parse_args()
    try:
        asyncio.run(run(options))
    except httpx.ConnectError:
        sys.exit(f"No server answers at {options.url}. Start one with: jaxserve serve demo")


if __name__ == "__main__":
    main()
