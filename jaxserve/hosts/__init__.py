"""Several hosts that run one model: host 0 schedules, the others run the same steps on their devices.

    host 0: Scheduler -> BroadcastRunner -> its own runner
                               `--steps, commands (ZMQ)--> host 1, 2, ...: replay -> their runners

Every process sees all devices (`jax.distributed`), so a step is one program over all of them and only its inputs travel here.
NumPy only; what starts JAX is `jaxserve.executor.distributed`.
"""

from __future__ import annotations

from jaxserve.hosts.follower import Follower
from jaxserve.hosts.leader import Leader
from jaxserve.hosts.protocol import Hello, HostsError, Welcome
from jaxserve.hosts.replay import Replay
from jaxserve.hosts.runner import BroadcastRunner

__all__ = ["BroadcastRunner", "Follower", "Hello", "HostsError", "Leader", "Replay", "Welcome"]
