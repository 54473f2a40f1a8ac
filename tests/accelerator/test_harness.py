"""The lane's own tools: a kernel is compiled for a GPU that is not there, its resources are read, and a race is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.aot.ptxas import parse_report
from jaxserve.aot.sass import compile_with_sass


def copy_pages(pages: jax.Array, page_table: jax.Array, interpret: Any = None) -> jax.Array:
    def body(pages_ref: Any, table_ref: Any, out_ref: Any, buffer: Any, barrier: Any) -> None:
        index = lax.axis_index("page")
        plgpu.copy_gmem_to_smem(pages_ref.at[table_ref[index]], buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[index])
        plgpu.wait_smem_to_gmem(0)

    count, page_shape = page_table.shape[0], pages.shape[1:]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, *page_shape), pages.dtype),
        grid=(count,),
        grid_names=("page",),
        scratch_types=[plgpu.SMEM(page_shape, pages.dtype), plgpu.Barrier(num_barriers=1)],
        interpret=interpret,
    )(pages, page_table)


def test_the_interpreter_runs_a_kernel(interpret: Any) -> None:
    pages = jax.random.normal(jax.random.key(0), (5, 8, 128))
    assert jnp.array_equal(copy_pages(pages, jnp.array([3, 1, 3]), interpret), pages[jnp.array([3, 1, 3])])


def test_a_kernel_is_compiled_for_h200_and_reported(compile_for_h200: Callable[..., Any]) -> None:
    facts = compile_for_h200(copy_pages, jax.ShapeDtypeStruct((5, 8, 128), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32))
    assert facts.argument_bytes >= 5 * 8 * 128 * 4
    (report,) = facts.gpu_kernels
    assert report.target == "sm_90a" and 0 < report.registers < 64 and report.spill_bytes == 0 and not report.warnings


@pytest.mark.compile
def test_code_is_read_and_says_which_compiler_made_it(h200: Mesh, chosen_ptxas: str | None) -> None:
    replicated = NamedSharding(h200, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct((7, 8, 128), jnp.float32, sharding=replicated)]
    shapes.append(jax.ShapeDtypeStruct((2,), jnp.int32, sharding=replicated))
    with jax.sharding.use_abstract_mesh(h200.abstract_mesh):
        _, (kernel,) = compile_with_sass(jax.jit(copy_pages).trace(*shapes).lower())
    assert kernel.name == "body" and sum(x.base == "UTMALDG" for x in kernel.instructions) == 1
    assert kernel.compiler == chosen_ptxas or (chosen_ptxas is None and kernel.compiler.startswith("13."))


def test_spills_are_read() -> None:
    text = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1 bytes smem
"""
    (report,) = parse_report(text)
    assert (report.name, report.registers, report.stack_bytes, report.spill_bytes) == ("k", 255, 8, 28)


def test_a_race_fails(request: pytest.FixtureRequest) -> None:
    """Two warpgroups write one place without a barrier: the fixture must object when it is torn down."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    def body(out_ref: Any, buffer: Any) -> None:
        buffer[...] = jnp.full((128,), lax.axis_index("wg"), jnp.float32)
        plgpu.commit_smem()

        @pl.when(lax.axis_index("wg") == 0)
        def _store() -> None:
            plgpu.copy_smem_to_gmem(buffer, out_ref)
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )()
    assert gpu_callbacks.get_races().races_found
    gpu_callbacks.reset_gpu_interpret_mode_state()
