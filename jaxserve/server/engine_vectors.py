"""The Engine's methods for vectors of texts: encode, classify, rerank and score, and their async forms. SGLang's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxserve.server.engine_base import EngineBase
from jaxserve.server.native.encode import EncodeJob, pairs_of
from jaxserve.server.native.positions import encode_body
from jaxserve.server.native.replies import Reply
from jaxserve.server.requests import PromptOptions, RequestError, TextPair
from jaxserve.server.reranking import RerankJob, relevances
from jaxserve.server.scoring import ScoreResult, score_items
from jaxserve.server.vectors import ANY, SCORES, chars_of, pooled


class VectorMethods(EngineBase):
    def encode(self, prompt: Any = None, *others: Any, **fields: Any) -> Reply | list[Reply]:
        """What the model makes of a text, or of each of a list: {"embedding", "meta_info"}. `prompt` may also be a list of
        pairs of texts; `fields` are further fields of POST /encode (input_ids, dimensions, rid, ...); `others` some of them at
        SGLang's positions. Raises RequestError."""
        return self._call(self._encode(encode_body(prompt, others, fields), ANY))

    async def async_encode(self, prompt: Any = None, *others: Any, **fields: Any) -> Reply | list[Reply]:
        """As `encode`, from any event loop."""
        return await self._wait(self._encode(encode_body(prompt, others, fields), ANY))

    def classify(self, prompt: Any = None, **fields: Any) -> Reply | list[Reply]:
        """As `encode`, of a model that gives scores: they come as its head gives them."""
        return self._call(self._encode(encode_body(prompt, (), fields), SCORES))

    async def async_classify(self, prompt: Any = None, **fields: Any) -> Reply | list[Reply]:
        """As `classify`, from any event loop."""
        return await self._wait(self._encode(encode_body(prompt, (), fields), SCORES))

    def rerank(
        self, query: str | Sequence[Sequence[str]], documents: Sequence[str] | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        """How well documents answer a query, the best first: {"index", "relevance_score", "document"}. `fields`: top_n,
        instruct, raw_scores, truncate_prompt_tokens, lora_path, priority. With a list of pairs alone, as SGLang's: the score of
        each, in their order, as {"embedding"}. Raises RequestError."""
        return self._call(self._rerank(query, documents, **fields))

    async def async_rerank(
        self, query: str | Sequence[Sequence[str]], documents: Sequence[str] | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        """As `rerank`, from any event loop."""
        return await self._wait(self._rerank(query, documents, **fields))

    def score(
        self,
        query: str | list[int] | None = None,
        items: str | list[str] | list[list[int]] | None = None,
        label_token_ids: list[int] | list[list[int]] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        *,
        temperature: float = 1.0,
        return_token_logprobs: bool = False,
    ) -> ScoreResult:
        """The probabilities of `label_token_ids` behind the query and each of the items; of a model that gives scores, its
        labels' scores. `temperature`, with apply_softmax, divides the labels' logits; `return_token_logprobs` asks for the
        result's `token_logprobs`. Raises RequestError."""
        given = (query, items, label_token_ids, apply_softmax, item_first)
        return self._call(self._score(*given, temperature=temperature, return_token_logprobs=return_token_logprobs))

    async def async_score(
        self,
        query: str | list[int] | None = None,
        items: str | list[str] | list[list[int]] | None = None,
        label_token_ids: list[int] | list[list[int]] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        *,
        temperature: float = 1.0,
        return_token_logprobs: bool = False,
    ) -> ScoreResult:
        """As `score`, from any event loop."""
        given = (query, items, label_token_ids, apply_softmax, item_first)
        return await self._wait(self._score(*given, temperature=temperature, return_token_logprobs=return_token_logprobs))

    async def _encode(self, body: Mapping[str, Any], gives: Collection[str]) -> Reply | list[Reply]:
        manager = self._pipeline.manager
        job = EncodeJob.plan(body, manager.limits, self.server_args, gives)
        got = await pooled(manager.generate, job.req)
        return await manager.lanes.run(chars_of(got.num_numbers), lambda: job.shape(got))

    async def _rerank(
        self,
        query: str | Sequence[Sequence[str]],
        documents: Sequence[str] | None,
        *,
        top_n: int | None = None,
        instruct: str | None = None,
        raw_scores: bool = False,
        truncate_prompt_tokens: int | None = None,
        lora_path: str | None = None,
        priority: int | None = None,
    ) -> list[dict[str, Any]]:
        if documents is None:
            pairs = pairs_of(query, "query")
        elif isinstance(query, str):
            pairs = [TextPair(query, document) for document in documents]
        else:
            raise RequestError("query must be one text where documents are given.", param="query")
        if not pairs:
            raise RequestError("documents must hold at least one text.", param="documents")
        job = RerankJob(
            queries=[pair.first for pair in pairs] if documents is None else [pairs[0].first],
            documents=[pair.second for pair in pairs],
            instruct=instruct,
            is_raw=raw_scores,
            options=PromptOptions(lora_path=lora_path, priority=priority),
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        got = await relevances(self._pipeline.manager, job)
        values = got.values.tolist()
        if documents is None:
            return [{"embedding": value} for value in values]
        return [
            {"index": place, "relevance_score": values[place], "document": {"text": pairs[place].second}}
            for place in got.best(top_n)
        ]

    async def _score(
        self, query: Any, items: Any, label_token_ids: Any, apply_softmax: bool, item_first: bool, **fields: Any
    ) -> ScoreResult:
        return await score_items(
            self._pipeline.manager, query, items, label_token_ids, apply_softmax=apply_softmax, item_first=item_first, **fields
        )
