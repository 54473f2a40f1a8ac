"""Host 0 and others in one process, over real sockets."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxserve.hosts import Follower, Hello, Leader
from jaxserve.hosts.sockets import HostAddress

SECRET = b"sixteen characters"


def free_address() -> HostAddress:
    while True:
        port = random.randrange(10000, 30000)
        try:
            for offset in range(3):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return HostAddress("127.0.0.1", port)


def run_host(address: HostAddress, rank: int, num_hosts: int) -> None:
    """A host in a process of its own, until somebody ends that: one that a test can stop, as if it were switched off."""
    if rank:
        follower = Follower(address, hello(rank), SECRET)
        follower.join(20.0)
        follower.watch(lambda reason: None)
        follower.start_steps()
    else:
        leader = Leader(address, hello(0), num_hosts, SECRET)
        leader.gather(20.0, lambda reason: None)
        leader.wait_joined()
    threading.Event().wait()


def hello(rank: int, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "name": f"machine-{rank}",
        "software": "jaxserve 1 with JAX 2",
        "options": {"tp_size": 4},
        "weights": "a",
    }
    return Hello(rank=rank, **(fields | changes))


class Hosts:
    """Makes them and ends them."""

    def __init__(self) -> None:
        self.address = free_address()
        self.leader: Leader | None = None
        self.followers: list[Follower] = []
        self.ended: dict[int, str] = {}  # what the followers heard last, by rank
        self.lost: list[str] = []
        self.changed = threading.Condition()

    def lead(self, num_hosts: int) -> Leader:
        self.leader = Leader(self.address, hello(0), num_hosts, SECRET)
        return self.leader

    def follower(self, rank: int, secret: bytes = SECRET, **changes: Any) -> Follower:
        self.followers.append(Follower(self.address, hello(rank, **changes), secret))
        return self.followers[-1]

    def all_join(self, num_hosts: int) -> tuple[Leader, list[Follower]]:
        """And are ready to run."""
        leader = self.lead(num_hosts)
        followers = [self.follower(rank) for rank in range(1, num_hosts)]
        self.run(leader, *followers)
        return leader, followers

    def run(self, leader: Leader | None, *followers: Follower) -> None:
        """Those of them that are here; others may be in processes of their own."""
        threads = [threading.Thread(target=follower.join, args=(20.0,)) for follower in followers]
        for thread in threads:
            thread.start()
        if leader is not None:
            leader.gather(20.0, self._note_loss)
        for thread in threads:
            thread.join()
        for follower in followers:
            follower.watch(self._noting(follower._hello.rank))
            follower.start_steps()
        if leader is not None:
            leader.wait_joined()

    def _note_loss(self, reason: str) -> None:
        with self.changed:
            self.lost.append(reason)
            self.changed.notify_all()

    def _noting(self, rank: int) -> Callable[[str], None]:
        def note(reason: str) -> None:
            with self.changed:
                self.ended[rank] = reason
                self.changed.notify_all()

        return note

    def wait_for(self, holds: Callable[[], Any], timeout_s: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, timeout_s), (self.ended, self.lost)

    def close(self) -> None:
        if self.leader is not None:
            self.leader.end("")
        for follower in self.followers:
            follower.close()
