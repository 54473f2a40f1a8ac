"""POST /encode and POST /classify: SGLang's native requests for what a model makes of texts, and their replies.

    body -> EncodeJob -> GenerateReqInput -> vectors -> {"embedding", "meta_info"}, or a list of them

Both give an embedding or the scores as they are, whichever the model makes; /classify is for scores. No HTTP but the routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from jaxserve.config import ServerArgs
from jaxserve.runner import Vectors
from jaxserve.server.foreign_fields import OFF, ForeignFields
from jaxserve.server.http.block_response import BlockResponse
from jaxserve.server.http.body import read_json_object
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.service import service_of
from jaxserve.server.long_json import json_blocks, packed
from jaxserve.server.native.conversion import convert
from jaxserve.server.native.replies import Reply, meta_info
from jaxserve.server.native.request import check_one_each
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, RequestError, TextPair, expanded_rids
from jaxserve.server.routed_rank import rank_of_fields
from jaxserve.server.vectors import (
    ANY,
    SCORES,
    Pooled,
    chars_of,
    check_dimensions,
    finished,
    options_of,
    pooled,
    pooling_request,
)


class EncodeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /encode and POST /classify."""

    text: str | list[str | list[str]] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    dimensions: int | None = None
    priority: int | None = None
    lora_path: str | list[str | None] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    custom_labels: dict[str, str] | None = None
    external_trace_header: dict[str, str] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    truncate_prompt_tokens: int | None = None


_ENCODE = ForeignFields(
    dict.fromkeys(
        ("image_data", "video_data", "audio_data", "input_embeds", "embed_override_token_id", "embed_overrides",
         "positional_embed_overrides", "modalities", "lora_id", "background", "return_pooled_hidden_states"),
        OFF,
    ),
    {
        "sampling_params": "there is nothing to sample",
        "is_cross_encoder_request": "lists of two texts are pairs without it",
        "log_metrics": "what SGLang counts",
        "model": "for routers before the server, which serves one; requests in OpenAI's form have it checked",
        "routing_key": "for routers before the server",
    },
)  # fmt: skip
router = APIRouter(tags=["native"])
_FIELDS = {field.name: field for field in msgspec.structs.fields(EncodeRequest)}


@dataclasses.dataclass(frozen=True)
class EncodeJob:
    """A checked request, and all that shapes its reply."""

    req: GenerateReqInput
    vectors: Vectors
    is_list: bool  # the reply is a list
    dimensions: int | None
    weight_version: str

    @staticmethod
    def plan(given: Mapping[str, Any], limits: ModelLimits, args: ServerArgs, gives: Collection[str] = ANY) -> EncodeJob:
        """`gives`: what the model must make of texts. Raises RequestError."""
        body = _read(given)
        vectors = limits.check_vectors(gives)
        check_dimensions(body.dimensions, vectors)
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("Exactly one of text and input_ids must be given.", param="text")
        prompts, is_list = _prompts(body)
        count = len(next(iter(prompts.values())))
        limits.check_num_sequences(count, 1)
        adapters = body.lora_path if isinstance(body.lora_path, list) else [body.lora_path] * count
        check_one_each("lora_path", adapters, count)
        common = {"priority": body.priority, "extra_key": body.extra_key, "cache_salt": body.cache_salt}
        req = pooling_request(
            **prompts,
            rids=expanded_rids(body.rid, count, is_batch=is_list),
            options=options_of(adapters, **common),
            custom_labels=body.custom_labels,
            trace_headers=body.external_trace_header,
            data_parallel_rank=rank_of_fields(body.routed_dp_rank, body.data_parallel_rank),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        return EncodeJob(req, vectors, is_list, body.dimensions, args.weight_version)

    def shape(self, got: Pooled, pack: Callable[[Any], Any] = lambda value: value) -> Reply | list[Reply]:
        """`pack`: what becomes of a list of numbers."""
        parts = got.parts if self.vectors.of_tokens else [got.matrix()]
        values = [finished(part, self.vectors, self.dimensions) for part in parts]
        replies = [
            {"embedding": pack(value.tolist()), "meta_info": meta_info(chunk, self.weight_version)}
            for value, chunk in zip(values if self.vectors.of_tokens else values[0], got.chunks, strict=True)
        ]
        return replies if self.is_list else replies[0]


def _read(given: Mapping[str, Any]) -> EncodeRequest:
    fields = {name: _plain(value) for name, value in given.items() if value is not None}
    _ENCODE.check(fields, _FIELDS)
    values = {name: convert(fields[name], field.type, name) for name, field in _FIELDS.items() if name in fields}
    return EncodeRequest(**values)


def _plain(value: Any) -> Any:
    """What an Engine's caller may give as arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray):
        return [row.tolist() for row in value]
    return value


def _prompts(body: EncodeRequest) -> tuple[dict[str, Any], bool]:
    """(what `pooling_request` is given, whether it is a list of prompts)"""
    if body.input_ids is not None:
        if body.input_ids and isinstance(body.input_ids[0], list):
            return {"input_ids": convert(body.input_ids, list[list[int]], "input_ids")}, True
        return {"input_ids": [convert(body.input_ids, list[int], "input_ids")]}, False
    if isinstance(body.text, str):
        return {"texts": [body.text]}, False
    texts = body.text or []
    if not any(isinstance(text, list) for text in texts):
        return {"texts": texts}, True
    return {"pairs": pairs_of(texts, "text")}, True


def pairs_of(texts: Any, field: str) -> list[TextPair]:
    """Of lists of two texts each."""
    if not isinstance(texts, list | tuple) or not all(_is_pair(text) for text in texts):
        raise RequestError(f"{field} must hold pairs, each a list of two texts.", param=field)
    return [TextPair(*text) for text in texts]


def _is_pair(text: Any) -> bool:
    return isinstance(text, list | tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)


@router.post("/encode", response_class=Response, openapi_extra=json_body(EncodeRequest))
@router.put("/encode", response_class=Response, include_in_schema=False)
async def encode(request: Request) -> Response:
    """What the model makes of each text: an embedding, or scores."""
    return await _answer(request, ANY)


@router.post("/classify", response_class=Response, openapi_extra=json_body(EncodeRequest))
@router.put("/classify", response_class=Response, include_in_schema=False)
async def classify(request: Request) -> Response:
    """The scores of each text, as the model's head gives them: of reward models and classifiers."""
    return await _answer(request, SCORES)


async def _answer(request: Request, gives: Collection[str]) -> Response:
    service = service_of(request)
    body = await read_json_object(request)

    async def reply() -> list[bytes]:
        job = EncodeJob.plan(body, service.limits, request.app.state.args, gives)
        got = await pooled(service.generate, job.req)
        return await service.lanes.run(
            chars_of(got.num_numbers), lambda: json_blocks(job.shape(got, packed), is_long=len(got.chunks) > 1)
        )

    return BlockResponse(await unless_disconnected(request.receive, reply()))
