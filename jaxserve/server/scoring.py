"""Scores of a query and its items. No HTTP here.

a model that generates   how likely it finds each of some tokens behind them
a model of scores        what it gives each of its labels
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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
    token_logprobs: list[list[float]] | None = None  # where asked for: of the labels, over the whole vocabulary


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
    label_token_ids: Sequence[int | Sequence[int]] | None,  # of all items, or a list for each
    *,
    apply_softmax: bool = False,
    item_first: bool = False,
    temperature: float = 1.0,
    return_token_logprobs: bool = False,
    lora_path: str | None = None,
) -> ScoreResult:
    """Of each item one score for each label, with the LoRA adapter named. `temperature` divides the labels' logits before
    `apply_softmax`. Raises RequestError."""
    if query is None or items is None:
        missing = "query" if query is None else "items"
        raise RequestError(f"{missing} must be given.", param=missing)
    if not 0 < temperature < math.inf:
        raise RequestError(f"temperature must be above 0 and finite, got {temperature}.", param="temperature")
    if temperature != 1 and not apply_softmax:
        raise RequestError("temperature needs apply_softmax: true.", param="temperature")
    items = [items] if isinstance(items, str) else items
    is_text = isinstance(query, str)
    if any(isinstance(item, str) != is_text for item in items):
        raise RequestError("items must be texts if the query is one, else lists of token ids.", param="items")
    pairs: list[tuple[Any, Any]] = [(item, query) if item_first else (query, item) for item in items]
    options = PromptOptions(lora_path=lora_path)
    if label_token_ids is None and not service.limits.generates:
        if return_token_logprobs:
            message = "return_token_logprobs needs a model that generates; this server's does not."
            raise RequestError(message, param="return_token_logprobs")
        return await _score_labels(service, pairs, options, apply_softmax=apply_softmax, temperature=temperature)
    service.limits.check_generates()
    labels = _labels_of_each(label_token_ids, len(pairs))
    if not pairs:
        return ScoreResult([], 0, [] if return_token_logprobs else None)
    req = one_token_request(labels, options, **_joined(pairs))
    return await score(
        service.generate,
        req,
        apply_softmax=apply_softmax,
        temperature=temperature,
        return_token_logprobs=return_token_logprobs,
    )


def _labels_of_each(label_token_ids: Any, num_items: int) -> list[tuple[int, ...]]:
    """Of each item. Raises RequestError."""

    def check(ok: bool, message: str) -> None:
        if not ok:
            raise RequestError(message, param="label_token_ids")

    check(bool(label_token_ids), "label_token_ids must hold at least one token.")
    num_lists = sum(isinstance(entry, list | tuple) for entry in label_token_ids)
    if not num_lists:
        return [tuple(label_token_ids)] * num_items
    check(num_lists == len(label_token_ids), "label_token_ids must not mix token ids and lists of token ids.")
    check(num_lists == num_items, f"label_token_ids must have one list per item: got {num_lists} for {num_items} items.")
    check(all(label_token_ids), "label_token_ids must hold at least one token for each item.")
    return [tuple(ids) for ids in label_token_ids]


async def _score_labels(
    service: Scores, pairs: list[tuple[Any, Any]], options: PromptOptions, *, apply_softmax: bool, temperature: float
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
    return ScoreResult((softmax(scores, temperature) if apply_softmax else scores).tolist(), got.prompt_tokens)


def _joined(pairs: list[tuple[Any, Any]]) -> dict[str, list[Any]]:
    """As one prompt each."""
    return {"prompts" if isinstance(pairs[0][0], str) else "input_ids": [first + second for first, second in pairs]}


def one_token_request(labels: list[tuple[int, ...]], options: PromptOptions, **fields: Any) -> GenerateReqInput:
    """For the logprobs of each prompt's labels behind it; the prompts are among `fields`, those of GenerateReqInput."""
    # By object, as hashing many labels for each of many prompts takes long: where all share one tuple, it is checked once.
    each = {id(ids): msgspec.structs.replace(options, return_logprob=True, token_ids_logprob=ids) for ids in labels}
    return GenerateReqInput(**fields, sampling_params=[_SAMPLING] * len(labels), options=[each[id(ids)] for ids in labels])


async def score(
    generate: Generate,
    request: GenerateReqInput,
    *,
    apply_softmax: bool,
    temperature: float = 1.0,
    return_token_logprobs: bool = False,
) -> ScoreResult:
    """The labels' probabilities at the end of each prompt; `apply_softmax`: among themselves, at a temperature."""
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
    in_order = [logprobs[index] for index in range(request.num_prompts)]
    if apply_softmax:
        scores = [_shares(of_prompt, temperature) for of_prompt in in_order]
    else:
        scores = [[math.exp(logprob) for logprob in of_prompt] for of_prompt in in_order]
    return ScoreResult(scores, sum(prompt_tokens.values()), in_order if return_token_logprobs else None)


def _shares(logprobs: list[float], temperature: float) -> list[float]:
    """Softmax among them: logprobs are logits less what all of them share."""
    largest = max(logprobs)
    weights = [math.exp((logprob - largest) / temperature) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
