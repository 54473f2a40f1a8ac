"""Front processes: who of them can answer a request, and where each process of the server listens for what others pass on.

With --tokenizer-worker-num above 1, front processes share the port, and each keeps what its own requests left behind. Whoever
finds that a request needs what another process has raises AnsweredElsewhere; `jaxserve.server.http.pass_on` does the rest.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path


class AnsweredElsewhere(Exception):  # noqa: N818 (not an error: an answer)
    """Another process can answer this request. May be raised until its response has begun."""

    def __init__(self, front: int | None) -> None:
        super().__init__(f"{name_of(front)} can answer this")
        self.front = front  # rank; None: the main process


@dataclasses.dataclass(frozen=True)
class Place:
    """A front process's own."""

    front: int  # its rank
    num_fronts: int
    folder: Path  # of the sockets; nobody else may enter it
    started_s: int  # Unix time at which the server started, the same in all

    def socket_of(self, front: int | None) -> Path:
        return http_socket(self.folder, front)


def http_socket(folder: Path, front: int | None) -> Path:
    """Where a process listens for HTTP from the others; None: the main process."""
    return folder / f"http-{'main' if front is None else front}.sock"


def name_of(front: int | None) -> str:
    return "the main process" if front is None else f"front process {front}"
