"""Logprobs token by token, from a message's arrays: made when somebody reads them, since a prompt may have millions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.messages import InputLogprobs, TokenLogprobs
from jaxserve.server.requests import TokenLogprob


def logprobs_of_tokens(ids: Sequence[int], logprobs: TokenLogprobs) -> Iterator[TokenLogprob]:
    top_ids, top_logprobs, id_logprobs = logprobs.top_ids, logprobs.top_logprobs, logprobs.id_logprobs
    for i, (token, value) in enumerate(zip(ids, logprobs.logprobs.tolist(), strict=True)):
        entry = TokenLogprob(token, value, [])
        if top_ids is not None and top_logprobs is not None:
            entry.top = list(zip(top_ids[i].tolist(), top_logprobs[i].tolist(), strict=True))
        if id_logprobs is not None:
            entry.id_logprobs = id_logprobs[i].tolist()
        yield entry


def logprobs_of_prompt(logprobs: InputLogprobs | None) -> Iterator[TokenLogprob]:
    """The first token has none. An aborted request may have fewer than tokens."""
    if logprobs is None:
        return
    ids = logprobs.token_ids[: len(logprobs.logprobs.logprobs) + 1].tolist()
    if ids:
        yield TokenLogprob(ids[0], None, [])
        yield from logprobs_of_tokens(ids[1:], logprobs.logprobs)
