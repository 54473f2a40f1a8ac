"""Scores: how likely the model finds each of some tokens behind a query and an item. No HTTP here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from jaxserve.server.requests import GenerateReqInput, GenerationChunk, PromptOptions, RequestError, raise_if_failed
from jaxserve.types import SamplingParams

# One greedy token, which nobody looks at: its place is where the labels' logprobs are asked for.
_SAMPLING = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class ScoreResult:
    scores: list[list[float]]  # of each item one for each label
    prompt_tokens: int


def score_request(
    query: str | list[int] | None,
    items: Any,  # a text, or a list of texts or of lists of token ids
    label_token_ids: list[int] | None,
    *,
    item_first: bool = False,
    lora_path: str | None = None,
) -> GenerateReqInput | None:
    """What to generate for the scores, with the LoRA adapter named; None if there is no item. Raises RequestError."""
    if query is None or items is None:
        missing = "query" if query is None else "items"
        raise RequestError(f"{missing} must be given.", param=missing)
    if not label_token_ids:
        raise RequestError("label_token_ids must hold at least one token.", param="label_token_ids")
    items = [items] if isinstance(items, str) else items
    is_text = isinstance(query, str)
    if any(isinstance(item, str) != is_text for item in items):
        raise RequestError("items must be texts if the query is one, else lists of token ids.", param="items")
    joined: list[Any] = [item + query if item_first else query + item for item in items]
    if not joined:
        return None
    options = PromptOptions(return_logprob=True, token_ids_logprob=tuple(label_token_ids), lora_path=lora_path)
    return GenerateReqInput(
        prompts=joined if is_text else None,
        input_ids=None if is_text else joined,
        sampling_params=[_SAMPLING] * len(joined),
        options=[options] * len(joined),
    )


async def score(
    generate: Callable[[GenerateReqInput], AsyncGenerator[GenerationChunk, None]],
    request: GenerateReqInput | None,
    *,
    apply_softmax: bool,
) -> ScoreResult:
    """The labels' probabilities at the end of each prompt; `apply_softmax`: among themselves."""
    if request is None:
        return ScoreResult([], 0)
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
