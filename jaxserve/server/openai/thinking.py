"""The thinking of a model: what a request says of it, and how the message behind a prompt thinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers.base import ReasoningFormat
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.http.service import GenerationService
from jaxserve.server.openai.protocol import ChatCompletionRequest
from jaxserve.server.requests import RequestError
from jaxserve.types import Thinking

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# By so many last tokens of a prompt a format sees whether the answer begins inside thinking.
_TAIL_TOKENS = 64
# Of a message that is to be continued: its thinking may be long.
_CONTINUED_TAIL_TOKENS = 8192


def thinking_after(
    prompt_ids: list[int], service: GenerationService, reasoning: ReasoningFormat, *, continued: bool
) -> Thinking | None:
    """How the message after this prompt thinks; None: the prompt has ended its thinking."""
    tail = service.decode(prompt_ids[-(_CONTINUED_TAIL_TOKENS if continued else _TAIL_TOKENS) :], False)
    if reasoning.is_open(tail):
        return Thinking(None, reasoning.end)
    has_ended = tail.rstrip().endswith(reasoning.end.strip())
    return None if has_ended or reasoning.begin is None else Thinking(reasoning.begin, reasoning.end)


def wishes_of(body: ChatCompletionRequest) -> tuple[str | float | None, bool | None]:
    """How hard the model shall think, and whether it shall at all; None: the template decides. Raises RequestError."""
    given = _object(body.reasoning, "reasoning", ("effort", "reasoning_effort", "enabled", "enable"))
    kind = _object(body.thinking, "thinking", ("type",)).get("type")
    if kind not in (None, "enabled", "disabled"):
        raise _wrong("thinking.type", "enabled or disabled", kind)
    enabled = given.get("enabled", given.get("enable", None if kind is None else kind == "enabled"))
    if not isinstance(enabled, bool | None):
        raise _wrong("reasoning.enabled", "true or false", enabled)
    effort = given.get("effort", given.get("reasoning_effort", body.reasoning_effort))
    if effort is None:
        return None, enabled
    check_effort(effort)
    return effort, effort != "none"


def check_effort(effort: Any) -> None:
    is_number = isinstance(effort, int | float) and not isinstance(effort, bool)
    if not (effort in EFFORTS if isinstance(effort, str) else is_number and 0 <= effort <= 0.99):
        raise _wrong("reasoning_effort", f"one of {', '.join(EFFORTS)}, or a number in [0, 0.99]", effort)


def _object(value: dict[str, Any] | None, where: str, known: Sequence[str]) -> dict[str, Any]:
    given = {name: part for name, part in (value or {}).items() if part is not None}
    for name in given:
        if name not in known:
            raise not_supported(f"{where}.{name}")
    return given


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param=where.partition(".")[0])
