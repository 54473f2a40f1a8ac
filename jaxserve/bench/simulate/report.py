"""What a simulation showed, in the terms of `bench serving`."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import numpy as np

from jaxserve.bench.record import latency_fields
from jaxserve.bench.simulate.workload import Arrival


def _numbers() -> array[float]:
    return array("d")


@dataclasses.dataclass
class Report:
    num_replicas: int
    busy_s: float = 0.0  # of all replicas together, of a pipeline's stage on average
    active_s: float = 0.0  # in which any of a replica's stages was busy, of all replicas together
    first_s: float = float("inf")  # when the first request arrived
    last_s: float = 0.0  # when the last one was done
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    # Of each request, in the order they ended: eight bytes each, for millions.
    ttft_s: array[float] = dataclasses.field(default_factory=_numbers)
    tpot_s: array[float] = dataclasses.field(default_factory=_numbers)  # 0 for an output of one token
    e2e_s: array[float] = dataclasses.field(default_factory=_numbers)

    def add(self, arrival: Arrival, first_s: float, done_s: float, num_outputs: int, num_cached: int) -> None:
        self.first_s, self.last_s = min(self.first_s, arrival.at_s), max(self.last_s, done_s)
        self.prompt_tokens += len(arrival.prompt)
        self.cached_tokens += num_cached
        self.output_tokens += num_outputs
        self.ttft_s.append(first_s - arrival.at_s)
        self.tpot_s.append((done_s - first_s) / max(num_outputs - 1, 1))
        self.e2e_s.append(done_s - arrival.at_s)

    @property
    def completed(self) -> int:
        return len(self.e2e_s)

    def goodput(self, slo_ms: dict[str, float]) -> float:
        """Share of the requests that kept all limits: of `ttft`, `tpot` and `e2el`, in ms."""
        times = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2e_s}
        kept = np.ones(self.completed, bool)
        for name, limit_ms in slo_ms.items():
            kept &= np.asarray(times[name]) * 1e3 <= limit_ms
        return float(kept.mean()) if self.completed else 0.0

    def record(self, slo_ms: dict[str, float], chips_per_replica: float = 1) -> dict[str, Any]:
        """Under the names of `bench serving`."""
        duration_s = max(self.last_s - self.first_s, 1e-9)
        per_s, num_chips = 1 / duration_s, self.num_replicas * chips_per_replica
        fields: dict[str, Any] = {
            "duration": duration_s,
            "completed": self.completed,
            "request_throughput": self.completed * per_s,
            "output_throughput": self.output_tokens * per_s,
            "input_throughput": self.prompt_tokens * per_s,
            "cache_hit_rate_pct": 100 * self.cached_tokens / max(self.prompt_tokens, 1),
            "device_busy_pct": 100 * self.busy_s * per_s / self.num_replicas,
            "bubble_pct": 100 * max(1 - self.busy_s / self.active_s, 0.0) if self.active_s else 0.0,
            **latency_fields("ttft", np.asarray(self.ttft_s)),
            **latency_fields("tpot", np.asarray(self.tpot_s)),
            **latency_fields("e2e_latency", np.asarray(self.e2e_s)),
        }
        if slo_ms:
            share = self.goodput(slo_ms)
            fields |= {"goodput_pct": 100 * share, "goodput": share * self.completed * per_s}
            fields["goodput_per_chip"] = fields["goodput"] / num_chips
        return fields
