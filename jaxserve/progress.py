"""Progress on stderr: a bar that is redrawn on a terminal, elsewhere a log line now and then, so that files get no `\\r`.

A worker's stderr is a pipe that the main process copies. Whether that ends in a terminal, a worker is told by its environment
(`for_workers`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from tqdm import tqdm

logger = logging.getLogger(__name__)

# Width of the terminal that the main process's stderr is, 0 if it is none.
_COLUMNS_VARIABLE = "JAXSERVE_TERMINAL_COLUMNS"
_USUAL_COLUMNS = 80
# Read by tqdm, for bars that are not ours.
_NO_BARS_VARIABLE = "TQDM_DISABLE"
# Without a speed: programs differ too much.
_COUNTED = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}s [{elapsed}<{remaining}]"
_LINE_EVERY_S = 5.0
# Clears a bar that another process has drawn, before a line is written.
CLEAR_LINE = "\r\x1b[K"


class Progress(Protocol):
    """A context manager; `update` may be called from any thread."""

    def update(self, n: int = 1) -> object: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...


def progress_bar(total: int, doing: str, unit: str, *, show: bool = True) -> Progress:
    """Of `total` units ("program", or "B" for bytes)."""
    columns = terminal_columns()
    if not show or columns is None:
        return _LogLines(total, doing, logger if show else None)
    layout = {"unit": "B", "unit_scale": True} if unit == "B" else {"unit": unit, "bar_format": _COUNTED}
    bar: Progress = tqdm(total=total, desc=doing, ncols=columns - 1, leave=False, file=sys.stderr, **layout)
    return bar


class _LogLines:
    """Says how far it is every few seconds, and nothing of what takes less."""

    def __init__(self, total: int, doing: str, logger: logging.Logger | None) -> None:
        self._total, self._doing, self._logger = total, doing, logger
        self._done = 0
        self._started_s = self._said_s = time.monotonic()
        self._lock = threading.Lock()

    def update(self, n: int = 1) -> None:
        with self._lock:
            self._done += n
            now_s = time.monotonic()
            if self._logger is None or now_s - self._said_s < _LINE_EVERY_S:
                return
            self._said_s = now_s
            percent, took_s = 100 * self._done // max(self._total, 1), now_s - self._started_s
            self._logger.info("%s: %d %% after %.0f s", self._doing, percent, took_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def terminal_columns() -> int | None:
    """Width of the terminal that stderr ends in; None: what is written there may end up in a file."""
    told = os.environ.get(_COLUMNS_VARIABLE, "")
    if told.isdecimal():
        return int(told) or None
    if os.environ.get("TERM") == "dumb" or not sys.stderr.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS


def for_workers() -> Mapping[str, str]:
    """What a worker whose output this process copies to its stderr has to find in its environment."""
    columns = terminal_columns()
    return {_COLUMNS_VARIABLE: str(columns)} if columns else {_COLUMNS_VARIABLE: "0", _NO_BARS_VARIABLE: "1"}
