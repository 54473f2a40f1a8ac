"""Replicas: the scheduler processes that serve, under their ranks, and the way of requests to them.

A rank stays, its process may change: one that has died, and the one that was started in its place, have addresses of their own
(`WorkerAddress.start`). What comes from one that is gone is for nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.config import ServerArgs
from jaxserve.data_parallel import CacheAware, DataParallelController, Prompt, Replica, ReplicaState, make_policy
from jaxserve.messages import SCHEDULER, Message, WorkerAddress
from jaxserve.server.fronts.shared import Shared
from jaxserve.server.worker_link import WorkerLink


class Replicas:
    def __init__(
        self,
        args: ServerArgs,
        link: WorkerLink,
        shared: Shared | None = None,
        tell_others: Callable[[int, Prompt], None] | None = None,
    ) -> None:
        """`shared`: with other processes that send requests to these replicas; `tell_others` of a prompt that a rank got."""
        policy = make_policy(args.load_balance_method, args.dp_size, has_prefix_cache=not args.disable_radix_cache)
        self.controller = DataParallelController(
            policy,
            args.dp_size,
            others_loads=None if shared is None else shared.others_loads,
            tell_others=tell_others if shared is not None and isinstance(policy, CacheAware) else None,
        )
        self._link = link
        self._shared = shared
        self._cache_tokens: dict[int, int] = {}  # by rank
        self._addresses = {worker.rank: worker for worker in link.workers if worker.kind == SCHEDULER}

    @property
    def num_up(self) -> int:
        return len(self.controller.up)

    @property
    def states(self) -> list[str]:
        """By rank: joining, up or down."""
        return [replica.state.value for replica in self.controller.replicas]

    @property
    def num_sequences(self) -> list[int]:
        """By rank, those that have not ended; of all processes that send requests."""
        own = [replica.num_sequences for replica in self.controller.replicas]
        if self._shared is None:
            return own
        return [count + int(others.num_sequences) for count, others in zip(own, self._shared.others_loads(), strict=True)]

    def process(self, rank: int) -> WorkerAddress | None:
        """None: it has died, and there is no other yet."""
        return self._addresses.get(rank)

    def cache_tokens(self, rank: int) -> int:
        """It has room for so many; 0 before it has said so."""
        return self._cache_tokens.get(rank, 0)

    @property
    def serving(self) -> list[WorkerAddress]:
        """The processes of those that are up."""
        return [self._addresses[replica.rank] for replica in self.controller.up]

    def has(self, source: WorkerAddress) -> bool:
        """What comes from there is of a process that is not given up."""
        return self._addresses.get(source.rank) == source

    def send(self, rank: int, message: Message) -> None:
        if (worker := self._addresses.get(rank)) is not None:
            self._link.send(worker, message)

    def joins(self, worker: WorkerAddress) -> None:
        """A process that was started in place of one that is gone. It serves from `serves` on."""
        self.controller.join(worker.rank)
        self._addresses[worker.rank] = worker
        self._link.connect(worker)

    def serves(self, worker: WorkerAddress, cache_tokens: int) -> None:
        """It takes requests, and has room for so many tokens."""
        self.controller.set_up(worker.rank, cache_tokens)
        self._cache_tokens[worker.rank] = cache_tokens
        self._link.add(worker)

    def lost(self, worker: WorkerAddress) -> Replica:
        """Its process is gone. Returns what it had to do."""
        replica = self.controller.replicas[worker.rank]
        self.controller.set_down(worker.rank)
        del self._addresses[worker.rank]
        self._link.remove(worker)
        return replica

    def idle(self) -> list[Replica]:
        """Of those that serve."""
        return [replica for replica in self.controller.up if not replica.num_sequences]

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """For /metrics, by rank."""
        gauges: dict[str, dict[tuple[str, ...], float]] = {"replica_up": {}, "replica_live_sequences": {}}
        for replica, num_sequences in zip(self.controller.replicas, self.num_sequences, strict=True):
            labels = (str(replica.rank),)
            gauges["replica_up"][labels] = float(replica.state is ReplicaState.UP)
            gauges["replica_live_sequences"][labels] = num_sequences
        return gauges
