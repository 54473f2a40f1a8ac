"""`jaxserve compile` and what it promises, through the real compilers: collectives, the KV cache in place, memory that fits.

Models have real heads but, mostly, two layers (they are alike), small buckets and narrow products; some are whole.
benchmarks/capacity.py compiles the full matrix.
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
from jax.experimental import mesh_utils
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.model_configs import LLAMA_8B, LLAMA_70B, QWEN3_32B, write_config
from jaxserve.aot.chips import CHIPS
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.programs import Compilation, ProgramReport
from jaxserve.aot.targets import known_targets, parse_target
from jaxserve.cli.main import run
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from tests.accelerator.proofs import Facts, Program, Record
from tests.accelerator.test_tpu_compile import kernel_names

pytestmark = pytest.mark.compile
pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")

NUM_PAGES = 2048
SMALL = {
    "max_running_requests": 32,
    "decode_row_buckets": (32,),
    "chunked_prefill_size": 512,
    "prefill_token_buckets": (512,),
}
NARROW = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 16384}  # wide products take the compiler long
MODELS = {"8b": LLAMA_8B, "32b": QWEN3_32B, "70b": LLAMA_70B}


Prove = Callable[..., Facts]


def check_steps(
    prove: Prove,
    folder: Path,
    raw: dict[str, Any],
    topology: str,
    tp_size: int,
    expected: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """The decode step and the extend step: collectives, aliasing, no second KV cache, our kernels."""
    config = ModelConfig.from_pretrained(write_config(folder, {**raw, "num_hidden_layers": 2}))
    args = ServerArgs(model_path=str(folder), tp_size=tp_size, **{**SMALL, **options})
    blueprint = Blueprint.draw(args, config, make_mesh(tp_size, list(parse_target(topology).devices())))
    assert blueprint.backend.name == "pallas"
    for bucket in (*blueprint.buckets.decode[-1:], *blueprint.buckets.extend[-1:]):
        facts = prove(blueprint.lower(bucket, blueprint.pages_each(NUM_PAGES)))
        assert facts.collectives == (expected or expected_collectives(config, tp_size)), bucket
        assert facts.aliased_bytes >= sum(blueprint.page_bytes) * NUM_PAGES, bucket
        for page in jax.tree.leaves(blueprint.backend.kv_pages()):
            assert not facts.copies_of((config.num_layers * NUM_PAGES, *page.shape)), bucket
        kernels = kernel_names(blueprint.backend, bucket.decode_only)
        if blueprint.config.batch_invariant:  # rows of one query are the extend pass', too
            kernels = {"paged_extend", "write_kv"}
        assert {kernel.name for kernel in facts.tpu_kernels} == kernels, bucket


@pytest.mark.parametrize(
    ("model", "topology", "tp_size"),
    [
        ("8b", "v6e:1x1", 1),
        ("8b", "tpu7x:2x2x1", 8),
        ("32b", "tpu7x:1x1x1", 1),
        ("32b", "v6e:2x2", 4),
        ("70b", "v5e:2x4", 8),
        ("70b", "v6e:4x4", 16),  # more devices than KV heads: each head is kept twice, and no other collective appears for it
    ],
)
def test_steps(model: str, topology: str, tp_size: int, tmp_path: Path, prove: Prove) -> None:
    check_steps(prove, tmp_path, {**MODELS[model], **NARROW}, topology, tp_size)


def test_tensor_parallelism_over_64_chips(tmp_path: Path, prove: Prove) -> None:
    """XLA gathers few rows of logits over so many chips by adding them up, each chip's part in its place."""
    check_steps(prove, tmp_path, {**LLAMA_70B, **NARROW}, "v6e:8x8", 64, expected={"all-reduce": 6})


def test_drafts_are_verified_by_the_decode_kernel(tmp_path: Path, prove: Prove) -> None:
    check_steps(prove, tmp_path, {**LLAMA_8B, **NARROW}, "v6e:1x1", 1, speculative_algorithm="NGRAM")


def test_a_quantized_cache(tmp_path: Path, prove: Prove) -> None:
    check_steps(prove, tmp_path, {**LLAMA_8B, **NARROW}, "v6e:2x2", 4, kv_cache_dtype="int8")


def test_deterministic_inference_has_one_step(tmp_path: Path, prove: Prove) -> None:
    """Sums are gathered and added up in the devices' order."""
    raw, expected = {**LLAMA_8B, **NARROW}, {"all-gather": 6}
    options = {name: None for name in SMALL if name != "max_running_requests"}
    check_steps(prove, tmp_path, raw, "v6e:2x2", 4, expected, enable_deterministic_inference=True, **options)


def test_the_compiler_finds_its_own_rings() -> None:
    """Why the mesh keeps JAX's order of devices: the strategy of an all-reduce does not depend on it."""

    def strategies(devices: Any) -> list[str]:
        mesh = Mesh(np.array(devices).reshape(1, 8), ("data", "tensor"))
        sharded = NamedSharding(mesh, PartitionSpec())
        step = jax.shard_map(
            lambda x: jax.lax.psum(x, "tensor"), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        hlo = jax.jit(step).lower(jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16, sharding=sharded)).compile().as_text()
        return [line.split("collective_algorithm_config")[1][:200] for line in hlo.splitlines() if " all-reduce(" in line]

    devices = list(parse_target("v6e:2x4").devices())
    ring = mesh_utils.create_device_mesh((1, 8), devices).reshape(-1).tolist()
    assert ring != devices
    assert strategies(devices) == strategies(ring) != []


@pytest.fixture
def _programs_from_the_record(monkeypatch: pytest.MonkeyPatch, record: Record, request: pytest.FixtureRequest) -> None:
    """What the command would compile is taken from the record, if it holds this very program."""
    compile_ = Compilation.compile

    def recall(self: Compilation) -> ProgramReport:
        key = Program.of(self.lowered, self.pool_shapes, self.compiler_options).fingerprint
        return ProgramReport(**record.recall(request.node.nodeid, key, lambda: dataclasses.asdict(compile_(self))))

    monkeypatch.setattr(Compilation, "compile", recall)


@pytest.mark.usefixtures("_programs_from_the_record")
@pytest.mark.parametrize(
    ("model", "topology"), [("8b", "v6e:1x1"), ("8b", "v6e:2x2"), ("32b", "v6e:2x2"), ("70b", "v6e:2x4")], ids=" on ".join
)
def test_a_plan_at_full_depth_and_width(model: str, topology: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, MODELS[model])
    options = ["--max-running-requests", "64", "--decode-row-buckets", "64", "--chunked-prefill-size", "1024"]
    assert run(["compile", str(folder), "--topology", topology, "--programs", "largest", "--json", *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    tp_size, memory = plan["options"]["tp_size"], plan["memory_bytes"]
    assert plan["fits"] and tp_size == parse_target(topology).num_devices and plan["attention_backend"] == "pallas"
    assert plan["kv_cache"]["tokens"] > 100_000
    assert 0 < memory["free"] < 0.1 * memory["hbm"]
    compiled = [step for step in plan["steps"] if step["compiled"]]
    assert [step["decode_only"] for step in compiled] == [False, True]
    for step in compiled:
        program = step["compiled"]
        assert program["collectives"] == expected_collectives(ModelConfig.from_pretrained(folder), tp_size)
        assert program["aliased_bytes"] >= memory["kv_pool"] and program["pool_copies"] == 0
        # Norms, softmax and the like come on top of our count; of attention, which is in kernels, XLA counts what they declare.
        assert step["counted"]["matmul_flops"] < 1.2 * program["xla_flops"]
        assert program["argument_bytes"] >= memory["weights"] + memory["kv_pool"]


def test_a_cache_that_is_too_large_is_refused_by_the_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config(tmp_path, {**LLAMA_8B, **NARROW, "num_hidden_layers": 2}))
    options = ["--max-running-requests", "8", "--decode-row-buckets", "8", "--prefill-token-buckets", "256"]
    options += ["--chunked-prefill-size", "256"]
    tokens = ["--max-total-tokens", "20000000"]
    assert run(["compile", folder, "--topology", "v6e:1x1", "--programs", "largest", *options, *tokens]) == 1
    assert "does not compile with a KV cache of" in capsys.readouterr().err


@pytest.mark.parametrize("target", [t for t in known_targets() if t.num_devices <= 16], ids=lambda target: target.name)
def test_targets_are_what_the_compiler_says(target: Any) -> None:
    if target.chip.platform == "gpu":
        pytest.importorskip("jax_cuda13_plugin")
    devices = target.devices()
    assert len(devices) == target.num_devices
    assert {device.device_kind for device in devices} == {target.chip.kind}
    assert len({device.process_index for device in devices}) == target.num_hosts


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.platform == "tpu"], ids=lambda chip: chip.name)
def test_chips_are_what_jax_knows(chip: Any) -> None:
    target = next(target for target in known_targets() if target.chip is chip)
    mesh = Mesh(np.array(target.devices()[:1]), ("tensor",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        info = pltpu.get_tpu_info()
    cores = 2 if chip.name == "v5p" else 1  # JAX describes one of the two cores of a v5p
    assert chip.scratchpad_bytes == info.vmem_capacity_bytes
    assert chip.hbm_bytes == pytest.approx(cores * info.hbm_capacity_bytes, rel=0.05)
    assert chip.hbm_bytes_per_s == pytest.approx(cores * info.mem_bw_bytes_per_second, rel=0.15)
    assert chip.bf16_flops_per_s == pytest.approx(cores * info.bf16_ops_per_second, rel=0.02)
    if info.int8_ops_per_second:
        assert chip.int8_ops_per_s == pytest.approx(cores * info.int8_ops_per_second, rel=0.02)
    if info.fp8_ops_per_second:
        assert chip.fp8_flops_per_s == pytest.approx(cores * info.fp8_ops_per_second, rel=0.02)
