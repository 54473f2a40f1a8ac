"""Spans: names for what this process does, in a trace. While none is taken they are nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxserve.scheduler.batch import ScheduleBatch

_NOTHING = contextlib.nullcontext()


class Spans:
    def __init__(self, annotate: Callable[..., AbstractContextManager[Any]]) -> None:
        """`annotate`: as of the Runner."""
        self._annotate = annotate
        self.is_on = False

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        return self._annotate(name) if self.is_on else _NOTHING

    def launch(self, number: int, batch: ScheduleBatch) -> AbstractContextManager[Any]:
        """Of the `number`-th step since the start."""
        if not self.is_on:
            return _NOTHING
        tokens = len(batch.decode_rows) + batch.num_prefill_tokens
        return self._annotate(f"launch {kind_of(batch)}", step_num=number, rows=len(batch.rows), tokens=tokens)


def kind_of(batch: ScheduleBatch) -> str:
    if not batch.items:
        return "decode"
    return "mixed" if len(batch.decode_rows) else "prefill"
