"""Scores of a query and its items. No HTTP here.

a model that generates   how likely it finds each of some tokens behind them
a model of scores        what it gives each of its labels
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError, TextPair, raise_if_failed
from jaxserve.server.tokenizer import TextTokenizer
from jaxserve.server.vectors import Generate, pooled, pooling_request, softmax
from jaxserve.types import SamplingParams

# One greedy token, which nobody looks at: its place is where the labels' logprobs are asked for.
_SAMPLING = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class ScoreResult:
    scores: list[list[float]]  # of each item one for each label
    prompt_tokens: int


class Scores(Protocol):
    """http.service.GenerationService is one."""

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def generate(self) -> Generate: ...


async def score_items(
    service: Scores,
    query: str | list[int] | None,
    items: Any,  # a text, or a list of texts or of lists of token ids
    label_token_ids: list[int] | None,
    *,
    apply_softmax: bool = False,
    item_first: bool = False,
    lora_path: str | None = None,
) -> ScoreResult:
    """Of each item one score for each label, with the LoRA adapter named. Raises RequestError."""
    if query is None or items is None:
        missing = "query" if query is None else "items"
        raise RequestError(f"{missing} must be given.", param=missing)
    items = [items] if isinstance(items, str) else items
    is_text = isinstance(query, str)
    if any(isinstance(item, str) != is_text for item in items):
        raise RequestError("items must be texts if the query is one, else lists of token ids.", param="items")
    pairs: list[tuple[Any, Any]] = [(item, query) if item_first else (query, item) for item in items]
    if label_token_ids is None and not service.limits.generates:
        return await _score_labels(service, pairs, PromptOptions(lora_path=lora_path), apply_softmax=apply_softmax)
    service.limits.check_generates()
    if not label_token_ids:
        raise RequestError("label_token_ids must hold at least one token.", param="label_token_ids")
    if not pairs:
        return ScoreResult([], 0)
    prompts = _joined(pairs)
    req = one_token_request(label_token_ids, PromptOptions(lora_path=lora_path), **prompts)
    return await score(service.generate, req, apply_softmax=apply_softmax)


async def _score_labels(
    service: Scores, pairs: list[tuple[Any, Any]], options: PromptOptions, *, apply_softmax: bool
) -> ScoreResult:
    """As the model gives them. A query and an item are a pair to models that read pairs, else one text."""
    service.limits.check_vectors(("scores",))
    if not pairs:
        return ScoreResult([], 0)
    prompts: dict[str, Any] = _joined(pairs)
    if "prompts" in prompts:
        separate = service.tokenizer.separates_pairs
        prompts = {"pairs": [TextPair(*pair) for pair in pairs]} if separate else {"texts": prompts["prompts"]}
    got = await pooled(service.generate, pooling_request(**prompts, options=[options] * len(pairs)))
    scores = got.matrix()
    return ScoreResult((softmax(scores) if apply_softmax else scores).tolist(), got.prompt_tokens)


def _joined(pairs: list[tuple[Any, Any]]) -> dict[str, list[Any]]:
    """As one prompt each."""
    return {"prompts" if isinstance(pairs[0][0], str) else "input_ids": [first + second for first, second in pairs]}


def one_token_request(label_token_ids: list[int], options: PromptOptions, **fields: Any) -> GenerateReqInput:
    """For the labels' logprobs behind each of the prompts among `fields`, those of GenerateReqInput."""
    options = msgspec.structs.replace(options, return_logprob=True, token_ids_logprob=tuple(label_token_ids))
    count = len(fields.get("prompts") or fields.get("input_ids") or ())
    return GenerateReqInput(**fields, sampling_params=[_SAMPLING] * count, options=[options] * count)


async def score(
    generate: Generate,
    request: GenerateReqInput,
    *,
    apply_softmax: bool,
) -> ScoreResult:
    """The labels' probabilities at the end of each prompt; `apply_softmax`: among themselves."""
    logprobs: dict[int, list[float]] = {}
    prompt_tokens: dict[int, int] = {}
    try:
        async with aclosing(generate(request)) as chunks:
            async for chunk in chunks:
                raise_if_failed(chunk)
                prompt_tokens[chunk.index] = chunk.prompt_tokens
                if chunk.logprobs:
                    logprobs[chunk.index] = chunk.logprobs[0].id_logprobs
    except RequestError as error:
        if error.param != "token_ids_logprob":
            raise
        message = error.message.replace(error.param, "label_token_ids")
        raise RequestError(message, param="label_token_ids") from None
    scores = [_probabilities(logprobs[index], among_themselves=apply_softmax) for index in range(request.num_prompts)]
    return ScoreResult(scores, sum(prompt_tokens.values()))


def _probabilities(logprobs: list[float], *, among_themselves: bool) -> list[float]:
    if not among_themselves:
        return [math.exp(logprob) for logprob in logprobs]
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
