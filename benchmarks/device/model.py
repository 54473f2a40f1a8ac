"""A whole model through the executor: Llama-3.1-8B's shapes with dummy weights, decode steps and prefill steps, no scheduler.

Steps are launched one behind the other as a server does, without waiting for any but the last; a step's time is the whole
chain's over its length. The bytes of a decode step are the weights (without the embedding table, of which a row per token is
read) and the cached keys and values; the operations of a prefill step are those of its matrix products and of attention.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.device.case import Case, NotHereError, Setting
from benchmarks.model_configs import LLAMA_8B, write_config

_SMALLER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    config: dict[str, Any]
    backend: str
    page_size: int
    batches: tuple[int, ...]
    context: int
    prefill_tokens: int  # of a step
    decode_steps: int
    repeats: int

    @property
    def max_rows(self) -> int:
        return max(self.batches)

    @property
    def row_tokens(self) -> int:
        """Room in a row's pages: its context and what the timed steps add, in whole pages."""
        wanted = self.context + self.decode_steps + 1
        return -(-wanted // self.page_size) * self.page_size


def plan_for(setting: Setting) -> Plan:
    if setting.smoke:
        return Plan({**LLAMA_8B, **_SMALLER}, "reference", 16, (1, 2), 32, 64, 2, 1)
    return Plan(LLAMA_8B, "pallas", 64, (1, 16, 64), 2048, 8192, 32, 5)


@functools.cache
def _built(setting: Setting) -> Driver | Exception:
    """By the first case that needs it; what went wrong then would go wrong again."""
    try:
        return Driver(plan_for(setting))
    except Exception as error:
        return error


def driver_for(setting: Setting) -> Driver:
    built = _built(setting)
    if isinstance(built, Exception):
        raise built
    return built


class Driver:
    """A ModelRunner and steps for it."""

    def __init__(self, plan: Plan) -> None:
        try:
            from jaxserve.config import ServerArgs
            from jaxserve.executor import build_runner
        except ModuleNotFoundError as error:
            raise NotHereError(f"{error.name} is not installed") from error
        self.plan = plan
        folder = Path(tempfile.mkdtemp())
        write_config(folder, plan.config)
        args = ServerArgs(
            model_path=str(folder),
            load_format="dummy",
            attention_backend=plan.backend,
            page_size=plan.page_size,
            context_length=plan.row_tokens,
            max_running_requests=plan.max_rows,
            max_total_tokens=plan.max_rows * plan.row_tokens,
            chunked_prefill_size=plan.prefill_tokens,
            prefill_token_buckets=(plan.prefill_tokens,),
            decode_row_buckets=plan.batches,
            compilation_cache_dir=str(folder / "compiled"),
        )
        started_s = time.monotonic()
        self.runner = build_runner(args, show_progress=False).runner
        self.start_s = time.monotonic() - started_s
        self._prefilled = 0

    def weight_bytes(self) -> int:
        """What a decode step reads: all but the embedding table."""
        config = self.plan.config
        itemsize = np.dtype("float32").itemsize if config["dtype"] == "float32" else 2
        total = self.runner.internal_state()["memory_usage"]["weight_gb"] * 1e9
        return int(total) - config["vocab_size"] * config["hidden_size"] * itemsize

    def kv_bytes(self, tokens: int) -> int:
        config = self.plan.config
        itemsize = 4 if config["dtype"] == "float32" else 2
        return tokens * config["num_hidden_layers"] * config["num_key_value_heads"] * 2 * config["head_dim"] * itemsize

    def prefill(self, rows: list[int]) -> Any:
        """Launches one step with the whole prompts of `rows`."""
        from jaxserve.runner import PageUpdates, RowState
        from jaxserve.types import ForwardMode, SamplingParams

        plan, count = self.plan, len(rows)
        pages = plan.row_tokens // plan.page_size
        index = np.tile(np.arange(pages, dtype=np.int32), count)
        owner = np.repeat(np.asarray(rows, np.int32), pages)
        rng = np.random.default_rng(rows[0])
        nothing = np.zeros(0, np.int32)
        greedy = SamplingParams(temperature=0)
        step = self._step(
            ForwardMode.EXTEND,
            rows,
            plan.context,
            plan.context,
            input_ids=rng.integers(0, plan.config["vocab_size"], count * plan.context, np.int32),
            page_updates=PageUpdates(owner, index, owner * pages + index),
            new_rows=[RowState(row, greedy, 0, plan.context, nothing, nothing) for row in rows],
        )
        return self.runner.launch(step)

    def decode(self, batch: int, seq_len: int) -> Any:
        """Launches one step that brings the first `batch` rows to `seq_len` tokens."""
        from jaxserve.runner import PageUpdates
        from jaxserve.types import ForwardMode

        nothing = np.zeros(0, np.int32)
        updates = PageUpdates(nothing, nothing, nothing)
        rows = list(range(batch))
        return self.runner.launch(
            self._step(ForwardMode.DECODE, rows, seq_len, 1, input_ids=nothing, page_updates=updates, new_rows=[])
        )

    def _step(self, mode: Any, rows: list[int], seq_len: int, extend_len: int, **fields: Any) -> Any:
        from jaxserve.runner import StepInput

        count = len(rows)
        return StepInput(
            mode=mode,
            rows=np.asarray(rows, np.int32),
            seq_lens=np.full(count, seq_len, np.int32),
            extend_lens=np.full(count, extend_len, np.int32),
            num_decode_rows=count if mode.name == "DECODE" else 0,
            sample=np.ones(count, bool),
            needs_sampling=False,
            needs_adjusting=False,
            needs_logprobs=False,
            needs_top_logprobs=False,
            **fields,
        )

    def fill_rows(self, count: int) -> None:
        """Every decode row needs a prompt in the cache, once."""
        together = max(self.plan.prefill_tokens // self.plan.context, 1)
        while self._prefilled < count:
            rows = list(range(self._prefilled, min(self._prefilled + together, self.plan.max_rows)))
            self.runner.fetch(self.prefill(rows))
            self._prefilled += len(rows)


def _timed_us(launch_all: Callable[[], Any], steps: int, driver: Driver, repeats: int) -> dict[str, Any]:
    """`launch_all` launches `steps` steps and returns the last one's handle."""
    driver.runner.fetch(launch_all())
    samples = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        output = driver.runner.fetch(launch_all())
        samples.append((time.perf_counter() - start_s) * 1e6 / steps)
        if (output.next_token_ids < 0).any():
            raise FloatingPointError("the logits hold a NaN")
    us = {"us": statistics.median(samples), "us_min": min(samples), "us_max": max(samples)}
    return {**{name: round(value, 1) for name, value in us.items()}, "steps": steps, "repeats": repeats}


def time_decode(batch: int, setting: Setting) -> dict[str, Any]:
    driver = driver_for(setting)
    plan = driver.plan
    driver.fill_rows(batch)

    def launch_all() -> Any:
        handles = [driver.decode(batch, plan.context + 1 + step) for step in range(plan.decode_steps)]
        return handles[-1]

    times = _timed_us(launch_all, plan.decode_steps, driver, plan.repeats)
    weights, kv = driver.weight_bytes(), driver.kv_bytes(batch * (plan.context + plan.decode_steps // 2))
    return {
        **times,
        "bytes": weights + kv,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "tokens_per_s": round(batch / times["us"] * 1e6, 1),
        "start_s": round(driver.start_s, 1),
    }


def time_prefill(setting: Setting) -> dict[str, Any]:
    driver = driver_for(setting)
    plan = driver.plan
    together = max(min(plan.prefill_tokens // plan.context, plan.max_rows), 1)
    steps = max(plan.max_rows // together // 4, 1)

    def launch_all() -> Any:
        handles = [driver.prefill(list(range(together))) for _ in range(steps)]
        return handles[-1]

    times = _timed_us(launch_all, steps, driver, plan.repeats)
    tokens = together * plan.context
    config = plan.config
    layer_weights = config["hidden_size"] * (
        config["head_dim"] * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
        + 3 * config["intermediate_size"]
    )
    pairs = together * plan.context * (plan.context + 1) // 2
    attention = 4 * pairs * config["num_attention_heads"] * config["head_dim"]
    return {
        **times,
        "flop": config["num_hidden_layers"] * (2 * tokens * layer_weights + attention),
        "tokens": tokens,
        "tokens_per_s": round(tokens / times["us"] * 1e6, 1),
    }


def cases(setting: Setting) -> list[Case]:
    plan = plan_for(setting)
    decode = [
        # The first one builds the runner: weights, and a handful of programs to compile.
        Case(f"model decode {batch} x {plan.context}", functools.partial(time_decode, batch, setting), limit_s=150)
        for batch in plan.batches
    ]
    prefill = Case(f"model prefill of {plan.prefill_tokens} tokens", functools.partial(time_prefill, setting), limit_s=150)
    return [*decode, prefill]
