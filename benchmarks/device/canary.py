"""One tiny case of each kernel and of the sampler, with CUDA graphs (XLA's command buffers) and without. If one of them fails,
nothing that follows can be believed, so the run ends. The same cases are what the sanitizer looks at.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.case import Case, CompilerOptions, Measure, Numbers, Setting
from benchmarks.device.check_write import WriteShape, check_write
from benchmarks.device.checks import check_attention
from benchmarks.device.machine import facts
from benchmarks.device.mla import mla_case
from jaxserve.bench.inputs import AttentionCase

# A graph is made of any two kernels, or of none.
MODES: dict[str, CompilerOptions] = {
    "graphs on": {"xla_gpu_graph_min_graph_size": 1},
    "graphs off": {"xla_gpu_enable_command_buffer": ""},
}
_SAMPLED_ROWS, _VOCAB = 64, 1000


def attention_shapes(setting: Setting) -> dict[str, AttentionCase]:
    """By what MAKERS calls them."""
    if setting.smoke:
        small: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "head_dim_v": 64, "page_size": 16}
        rows: tuple[tuple[int, int], ...] = ((1, 0), (1, 17))
        extend = AttentionCase(((3, 20),), **small)
        return {"decode": AttentionCase(rows, **small), "extend": extend, "mla decode": mla_case(1, 20, 8, 16)}
    rows = ((1, 0), (1, 1), (1, 65), (1, 700))
    mla = AttentionCase(**{**vars(mla_case(1, 64, 16)), "rows": rows})
    return {"decode": AttentionCase(rows), "extend": AttentionCase(((70, 70), (0, 0), (17, 300))), "mla decode": mla}


def toolkit(setting: Setting) -> Measure:
    """That JAX has the GPU, and where it looks for ptxas: no failure if none is there, the compiler may have its own."""
    from jax._src.lib import cuda_path

    root = Path(cuda_path or "/usr/local/cuda")  # what JAX takes then
    found = {"cuda_path": cuda_path, "has_ptxas": (root / "bin" / "ptxas").exists(), "ptxas": facts(None)["ptxas"]}
    device = jax.devices()[0]
    if device.platform != "gpu" and not setting.smoke:
        raise RuntimeError(f"JAX does not find the GPU, only {device}; its warning stands in the log")
    return lambda: {**found, "device": device.device_kind, "jax": jax.__version__}


def check_sampler(options: CompilerOptions, setting: Setting) -> Measure:
    """Greedy rows are the largest logit's, one candidate leaves no choice, and draws are what the CPU draws."""
    from jaxserve.executor.row_params import RowParams
    from jaxserve.executor.sampler import SamplingMode, sample

    rng = np.random.default_rng(0)
    logits = rng.standard_normal((_SAMPLED_ROWS, _VOCAB), np.float32) * 3
    row = np.arange(_SAMPLED_ROWS)

    def floats(values: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, np.float32), row.shape)

    params = RowParams(
        temperature=np.where(row % 4 == 0, 0, 0.8).astype(np.float32),
        top_p=floats(np.where(row % 4 == 2, 0.9, 1)),
        min_p=floats(np.where(row % 4 == 3, 0.02, 0)),
        frequency_penalty=floats(0),
        presence_penalty=floats(0),
        repetition_penalty=floats(1),
        top_k=np.where(row % 4 == 1, 1, 50).astype(np.int32),
        seed_low=row.astype(np.int32),
        seed_high=row.astype(np.int32),
        min_seq_len=np.zeros_like(row, np.int32),
        num_bias=np.zeros_like(row, np.int32),
    )
    arguments = (jnp.asarray(logits), jax.tree.map(jnp.asarray, params), jnp.asarray(row + 5, jnp.int32))

    def run(*arguments: Any) -> jax.Array:
        return sample(*arguments, SamplingMode.LIMITED)

    compiled = jax.jit(run).lower(*arguments).compile(compiler_options=options)
    with jax.default_device(jax.devices("cpu")[0]):
        want = np.asarray(jax.jit(run)(*jax.tree.map(np.asarray, arguments)))

    def measure() -> Numbers:
        got = np.asarray(compiled(*arguments))
        fixed = row % 4 < 2
        wrong = int((got[fixed] != logits.argmax(-1)[fixed]).sum()) + int((got != want).sum())
        failed = {"status": "failed", "reason": f"{wrong} of {_SAMPLED_ROWS} rows got another token"} if wrong else {}
        return {"error": wrong / _SAMPLED_ROWS, **failed}

    return measure


def cases(setting: Setting) -> list[Case]:
    found = [Case("toolkit", functools.partial(toolkit, setting))]
    write = WriteShape(9, 2, 2, 64, 16) if setting.smoke else WriteShape(num_tokens=70)
    for mode, options in MODES.items():
        if setting.smoke and mode != "graphs on":
            continue  # a CPU has none
        for op, shape in attention_shapes(setting).items():
            found.append(Case(f"{op}, {mode}", functools.partial(check_attention, op, shape, setting, options)))
        found.append(Case(f"write, {mode}", functools.partial(check_write, write, setting, options)))
        found.append(Case(f"sampler, {mode}", functools.partial(check_sampler, options, setting)))
    return found
