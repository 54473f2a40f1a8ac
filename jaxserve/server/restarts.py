"""Restarts: what becomes of a replica whose process has died. The others serve on; with --restart-workers it comes back.

    died -> (wait) -> new process -> ready -> told what the others were told -> one token -> serves
                          `-> died again: the same, after a longer wait

A detokenizer that dies, or the last scheduler if none is to be started again, ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from jaxserve.messages import SCHEDULER, WorkerAddress
from jaxserve.server.logs import log_lines
from jaxserve.server.requests import RequestError
from jaxserve.server.tokenizer_manager import TokenizerManager
from jaxserve.server.worker import WorkerDiedError
from jaxserve.server.workers import WorkerGroup

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
# One that served for so long has recovered: it is started again at once if it dies.
STABLE_S = 60.0


class Restarts:
    def __init__(
        self, workers: WorkerGroup, manager: TokenizerManager, *, is_on: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers = workers
        self._manager = manager
        self._is_on = is_on
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by rank: what brings it back
        self._deaths: Counter[int] = Counter()  # one after the other
        self._serving_since_s: dict[int, float] = {}

    def survives(self, death: WorkerDiedError) -> bool:
        """Whether the server goes on without the worker, or until it is back. Its requests have their answers then."""
        worker = death.worker
        if worker is None or worker.kind != SCHEDULER:
            return False
        comes_back = self._is_on
        if not comes_back and not any(other.kind == SCHEDULER for other in self._workers.alive):
            return False
        self._workers.bury(worker)
        log_lines(logger, logging.ERROR, str(death))
        if (task := self._tasks.pop(worker.rank, None)) is not None:
            task.cancel()
        self._manager.replica_lost(worker, death.for_clients, restarts=comes_back)
        if comes_back:
            self._tasks[worker.rank] = asyncio.create_task(self._bring_back(worker))
        else:
            logger.error("%d of %d replicas serve on.", self._manager.replicas.num_up, len(self._manager.replicas.states))
        return True

    def close(self) -> list[WorkerAddress]:
        """Nothing comes back any more. Returns the processes that were on their way."""
        self._is_on = False
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        serving = self._manager.replicas.serving
        return [worker for worker in self._workers.alive if worker.kind == SCHEDULER and worker not in serving]

    def _wait_s(self, rank: int) -> float:
        since_s = self._serving_since_s.pop(rank, None)
        if since_s is not None and self._clock() - since_s > STABLE_S:
            self._deaths[rank] = 0
        self._deaths[rank] += 1
        return 0.0 if self._deaths[rank] == 1 else min(LONGEST_WAIT_S, 2.0 ** (self._deaths[rank] - 2))

    async def _bring_back(self, died: WorkerAddress) -> None:
        wait_s, began_s = self._wait_s(died.rank), self._clock()
        logger.warning("The %s is started again%s.", died, f" in {wait_s:g} s" if wait_s else "")
        await asyncio.sleep(wait_s)
        worker = self._workers.start_again(died)
        self._manager.replica_joins(worker)
        info = (await self._workers.wait_ready(worker))[worker]
        try:
            await self._manager.replica_back(worker, info)
        except RequestError as error:
            logger.error("The new %s does not work: %s", worker, error.message)
            await self._workers.kill(only=[worker])  # which is a death like any other
            return
        self._serving_since_s[worker.rank] = self._clock()
        logger.warning("The %s serves again after %.1f s.", worker, self._clock() - began_s)
