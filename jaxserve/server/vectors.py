"""Vectors of texts: the requests for them, and what replies make of them. No HTTP here.

    texts -> pooling_request -> scheduler -> pooled -> embeddings, probabilities -> reply

A step gives what pooling and the model's last layers make of a text. What is left is done here, in float32: an embedding is cut
to its first `dimensions` components, then made one of length 1 where the model's are (as Matryoshka embeddings want it); scores
become probabilities by the model's own function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from jaxserve.runner import Vectors
from jaxserve.server.requests import (
    GenerateReqInput,
    GenerationChunk,
    PromptOptions,
    RequestError,
    TextPair,
    raise_if_failed,
)
from jaxserve.types import SamplingParams

Generate = Callable[[GenerateReqInput], AsyncGenerator[GenerationChunk, None]]

# As many components of vectors take about as long to write as a character to tokenize.
_NUMBERS_PER_CHAR = 4
_BASE64_NUMBERS_PER_CHAR = 64

SCORES = ("scores", "token_scores")
ANY = ("embedding", *SCORES)

_SAMPLING = SamplingParams(max_new_tokens=0, temperature=0.0)
_LEAST_NORM = 1e-12  # as PyTorch's normalize has it


def pooling_request(
    *,
    texts: list[str] | None = None,
    pairs: list[TextPair] | None = None,
    input_ids: list[list[int]] | None = None,
    options: Sequence[PromptOptions] = (),
    **fields: Any,
) -> GenerateReqInput:
    """For the vectors of all of one kind of prompts. `options` of each; none: the defaults. `fields` of GenerateReqInput."""
    count = len(next(given for given in (texts, pairs, input_ids) if given is not None))
    return GenerateReqInput(
        prompts=texts,
        pairs=pairs,
        input_ids=input_ids,
        sampling_params=[_SAMPLING] * count,
        options=list(options),
        pools=True,
        **fields,
    )


def options_of(adapters: Sequence[str | None], **common: Any) -> list[PromptOptions]:
    """Of prompts, by the LoRA adapter that each runs with: prompts of one adapter share theirs."""
    shared = {adapter: PromptOptions(lora_path=adapter, **common) for adapter in dict.fromkeys(adapters)}
    return [shared[adapter] for adapter in adapters]


@dataclasses.dataclass(frozen=True)
class Pooled:
    """What came for the prompts of a request, in their order."""

    chunks: list[GenerationChunk]  # the last of each

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.prompt_tokens for chunk in self.chunks)

    @property
    def parts(self) -> list[np.ndarray]:
        """Of each prompt float32 [1, size], or [prompt_len, size] where tokens have a vector each."""
        return [chunk.pooled for chunk in self.chunks if chunk.pooled is not None]

    @property
    def num_numbers(self) -> int:
        return sum(part.size for part in self.parts)

    def matrix(self) -> np.ndarray:
        """Float32 [number of prompts, size], where each has one vector."""
        return np.concatenate(self.parts)


async def pooled(generate: Generate, req: GenerateReqInput) -> Pooled:
    """Raises RequestError if a vector did not come."""
    chunks: dict[int, GenerationChunk] = {}
    async with aclosing(generate(req)) as arriving:
        async for chunk in arriving:
            raise_if_failed(chunk)
            if chunk.finish_reason is not None:
                chunks[chunk.index] = chunk
    in_order = [chunks[index] for index in range(req.num_prompts)]
    for chunk in in_order:
        if chunk.pooled is None:
            assert chunk.finish_reason is not None
            raise RequestError(chunk.finish_reason.message or "The request was aborted.")
    return Pooled(in_order)


def chars_of(num_numbers: int, *, is_base64: bool = False) -> int:
    """How long they take to write, as TextLanes count: in characters to tokenize."""
    return num_numbers // (_BASE64_NUMBERS_PER_CHAR if is_base64 else _NUMBERS_PER_CHAR)


def check_of_texts(vectors: Vectors) -> None:
    if vectors.of_tokens:
        message = "This server's model makes a vector of each token, not of a text: POST /encode or /classify."
        raise RequestError(message, param="model")


def check_dimensions(dimensions: int | None, vectors: Vectors) -> None:
    if dimensions is None:
        return
    if vectors.gives != "embedding":
        raise RequestError("dimensions is of embeddings, and this server's model gives scores.", param="dimensions")
    if not 1 <= dimensions <= vectors.size:
        message = f"dimensions must be in [1, {vectors.size}], the size of the model's embeddings, got {dimensions}."
        raise RequestError(message, param="dimensions")


def finished(values: np.ndarray, vectors: Vectors, dimensions: int | None = None) -> np.ndarray:
    """Of embeddings what clients get of them, cut and then normalized; scores are left as they are. [n, size]"""
    if dimensions is not None:
        values = values[:, :dimensions]
    return normalized(values) if vectors.normalizes else values


def normalized(values: np.ndarray) -> np.ndarray:
    """Each row made one of length 1; one without a direction stays."""
    return values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), np.float32(_LEAST_NORM))


def probabilities(scores: np.ndarray, vectors: Vectors) -> np.ndarray:
    """Of each row's labels, by the model's own function; if it has none, the scores. [n, labels]"""
    if vectors.activation == "softmax":
        return softmax(scores)
    if vectors.activation == "sigmoid":
        return (0.5 * (1 + np.tanh(0.5 * scores))).astype(np.float32)
    return scores


def softmax(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Of each row, divided by `temperature` first. Float32 [n, labels]"""
    below = scores - scores.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):  # to -inf, at temperatures near 0
        weights = np.exp(below / np.float64(temperature))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), np.float32)


def cosines(query: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The cosine similarity of a vector and each of others, or of two equally many. Float32 [n]"""
    return np.asarray(np.sum(normalized(query) * normalized(others), axis=-1), np.float32)


def labels_of(vectors: Vectors) -> list[str]:
    return list(vectors.labels) or [f"LABEL_{index}" for index in range(vectors.size)]


def describe_vectors(vectors: Vectors | None) -> dict[str, Any] | None:
    """For whoever asks about the model."""
    if vectors is None:
        return None
    if vectors.gives == "embedding":
        return {"gives": vectors.gives, "size": vectors.size, "normalized": vectors.normalizes}
    return {"gives": vectors.gives, "labels": labels_of(vectors), "activation": vectors.activation}
