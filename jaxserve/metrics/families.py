"""Every metric there is, in one table: name, kind, what it means, labels, buckets. docs/metrics.md is checked against it.

Names are SGLang's where it has the metric, behind `jaxserve:` in place of `sglang:`. All have the label `model_name` and those
of --extra-metric-labels; what a worker counts also has `engine_type` and `dp_rank` (and all detokenizers but the first a
`detokenizer_rank`), and what is counted per request the labels of --tokenizer-metrics-allowed-custom-labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

PREFIX = "jaxserve:"

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["scheduler", "detokenizer", "main", "every"]

# Series of a family; what comes beyond them is counted together.
MAX_SERIES = 256

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_LONG_SECONDS = (*_SECONDS, 600, 1200, 1800, 2400)
_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4,
                  0.6, 0.8, 1, 2, 4, 6, 8)  # fmt: skip
_SHORT_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_TOKENS = (1, 10, 30, 100, 300, 500, 1000, 2000, 3000, 5000, 7000, 10_000, 15_000, 20_000, 30_000, 50_000, 100_000, 200_000)


_KINDS = ("prefill", "decode", "mixed")
_KNOWN_KINDS = tuple((kind,) for kind in _KINDS)
_STAGES = ("tokenize", "dispatch", "grammar_wait", "queue", "prefill", "decode", "return")


@dataclasses.dataclass(frozen=True)
class Family:
    name: str  # without the prefix
    kind: Kind
    source: Source
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()  # values of the labels that are shown before anything was counted
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds
    per_request: bool = False  # takes custom labels, too
    max_series: int = MAX_SERIES

    def __post_init__(self) -> None:
        assert (self.kind == "histogram") == bool(self.buckets), f"{self.name}: buckets are for histograms"
        assert (self.kind == "counter") == self.name.endswith("_total"), f"{self.name}: counters end with _total, others do not"


_Row = tuple[str, str] | tuple[str, str, tuple[str, ...]] | tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _rows(kind: Kind, source: Source, rows: Iterable[_Row]) -> Iterable[Family]:
    """Of each its name, what it means, its labels, and known values of the one it has."""
    for name, text, *more in rows:
        labels = more[0] if more else ()
        known = tuple((value,) for value in more[1]) if len(more) > 1 else ()
        yield Family(name, kind, source, text, labels, known)


def _counters(source: Source, *rows: _Row) -> Iterable[Family]:
    return _rows("counter", source, rows)


def _gauges(source: Source, *rows: _Row) -> Iterable[Family]:
    return _rows("gauge", source, rows)


def _scheduler() -> Iterable[Family]:
    yield from _gauges(
        "scheduler",
        ("num_running_reqs", "Requests that hold memory: in the running batch, or their prompt is being computed."),
        ("num_queue_reqs", "Requests in the waiting queue."),
        ("num_grammar_queue_reqs", "Requests whose grammar is being compiled."),
        ("num_paused_reqs", "Requests that run or wait while generation is paused."),
        ("num_pending_tokens", "Prompt tokens of the waiting queue."),
        ("decode_sum_seq_lens", "Tokens of all running sequences together."),
        ("gen_throughput", "Generated tokens per second, over the last logged interval of decode steps."),
        ("cache_hit_rate", "Share of the prompt tokens of newly scheduled requests that came from the cache, since the start."),
        ("token_usage", "Share of KV memory in use, of the fullest pool."),
        ("full_token_usage", "The same, of layers that keep all tokens."),
        ("swa_token_usage", "The same, of layers with a sliding window."),
        ("num_used_tokens", "Tokens in KV memory that running requests hold, of the pool that holds most."),
        ("kv_used_tokens", "Tokens that running requests hold, of layers that keep all tokens."),
        ("kv_available_tokens", "Tokens for which memory is free, of layers that keep all tokens."),
        ("kv_evictable_tokens", "Cached tokens that nobody uses, of layers that keep all tokens."),
        ("swa_used_tokens", "Tokens that running requests hold, of layers with a sliding window."),
        ("swa_available_tokens", "Tokens for which memory is free, of layers with a sliding window."),
        ("swa_evictable_tokens", "Cached tokens that nobody uses, of layers with a sliding window."),
        ("num_cached_tokens", "Tokens that the prefix cache knows, in use or not."),
        ("max_total_num_tokens", "Tokens that KV memory can hold."),
        ("max_total_num_tokens_swa", "Tokens that the memory of layers with a sliding window can hold."),
        ("page_size", "Tokens of a KV page."),
        ("num_pages", "KV pages."),
        ("context_len", "Longest sequence."),
        ("max_running_reqs", "Most requests in a batch."),
        ("new_token_ratio", "Share of the output still possible for which memory is held free."),
        ("num_retracted_reqs", "Requests in the waiting queue that ran before and had to give way."),
        ("spec_accept_length", "Tokens gained per request and step that verified drafts, since the start."),
        ("spec_accept_rate", "Share of the drafts that were right, since the start."),
        ("spec_num_draft_tokens", "Tokens of a request verified in one step; 1 without speculation."),
        ("weight_memory_usage_gb", "GB of the weights on all devices."),
        ("kv_cache_memory_usage_gb", "GB of KV memory on all devices."),
        ("weight_load_duration_seconds", "How long loading the weights took at the start."),
        ("programs_missing", "Programs that are still being compiled; until it is 0, steps run in larger ones."),
    )
    yield from _counters(
        "scheduler",
        ("num_retracted_requests_total", "Times a running request had to give way."),
        ("num_retracted_input_tokens_total", "Prompt tokens of requests when they had to give way."),
        ("num_retracted_output_tokens_total", "Generated tokens of requests when they had to give way."),
        ("num_preempted_requests_total", "Of these, for a more urgent request."),
        ("num_grammar_total", "Requests with a grammar."),
        ("num_grammar_cache_hit_total", "Of these, whose grammar had been compiled before."),
        ("num_grammar_aborted_total", "Of these, whose grammar could not be used."),
        ("num_grammar_timeout_total", "Of these, whose grammar took too long to compile."),
        ("num_jumps_total", "Times tokens that a grammar forces were taken over without sampling."),
        (
            "realtime_tokens_total",
            "Tokens as they come: prompt tokens computed (prefill_compute) or from the cache (prefill_cache), and generated "
            "ones (decode).",
            ("mode",),
            ("prefill_compute", "prefill_cache", "decode"),
        ),
        ("evicted_tokens_total", "Cached tokens that had to go, by KV group: full or swa.", ("group",), ("full",)),
        ("spec_verify_calls_total", "Requests times steps that verified drafts."),
        ("spec_accepted_tokens_total", "Drafts that were right."),
        (
            "scheduler_stage_seconds_total",
            "Time of the scheduler's thread: receive (messages), schedule (who is in the next step), launch, wait (for the "
            "device), process (results), idle.",
            ("stage",),
            ("idle", "receive", "schedule", "launch", "wait", "process"),
        ),
        ("scheduler_process_cpu_seconds_total", "CPU time of the scheduler process."),
        ("scheduler_idle_seconds_total", "Time with nothing to do."),
        ("num_steps_total", "Steps launched: prefill, decode, or mixed.", ("kind",), _KINDS),
        ("steps_in_larger_program_total", "Steps that ran in a larger program than they needed, as it was not compiled yet."),
        ("compiles_after_ready_total", "Programs compiled in front of traffic; stays 0."),
        ("num_leaks_repaired_total", "Times the cache's books were wrong and were repaired."),
    )
    yield Family("eviction_duration_seconds", "histogram", "scheduler", "Making room in the cache.", buckets=_SHORT_SECONDS)
    yield Family(
        "grammar_compilation_time_seconds", "histogram", "scheduler", "From a request's arrival until its grammar is there.",
        buckets=_SHORT_SECONDS,
    )  # fmt: skip
    yield Family(
        "step_seconds", "histogram", "scheduler", "From a step's launch until its results are there: prefill, decode, mixed.",
        ("kind",), _KNOWN_KINDS, _TOKEN_SECONDS,
    )  # fmt: skip
    yield Family("step_tokens", "histogram", "scheduler", "Tokens computed in a step.", ("kind",), _KNOWN_KINDS, _TOKENS)


def _detokenizer() -> Iterable[Family]:
    yield from _counters(
        "detokenizer",
        ("detokenizer_seconds_total", "Time spent on making text."),
        ("detokenizer_tokens_total", "Tokens that became text."),
    )
    yield from _gauges("detokenizer", ("detokenizer_sequences", "Sequences it is in the middle of."))


def _requests() -> Iterable[Family]:
    for name, text, labels in (
        ("prompt_tokens_total", "Prompt tokens of requests that have ended.", ()),
        ("generation_tokens_total", "Generated tokens of requests that have ended.", ()),
        ("cached_tokens_total", "Prompt tokens that came from the cache.", ("cache_source",)),
        ("num_requests_total", "Requests that have ended; each of n samples counts.", ()),
        ("num_so_requests_total", "Of these, with a grammar.", ()),
        ("num_aborted_requests_total", "Of these, aborted: refused, given up by their client, or failed.", ()),
        ("num_failed_requests_total", "Of these, with an error, by its HTTP status.", ("status_code",)),
    ):
        known = {"cache_source": (("device",),), "status_code": (("400",), ("500",), ("503",))}.get("".join(labels), ())
        yield Family(name, "counter", "main", text, labels, known, per_request=True)
    for name, text, buckets in (
        ("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS),
        ("inter_token_latency_seconds", "Between two tokens of a request; those that come together share their time.",
         _TOKEN_SECONDS),
        ("request_time_per_output_token_seconds", "A request's mean time between its tokens.", _TOKEN_SECONDS),
        ("e2e_request_latency_seconds", "From a request's arrival to its end.", _LONG_SECONDS),
        ("queue_time_seconds", "In the waiting queue.", _SECONDS),
        ("prompt_tokens_histogram", "Prompt tokens of a request.", _TOKENS),
        ("uncached_prompt_tokens_histogram", "Prompt tokens of a request that had to be computed.", _TOKENS),
        ("generation_tokens_histogram", "Generated tokens of a request.", _TOKENS),
    ):  # fmt: skip
        yield Family(name, "histogram", "main", text, buckets=buckets, per_request=True)
    yield Family(
        "per_stage_req_latency_seconds", "histogram", "main",
        "Parts of a request's life: tokenize, dispatch (to the scheduler), grammar_wait, queue, prefill, decode, return (of "
        "the last token to the client).",
        ("stage",), tuple((stage,) for stage in _STAGES), _SECONDS,
    )  # fmt: skip


def _server() -> Iterable[Family]:
    yield from _counters(
        "main",
        ("http_requests_total", "HTTP requests.", ("endpoint", "method")),
        ("http_responses_total", "HTTP replies.", ("endpoint", "method", "status_code")),
        ("replica_restarts_total", "Times that a replica's process was started in place of one that had died.", ("dp_rank",)),
    )
    yield from _counters("every", ("process_cpu_seconds_total", "CPU time of each process.", ("component",)))
    yield from _gauges("every", ("process_resident_memory_bytes", "Memory of each process.", ("component",)))
    yield from _gauges(
        "main",
        ("http_requests_active", "HTTP requests that are being answered.", ("endpoint", "method")),
        ("num_live_sequences", "Sequences of requests that have not ended."),
        ("num_sessions", "Open sessions."),
        ("session_held_tokens", "Tokens that open sessions keep."),
        ("startup_time_seconds", "From the start until requests were taken."),
        ("server_ready", "1 while new requests are served, else 0."),
        ("server_running_reqs", "num_running_reqs of all replicas together."),
        ("server_queue_reqs", "num_queue_reqs of all replicas together."),
        ("server_token_usage", "token_usage, the mean of all replicas."),
        ("server_num_pages", "num_pages of all replicas together."),
        ("replica_up", "1 while a replica takes requests, else 0.", ("dp_rank",)),
        ("replica_live_sequences", "Sequences that a replica has been sent and that have not ended.", ("dp_rank",)),
        ("snapshot_age_seconds", "How old a worker's numbers are: it is busy or gone if this grows.", ("component", "dp_rank")),
    )


FAMILIES: dict[str, Family] = {
    family.name: family for part in (_requests, _scheduler, _detokenizer, _server) for family in part()
}
