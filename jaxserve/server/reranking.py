"""How well texts answer others, by whatever the model is. No HTTP here.

    a cross-encoder (scores of one label)   reads both together: its score, made a probability
    an embedding model                      reads each alone: the cosine similarity of their vectors
    a model that generates                  is asked for "yes" or "no", in the words of its chat template (Qwen3-Reranker)

A cross-encoder whose chat template is a reranker's is given its words, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.runner import Vectors
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError, TextPair
from jaxserve.server.scoring import one_token_request, score
from jaxserve.server.text_lanes import TextLanes
from jaxserve.server.tokenizer import TextTokenizer
from jaxserve.server.vectors import ANY, Generate, check_of_texts, cosines, finished, pooled, pooling_request, probabilities

ANSWERS = ("yes", "no")
# What the template of a reranker by chat holds, in small letters.
_MARKS = ("<document>", 'only be "yes" or "no"')


class Reranks(Protocol):
    """http.service.GenerationService is one."""

    @property
    def lanes(self) -> TextLanes: ...

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def generate(self) -> Generate: ...

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankJob:
    queries: Sequence[str]  # one for all documents, or one for each
    documents: Sequence[str]
    instruct: str | None = None  # to a model that is asked in words
    is_raw: bool = False  # a cross-encoder's score as it is
    options: PromptOptions = dataclasses.field(default_factory=PromptOptions)
    truncate_prompt_tokens: int | None = None
    data_parallel_rank: int | None = None

    @property
    def pairs(self) -> list[TextPair]:
        queries = [self.queries[0]] * len(self.documents) if len(self.queries) == 1 else self.queries
        return [TextPair(*pair) for pair in zip(queries, self.documents, strict=True)]

    def pooling(self, count: int, **prompts: Any) -> GenerateReqInput:
        return pooling_request(
            **prompts,
            options=[self.options] * count,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            data_parallel_rank=self.data_parallel_rank,
        )


@dataclasses.dataclass(frozen=True)
class Relevances:
    """Of documents, in their order."""

    values: np.ndarray  # float32 [n]
    prompt_tokens: int

    def best(self, count: int | None) -> list[int]:
        """The places of the most relevant documents, the best first; None: of all."""
        return np.argsort(-self.values, kind="stable")[:count].tolist()


async def relevances(service: Reranks, job: RerankJob) -> Relevances:
    """Raises RequestError, also if the model is none that reranks."""
    limits, is_asked = service.limits, asks_in_words(service.chat_template)
    if limits.generates and not is_asked:
        raise RequestError(
            "This server's model cannot rerank: it generates, and its chat template is not a reranker's, which asks for "
            '"yes" or "no" about a <Query> and a <Document> (--chat-template).',
            param="model",
        )
    if job.instruct is not None and not is_asked:
        raise RequestError("instruct is for models that are asked in words; this server's is not.", param="instruct")
    if is_asked and job.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens is not available: the documents stand in the middle of what the model is asked."
        raise RequestError(message, param="truncate_prompt_tokens")
    if limits.generates:
        return await _by_answers(service, job)
    vectors = limits.check_vectors(ANY)
    check_of_texts(vectors)
    if vectors.gives == "embedding":
        return await _by_embeddings(service, job, vectors)
    if vectors.size != 1:
        message = f"This server's model cannot rerank: it gives scores of {vectors.size} labels (POST /v1/classify), not one."
        raise RequestError(message, param="model")
    prompts: dict[str, Any] = {"input_ids": await _asked(service, job)} if is_asked else {"pairs": job.pairs}
    got = await pooled(service.generate, job.pooling(len(job.documents), **prompts))
    scores = got.matrix()
    return Relevances((scores if job.is_raw else probabilities(scores, vectors))[:, 0], got.prompt_tokens)


def asks_in_words(chat_template: str | None) -> bool:
    """The template is that of a reranker, not of conversations."""
    if chat_template is None:
        return False
    text = chat_template.replace("\\", "").lower()  # the quotes may stand in a quoted text
    return all(mark in text for mark in _MARKS)


async def _by_embeddings(service: Reranks, job: RerankJob, vectors: Vectors) -> Relevances:
    texts = [*job.queries, *job.documents]
    got = await pooled(service.generate, job.pooling(len(texts), texts=texts))
    values = finished(got.matrix(), vectors)
    return Relevances(cosines(values[: len(job.queries)], values[len(job.queries) :]), got.prompt_tokens)


async def _by_answers(service: Reranks, job: RerankJob) -> Relevances:
    """How likely yes is, of yes and no."""
    answers = [service.tokenizer.encode(word, add_special_tokens=False) for word in ANSWERS]
    if any(len(ids) != 1 for ids in answers):
        message = "This server's model cannot rerank: its tokenizer has no single tokens for yes and no."
        raise RequestError(message, param="model")
    req = one_token_request(
        [tuple(ids[0] for ids in answers)] * len(job.documents),
        job.options,
        input_ids=await _asked(service, job),
        data_parallel_rank=job.data_parallel_rank,
    )
    result = await score(service.generate, req, apply_softmax=True)
    return Relevances(np.array([of_yes for of_yes, _ in result.scores], np.float32), result.prompt_tokens)


async def _asked(service: Reranks, job: RerankJob) -> list[list[int]]:
    """Each pair in the words of the chat template. Templates find the texts by their roles or by their places, the instruction
    as a message or by its name."""
    given: dict[str, Any] = {} if job.instruct is None else {"instruct": job.instruct}
    instruction = [{"role": "system", "content": job.instruct}] if job.instruct is not None else []

    def ask(pair: TextPair) -> list[int]:
        texts = [{"role": "query", "content": pair.first}, {"role": "document", "content": pair.second}]
        return service.apply_chat_template([*texts, *instruction], **given)

    size = sum(len(pair.first) + len(pair.second) for pair in job.pairs)
    return await service.lanes.run_all(size, [functools.partial(ask, pair) for pair in job.pairs])
