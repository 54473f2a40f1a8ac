"""Meter: the scheduler's metrics. What happens in steps is counted as it happens; all else is read from `internal_state`, which
/server_info shows, when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.messages import SCHEDULER
from jaxserve.metrics import Registry, Snapshot, count_process
from jaxserve.scheduler.batch import ScheduleBatch
from jaxserve.scheduler.stages import KINDS, Stage, StageClock

# Gauges that stand in the state, there under other names where these are given.
_GAUGES = {
    "num_running_reqs": "",
    "num_queue_reqs": "num_waiting_reqs",
    "num_grammar_queue_reqs": "",
    "num_paused_reqs": "",
    "num_pending_tokens": "",
    "decode_sum_seq_lens": "",
    "gen_throughput": "last_gen_throughput",
    "cache_hit_rate": "",
    "token_usage": "",
    "num_used_tokens": "",
    "num_cached_tokens": "",
    "max_total_num_tokens": "",
    "page_size": "",
    "context_len": "",
    "max_running_reqs": "max_running_requests",
    "new_token_ratio": "",
    "num_retracted_reqs": "",
    "spec_accept_length": "avg_spec_accept_length",
    "spec_accept_rate": "",
    "spec_num_draft_tokens": "",
}
_COUNTERS = {
    "num_retracted_requests_total": "num_retractions",
    "num_retracted_input_tokens_total": "num_retracted_input_tokens",
    "num_retracted_output_tokens_total": "num_retracted_output_tokens",
    "num_preempted_requests_total": "num_preemptions",
    "num_grammar_total": "num_grammars",
    "num_grammar_cache_hit_total": "num_grammar_cache_hits",
    "num_grammar_aborted_total": "num_grammars_aborted",
    "num_grammar_timeout_total": "num_grammar_timeouts",
    "num_jumps_total": "num_jumps",
    "spec_verify_calls_total": "num_spec_verify_calls",
    "spec_accepted_tokens_total": "num_spec_accepted_tokens",
    "num_leaks_repaired_total": "num_leaks_repaired",
}


class Meter:
    def __init__(self, stages: StageClock, buckets: Mapping[str, Sequence[float]] | None = None, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.stages = stages
        self._registry = Registry("scheduler", buckets)
        self._step_seconds = self._registry.histogram("step_seconds")
        self._step_tokens = self._registry.histogram("step_tokens")
        self._steps = self._registry.counter("num_steps_total")
        self._evicted = self._registry.counter("evicted_tokens_total")
        self._eviction_seconds = self._registry.histogram("eviction_duration_seconds")
        self._grammar_seconds = self._registry.histogram("grammar_compilation_time_seconds")

    # --- as it happens

    def step_done(self, batch: ScheduleBatch, launched_s: float) -> None:
        """Its results are there. `launched_s`: time.perf_counter()."""
        if self.is_on:
            kind = (KINDS[batch.mode],)
            self._steps.inc(1.0, kind)
            self._step_seconds.observe(time.perf_counter() - launched_s, kind)
            self._step_tokens.observe(len(batch.decode_rows) + (batch.num_prefill_tokens if batch.items else 0), kind)

    def evicted(self, windows: Sequence[int | None], tokens: Sequence[int], took_s: float) -> None:
        """So many of each KV group."""
        for window, count in zip(windows, tokens, strict=True):
            if count:
                self._evicted.inc(count, ("full" if window is None else "swa",))
        self._eviction_seconds.observe(took_s)

    def grammar_compiled(self, took_s: float) -> None:
        self._grammar_seconds.observe(took_s)

    # --- when somebody asks

    def snapshot(self, state: Mapping[str, Any]) -> Snapshot:
        """`state` is the scheduler's internal_state."""
        registry = self._registry
        for name, key in _GAUGES.items():
            registry.gauge(name).set(state[key or name] or 0.0)
        for name, key in _COUNTERS.items():
            registry.counter(name).set_total(state[key])
        tokens = registry.counter("realtime_tokens_total")
        tokens.set_total(state["prefill_tokens"], ("prefill_compute",))
        tokens.set_total(state["prefill_cached_tokens"], ("prefill_cache",))
        tokens.set_total(state["generated_tokens"], ("decode",))
        self._set_groups(state["kv_groups"], state["page_size"])
        self._set_runner(state["runner"])
        self.stages.enter(Stage.RECEIVE)
        for stage in Stage:
            registry.counter("scheduler_stage_seconds_total").set_total(self.stages.seconds[stage], (stage.name.lower(),))
        registry.counter("scheduler_idle_seconds_total").set_total(self.stages.seconds[Stage.IDLE])
        registry.counter("scheduler_process_cpu_seconds_total").set_total(time.process_time())
        count_process(registry, SCHEDULER)
        return registry.snapshot(time.time())

    def _set_groups(self, groups: Sequence[Mapping[str, Any]], page_size: int) -> None:
        """Of several groups with windows the fullest counts, as it bounds the others."""
        registry = self._registry
        registry.gauge("num_pages").set(groups[0]["total_tokens"] // page_size)
        for is_full, prefix in ((True, "kv"), (False, "swa")):
            some = [group for group in groups if (group["window"] is None) == is_full]
            if not some:
                continue
            group = max(some, key=lambda one: one["token_usage"])
            used, evictable, total = group["used_tokens"], group["evictable_tokens"], group["total_tokens"]
            registry.gauge(f"{prefix}_used_tokens").set(used)
            registry.gauge(f"{prefix}_evictable_tokens").set(evictable)
            registry.gauge(f"{prefix}_available_tokens").set(total - used - evictable)
            registry.gauge("full_token_usage" if is_full else "swa_token_usage").set(group["token_usage"])
            if not is_full:
                registry.gauge("max_total_num_tokens_swa").set(total)

    def _set_runner(self, state: Mapping[str, Any]) -> None:
        registry, memory = self._registry, state.get("memory_usage", {})
        registry.gauge("weight_memory_usage_gb").set(memory.get("weight_gb", 0.0))
        registry.gauge("kv_cache_memory_usage_gb").set(memory.get("kvcache_gb", 0.0))
        registry.gauge("weight_load_duration_seconds").set(state.get("startup_s", {}).get("weights", 0.0))
        registry.gauge("programs_missing").set(state.get("programs_missing", 0))
        registry.counter("compiles_after_ready_total").set_total(state.get("compiles_after_ready_total", 0))
        registry.counter("steps_in_larger_program_total").set_total(state.get("steps_in_larger_program_total", 0))
