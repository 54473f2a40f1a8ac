"""Files with requests and their answers, as JSON lines, one sequence each.

    requests_<time>.jsonl     of --dump-requests-folder: every so many that have ended
    crash_<time>.jsonl        of --crash-dump-folder: what ran, and what ended in the last minutes before; its first line is why

Files are readable by their owner only and hold no keys. A disk that is nearly full gets none.
"""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.server.journal.record import Output, RequestRecord

logger = logging.getLogger(__name__)

_KEPT_S = 300.0
_KEPT_SIZE = 64 * 1024 * 1024  # characters and tokens
_LEAST_FREE_BYTES = 1 << 30

Entry = dict[str, Any]


def entry_of(record: RequestRecord, output: Output, ended_s: float | None = None) -> Entry:
    return {
        "rid": output.rid,
        "received_s": record.received_s,
        "ended_s": ended_s,
        "request": record.prompt_of(output),
        "reply": output.to_dict(),
    }


def _size_of(entry: Entry) -> int:
    request, reply = entry["request"], entry["reply"]
    return len(request.get("text", ())) + len(request.get("input_ids", ())) + len(reply["text"]) + len(reply["output_ids"])


class RecentRequests:
    """Those that ended in the last minutes, as many as fit."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Entry]] = deque()  # with their sizes
        self._size = 0

    def __iter__(self) -> Any:
        return (entry for _, entry in self._entries)

    def add(self, entry: Entry) -> None:
        size = _size_of(entry)
        self._entries.append((size, entry))
        self._size += size
        oldest_s = time.time() - _KEPT_S
        while self._entries and (self._size > _KEPT_SIZE or self._entries[0][1]["ended_s"] < oldest_s):
            self._size -= self._entries.popleft()[0]

    def clear(self) -> None:
        self._entries.clear()
        self._size = 0


class RequestDump:
    """Collects what ended and writes it, `threshold` at a time or when that much has been collected."""

    def __init__(self, folder: str, threshold: int) -> None:
        self.folder, self.threshold = folder, threshold
        self._entries: list[Entry] = []
        self._size = 0

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._size += _size_of(entry)
        if len(self._entries) >= self.threshold or self._size > _KEPT_SIZE:
            self.flush()

    def flush(self) -> None:
        entries, self._entries, self._size = self._entries, [], 0
        if entries:
            write(self.folder, "requests", entries)


def write(folder: str, kind: str, lines: Iterable[Any]) -> Path | None:
    """The file; None, and a log line, if it cannot be written."""
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    path = Path(folder, socket.gethostname(), f"{kind}_{now}_{os.getpid()}.jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < _LEAST_FREE_BYTES:
            logger.error("%s is not written: less than 1 GiB is free there.", path)
            return None
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for line in lines:
                file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:
        logger.error("%s cannot be written: %s.", path, error.strerror)
        return None
    return path
