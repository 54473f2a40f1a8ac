"""From an exception to a reply, in the shape of the path's protocol (`jaxserve.server.http.envelopes`).

Routes raise RequestError (or let one pass through); the handlers here turn it into a reply. An unexpected exception becomes a
500 without its details, which go to the log.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxserve.server.http.envelopes import envelope_of
from jaxserve.server.requests import ERR_TYPES, RequestError

logger = logging.getLogger(__name__)

# The number nginx gave to "the client closed the connection"; nobody is left to read it.
CLIENT_CLOSED_REQUEST = 499


def internal_error() -> RequestError:
    return RequestError("Internal server error; the server's log says more.", 500, ERR_TYPES[500])


def error_response(path: str, error: RequestError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status_code == HTTPStatus.UNAUTHORIZED else None
    body = msgspec.json.encode(envelope_of(path).body(error))
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
