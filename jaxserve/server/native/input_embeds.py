"""`input_embeds`: prompts as embeddings, from JSON or from arrays.

There may be millions of numbers. What does not fit the model is refused before they are read; and JSON is read row by row, so
that in a thread it lets others run in between.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from jaxserve.server.native.conversion import convert, sentence
from jaxserve.server.request_checks import ModelLimits, fit_prompt
from jaxserve.server.requests import PromptEmbeds, RequestError

T = TypeVar("T")

FIELD = "input_embeds"

_RULE = "must be a list of rows of numbers, one row for each token, or a list of such lists"
_MAX_SHOWN_CHARS = 80
_OPENING = re.compile(rb"(?:\s*\[){0,3}")
_elements = msgspec.json.Decoder(list[msgspec.Raw])
_numbers = msgspec.json.Decoder(list[float])


@dataclasses.dataclass(frozen=True)
class GivenEmbeds:
    prompts: list[PromptEmbeds]
    is_list: bool  # they came as a list of prompts


def with_embeds(body: dict[str, Any], limits: Callable[[], ModelLimits]) -> dict[str, Any]:
    """The body with GivenEmbeds in place of its embeddings, if it has any."""
    if body.get(FIELD) is None:
        return body
    return {**body, FIELD: embeds_of(body[FIELD], limits())}


def embeds_of(value: Any, limits: ModelLimits) -> GivenEmbeds:
    """From lists, arrays, lists of arrays, or JSON (msgspec.Raw)."""
    depth = _depth(value)
    if depth < 2:
        raise RequestError(f"{FIELD} {_RULE}, got {_shown(value)}.", param=FIELD)
    if depth == 2:
        return GivenEmbeds([_prompt(value, FIELD, limits)], is_list=False)
    prompts = _parts(value, FIELD)
    limits.check_num_sequences(len(prompts), 1)
    return GivenEmbeds([_prompt(one, f"{FIELD}[{index}]", limits) for index, one in enumerate(prompts)], is_list=True)


def _depth(value: Any) -> int:
    """How many lists stand in each other, as far as that matters."""
    if isinstance(value, np.ndarray):
        return value.ndim
    if isinstance(value, msgspec.Raw):
        opening = _OPENING.match(value)
        return 0 if opening is None else opening.group().count(b"[")
    if isinstance(value, list | tuple):
        return 1 + (_depth(value[0]) if value else 0)
    return 0


def _prompt(value: Any, name: str, limits: ModelLimits) -> PromptEmbeds:
    rows: Any = value if isinstance(value, np.ndarray) and value.ndim == 2 else _parts(value, name)
    if not len(rows):
        raise RequestError(f"{name} is empty: a prompt must hold at least one embedding.", param=FIELD)
    rows = rows[: fit_prompt(len(rows), limits)]
    if isinstance(rows, np.ndarray):
        _check_width(rows.shape[1], name, limits)
        values = _as_floats(rows, name)
    else:
        values = np.empty((len(rows), limits.hidden_size), np.float32)
        with np.errstate(over="ignore"):  # found below
            for index, row in enumerate(rows):
                values[index] = _row(row, f"{name}[{index}]", limits)
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        wrong = values[row, column]
        raise RequestError(f"{name}[{row}][{column}] must be a finite number of float32, got {wrong}.", param=FIELD)
    return PromptEmbeds(values, hashlib.sha256(values.data).hexdigest())


def _parts(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, np.ndarray):
        return value  # type: ignore[return-value]
    return _decoded(_elements, value, name) if isinstance(value, msgspec.Raw) else convert(value, list[Any], name)


def _row(row: Any, name: str, limits: ModelLimits) -> Any:
    if isinstance(row, np.ndarray) and row.ndim == 1:
        numbers: Any = _as_floats(row, name)
    else:
        numbers = _decoded(_numbers, row, name) if isinstance(row, msgspec.Raw) else convert(row, list[float], name)
    _check_width(len(numbers), name, limits)
    return numbers


def _decoded(decoder: msgspec.json.Decoder[list[T]], raw: msgspec.Raw, name: str) -> list[T]:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise sentence(str(error), name) from None


def _check_width(width: int, name: str, limits: ModelLimits) -> None:
    if width != limits.hidden_size:
        message = f"{name} must have {limits.hidden_size} numbers for each token, the model's hidden size, got {width}."
        raise RequestError(message, param=FIELD)


def _as_floats(array: np.ndarray, name: str) -> np.ndarray:
    """float32, in one piece."""
    if array.dtype.kind not in "fiuV":  # V: bfloat16
        raise RequestError(f"{name} must hold numbers, got an array of {array.dtype}.", param=FIELD)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, np.float32)


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    text = bytes(value).decode() if isinstance(value, msgspec.Raw) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."
