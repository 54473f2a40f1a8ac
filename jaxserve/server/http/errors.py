"""How an error looks on the wire, in each protocol's shape.

Routes raise RequestError (or let one pass through); the handlers here turn it into a reply: OpenAI's nested object, which its
clients read, next to SGLang's flat keys, which SGLang's clients read. An unexpected exception becomes a 500 without its
details, which go to the log.
"""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxserve.server.requests import ERR_TYPES, RequestError

logger = logging.getLogger(__name__)

# The number nginx gave to "the client closed the connection"; nobody is left to read it.
CLIENT_CLOSED_REQUEST = 499

# What a client sent is quoted in messages, in places uncut.
_MAX_MESSAGE_CHARS = 2000

# Behind the routes a request has SGLang's names; whoever called an OpenAI route used these.
_OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "text": "prompt",
}


def internal_error() -> RequestError:
    return RequestError("Internal server error; the server's log says more.", 500, ERR_TYPES[500])


def uses_openai_envelope(path: str) -> bool:
    return path.startswith("/v1/")


def error_body(path: str, error: RequestError) -> dict[str, Any]:
    message = error.message
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + "..."
    fields: dict[str, Any]
    if uses_openai_envelope(path):
        param = _OPENAI_NAMES.get(error.param or "", error.param)
        if param != error.param:
            message = re.sub(rf"\b{error.param}\b", str(param), message)
        code = error.code if error.code is not None else error.status_code
        fields = {"message": message, "type": error.err_type, "param": param, "code": code}
    else:
        fields = {"message": message, "type": error.err_type, "code": error.status_code}
    return {"object": "error", **fields, "error": fields}


def error_response(path: str, error: RequestError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status_code == HTTPStatus.UNAUTHORIZED else None
    body = msgspec.json.encode(error_body(path, error))
    return Response(body, status_code=error.status_code, media_type="application/json", headers=headers)


def as_request_error(error: BaseException) -> RequestError:
    """The RequestError to report for any exception of a route; unexpected ones are logged here, once."""
    if isinstance(error, RequestError):
        return error
    logger.error("A request failed unexpectedly.", exc_info=error)
    return internal_error()


def install_error_handlers(app: FastAPI) -> None:
    async def on_request_error(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, as_request_error(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"There is no endpoint {request.method} {request.url.path}.",
            405: f"{request.url.path} does not accept the method {request.method}.",
        }.get(error.status_code, str(error.detail))
        err_type = ERR_TYPES.get(error.status_code, "BadRequestError")
        response = error_response(request.url.path, RequestError(message, error.status_code, err_type))
        response.headers.update(error.headers or {})
        return response

    async def on_bad_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = str(first["loc"][-1])
        message = f"{field} is wrong: {first['msg']}, got {first['input']!r}."
        return error_response(request.url.path, RequestError(message, param=field))

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_bad_parameter)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(500, on_unexpected_error)


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    # Starlette raises the exception again after this reply, and uvicorn logs it: no logging here.
    return error_response(request.url.path, internal_error())
