"""POST /v1/rerank, /v2/rerank and /rerank: documents in the order of how well they answer a query.

The form of Jina, Cohere and vLLM, which their clients read; with `texts` in place of `documents` that of
text-embeddings-inference, whose reply is a bare list.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.server.foreign_fields import OFF, ForeignFields
from jaxserve.server.http.block_response import BlockResponse
from jaxserve.server.http.body import read_struct, shown
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.embeddings import WITHOUT_EFFECT
from jaxserve.server.openai.params import ServedModel, adapters_of, check, served_model
from jaxserve.server.openai.protocol import Int32
from jaxserve.server.requests import PromptOptions, RequestError, new_rid
from jaxserve.server.reranking import Relevances, RerankJob, relevances
from jaxserve.server.routed_rank import rank_of_fields


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank, /v2/rerank and /rerank."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    model: str | None = None
    top_n: Int32 | None = None
    return_documents: bool = True
    # SGLang's extensions
    instruct: str | None = None
    priority: Int32 | None = None
    lora_path: str | None = None
    routed_dp_rank: Int32 | None = None
    data_parallel_rank: Int32 | None = None
    # vLLM's
    use_activation: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    # text-embeddings-inference's
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False


_RERANK = ForeignFields(
    {"rank_fields": OFF, "mm_processor_kwargs": OFF, "truncation_direction": ("Right", "right")},
    {
        **WITHOUT_EFFECT,
        "max_tokens_per_doc": "at how many tokens Cohere cuts documents; here truncate_prompt_tokens says it",
        "max_chunks_per_doc": "into how many parts Cohere cuts documents",
    },
)
router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(RerankRequest)


@router.post("/v1/rerank", response_class=Response, openapi_extra=json_body(RerankRequest))
@router.put("/v1/rerank", response_class=Response, include_in_schema=False)
@router.post("/v2/rerank", response_class=Response, openapi_extra=json_body(RerankRequest))
@router.post("/rerank", response_class=Response, openapi_extra=json_body(RerankRequest))
async def rerank(request: Request) -> Response:
    """Documents in the order of how well they answer a query."""
    context = context_of(request)
    body = await read_struct(request, _decoder, _RERANK)
    return BlockResponse(await unless_disconnected(request.receive, _reply(body, context)))


async def _reply(body: RerankRequest, context: OpenAIContext) -> list[bytes]:
    model = served_model(body.model, context.args, context.service.lora_adapters)
    documents, job = _job(body, model, context)
    got = await relevances(context.service, job)
    best = got.best(body.top_n or None)
    reply = _list(body, got, best) if body.texts is not None else _results(body, model.name, documents, got, best)
    return [msgspec.json.encode(reply)]


def _job(body: RerankRequest, model: ServedModel, context: OpenAIContext) -> tuple[list[str], RerankJob]:
    if (body.documents is None) == (body.texts is None):
        raise RequestError("Exactly one of documents and texts must be given.", param="documents")
    field = "documents" if body.texts is None else "texts"
    given = body.documents if body.texts is None else body.texts
    context.service.check_num_sequences(len(given or ()), 1)
    documents = [_text_of(document, field) for document in given or ()]
    check(bool(documents), field, "a list of at least one text", given)
    check(body.query != "", "query", "a text of at least one character", body.query)
    check("" not in documents, field, "texts of at least one character each", "")
    check(body.top_n is None or body.top_n >= 0, "top_n", "at least 0 (all)", body.top_n)
    return documents, RerankJob(
        queries=[body.query],
        documents=documents,
        instruct=body.instruct,
        is_raw=body.raw_scores or body.use_activation is False,
        options=PromptOptions(lora_path=adapters_of(body.lora_path, model, 1)[0], priority=body.priority),
        truncate_prompt_tokens=-1 if body.truncate else body.truncate_prompt_tokens,
        data_parallel_rank=rank_of_fields(body.routed_dp_rank, body.data_parallel_rank),
    )


def _text_of(document: str | dict[str, Any], field: str) -> str:
    if isinstance(document, dict):
        if document.keys() != {"text"} or not isinstance(document["text"], str):
            message = f"{field} must hold texts, or objects with a text and nothing else, got {shown(document)}."
            raise RequestError(message, param=field)
        return str(document["text"])
    return document


def _results(body: RerankRequest, model: str, documents: list[str], got: Relevances, best: list[int]) -> dict[str, Any]:
    values = got.values.tolist()
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": values[place]} for place in best]
    if body.return_documents:
        results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
    usage = {"prompt_tokens": got.prompt_tokens, "total_tokens": got.prompt_tokens}
    return {"id": f"rerank-{new_rid()}", "model": model, "usage": usage, "results": results}


def _list(body: RerankRequest, got: Relevances, best: list[int]) -> list[dict[str, Any]]:
    values, texts = got.values.tolist(), body.texts or []
    return [{"index": place, "score": values[place], **({"text": texts[place]} if body.return_text else {})} for place in best]
