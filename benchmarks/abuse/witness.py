"""A patient client beside the abuse: streams and short requests in turns, each timed.

    python -m benchmarks.abuse.witness PORT FILE

Runs in a process of its own until it is ended, and writes a line of JSON per request to FILE: when it was sent, its kind, its
outcome, the time to its first token and the gaps between its tokens, in seconds. Knows nothing of what goes on beside it.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import time
from typing import Any

_TIMEOUT_S = 120.0
_PAUSE_S = 0.05
_STREAM_TOKENS = 24


def observe(port: int, number: int) -> dict[str, Any]:
    """One request. ok: its reply was whole; if not, `outcome` says how it ended."""
    stream = number % 2 == 0
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": _STREAM_TOKENS if stream else 2}
    body = {
        "text": f"Number {number}: tell me about rivers.",
        "sampling_params": sampling,
        "stream": True,
        "rid": f"witness-{number}",
    }
    seen = {"at_s": time.time(), "kind": "stream" if stream else "short", "ok": False, "ttft_s": None, "gaps_s": []}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        seen["outcome"] = _read(connection, body, seen, sampling["max_new_tokens"])
        seen["ok"] = seen["outcome"] == "whole"
    except (OSError, http.client.HTTPException) as error:
        seen["outcome"] = type(error).__name__
    finally:
        connection.close()
    return {**seen, "ended_s": time.time()}


def _read(connection: http.client.HTTPConnection, body: dict[str, Any], seen: dict[str, Any], expected: int) -> str:
    last_s = time.perf_counter()
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        return f"{reply.status} {reply.read(200).decode(errors='replace')}"
    ended, tokens = "no [DONE]", 0
    while line := reply.readline():
        now_s = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            ended = "whole" if tokens == expected else f"{tokens} tokens"
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                return str(event["error"])[:200]
            meta = event["meta_info"]
            if (meta["finish_reason"] or {}).get("type") == "abort":
                return "aborted"
            tokens = meta["completion_tokens"]
            if seen["ttft_s"] is None:
                seen["ttft_s"] = now_s - last_s
            else:
                seen["gaps_s"].append(now_s - last_s)
            last_s = now_s
    return ended


def main() -> None:
    port, path = int(sys.argv[1]), sys.argv[2]
    with open(path, "a", buffering=1) as file:
        for number in itertools.count():
            file.write(json.dumps(observe(port, number)) + "\n")
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
