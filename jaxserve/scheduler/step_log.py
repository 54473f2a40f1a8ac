"""StepLog: counters since the start, and SGLang's log lines per prefill batch and per `decode_log_interval` decode steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from jaxserve.cache import PoolUsage
from jaxserve.scheduler.batch import ScheduleBatch

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Counters:
    """Since the scheduler started."""

    num_requests: int = 0  # accepted or not
    num_finished: int = 0  # by stop or length
    num_aborted: int = 0  # refused ones included
    prompt_tokens: int = 0  # of finished requests
    cached_tokens: int = 0  # of those, taken from the radix tree
    generated_tokens: int = 0
    prefill_tokens: int = 0  # computed; recomputed ones after a retraction count again
    prefill_cached_tokens: int = 0  # of those whose prefill began, from the radix tree
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_leaks_repaired: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """Of prefilled tokens, since the start."""
        return self.prefill_cached_tokens / max(self.prefill_cached_tokens + self.prefill_tokens, 1)


@dataclasses.dataclass(frozen=True)
class Load:
    """How full the scheduler is right now."""

    num_running: int
    num_waiting: int
    pending_tokens: int  # prompt tokens in the waiting queue
    pools: tuple[PoolUsage, ...]  # of each KV group
    avg_accept_len: float | None = None  # tokens gained per step that verified drafts

    @property
    def used_tokens(self) -> int:
        """As in SGLang, of the KV group that holds most."""
        return max(pool.used_tokens for pool in self.pools)

    @property
    def token_usage(self) -> float:
        """As in SGLang, of the fullest pool."""
        return max(pool.token_usage for pool in self.pools)

    def counts(self) -> dict[str, Any]:
        return {
            "num_running_reqs": self.num_running,
            "num_waiting_reqs": self.num_waiting,
            "num_pending_tokens": self.pending_tokens,
            "num_used_tokens": self.used_tokens,
            "token_usage": self.token_usage,
            "kv_groups": [{**vars(pool), "token_usage": pool.token_usage} for pool in self.pools],
        }

    def named_pools(self) -> list[tuple[str, PoolUsage]]:
        """With what stands before their numbers in a log line."""
        is_one = len(self.pools) == 1
        return [("" if is_one else "full " if pool.window is None else "swa ", pool) for pool in self.pools]


class StepLog:
    def __init__(self, decode_log_interval: int, load: Callable[[], Load], clock: Callable[[], float]) -> None:
        self.counters = Counters()
        self.decode_log_interval = decode_log_interval
        self._load = load
        self._clock = clock
        self._last_prefill_s = self._last_decode_s = clock()
        self._generated_at_last = 0
        self.gen_throughput = 0.0  # tokens per second over the last logged interval

    def counts(self) -> dict[str, float]:
        return {
            "last_gen_throughput": self.gen_throughput,
            "cache_hit_rate": self.counters.cache_hit_rate,
            **vars(self.counters),
        }

    def launched(self, batch: ScheduleBatch) -> None:
        if batch.items:
            self._prefill(batch)
        if len(batch.decode_rows):
            self.counters.num_decode_steps += 1
            if self.counters.num_decode_steps % self.decode_log_interval == 0:
                self._decode()

    def idle(self) -> None:
        """The time until the next step is not to count as slow generation."""
        self._last_prefill_s = self._last_decode_s = self._clock()
        self._generated_at_last = self.counters.generated_tokens

    def _prefill(self, batch: ScheduleBatch) -> None:
        self.counters.num_prefill_steps += 1
        self.counters.prefill_tokens += batch.num_prefill_tokens
        num_cached_tokens = sum(item.start for item in batch.items if item.is_new)
        self.counters.prefill_cached_tokens += num_cached_tokens
        now = self._clock()
        elapsed_s, self._last_prefill_s = now - self._last_prefill_s, now
        if not logger.isEnabledFor(logging.INFO):
            return
        load = self._load()
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, %s, #running-req: %d, "
            "#queue-req: %d, #pending-token: %d, input throughput (token/s): %.2f",
            len(batch.items),
            batch.num_prefill_tokens,
            num_cached_tokens,
            ", ".join(f"{name}token usage: {pool.token_usage:.2f}" for name, pool in load.named_pools()),
            load.num_running,
            load.num_waiting,
            load.pending_tokens,
            batch.num_prefill_tokens / max(elapsed_s, 1e-9),
        )

    def _decode(self) -> None:
        now = self._clock()
        elapsed_s, self._last_decode_s = now - self._last_decode_s, now
        generated = self.counters.generated_tokens
        self.gen_throughput = (generated - self._generated_at_last) / max(elapsed_s, 1e-9)
        self._generated_at_last = generated
        load = self._load()
        logger.info(
            "Decode batch, #running-req: %d, %s,%s gen throughput (token/s): %.2f, #queue-req: %d",
            load.num_running,
            ", ".join(
                f"#{name}token: {pool.used_tokens}, {name}token usage: {pool.token_usage:.2f}"
                for name, pool in load.named_pools()
            ),
            "" if load.avg_accept_len is None else f" accept len: {load.avg_accept_len:.2f},",
            self.gen_throughput,
            load.num_waiting,
        )
