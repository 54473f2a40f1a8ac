"""Whether the server lives and whether it takes requests: /, /health, /health_generate, /ready. None of them needs a key.

/health and /ready read a state and cost nothing; /health_generate proves the whole pipeline with one generated token, unless
the pipeline has just proven itself by serving somebody.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from jaxserve.server.http.service import service_of
from jaxserve.server.web import front_page

# How long /health_generate waits for a sign of life (SGLang's SGLANG_HEALTH_CHECK_TIMEOUT).
HEALTH_CHECK_TIMEOUT_S = 20.0

router = APIRouter(tags=["health"])


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def root(request: Request) -> Response:
    page = None if request.app.state.args.disable_web else front_page(request)
    return page or PlainTextResponse("jaxserve is running\n")


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the server works; 503 while it starts, drains or has failed."""
    status = service_of(request).status
    return PlainTextResponse(f"{status}\n", status_code=200 if status == "ready" else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 if new requests are served, else 503: also while generation is paused. Says what is still being compiled."""
    service = service_of(request)
    if service.status == "ready" and not service.is_ready:
        return PlainTextResponse("paused\n", status_code=503)
    if not service.is_ready:
        return PlainTextResponse(f"{service.status}\n", status_code=503)
    missing = service.num_programs_missing
    return PlainTextResponse(f"ready; {missing} programs are still being compiled\n" if missing else "ready\n")


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 if the pipeline generated something just now, else 503."""
    service = service_of(request)
    if service.status != "ready":
        return PlainTextResponse(f"{service.status}\n", status_code=503)
    if not await service.health_check(HEALTH_CHECK_TIMEOUT_S):
        return PlainTextResponse(f"no token came out within {HEALTH_CHECK_TIMEOUT_S:g} s\n", status_code=503)
    return PlainTextResponse("ready\n")
