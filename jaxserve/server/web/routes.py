"""/playground, /dashboard and their files. None of them needs a key: what the pages ask for does."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from jaxserve.server.requests import RequestError
from jaxserve.server.web.files import file_response

router = APIRouter(include_in_schema=False)


@router.api_route("/playground", methods=["GET", "HEAD"])
async def playground(request: Request) -> Response:
    """Talk with the model."""
    return _found(request, "playground.html")


@router.api_route("/dashboard", methods=["GET", "HEAD"])
async def dashboard(request: Request) -> Response:
    """Watch the server work."""
    return _found(request, "dashboard.html")


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def web_file(request: Request, name: str) -> Response:
    """A script, style sheet or picture of the pages."""
    return _found(request, name)


# Their relative addresses count from the path without a slash.
@router.get("/playground/")
async def to_playground() -> Response:
    return RedirectResponse("../playground")


@router.get("/dashboard/")
async def to_dashboard() -> Response:
    return RedirectResponse("../dashboard")


def _found(request: Request, name: str) -> Response:
    reply = file_response(request, name)
    if reply is None:
        raise RequestError("There is no such file.", 404, "NotFoundError")
    return reply
