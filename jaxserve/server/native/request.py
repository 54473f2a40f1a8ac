"""SGLang's request object, as a Python dict, to a GenerateReqInput.

Shared by POST /generate and the Engine. Checks types and the names of fields; ranges and lengths are checked later, in
`jaxserve.server.request_checks`. Every failure is a RequestError naming the field.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.server.native.conversion import convert
from jaxserve.server.native.foreign_fields import GENERATE
from jaxserve.server.native.input_embeds import FIELD as EMBEDS
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError, expanded_rids
from jaxserve.server.routed_rank import FIELDS as RANK
from jaxserve.server.routed_rank import rank_of_fields
from jaxserve.types import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams, Thinking

_OPTIONS = {field.name: field for field in msgspec.structs.fields(PromptOptions)}
_SHOWN = ("return_text_in_logprobs", "return_prompt_token_ids")  # what shapes replies alone
_PROMPTS = ("text", "input_ids", EMBEDS)
_TRACE = "external_trace_header"
KNOWN_FIELDS = frozenset(
    {*_PROMPTS, "sampling_params", "rid", "stream", "require_reasoning", "custom_labels", _TRACE, *RANK, *_SHOWN, *_OPTIONS}
)
# Sampling fields for which null is a value of its own: "no limit" or "none".
_NULLABLE = frozenset({"max_new_tokens", "stream_interval", "sampling_seed"})
# Sampling fields that may be a single string.
_STRING_OR_LIST = ("stop", "stop_regex")
# Sampling fields that hold JSON, as a text or as it is.
_TEXT_OR_OBJECT = ("json_schema", "structural_tag")

_MOST_ENTRIES = {
    "stop": MAX_STOP_STRINGS,
    "stop_regex": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
}


@dataclasses.dataclass(frozen=True)
class NativeRequest:
    req: GenerateReqInput
    is_list: bool  # the reply is a list: several prompts, or n > 1
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool


def build_generate_request(
    body: Mapping[str, Any],
    preferred_sampling_params: str | None = None,
    thinking_end: str | None = None,
    check_num_prompts: Callable[[int], None] = lambda count: None,
) -> NativeRequest:
    """`preferred_sampling_params` is the option of that name: JSON with defaults for fields the request leaves out.
    `thinking_end` is the tag with which the model's thinking ends, if the server knows it.
    `check_num_prompts` may refuse the request before anything is done for each of its prompts. Embeddings come as GivenEmbeds
    (`with_embeds`)."""
    fields = {name: value for name, value in body.items() if value is not None}
    GENERATE.check(fields, KNOWN_FIELDS)
    _check_one_prompt(fields)
    given = fields.get(EMBEDS)
    prompts, input_ids, is_batch = (None, None, given.is_list) if given is not None else _prompts(fields)
    embeds = None if given is None else given.prompts
    count = len(next(some for some in (prompts, input_ids, embeds) if some is not None))
    check_num_prompts(count)
    defaults = json.loads(preferred_sampling_params) if preferred_sampling_params else {}
    params = _sampling_params(fields.get("sampling_params", {}), count, defaults)
    req = GenerateReqInput(
        prompts=prompts,
        input_ids=input_ids,
        input_embeds=embeds,
        sampling_params=params,
        rids=_rids(fields, count, is_batch),
        options=_options(fields, count),
        stream=convert(fields.get("stream", False), bool, "stream"),
        thinking=_thinking(fields, thinking_end),
        trace_headers=convert(fields[_TRACE], dict[str, str], _TRACE) if _TRACE in fields else None,
        data_parallel_rank=rank_of_fields(*(convert(fields.get(name), int | None, name) for name in RANK)),
        custom_labels=convert(fields.get("custom_labels"), dict[str, str] | None, "custom_labels"),
    )
    shown = {name: convert(fields.get(name, False), bool, name) for name in _SHOWN}
    if embeds is not None and shown["return_prompt_token_ids"]:
        raise RequestError("return_prompt_token_ids needs a prompt of tokens.", param="return_prompt_token_ids")
    return NativeRequest(req, is_list=is_batch or any(p.n > 1 for p in params), **shown)


def _thinking(fields: dict[str, Any], end: str | None) -> Thinking | None:
    """With require_reasoning the output begins with thinking, whether or not the prompt has opened it."""
    if not convert(fields.get("require_reasoning", False), bool, "require_reasoning"):
        return None
    if end is None:
        raise RequestError(
            "require_reasoning is not available: this server does not know how the model's thinking ends (--reasoning-parser).",
            param="require_reasoning",
        )
    return Thinking(begin=None, end=end)


def _check_one_prompt(fields: dict[str, Any]) -> None:
    if len(fields.keys() & set(_PROMPTS)) != 1:
        raise RequestError("Exactly one of text, input_ids and input_embeds must be given.", param="text")


def _prompts(fields: dict[str, Any]) -> tuple[list[str] | None, list[list[int]] | None, bool]:
    """Text prompts or token prompts, and whether they came as a list of prompts."""
    if "text" in fields:
        text = fields["text"]
        if isinstance(text, str):
            return [text], None, False
        return convert(text, str | list[str], "text"), None, True
    ids = fields["input_ids"]
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple | np.ndarray):
        rows = [row.tolist() if isinstance(row, np.ndarray) else row for row in ids]
        return None, convert(rows, list[list[int]], "input_ids"), True
    return None, [convert(ids, list[int], "input_ids")], False


def _rids(fields: dict[str, Any], count: int, is_batch: bool) -> list[str] | None:
    rid = fields.get("rid")
    return expanded_rids(rid if rid is None else convert(rid, str | list[str], "rid"), count, is_batch=is_batch)


def _sampling_params(given: Any, count: int, defaults: dict[str, Any]) -> list[SamplingParams]:
    """One per prompt. A list must have as many entries as there are prompts."""
    if isinstance(given, list | tuple):
        check_one_each("sampling_params", given, count)
        return [parse_sampling_params(entry, defaults) for entry in given]
    return [parse_sampling_params(given, defaults)] * count


def parse_sampling_params(given: Any, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """A dict of SGLang's sampling fields, on top of `defaults`."""
    if isinstance(given, SamplingParams):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise RequestError("sampling_params must be an object or a list of objects.", param="sampling_params")
    merged = {**(defaults or {}), **(given or {})}
    values = {name: value for name, value in merged.items() if value is not None or name in _NULLABLE}
    for name in _STRING_OR_LIST:
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    for name, most in _MOST_ENTRIES.items():  # before anything is done for each
        if isinstance(values.get(name), list | dict) and len(values[name]) > most:
            raise RequestError(f"{name} may hold at most {most} entries, got {len(values[name])}.", param=name)
    for name in _TEXT_OR_OBJECT:
        if isinstance(values.get(name), Mapping):
            values[name] = _json_text(values[name], name)
    return convert(values, SamplingParams, "sampling_params")


def _json_text(value: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply.", param=name) from None
    except TypeError as error:  # an Engine's caller may pass anything
        raise RequestError(f"{name} must be JSON: {error}.", param=name) from None


def _options(fields: dict[str, Any], count: int) -> list[PromptOptions]:
    """One per prompt; prompts that ask for the same share theirs."""
    columns = {name: _per_prompt(fields[name], name, count) for name in _OPTIONS if fields.get(name, {}) != {}}
    if not any(isinstance(column, list) for column in columns.values()):
        return [PromptOptions(**columns)] * count
    rows = zip(*(column if isinstance(column, list) else [column] * count for column in columns.values()), strict=True)
    shared: dict[PromptOptions, PromptOptions] = {}
    made = (PromptOptions(**dict(zip(columns, row, strict=True))) for row in rows)
    return [shared.setdefault(options, options) for options in made]


def _per_prompt(value: Any, name: str, count: int) -> Any:
    """The value for all prompts, or a list with one for each, where null is the default. A field whose values are lists
    themselves (as tuples in PromptOptions) is for all prompts unless it holds lists or nulls."""
    field = _OPTIONS[name]
    for_each = isinstance(value, list | tuple)
    if for_each and any(typing.get_origin(kind) is tuple for kind in (field.type, *typing.get_args(field.type))):
        for_each = any(entry is None or isinstance(entry, list | tuple) for entry in value)
    if not for_each:
        return convert(value, field.type, name)
    check_one_each(name, value, count)
    return [field.default if entry is None else convert(entry, field.type, name) for entry in value]


def check_one_each(name: str, entries: Sequence[Any], count: int) -> None:
    if len(entries) != count:
        raise RequestError(f"{name} must have one entry per prompt: got {len(entries)} for {count} prompts.", param=name)
