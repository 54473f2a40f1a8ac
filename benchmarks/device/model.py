"""Whole models through the executor: shapes that people serve with dummy weights, decode, prefill and mixed steps.

Steps are launched one behind the other as a server does, without waiting for any but the last; a step's time is the whole
chain's over its length. The bytes of a decode step are the weights (without the embedding table, of which a row per token is
read) and the cached keys and values; the operations of a prefill step are those of its matrix products and of attention.

What compiles is bounded: the first runner has one decode bucket and one size of prefill, and everything that one runner can
show is timed before the next is built. Qwen3-30B-A3B is dense here (48 layers, its attention, and of its experts the width of
the eight that a token goes through): what reads weights differs, the rest is a step of its shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.device.carried import FOLDER, Carried
from benchmarks.device.case import Case, Measure, Numbers, Setting
from benchmarks.device.driver import Driver, Plan, Sampling
from benchmarks.model_configs import LLAMA_8B, QWEN3_32B

QWEN3_30B_DENSE = {
    **QWEN3_32B,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "intermediate_size": 8 * 768,
}
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
_DRAWS: dict[str, Any] = {"params": {"temperature": 0.8}, "needs_sampling": True}
_LIMITED: dict[str, Any] = {"params": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}, "needs_sampling": True}
_PENALTIES = {**_LIMITED["params"], "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {7: 1.0}}
SAMPLINGS = {
    "drawn": Sampling(**_DRAWS),
    "top k, p, min p": Sampling(**_LIMITED),
    "penalties": Sampling(params=_PENALTIES, needs_sampling=True, needs_adjusting=True),
    "logprobs": Sampling(needs_logprobs=True, needs_top_logprobs=True),
}
_MIXED_STEPS = 4  # each computes a whole prefill bucket, whatever the prompt's length
_BUILD_LIMIT_S = 300.0  # weights, and some programs of 32 layers to compile


def plans(setting: Setting) -> dict[str, Plan]:
    """In the order in which they are worth their time."""
    if setting.smoke:
        one = Plan("tiny", "reference", 16, (4,), 32, 64, 2, 1, config=_items({**LLAMA_8B, **_SMALLER}))
        return {"one bucket": one, "small batches": dataclasses.replace(one, batches=(1, 4))}
    llama = Plan("Llama-8B", "pallas", 64, (64,), 2048, 8192, 32, 5, config=_items(LLAMA_8B))
    return {
        "one bucket": llama,
        "small batches": dataclasses.replace(llama, batches=(1, 16, 64)),
        "fp8 KV": dataclasses.replace(llama, kv_cache_dtype="fp8_e4m3"),
        "Qwen3-30B": dataclasses.replace(llama, model="Qwen3-30B-A3B, dense", config=_items(QWEN3_30B_DENSE)),
    }


def _items(config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in config.items())


@functools.lru_cache(maxsize=1)
def _built(plan: Plan) -> Driver | Exception:
    """By the first case that needs it; what went wrong then would go wrong again."""
    try:
        return Driver(plan)
    except Exception as error:
        return error


def driver_for(plan: Plan) -> Driver:
    built = _built(plan)
    if isinstance(built, Exception):
        raise built
    return built


def weight_bytes(driver: Driver) -> int:
    """What a decode step reads: all but the embedding table."""
    config = dict(driver.plan.config)
    total = driver.runner.internal_state()["memory_usage"]["weight_gb"] * 1e9
    return int(total) - config["vocab_size"] * config["hidden_size"] * _itemsize(config)


def kv_bytes(plan: Plan, tokens: int) -> int:
    config = dict(plan.config)
    is_quantized = plan.kv_cache_dtype != "auto"
    token = config["head_dim"] + 4 if is_quantized else config["head_dim"] * _itemsize(config)
    return tokens * config["num_hidden_layers"] * config["num_key_value_heads"] * 2 * token


def _itemsize(config: dict[str, Any]) -> int:
    return 4 if config["dtype"] == "float32" else 2


def _timed_us(launch_all: Callable[[], Any], steps: int, driver: Driver) -> Numbers:
    """`launch_all` launches `steps` steps and returns the last one's handle."""
    driver.runner.fetch(launch_all())
    samples = []
    for _ in range(driver.plan.repeats):
        start_s = time.perf_counter()
        output = driver.runner.fetch(launch_all())
        samples.append((time.perf_counter() - start_s) * 1e6 / steps)
        if (output.token_ids < 0).any():
            raise FloatingPointError("the logits hold a NaN")
    us = {"us": statistics.median(samples), "us_min": min(samples), "us_max": max(samples)}
    rounded = {name: round(value, 1) for name, value in us.items()}
    return {**rounded, "steps": steps, "repeats": len(samples), "start_s": driver.start_s}


def time_decode(plan: Plan, batch: int, sampling: Sampling) -> Measure:
    driver = driver_for(plan)

    def launch_all() -> Any:
        for step in range(plan.decode_steps):
            handle = driver.decode(batch, plan.context + 1 + step, sampling, brings_params=step == 0)
        return handle

    def measure() -> Numbers:
        driver.fill_rows(batch)
        times = _timed_us(launch_all, plan.decode_steps, driver)
        weights, kv = weight_bytes(driver), kv_bytes(plan, batch * (plan.context + plan.decode_steps // 2))
        rates = {"bytes": weights + kv, "weight_bytes": weights, "kv_bytes": kv}
        return {**times, **rates, "tokens_per_s": round(batch / times["us"] * 1e6, 1)}

    return measure


def time_prefill(plan: Plan) -> Measure:
    driver = driver_for(plan)
    together, steps = plan.together, max(plan.max_rows // plan.together // 4, 1)
    prompts = [driver.random_prompt(plan.context, row) for row in range(together)]

    def launch_all() -> Any:
        return [driver.prefill(prompts) for _ in range(steps)][-1]

    def measure() -> Numbers:
        times, tokens = _timed_us(launch_all, steps, driver), together * plan.context
        rates = {"flop": prefill_flop(plan, together), "tokens": tokens, "tokens_per_s": round(tokens / times["us"] * 1e6, 1)}
        return {**times, **rates}

    return measure


def prefill_flop(plan: Plan, rows: int) -> int:
    config, tokens = dict(plan.config), rows * plan.context
    attention_width = config["head_dim"] * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer_weights = config["hidden_size"] * (attention_width + 3 * config["intermediate_size"])
    pairs = rows * plan.context * (plan.context + 1) // 2
    attention = 4 * pairs * config["num_attention_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * (2 * tokens * layer_weights + attention))


def time_mixed(plan: Plan) -> Measure:
    """All rows but one decode, the last brings a prompt."""
    driver = driver_for(plan)
    batch = plan.max_rows - 1
    prompt = driver.random_prompt(min(plan.context, plan.prefill_tokens - batch), 7)

    def launch_all() -> Any:
        return [driver.mixed(batch, plan.context + 1 + step, prompt) for step in range(_MIXED_STEPS)][-1]

    def measure() -> Numbers:
        driver.fill_rows(plan.max_rows)
        times = _timed_us(launch_all, _MIXED_STEPS, driver)
        tokens = batch + len(prompt)
        return {**times, "tokens": tokens, "tokens_per_s": round(tokens / times["us"] * 1e6, 1)}

    return measure


def carried_plan(setting: Setting) -> Plan:
    return plans(setting)["one bucket"]


def time_carried(plan: Plan) -> Measure:
    """Decode steps of programs that were compiled without the device, which times no candidates for their matmuls."""
    carried = Carried.copy(plan, FOLDER)
    measure = time_decode(carried.plan, plan.max_rows, Sampling())
    taken = carried.taken()
    return lambda: {**measure(), **taken}


def cases(setting: Setting) -> list[Case]:
    found: list[Case] = []

    def add(name: str, prepare: Callable[..., Measure], *arguments: Any) -> None:
        found.append(Case(name, functools.partial(prepare, *arguments), limit_s=30, prepare_limit_s=_BUILD_LIMIT_S))

    for label, plan in plans(setting).items():
        suffix = ", fp8 KV" if plan.kv_cache_dtype != "auto" else ""
        batches = plan.batches[:-1] if label == "small batches" else plan.batches
        for batch in batches:
            add(f"{plan.model} decode {batch} x {plan.context}{suffix}", time_decode, plan, batch, Sampling())
        if label == "one bucket":
            add(f"{plan.model} prefill of {plan.prefill_tokens} tokens", time_prefill, plan)
            add(f"{plan.model} mixed, {plan.max_rows - 1} rows and a prompt", time_mixed, plan)
            for name, sampling in SAMPLINGS.items():
                add(f"{plan.model} decode {plan.max_rows} x {plan.context}, {name}", time_decode, plan, plan.max_rows, sampling)
    if not setting.smoke:  # last, as it is a runner of its own; programs are carried for one device
        plan = carried_plan(setting)
        add(f"{plan.model} decode {plan.max_rows} x {plan.context}, carried programs", time_carried, plan)
    return found
