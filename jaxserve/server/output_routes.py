"""Routes: which detokenizer makes the texts of a process's next request, and which processes may read them."""

from __future__ import annotations

import itertools

from jaxserve.config import ServerArgs
from jaxserve.messages import FRONT, Route, WorkerAddress


def fronts_of(args: ServerArgs) -> list[WorkerAddress]:
    """The front processes beside the main process."""
    return [WorkerAddress(FRONT, rank) for rank in range(args.tokenizer_worker_num) if args.tokenizer_worker_num > 1]


class Routes:
    """Of one front process, or of the main process (`front` None), which uses all detokenizers. Front processes share them out:
    each has one of its own, or several, as long as there are enough."""

    def __init__(self, front: int | None = None, num_fronts: int = 0, num_detokenizers: int = 1) -> None:
        if front is None:
            ranks = range(num_detokenizers)
        elif num_detokenizers <= num_fronts:
            ranks = range(front % num_detokenizers, num_detokenizers, num_detokenizers)
        else:
            ranks = range(front, num_detokenizers, num_fronts)
        self._in_turn = itertools.cycle([Route(rank, front) for rank in ranks])

    def next(self) -> Route:
        return next(self._in_turn)
