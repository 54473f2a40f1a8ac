"""PrefillItem: one request's part of a prefill step."""

from __future__ import annotations

import dataclasses

from jaxserve.scheduler.req import Req


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillItem:
    """The tokens [start, end) of a request's sequence, to be computed in this step."""

    req: Req
    row: int
    start: int
    end: int
    fill_len: int  # tokens to compute before the first (next) output token
    expected_len: int  # how long the sequence may become, as far as is planned for
    is_new: bool  # first step of a (re)admission

    @property
    def is_last(self) -> bool:
        return self.end == self.fill_len
