"""A whole tiny model on interpreted kernels gives what it gives on the reference: prefill, a mixed step, decode."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tpu_interpreter

from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.forward_batch import Bucket, pack
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.row_params import NUM_ROW_PARAMS
from jaxserve.executor.sampling import Continuation
from jaxserve.kernels.api import AttentionBackend, AttentionSpec, Chip
from jaxserve.kernels.pallas.gpu_attention import PallasGpuAttention
from jaxserve.kernels.pallas.tpu_backend import PallasTpuAttention
from jaxserve.kernels.reference import ReferenceAttention
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
NUM_PAGES = 8


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


Pages = dict[tuple[int, int], int]  # (row, index) -> page


def step(rows: list[int], lens: list[tuple[int, int]], num_decode: int, tokens: np.ndarray, pages: Pages) -> StepInput:
    """lens: (tokens added, tokens after the step) of each row."""
    columns = np.asarray([(row, index, page) for (row, index), page in pages.items()], np.int32).T
    entries = PageUpdates.of(*columns)
    return StepInput(
        mode=ForwardMode.MIXED,
        rows=ints(*rows),
        seq_lens=ints(*(after for _, after in lens)),
        extend_lens=ints(*(added for added, _ in lens)),
        num_decode_rows=num_decode,
        input_ids=tokens.astype(np.int32),
        sample=np.ones(len(rows), bool),
        page_updates=entries,
        new_rows=[],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )


def logits_of_steps(blueprint: Blueprint, params: Any) -> list[np.ndarray]:
    programs = blueprint.programs(blueprint.pages_each(NUM_PAGES))
    state, _ = programs.empty_state()
    tokens = np.random.default_rng(0).integers(0, 256, 200)
    goes_on_from = Continuation(jnp.asarray(np.arange(5) + 7, jnp.int32)[:, None], None)
    prefill = step([0, 1], [(70, 70), (9, 9)], 0, tokens[:79], {(0, 0): 3, (0, 1): 1, (1, 0): 6})
    mixed = step([1, 2], [(1, 10), (20, 20)], 1, tokens[100:120], {(2, 0): 5})
    decode = step([0, 1, 2], [(1, 71), (1, 11), (1, 21)], 3, tokens[:0], {(0, 1): 1})
    found = []
    for request, bucket in (
        (prefill, Bucket(96, 4, 8, decode_only=False)),
        (mixed, Bucket(32, 4, 8, decode_only=False)),
        (decode, Bucket(4, 4, 8, decode_only=True)),
    ):
        packed = pack(request, bucket, np.zeros((request.num_rows, NUM_ROW_PARAMS), np.int32), scratch_row=4)
        program = programs.lower_forward(bucket, params).compile()
        state, forwarded = program(params, state, goes_on_from, packed)
        found.append(np.asarray(forwarded.logits)[: request.num_rows])
    return found


def gpu(spec: AttentionSpec, interpret: Any) -> AttentionBackend:
    return PallasGpuAttention(dataclasses.replace(spec, chip=Chip("gpu", "NVIDIA H200", (9, 0), 2)), interpret)


def tpu(spec: AttentionSpec, interpret: Any) -> AttentionBackend:
    return PallasTpuAttention(dataclasses.replace(spec, chip=Chip("tpu", "TPU v6 lite")), tpu_interpreter.INTERPRET)


tpu_races_fail = pytest.fixture(tpu_interpreter.fail_on_races)


@pytest.mark.usefixtures("tpu_races_fail")
@pytest.mark.parametrize("bind", [gpu, tpu])
def test_a_model(bind: Callable[..., AttentionBackend], tmp_path: Path, interpret: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options: dict[str, Any] = {"dtype": "bfloat16", "page_size": 64, "max_running_requests": 4, "context_length": 256}
    args = ServerArgs(model_path=str(tmp_path), **options)
    config, mesh = ModelConfig.from_pretrained(tmp_path), make_mesh(1)
    reference = Blueprint.draw(args, config, mesh)
    assert isinstance(reference.backend, ReferenceAttention)
    kernels = dataclasses.replace(reference, backend=bind(reference.backend.spec, interpret))
    params = load_params(str(tmp_path), config, mesh, jnp.bfloat16, "dummy", progress=False)
    for got, want in zip(logits_of_steps(kernels, params), logits_of_steps(reference, params), strict=True):
        assert relative_error(got, want) < 2e-2
