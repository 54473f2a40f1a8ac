"""POST /parse_function_call and /separate_reasoning: the parsers of messages, for a text that is whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from jaxserve.parsers.base import Parser, ReasoningFormat, ToolFormat
from jaxserve.parsers.message import MessageFormat
from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from jaxserve.parsers.reasoning import REASONING_FORMATS
from jaxserve.parsers.tools import TOOL_FORMATS
from jaxserve.server.http.body import read_struct, shown
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.service import GenerationService, service_of
from jaxserve.server.native.sizes import check_size, most_together
from jaxserve.server.requests import RequestError

router = APIRouter(tags=["parsers"])

_MOST_TOOLS = 4096


class ParseFunctionCallRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /parse_function_call."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: str | None = None


class SeparateReasoningRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /separate_reasoning."""

    text: str
    reasoning_parser: str | None = None
    return_blocks: bool = False


_calls_decoder = msgspec.json.Decoder(ParseFunctionCallRequest)
_reasoning_decoder = msgspec.json.Decoder(SeparateReasoningRequest)


@router.post("/parse_function_call", openapi_extra=json_body(ParseFunctionCallRequest))
async def parse_function_call(request: Request) -> dict[str, Any]:
    """A model's text to the calls in it, each with its tool's place among `tools`, and what else there is."""
    body, service = await read_struct(request, _calls_decoder), service_of(request)
    default = request.app.state.args.tool_call_parser
    tools: ToolFormat = _chosen("tool_call_parser", body.tool_call_parser, default, TOOL_FORMATS)
    places = {name: place for place, name in enumerate(_names(body.tools))}
    pieces = await _parsed(service, body.text, functools.partial(MessageFormat(tools=tools).parser, body.tools))
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case CallBegin(_, name):
                calls.append({"tool_index": places[name], "name": name, "parameters": ""})
            case CallArguments(call, text):
                calls[call]["parameters"] += text
    return {"normal_text": _joined(pieces, Content), "calls": calls}


@router.post("/separate_reasoning", openapi_extra=json_body(SeparateReasoningRequest))
async def separate_reasoning(request: Request) -> dict[str, Any]:
    """A model's text to its thinking and its answer."""
    body, service = await read_struct(request, _reasoning_decoder), service_of(request)
    default = request.app.state.args.reasoning_parser
    reasoning: ReasoningFormat = _chosen("reasoning_parser", body.reasoning_parser, default, REASONING_FORMATS)
    make = functools.partial(MessageFormat(reasoning=reasoning).parser, is_open=reasoning.is_open(""))
    pieces = await _parsed(service, body.text, make)
    reply: dict[str, Any] = {"reasoning_text": _joined(pieces, Reasoning), "text": _joined(pieces, Content)}
    if body.return_blocks:
        texts = [piece for piece in pieces if isinstance(piece, Reasoning | Content)]
        reply["reasoning_blocks"] = [piece.text for piece in texts if isinstance(piece, Reasoning)]
        reply["text_blocks"] = [piece.text for piece in texts if isinstance(piece, Content)]
        reply["blocks"] = [{"type": "reasoning" if isinstance(p, Reasoning) else "text", "text": p.text} for p in texts]
    return reply


def _chosen(field: str, name: str | None, default: str | None, formats: Mapping[str, Any]) -> Any:
    name = default if name is None else name
    if name is None:
        raise RequestError(f"{field} is required: the server was started without --{field.replace('_', '-')}.", param=field)
    if name not in formats:
        raise RequestError(f"{field} must be one of {', '.join(formats)}; got {shown(name)}.", param=field)
    return formats[name]


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    """Of tools that are what a parser takes."""
    check_size("tools", "functions", len(tools), _MOST_TOOLS)
    names = []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}].function must be an object with a name, got {shown(function)}.", param="tools")
        if not isinstance(parameters := function.get("parameters"), dict | None):
            where = f"tools[{i}].function.parameters"
            raise RequestError(f"{where} must be a JSON schema as an object, got {shown(parameters)}.", param="tools")
        names.append(function["name"])
    return names


async def _parsed(service: GenerationService, text: str, make: Callable[[], Parser]) -> list[Piece]:
    check_size("text", "characters", len(text), most_together(service))

    def parse() -> list[Piece]:
        parser = make()
        return parser.feed(text) + parser.finish()

    return await service.lanes.run(len(text), parse)


def _joined(pieces: Sequence[Piece], kind: type[Reasoning] | type[Content]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))
