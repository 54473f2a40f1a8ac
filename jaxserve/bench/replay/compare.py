"""What differs between the answer of then and the answer of now.

Texts and tokens are compared where they follow from the request: greedy ones, and those with a seed, which hold on one machine
and build. Of others only whether they were answered at all. A request that had not ended is compared as far as it had come.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.bench.replay.dump_file import Recorded
from jaxserve.bench.replay.sending import Answer

STATUS, FINISH, TOKENS, TEXT = KINDS = ("status", "finish reason", "tokens", "text")
_SHOWN_CHARS = 40


@dataclasses.dataclass(frozen=True)
class Difference:
    kind: str
    sentence: str


def differences(recorded: Recorded, answer: Answer) -> list[Difference]:
    then = _status(recorded.finish)
    if then != answer.status or (answer.error and answer.status == 200):
        now = f"{answer.status or 'no answer'}" + (f" ({answer.error})" if answer.error else "")
        return [Difference(STATUS, f"{then} then, {now} now")]
    if answer.status != 200 or not recorded.is_determined:
        return []
    found = []
    had_ended = recorded.finish is not None
    if had_ended and _end(recorded.finish) != _end(answer.finish):
        found.append(Difference(FINISH, f"{_end(recorded.finish)} then, {_end(answer.finish)} now"))
    ids = list(answer.output_ids) if had_ended else list(answer.output_ids[: len(recorded.output_ids)])
    if ids != recorded.output_ids:
        at = _first_difference(recorded.output_ids, ids)
        found.append(
            Difference(TOKENS, f"from token {at} of {len(recorded.output_ids)} on: {_beside(recorded.output_ids, ids, at)}")
        )
    text = answer.text if had_ended else answer.text[: len(recorded.text)]
    if text != recorded.text:
        at = _first_difference(recorded.text, text)
        then_text, now_text = recorded.text[at:][:_SHOWN_CHARS], text[at:][:_SHOWN_CHARS]
        found.append(Difference(TEXT, f"from character {at} on: {then_text!r} then, {now_text!r} now"))
    return found


def _status(finish: dict[str, Any] | None) -> int:
    """What HTTP said of it; of what had not ended: what it would have said."""
    if finish is None or finish.get("type") != "abort":
        return 200
    return int(finish["status_code"])


def _end(finish: dict[str, Any] | None) -> str:
    if finish is None:
        return "none"
    matched = finish.get("matched")
    return str(finish.get("type")) + ("" if matched is None else f" at {matched!r}")


def _first_difference(then: Any, now: Any) -> int:
    return next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))


def _beside(then: list[int], now: list[int], at: int) -> str:
    return f"{then[at] if at < len(then) else 'the end'} then, {now[at] if at < len(now) else 'the end'} now"
