"""How much text one request may bring to a route that works on text alone."""

from __future__ import annotations

from jaxserve.server.http.service import GenerationService
from jaxserve.server.requests import RequestError

# Of one request. Tokenizing takes a hundred times a text's memory and a second for some megabytes.
_MOST_TOGETHER = 2 * 1024 * 1024


def most_together(service: GenerationService) -> int:
    """Characters, or tokens, of one request: enough for several prompts that fill the context."""
    return max(_MOST_TOGETHER, 8 * service.context_len)


def check_size(field: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{field} may hold at most {most} {what} in one request, got {count}.", param=field)
