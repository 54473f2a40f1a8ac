"""From an OpenAI request's fields to SamplingParams and a model name that exists, in OpenAI's vocabulary of errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from jaxserve.config import ServerArgs
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.openai.protocol import OpenAIRequest
from jaxserve.server.requests import RequestError
from jaxserve.types import MAX_LOGIT_BIAS, Grammar, SamplingParams

# OpenAI's limit; each sample is a sequence of its own in the scheduler.
MAX_CHOICES = 128
# The name SGLang's clients send when they do not care.
DEFAULT_MODEL_NAME = "default"


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What a request asks for as `model`: the base model, or a LoRA adapter on top of it."""

    name: str  # as replies show it
    adapter: str | None = None


def served_model(name: str | None, args: ServerArgs, adapters: Mapping[str, str]) -> ServedModel:
    """`adapters` are those that are loaded. One is named alone, or behind the base model and a colon, of which the base model's
    own name may have some. Raises RequestError for any other name."""
    base = args.effective_served_model_name
    base_names = ("", DEFAULT_MODEL_NAME, base, args.model_path)
    if name is None or name in base_names:
        return ServedModel(base)
    for prefix in base_names:
        adapter = name.removeprefix(f"{prefix}:")
        if adapter != name and adapter in adapters:
            return ServedModel(name, adapter)
    if name in adapters:
        return ServedModel(name, name)
    message = f"model {shown(name)} does not exist; this server serves {shown(base)}."
    if adapters:
        message = f"{message[:-1]}, and adapters: {shown(', '.join(adapters))}."
    raise RequestError(message, 404, "NotFoundError", param="model", code="model_not_found")


def adapters_of(lora_path: str | list[str | None] | None, model: ServedModel, num_prompts: int) -> list[str | None]:
    """Of each prompt the LoRA adapter that it runs with, as `model` or `lora_path` names it; None: none."""
    given = lora_path if isinstance(lora_path, list) else [lora_path] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"lora_path must have one entry per prompt: got {len(given)} for {num_prompts} prompts.", param="lora_path"
        )
    if model.adapter is None:
        return given
    other = next((path for path in given if path and path != model.adapter), None)
    if other is not None:
        message = f"lora_path is {shown(other)}, but model names the adapter {shown(model.adapter)}; give one of them."
        raise RequestError(message, param="lora_path")
    return [model.adapter] * num_prompts


def count_prompts(prompt: str | list[Any]) -> int:
    """Of what `texts_or_ids` takes. Cheap."""
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if is_batch else 1


def texts_or_ids(prompt: str | list[Any], field: str) -> tuple[list[str] | None, list[list[int]] | None]:
    """(texts, None) or (None, token ids), one entry per prompt."""
    if isinstance(prompt, str):
        return [prompt], None
    check(bool(prompt), field, "a string, a list of strings, token ids, or lists of token ids", prompt)
    kinds = {type(item) for item in prompt}
    if kinds == {str}:
        return cast(list[str], prompt), None
    if kinds == {int}:
        return None, [cast(list[int], prompt)]
    if kinds == {list}:
        return None, cast(list[list[int]], prompt)
    raise RequestError(f"{field} must not mix strings, token ids and lists of token ids.", param=field)


def check(ok: bool, field: str, rule: str, value: Any) -> None:
    if not ok:
        raise RequestError(f"{field} must be {rule}, got {shown(value)}.", param=field)


def check_stream_options(request: OpenAIRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise RequestError("stream_options needs stream: true.", param="stream_options")
    if options.include_obfuscation:
        raise not_supported("stream_options.include_obfuscation")


def rid_of(request: OpenAIRequest) -> str | None:
    check(request.rid != "", "rid", "a string of at least one character", request.rid)
    if isinstance(request.rid, list):
        check(len(request.rid) == 1, "rid", "one string here", request.rid)
        return request.rid[0]
    return request.rid


def sampling_params(
    request: OpenAIRequest,
    max_new_tokens: int | None,
    defaults: Mapping[str, Any],
    vocab_size: int,
    *,
    grammar: Grammar | None = None,
    keep_special_tokens: bool = False,
) -> SamplingParams:
    """Verified SamplingParams; what the request leaves out comes from `defaults`, then from SamplingParams. `grammar`: what the
    output must match, as far as the request says so and what follows from it. `keep_special_tokens`, whatever it says."""
    n = request.num_choices
    check(1 <= n <= MAX_CHOICES, "n", f"in [1, {MAX_CHOICES}]", n)
    min_tokens = request.min_tokens or 0
    most = "max_tokens" if max_new_tokens is None else f"max_tokens={max_new_tokens}"
    check(0 <= min_tokens <= (max_new_tokens or min_tokens), "min_tokens", f"in [0, {most}]", min_tokens)
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "stop": _as_list(request.stop),
        "stop_token_ids": request.stop_token_ids,
        "stop_regex": _as_list(request.stop_regex),
        "no_stop_trim": request.no_stop_trim,
        "ignore_eos": request.ignore_eos,
        "skip_special_tokens": False if keep_special_tokens else request.skip_special_tokens,
        "spaces_between_special_tokens": request.spaces_between_special_tokens,
        "sampling_seed": request.seed,
        "custom_params": request.custom_params,
        "logit_bias": None if request.logit_bias is None else _token_biases(request.logit_bias),
    }
    if grammar is not None:
        given[grammar.kind] = grammar.text
    given = {name: value for name, value in given.items() if value is not None}
    params = SamplingParams(
        **{**defaults, **given, "n": request.num_samples, "max_new_tokens": max_new_tokens, "min_new_tokens": min_tokens}
    )
    try:
        params.verify(vocab_size)
    except ValueError as error:
        message = str(error)  # begins with the field's name
        field = message.partition(" ")[0]
        raise RequestError(message, param=field if field in given else None) from None
    return params


def _as_list(value: str | list[str] | None) -> list[str] | None:
    return [value] if isinstance(value, str) else value


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    if len(biases) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, got {len(biases)}.", param="logit_bias")
    by_token = {}
    for key, bias in biases.items():
        # int() would also take "1_0" or " 1 ".
        check(key.isascii() and key.isdecimal() and len(key) < 12, "logit_bias", "an object whose keys are token ids", key)
        by_token[int(key)] = bias
    return by_token
