"""The latent backend of Hopper: interpreted against the reference, and in whole steps of DeepSeek-V3 compiled for H200.

Pages that a row may not look at hold NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.model_configs import DEEPSEEK_V3, write_config
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.targets import gpu_devices
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.kernels.api import AttentionMetadata, AttentionSpec, Chip, choose_latent_backend
from jaxserve.kernels.latent import Projections
from jaxserve.kernels.latent_parts import Division
from jaxserve.kernels.pallas.gpu.extend import ExtendConfig
from jaxserve.kernels.pallas.gpu.latent_attention import PallasGpuLatentAttention
from jaxserve.kernels.pallas.gpu.mla import MlaConfig
from jaxserve.kernels.spec import ProjectedHead
from jaxserve.models import ModelConfig
from tests.accelerator.conftest import relative_error, some_always
from tests.accelerator.proofs import Facts

H200 = Chip("gpu", "NVIDIA H200", (9, 0), 132)
SPEC = AttentionSpec(H200, 16, 1, 576, "bfloat16", "bfloat16", page_size=64, latent_dim=512)
TINY = MlaConfig(num_blocks=3, min_tiles=1)
SCALE = 0.07


# Expanding them pays from 44 queries on.
HEAD = ProjectedHead(nope_dim=16, rope_dim=64, value_dim=64)
DIVIDED = {
    "override": TINY,
    "extend_override": ExtendConfig(block_kv=64, num_sms=3),
    "division": Division(absorbed_tokens=8),
}


@dataclasses.dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]  # queries, and tokens in the cache with them
    num_tokens: int
    decode_q_len: int | None = None
    num_heads: int = 16
    num_parts: tuple[int, int] | None = None  # that are absorbed and expanded; None: the step is not divided


CASES = {
    "decode": Case(((1, 70), (0, 0), (1, 9)), 3, decode_q_len=1),
    "verify": Case(((5, 70), (0, 0), (2, 2)), 15, decode_q_len=5),
    "prompts": Case(((6, 130), (1, 65), (0, 0), (3, 3)), 12),
    "more heads than a group has room for": Case(((3, 67), (2, 2)), 6, num_heads=40),
    "many queries": Case(((1, 65), (50, 70), (9, 9)), 64, num_heads=8, num_parts=(2, 1)),
    "a long prefix": Case(((45, 140), (2, 2)), 48, num_heads=8, num_parts=(1, 3)),
}


def tokens_of(case: Case) -> list[tuple[int, int]]:
    """Of each token slot (row, position); (-1, 0) is padding."""
    if case.decode_q_len is None:
        live = [(row, kv - q + i) for row, (q, kv) in enumerate(case.rows) for i in range(q)]
        return live + [(-1, 0)] * (case.num_tokens - len(live))
    return [(row, kv - q + i) if i < q else (-1, 0) for row, (q, kv) in enumerate(case.rows) for i in range(case.decode_q_len)]


def expected(q: np.ndarray, projections: Projections, latents: list[np.ndarray], tokens: list[tuple[int, int]]) -> np.ndarray:
    """By definition, in float64."""
    out = np.zeros((*q.shape[:2], HEAD.value_dim))
    by_key, by_value = (np.asarray(x, np.float64) for x in projections)
    for token, (row, position) in enumerate(tokens):
        if row < 0:
            continue
        seen = latents[row][: position + 1]
        keys = np.einsum("sl,hnl->hsn", seen[:, :512], by_key)
        nope, rotated = np.split(q[token].astype(np.float64), [HEAD.nope_dim], axis=1)
        scores = (np.einsum("hn,hsn->hs", nope, keys) + rotated @ seen[:, 512:].T) * SCALE
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        values = np.einsum("sl,hvl->hsv", seen[:, :512], by_value)
        out[token] = np.einsum("hs,hsv->hv", weights / weights.sum(axis=1, keepdims=True), values)
    return out


@pytest.mark.parametrize("name", some_always(CASES, "prompts", "many queries"))
def test_a_step_equals_attention_by_definition(name: str, interpret: Any) -> None:
    case, rng, page_size = CASES[name], np.random.default_rng(0), 64
    spec = dataclasses.replace(SPEC, num_heads=case.num_heads, projected=HEAD)
    assert PallasGpuLatentAttention.supports(spec) is None
    backend = PallasGpuLatentAttention(spec, interpret=interpret, **DIVIDED)  # type: ignore[arg-type]
    tokens, counts = tokens_of(case), [-(-kv // page_size) for _, kv in case.rows]
    num_pages = sum(counts) + 1
    table = np.full((len(case.rows), max(counts) + 1), 1 << 30, np.int32)  # behind a row's pages there is nothing to find
    pool = np.full((2 * num_pages, 1, page_size, 576), np.nan, jnp.bfloat16)  # of two layers; the second is used
    latents, free = [], list(rng.permutation(num_pages))
    for row, ((q_len, kv), count) in enumerate(zip(case.rows, counts, strict=True)):
        table[row, :count] = [free.pop() for _ in range(count)]
        rows = rng.standard_normal((kv, 576)).astype(jnp.bfloat16)
        latents.append(rows.astype(np.float64))
        for position in range(kv - q_len):  # what the step brings it writes itself
            pool[num_pages + table[row, position // page_size], 0, position % page_size] = rows[position]
    new = np.stack([latents[row][position] if row >= 0 else np.full(576, np.nan) for row, position in tokens])
    q = rng.standard_normal((len(tokens), case.num_heads, HEAD.key_dim)).astype(jnp.bfloat16)
    projections = Projections(
        *(
            jnp.asarray(rng.standard_normal((case.num_heads, n, 512)) / 512**0.5, jnp.bfloat16)
            for n in (HEAD.nope_dim, HEAD.value_dim)
        )
    )
    arguments = {
        "kv_lens": [kv for _, kv in case.rows],
        "cu_q_lens": np.cumsum([0, *(q_len for q_len, _ in case.rows)]),
        "page_table": table,
        "slot_pages": [table[row, position // page_size] if row >= 0 else 1 << 30 for row, position in tokens],
        "slot_offsets": [position % page_size for _, position in tokens],
    }
    step = {name: jnp.asarray(array, jnp.int32) for name, array in arguments.items()}
    metadata = backend.plan(AttentionMetadata(**step, decode_q_len=case.decode_q_len))
    divided = metadata.work.divided
    assert (divided and (int(divided.num_absorbed), int(divided.num_expanded))) == case.num_parts
    written = backend.write(jnp.asarray(new, jnp.bfloat16), jnp.asarray(pool), metadata, num_pages)
    out = backend.attend(jnp.asarray(q), projections, written, metadata, num_pages, scale=SCALE)
    want = expected(q, projections, latents, tokens)
    for token, (row, _) in enumerate(tokens):
        if row < 0:
            assert not jnp.any(out[token]), f"token {token}"
        else:
            assert relative_error(out[token], want[token]) < 2e-2, f"token {token}"


def test_it_is_chosen_for_hopper_and_says_what_it_cannot_do() -> None:
    backend = choose_latent_backend("auto", dataclasses.replace(SPEC, page_size=None))
    assert isinstance(backend, PallasGpuLatentAttention) and backend.kv_pages().shape == (1, 64, 576)
    for change, words in [
        ({"num_heads": 2}, "8 to 128 heads"),
        ({"kv_dtype": "int8"}, "the model's type, bfloat16, not int8"),
        ({"page_size": 48}, "page size 48"),
        ({"chip": Chip("gpu", "NVIDIA B200", (10, 0), 148)}, "compute capability 10.0"),
    ]:
        spec = dataclasses.replace(SPEC, **change)  # type: ignore[arg-type]
        assert choose_latent_backend("auto", spec).name == "reference"
        with pytest.raises(NotImplementedError, match=words):
            choose_latent_backend("pallas", spec)


@pytest.mark.compile
@pytest.mark.parametrize("options", [{}, {"speculative_algorithm": "NGRAM"}], ids=["plain", "drafts"])
def test_a_step_of_deepseek_v3_on_eight_h200(options: dict[str, Any], tmp_path: Path, prove: Callable[..., Facts]) -> None:
    """Four layers, of which one has experts. Its kernels are there, the cache stays in place, no other collectives."""
    write_config(tmp_path, {**DEEPSEEK_V3, "num_hidden_layers": 4})
    args = ServerArgs(model_path=str(tmp_path), tp_size=8, **options)
    config = ModelConfig.from_pretrained(tmp_path)
    plan = Blueprint.draw(args, config, make_mesh(8, list(gpu_devices("h200", 8))))
    assert plan.backend.name == "pallas" and plan.page_size == 64
    num_pages = 16384
    pool_bytes = sum(plan.page_bytes) * num_pages
    # A prompt's step is in parts, as many as there are, of either side; they are planned before the layers.
    for bucket, kernel_names, open_loops in (
        (plan.buckets.decode[-1], {"mla_decode", "mla_decode_combine"}, 0),
        (plan.buckets.extend[-2], {"mla_decode", "mla_decode_combine", "paged_extend"}, 2 + 2 * config.num_layers),
    ):
        facts = prove(plan.lower(bucket, plan.pages_each(num_pages)))
        assert kernel_names <= set(facts.kernel_names), f"{bucket}: {facts.kernel_names}"
        assert facts.collectives == expected_collectives(config, 8)
        # What makes an array like the pool is the scatter into it, which has the work before it fused in.
        makers = {array.opcode for array in facts.copies_of((config.num_layers * num_pages, 1, 64, 576))}
        assert makers == {"fusion"} and facts.aliased_bytes >= pool_bytes > facts.temp_bytes
        assert all(kernel.spill_bytes == 0 and not kernel.warnings for kernel in facts.gpu_kernels), facts.gpu_kernels
        assert facts.conditionals == 0 and facts.open_loops == open_loops
