"""The record of what compilers said: it knows a program again, and nothing else for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.accelerator.proofs import Program, Prover, Record

SOURCE = """
def kernel(x):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), kernel_name="twice")(x)
"""


def lower(mesh: Mesh, source: str, **options: Any) -> Any:
    names: dict[str, Any] = {"plgpu": plgpu, "jax": jax, "jnp": jnp}
    exec(source, names)
    shape = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(names["kernel"], **options).trace(shape).lower()


def test_a_program_is_known_again_wherever_its_source_stands(h200: Mesh) -> None:
    program = Program.of(lower(h200, SOURCE))
    assert list(program.gpu_kernels.values()) == ["twice_mosaic_gpu_kernel"]
    assert Program.of(lower(h200, "\n\n" + SOURCE)) == program
    assert Program.of(lower(h200, SOURCE.replace("* 2", "* 3"))).fingerprint != program.fingerprint
    assert Program.of(lower(h200, SOURCE.replace("(x)\n", "(x) + 1\n"))).fingerprint != program.fingerprint
    told = {"compiler_options": {"xla_gpu_enable_triton_gemm": False}}
    assert Program.of(lower(h200, SOURCE, **told)).fingerprint != program.fingerprint
    assert Program.of(lower(h200, SOURCE), {"option": "1"}).fingerprint != program.fingerprint


def test_facts_are_complete_from_the_compiler_and_from_the_record(h200: Mesh, tmp_path: Path) -> None:
    """The second program calls a kernel that this process has built already, of which ptxas says nothing again."""
    record = Record(tmp_path)
    prove = Prover(record)
    first, second = lower(h200, SOURCE), lower(h200, SOURCE.replace("(x)\n", "(x) + 1\n"))
    facts = [prove("first", first), prove("second", second)]
    assert all([kernel.name for kernel in fact.gpu_kernels] == ["twice_mosaic_gpu_kernel"] for fact in facts)
    assert facts[0].kernel_names == ("twice",) and not facts[0].copies
    record.write()
    again = Record(tmp_path)
    assert [Prover(again)("any", lowered) for lowered in (first, second)] == facts
    assert (record.compiled, record.recalled, again.compiled, again.recalled) == (2, 0, 0, 2)


def test_records_of_several_processes_are_merged(tmp_path: Path) -> None:
    records = [Record(tmp_path) for _ in range(2)]
    for number, record in enumerate(records):
        record.recall("test", f"program {number}", lambda number=number: {"bytes": number})
        record.write()
    after = Record(tmp_path)
    assert [after.recall("test", f"program {number}", dict) for number in range(2)] == [{"bytes": 0}, {"bytes": 1}]
    assert after.compiled == 0


def test_what_is_compiled_anew_must_be_as_recorded(tmp_path: Path) -> None:
    record = Record(tmp_path)
    assert record.recall("test", "program", lambda: {"spills": 0}) == {"spills": 0}
    assert record.recall("test", "program", lambda: {"spills": 0}, anew=True) == {"spills": 0}
    with pytest.raises(AssertionError, match=r"test was recorded as .*0.*, and now is .*8"):
        record.recall("test", "program", lambda: {"spills": 8}, anew=True)


def test_a_record_of_other_compilers_is_not_believed(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.recall("test", "program", lambda: {"spills": 0})
    record.write()
    content = json.loads(record.path.read_text())
    content["versions"]["nvidia-cuda-nvcc"] = "13.0.88"
    record.path.write_text(json.dumps(content))
    assert Record(tmp_path).recall("test", "program", lambda: {"spills": 8}) == {"spills": 8}
