"""How much text one request may bring to a route that works on text alone, and what it is in tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxserve.server.http.service import GenerationService
from jaxserve.server.requests import RequestError

# Of one request. Tokenizing takes a hundred times a text's memory and a second for some megabytes.
_MOST_TOGETHER = 2 * 1024 * 1024
MOST_LISTS = 16384


def most_together(service: GenerationService) -> int:
    """Characters, or tokens, of one request: enough for several prompts that fill the context."""
    return max(_MOST_TOGETHER, 8 * service.context_len)


def check_size(field: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{field} may hold at most {most} {what} in one request, got {count}.", param=field)


async def encode_all(
    service: GenerationService, texts: Sequence[str], *, add_special_tokens: bool = True, field: str = "prompt"
) -> list[list[int]]:
    """The ids of each. Raises RequestError if there are too many."""
    num_chars = sum(map(len, texts))
    check_size(field, "texts", len(texts), MOST_LISTS)
    check_size(field, "characters", num_chars, most_together(service))
    encode = functools.partial(service.tokenizer.encode, add_special_tokens=add_special_tokens)
    return await service.lanes.run_all(num_chars, [functools.partial(encode, text) for text in texts])
