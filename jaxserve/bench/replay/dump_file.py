"""Reads the dumps that a server writes (`jaxserve.server.journal.dumps`): JSON lines, one sequence each.

The first line of a crash dump says why it was written.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

_PROMPTS = ("text", "input_ids")


class DumpFileError(Exception):
    """Not a dump; one sentence."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A sequence as it was asked for and answered."""

    line: int
    rid: str
    received_s: float  # Unix time
    body: dict[str, Any]  # for /generate; one sequence, whole
    text: str
    output_ids: list[int]
    finish: dict[str, Any] | None  # None: it had not ended, or its client left

    @property
    def is_determined(self) -> bool:
        """The same tokens are to be expected: greedy, or with a seed."""
        params = self.body["sampling_params"]
        return params.get("temperature", 1.0) == 0 or params.get("top_k") == 1 or params.get("sampling_seed") is not None


@dataclasses.dataclass(frozen=True)
class Dump:
    requests: list[Recorded]  # by the time they came
    reason: str | None  # of a crash dump
    left_out: int  # prompts of embeddings, of which a dump has only the size


def read_dump(path: str) -> Dump:
    """Raises DumpFileError, naming the line."""
    requests, reason, left_out = [], None, 0
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DumpFileError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DumpFileError(f"{path} is no dump: it is not UTF-8.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _json(path, number, line)
        if number == 1 and "reason" in entry and "request" not in entry:
            reason = str(entry["reason"])
        elif isinstance(entry.get("request"), dict) and "input_embeds" in entry["request"]:
            left_out += 1
        else:
            requests.append(_recorded(path, number, entry))
    if not requests and not left_out and reason is None:
        raise DumpFileError(f"{path} has no requests.")
    return Dump(sorted(requests, key=lambda request: request.received_s), reason, left_out)


def _json(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise DumpFileError(f"{path}, line {number} is no JSON object: dumps are files of lines of JSON.")
    return entry


def _recorded(path: str, number: int, entry: dict[str, Any]) -> Recorded:
    try:
        request, reply = entry["request"], entry["reply"]
        if sum(name in request for name in _PROMPTS) != 1:
            raise ValueError
        params = {**request.get("sampling_params", {}), "n": 1}
        finish = reply["meta_info"].get("finish_reason")
        if finish is not None and finish.get("type") == "abort" and finish.get("status_code") is None:
            finish = None  # somebody ended it
        return Recorded(
            line=number,
            rid=str(entry["rid"]),
            received_s=float(entry["received_s"]),
            body={**request, "sampling_params": params, "stream": False},
            text=str(reply["text"]),
            output_ids=list(reply["output_ids"]),
            finish=finish,
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DumpFileError(
            f"{path}, line {number} is not of a dump: it must have rid, received_s, request and reply."
        ) from error
