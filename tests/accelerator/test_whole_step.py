"""Whole steps of real model shapes, compiled for H200 from shapes alone: kernels present, the KV cache in place, no spills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.model_configs import GEMMA_3_27B, LLAMA_8B, write_config
from jaxserve.aot.launches import Thunks, read_thunks
from jaxserve.aot.targets import gpu_devices
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.build import measure_steps
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.programs import SamplingKey
from jaxserve.executor.sampler import SamplingMode
from jaxserve.models import ModelConfig
from tests.accelerator.conftest import some_always
from tests.accelerator.proofs import Facts, Program, Record

pytestmark = pytest.mark.compile

LAYERS = 2  # of 32: they are alike
NUM_PAGES = 4096
FULL_POOL_BYTES = 130 * 10**9  # as much as a server leaves to the KV cache of a small model
Prove = Callable[..., Facts]


# The copy of the step's hidden states is one launch; in the list of thunks it stands within others, which launch nothing.
AROUND_A_COPY = 3


def blueprint(folder: Path, config: dict[str, Any], tp_size: int, num_layers: int = LAYERS, **options: Any) -> Blueprint:
    write_config(folder, {**config, "num_hidden_layers": num_layers})
    args = ServerArgs(model_path=str(folder), tp_size=tp_size, **options)
    return Blueprint.draw(args, ModelConfig.from_pretrained(folder), make_mesh(tp_size, list(gpu_devices("h200", tp_size))))


def check_step(prove: Prove, plan: Blueprint, bucket: Bucket) -> None:
    facts = prove(plan.lower(bucket, plan.pages_each(NUM_PAGES)))
    pool_bytes = sum(plan.page_bytes) * NUM_PAGES
    assert facts.aliased_bytes >= pool_bytes, bucket
    assert facts.temp_bytes < pool_bytes, f"{bucket}: {facts.temp_bytes} temporary bytes"
    (page,) = jax.tree.leaves(plan.backend.kv_pages())[:1]
    assert not facts.copies_of((plan.config.num_layers * NUM_PAGES, *page.shape)), bucket
    # The host would have to wait for the device before it could take a branch, or leave a loop whose end only the device knows.
    assert facts.conditionals == 0 and facts.open_loops == 0
    assert "rope_and_write" in facts.kernel_names, f"{bucket}: {facts.kernel_names}"
    assert ("paged_decode" in facts.kernel_names) != plan.config.batch_invariant, f"{bucket}: {facts.kernel_names}"
    assert ("paged_extend" in facts.kernel_names) == (not bucket.decode_only), f"{bucket}: {facts.kernel_names}"
    assert facts.gpu_kernels and all(kernel.spill_bytes == 0 and not kernel.warnings for kernel in facts.gpu_kernels), facts


@pytest.mark.parametrize("tp_size", some_always([1, 4], 1))
def test_a_step_on_h200_keeps_the_cache_in_place(tp_size: int, tmp_path: Path, prove: Prove) -> None:
    plan = blueprint(tmp_path, LLAMA_8B, tp_size)
    assert plan.backend.name == "pallas" and plan.page_size == 64
    check_step(prove, plan, plan.buckets.decode[-1])
    check_step(prove, plan, plan.buckets.extend[-2])


def test_heads_that_fill_no_tile_and_a_quantized_cache(tmp_path: Path, prove: Prove) -> None:
    """Qwen2.5-7B's 28 and 4 heads over 4 devices, few rows, and the smallest prefill."""
    config = {**LLAMA_8B, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    plan = blueprint(tmp_path, config, 4, kv_cache_dtype="int8")
    check_step(prove, plan, plan.buckets.decode[0])
    check_step(prove, plan, plan.buckets.extend[0])


def test_layers_of_two_kv_groups(tmp_path: Path, prove: Prove) -> None:
    """Five layers that see a window, and one that sees all: their pages lie in one array, behind each other."""
    plan = blueprint(tmp_path, GEMMA_3_27B, 1, num_layers=6)
    assert plan.config.kv_windows == (None, 1024) and [pool.num_layers for pool in plan.pools((9, 9)).values()] == [1, 5]
    check_step(prove, plan, plan.buckets.decode[-1])
    check_step(prove, plan, plan.buckets.extend[-2])


def test_drafts_are_verified_by_the_decode_kernel(tmp_path: Path, prove: Prove) -> None:
    plan = blueprint(tmp_path, LLAMA_8B, 1, speculative_algorithm="NGRAM")
    bucket = plan.buckets.decode[-1]
    assert bucket.tokens_per_row == 8
    check_step(prove, plan, bucket)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_deterministic_inference_has_one_step(tp_size: int, tmp_path: Path, prove: Prove) -> None:
    plan = blueprint(tmp_path, LLAMA_8B, tp_size, enable_deterministic_inference=True)
    (bucket,) = plan.buckets.all
    assert bucket.num_tokens == bucket.num_rows == 256
    check_step(prove, plan, bucket)


def test_what_a_step_takes_is_known_before_the_pool_is_sized(tmp_path: Path) -> None:
    plan = blueprint(tmp_path, LLAMA_8B, 1, chunked_prefill_size=1024, max_running_requests=32)
    logits_bytes = 32 * LLAMA_8B["vocab_size"] * 4
    assert logits_bytes < measure_steps(plan).temporaries < 64 * logits_bytes


@pytest.fixture
def thunks_of(record: Record, request: pytest.FixtureRequest) -> Callable[[Any], Thunks]:
    """What the runtime does for a lowered program, from the record if it holds this very program."""

    def read(lowered: Any) -> Thunks:
        key = Program.of(lowered, "thunks").fingerprint
        fields = record.recall(request.node.nodeid, key, lambda: dataclasses.asdict(read_thunks(lowered)))
        return Thunks(**{**fields, "outside": tuple(fields["outside"])})

    return read


@pytest.mark.parametrize("which", [0, -1])
def test_a_layer_of_decode_is_few_launches_and_the_step_one_graph(
    which: int, tmp_path: Path, prove: Prove, thunks_of: Callable[[Any], Thunks]
) -> None:
    launches = []
    for num_layers in (LAYERS, LAYERS + 1):
        plan = blueprint(tmp_path, LLAMA_8B, 1, num_layers)
        bucket = plan.buckets.decode[which]
        lowered = plan.lower(bucket, plan.pages_each(NUM_PAGES))
        launches.append(prove(lowered).launches)
    assert launches[1] - launches[0] <= 10, launches
    full = plan.lower(bucket, plan.pages_each(FULL_POOL_BYTES // sum(plan.page_bytes)))
    assert prove(full).launches == launches[1]
    thunks = thunks_of(lowered)
    assert (thunks.graphs, thunks.in_graphs - AROUND_A_COPY, thunks.outside) == (1, launches[1], ())


def test_prefill_and_sampling_are_one_graph_each(tmp_path: Path, thunks_of: Callable[[Any], Thunks]) -> None:
    plan = blueprint(tmp_path, LLAMA_8B, 1)
    programs = plan.programs(plan.pages_each(NUM_PAGES))
    prefill = thunks_of(plan.lower(plan.buckets.extend[-1], plan.pages_each(NUM_PAGES)))
    assert prefill.graphs == 1 and not prefill.outside, prefill
    greedy = thunks_of(programs.lower_sampling(SamplingKey(64, 1, SamplingMode.GREEDY)))
    assert greedy.graphs == 0 and len(greedy.outside) < 5, greedy  # XLA makes no graph of so few
    for mode in (SamplingMode.DRAW, SamplingMode.LIMITED, SamplingMode.MASKED, SamplingMode.EVERYTHING):
        sampling = thunks_of(programs.lower_sampling(SamplingKey(64, 1, mode)))
        assert sampling.graphs == 1 and not sampling.outside, (mode, sampling)
