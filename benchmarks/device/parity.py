"""A small trained checkpoint through the executor: our kernels against the reference attention, in its tokens and their
logprobs, after prefill, decode and mixed steps, in every sampling mode, and with a quantized KV cache."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.device.carried import FOLDER, Carried
from benchmarks.device.case import Case, Measure, Numbers, Setting
from benchmarks.device.checkpoint import widened_demo
from benchmarks.device.driver import Driver, Plan, Sampling
from benchmarks.device.model import SAMPLINGS

TEXT = (
    "A server answers requests; a scheduler orders them; the model computes the next token of each of them. Once upon a time "
    "there was a small model that lived on a large machine, and every day it read one line more than the day before. "
)
GREEDY = Sampling(needs_logprobs=True)
# Mean |logprob - reference's| of tokens that both chose, and the least share of tokens before the first other one. The two
# compute the same in bfloat16 with other roundings; a quantized cache adds its own.
LIMITS = {"auto": (0.05, 0.7), "fp8_e4m3": (0.15, 0.4), "int8": (0.08, 0.6)}


@dataclasses.dataclass(frozen=True)
class Generated:
    tokens: np.ndarray  # int32 [R, steps]
    logprobs: np.ndarray | None  # float32 [R, steps]


@functools.cache
def model_folder() -> str:
    return str(widened_demo(Path(tempfile.mkdtemp()) / "demo-64"))


def plan_for(setting: Setting, backend: str, kv_cache_dtype: str = "auto", model: str = "") -> Plan:
    rows, context, steps = (4, 16, 4) if setting.smoke else (16, 64, 32)
    page_size = 16 if setting.smoke else 64
    return Plan(
        model or model_folder(), backend, page_size, (rows,), context, rows * context, steps, kv_cache_dtype=kv_cache_dtype
    )


@functools.lru_cache(maxsize=3)
def driver_for(plan: Plan) -> Driver:
    return Driver(plan)


def prompts(plan: Plan) -> list[np.ndarray]:
    """Of different lengths, each beginning elsewhere."""
    from tokenizers import Tokenizer

    ids = np.asarray(Tokenizer.from_file(str(Path(plan.model) / "tokenizer.json")).encode(TEXT * 8).ids, np.int32)
    return [np.roll(ids, -3 * row)[: plan.context - row % 5] for row in range(plan.max_rows)]


def generate(plan: Plan, sampling: Sampling, *, mixed: bool = False) -> Generated:
    """All rows have the length of the shortest prompt then and go on from there. `mixed`: the last prompt comes in a step in
    which the others decode."""
    driver = driver_for(plan)
    runner, texts = driver.runner, [prompt[: plan.context - 5] for prompt in prompts(plan)]
    length = len(texts[0])
    if mixed:
        runner.fetch(driver.prefill(texts[:-1], sampling=GREEDY))
        out = [runner.fetch(driver.mixed(plan.max_rows - 1, length + 1, texts[-1]))]
        return Generated(np.concatenate([one.token_ids for one in out], axis=1), None)
    out = [runner.fetch(driver.prefill(texts, sampling=sampling))]
    for step in range(plan.decode_steps - 1):
        out.append(runner.fetch(driver.decode(plan.max_rows, length + 1 + step, sampling, brings_params=False)))
    logprobs = np.concatenate([one.logprobs for one in out], axis=1) if out[0].logprobs is not None else None
    return Generated(np.concatenate([one.token_ids for one in out], axis=1), logprobs)


def compare(got: Generated, want: Generated, kv_cache_dtype: str = "auto") -> Numbers:
    limit, least = LIMITS[kv_cache_dtype]
    is_same = np.cumprod(got.tokens == want.tokens, axis=1).astype(bool)
    agreed = float(is_same.mean())
    numbers: Numbers = {"tokens_agreed": round(agreed, 3), "tokens": int(got.tokens.size)}
    problems = [] if agreed >= least else [f"{agreed:.2f} of the tokens come before the first other one, at least {least} must"]
    if got.logprobs is not None and want.logprobs is not None and is_same.any():
        differences = np.abs(got.logprobs - want.logprobs)[is_same]
        numbers |= {"error": round(float(differences.mean()), 5), "worst_logprob": round(float(differences.max()), 4)}
        problems += [] if numbers["error"] <= limit else [f"the logprobs differ by {numbers['error']:.3f}, more than {limit}"]
    if (got.tokens < 0).any():
        problems.append("the logits hold a NaN")
    return {**numbers, **({"status": "failed", "reason": "; ".join(problems)} if problems else {})}


def against_reference(plan: Plan, sampling: Sampling, setting: Setting, *, mixed: bool = False) -> Measure:
    reference = plan_for(setting, "reference")
    driver_for(reference)
    driver_for(plan)

    def measure() -> Numbers:
        return compare(generate(plan, sampling, mixed=mixed), generate(reference, sampling, mixed=mixed), plan.kv_cache_dtype)

    return measure


def widened_against_original(setting: Setting) -> Measure:
    """That the checkpoint is the one it was made from: both by the reference."""
    from jaxserve.demo import demo_model_path

    wide, original = plan_for(setting, "reference"), plan_for(setting, "reference", model=demo_model_path())
    driver_for(wide)
    driver_for(original)
    return lambda: compare(generate(wide, GREEDY), generate(original, GREEDY))


def carried_plan(setting: Setting) -> Plan:
    return plan_for(setting, "reference" if setting.smoke else "pallas")


def carried_against_compiled_here(setting: Setting, folder: Path) -> Measure:
    """Programs that were compiled without the device: all are taken, and give the tokens of those that it compiled itself."""
    plan = carried_plan(setting)
    carried = Carried.copy(plan, folder)
    starts = {"start_s": driver_for(carried.plan).start_s, "own_start_s": driver_for(plan).start_s}
    taken = carried.taken()
    return lambda: {**compare(generate(carried.plan, GREEDY), generate(plan, GREEDY)), **taken, **starts}


def cases(setting: Setting) -> list[Case]:
    ours = "reference" if setting.smoke else "pallas"
    plan = plan_for(setting, ours)
    found = {
        "the checkpoint, heads of 64 against 32": functools.partial(widened_against_original, setting),
        "greedy, pallas against reference": functools.partial(against_reference, plan, GREEDY, setting),
        "mixed step, pallas against reference": functools.partial(against_reference, plan, GREEDY, setting, mixed=True),
    }
    for name, sampling in SAMPLINGS.items():
        found[f"{name}, pallas against reference"] = functools.partial(against_reference, plan, sampling, setting)
    for dtype in ("int8",) if setting.smoke else ("fp8_e4m3", "int8"):
        quantized = plan_for(setting, ours, dtype)
        found[f"{dtype} KV, pallas against reference"] = functools.partial(against_reference, quantized, GREEDY, setting)
    if not setting.smoke:  # programs are carried for one device
        found["carried programs against those compiled here"] = functools.partial(
            carried_against_compiled_here, setting, FOLDER
        )
    return [Case(name, prepare, limit_s=30, prepare_limit_s=240) for name, prepare in found.items()]
