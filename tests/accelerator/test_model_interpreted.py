"""A whole tiny model on interpreted kernels gives what it gives on the reference: prefill, a mixed step, decode, drafts.

Of a model with a window, pages that lie behind it are NaN before the decode step, and their page-table entries nonsense.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_interpreter

from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.deal import Shards
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.row_params import NUM_ROW_PARAMS
from jaxserve.executor.sampling import Continuation
from jaxserve.executor.step import ForwardState
from jaxserve.kernels.api import AttentionSpec, Chip, PagedBackend
from jaxserve.kernels.pallas.gpu.attention import PallasGpuAttention
from jaxserve.kernels.pallas.gpu.latent_attention import PallasGpuLatentAttention
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention, PallasTpuLatentAttention
from jaxserve.models import ModelConfig, load_params
from jaxserve.runner import PageUpdates, StepInput
from jaxserve.types import ForwardMode
from tests.accelerator.conftest import relative_error

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
WINDOW = 16  # of the second layer; the first sees all
TWO_GROUPS = {
    **CONFIG,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}  # the first layer sees all
LATENTS = {
    **CONFIG,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,  # no layer has experts
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
DRAFTS = [[7, 20, 21], [8, -1, -1], [9, 30, -1], [-1] * 3, [-1] * 3]  # what rows go on from; the last is the scratch row
NUM_PAGES = 8
FIRST_PAGE = 3  # of the row that outgrows the window


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


Pages = dict[tuple[int, int], int]  # (row, index) -> page


def step(
    rows: list[int], lens: list[tuple[int, int]], num_decode: int, tokens: np.ndarray, pages: Pages, num_groups: int
) -> StepInput:
    """lens: (tokens added, tokens after the step) of each row. All groups use the same page numbers."""
    of_group = np.asarray([(*where, page) for where, page in pages.items()], np.int32).T
    groups = np.repeat(np.arange(num_groups, dtype=np.int32), len(pages))
    return StepInput(
        mode=ForwardMode.MIXED,
        rows=ints(*rows),
        seq_lens=ints(*(after for _, after in lens)),
        extend_lens=ints(*(added for added, _ in lens)),
        num_decode_rows=num_decode,
        input_ids=tokens.astype(np.int32),
        sample=np.ones(len(rows), bool),
        page_updates=PageUpdates(*np.tile(of_group, num_groups), groups),
        new_rows=[],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )


def logits_of_steps(blueprint: Blueprint, params: Any) -> list[np.ndarray]:
    num_pages = blueprint.pages_each(NUM_PAGES)
    programs, groups = blueprint.programs(num_pages), len(num_pages)
    shards = Shards.of(blueprint.spec(num_pages))
    state, _ = programs.lower_empty_state().compile()()
    tokens = np.random.default_rng(0).integers(0, 256, 200)
    K = blueprint.num_draft_tokens
    following = jnp.asarray(DRAFTS, jnp.int32)[:, :K]
    pages = {(0, 0): FIRST_PAGE, (0, 1): 1, (1, 0): 6}
    prefill = step([0, 1], [(85, 85), (9, 9)], 0, tokens[:94], pages, groups)
    mixed = step([1, 2], [(1, 10), (20, 20)], 1, tokens[100:120], {(2, 0): 5}, groups)
    decode = step([0, 1, 2], [(K, 85 + K), (K, 10 + K), (K, 20 + K)], 3, tokens[:0], {(0, 1): 1}, groups)
    found = []
    for request, bucket, lengths in (
        (prefill, Bucket(96, 4, 8, decode_only=False), (0, 0, 0)),
        (mixed, Bucket(32, 4, 8, decode_only=False), (85, 9, 0)),
        (decode, Bucket(4 * K, 4, 8, decode_only=True), (85, 10, 20)),
    ):
        if bucket.decode_only:
            state = without_hidden_pages(state, blueprint)
        packed = shards.deal(request, bucket).pack(np.zeros((request.num_rows, NUM_ROW_PARAMS), np.int32))
        program = programs.lower_forward(bucket, params).compile()
        goes_on_from = Continuation(following, jnp.asarray([*lengths, 0, 0], jnp.int32) if K > 1 else None)
        state, forwarded = program(params, state, goes_on_from, packed)
        logits = np.asarray(forwarded.logits).reshape(bucket.num_rows, bucket.tokens_per_row, -1)
        is_live = np.arange(bucket.tokens_per_row) < np.asarray(forwarded.extend_lens)[:, None]
        found.append(logits[is_live] if bucket.decode_only else logits[: request.num_rows])
    return found


def without_hidden_pages(state: ForwardState, blueprint: Blueprint) -> ForwardState:
    """What the groups with a window have no right to read any more is NaN, and not where the page table says."""
    kv, page_table = state.kv, state.page_table
    num_rows = len(page_table) // len(blueprint.config.kv_windows)
    pools = blueprint.pools(blueprint.pages_each(NUM_PAGES))
    for group, (window, pool) in enumerate(pools.items()):
        if window is not None:
            hidden = np.asarray([pool.page_offset(i) + FIRST_PAGE for i in range(pool.num_layers)])
            kv = jax.tree.map(lambda pages, hidden=hidden: pages.at[hidden].set(not_a_number(pages.dtype)), kv)
            page_table = page_table.at[group * num_rows, 0].set(1 << 30)
    return dataclasses.replace(state, kv=kv, page_table=page_table)


def not_a_number(dtype: Any) -> Any:
    """Where floats are kept as bits: all of them set."""
    return np.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.nan


def gpu(spec: AttentionSpec, interpret: Any) -> PagedBackend:
    backend = PallasGpuAttention if spec.latent_dim is None else PallasGpuLatentAttention
    return backend(dataclasses.replace(spec, chip=Chip("gpu", "NVIDIA H200", (9, 0), 2)), interpret)


def tpu(spec: AttentionSpec, interpret: Any) -> PagedBackend:
    backend = PallasTpuAttention if spec.latent_dim is None else PallasTpuLatentAttention
    return backend(dataclasses.replace(spec, chip=Chip("tpu", "TPU v6 lite")), tpu_interpreter.INTERPRET)


tpu_races_fail = pytest.fixture(tpu_interpreter.fail_on_races)


@pytest.mark.usefixtures("tpu_races_fail")
@pytest.mark.parametrize("bind", [gpu, tpu])
@pytest.mark.parametrize(
    ("model", "options"),
    [(CONFIG, {}), (TWO_GROUPS, {}), (TWO_GROUPS, NGRAM), (LATENTS, {}), (LATENTS, NGRAM)],
    ids=["one group", "two groups", "two groups, drafts", "latents", "latents, drafts"],
)
def test_a_model(
    model: dict[str, Any],
    options: dict[str, Any],
    bind: Callable[..., PagedBackend],
    tmp_path: Path,
    interpret: Any,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "page_size": 64,
        "attention_backend": "reference",
        "max_running_requests": 4,
        "context_length": 256,
    }
    args = ServerArgs(model_path=str(tmp_path), **common, **options)
    config, mesh = ModelConfig.from_pretrained(tmp_path), make_mesh(1)
    reference = Blueprint.draw(args, config, mesh)
    assert reference.backend.name == "reference"
    kernels = dataclasses.replace(reference, backend=bind(reference.backend.spec, interpret))
    assert len(reference.config.kv_windows) == (2 if model is TWO_GROUPS else 1)
    params = load_params(str(tmp_path), config, mesh, jnp.bfloat16, "dummy", progress=False)
    for got, want in zip(logits_of_steps(kernels, params), logits_of_steps(reference, params), strict=True):
        assert relative_error(got, want) < 2e-2
