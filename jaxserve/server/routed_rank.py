"""Which replica a request asks for: by a header, or by a field of its body, under SGLang's newer or older name."""

from __future__ import annotations

import contextvars

from jaxserve.server.requests import RequestError

FIELDS = ("routed_dp_rank", "data_parallel_rank")
HEADER = "x-data-parallel-rank"
_MAX_DIGITS = 9

rank_header: contextvars.ContextVar[str | None] = contextvars.ContextVar("rank_header", default=None)  # as the client sent it


def rank_of_fields(routed_dp_rank: int | None, data_parallel_rank: int | None) -> int | None:
    """Raises RequestError if both are given and differ."""
    if routed_dp_rank is None or data_parallel_rank is None:
        return data_parallel_rank if routed_dp_rank is None else routed_dp_rank
    if routed_dp_rank != data_parallel_rank:
        raise RequestError(
            f"routed_dp_rank and data_parallel_rank mean the same and must not differ; got {routed_dp_rank} and "
            f"{data_parallel_rank}.",
            param="routed_dp_rank",
        )
    return routed_dp_rank


def rank_of_header() -> int | None:
    """Of the HTTP request that is being served, if there is one and it says so. Raises RequestError."""
    text = rank_header.get()
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):  # int() would also take "1_0" or " 1 "
        raise RequestError(f"The header {HEADER} must be a number of decimal digits, got {text[:40]!r}.", param=HEADER)
    return int(text)
