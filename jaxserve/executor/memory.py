"""The memory budget of a device: what weights, tables, programs and KV pages take of it, and so how many pages fit.

A starting server and `jaxserve compile` ask the same function. What differs is where the numbers come from: a server measures
the device once its weights are loaded, a plan takes a chip's data sheet less the weights. Knows shapes, not arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import psutil

from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.programs import SamplingKey
from jaxserve.executor.row_tables import RowTables

# On CPU the pool is ordinary host memory, which other programs need too: without --max-total-tokens no more is taken.
CPU_POOL_LIMIT_BYTES = 2 * 2**30
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device."""

    total: int
    free: int  # with the weights loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """What the compiler says of one program, in bytes of one device."""

    arguments: int
    temporaries: int
    new_outputs: int  # those that do not lie where arguments did
    code: int

    @staticmethod
    def of(analysis: Any) -> ProgramMemory:
        """From the memory_analysis() of a compiled program; a backend may have none."""
        if analysis is None:
            return ProgramMemory(arguments=0, temporaries=0, new_outputs=0, code=0)
        return ProgramMemory(
            arguments=analysis.argument_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
            new_outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )

    @property
    def beside_arguments(self) -> int:
        return self.temporaries + self.new_outputs


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What running steps takes beside weights, tables and pool, in bytes of one device."""

    temporaries: int
    code: int

    @staticmethod
    def of(blueprint: Blueprint, forward: Sequence[ProgramMemory], sampling: ProgramMemory, num_pages: int) -> StepMemory:
        """From the largest programs, compiled with a pool of `num_pages`. The logits of the step before the one that runs are
        still there; an input, and what the compiler pads, come with the arguments. Code is that of all programs a server
        compiles, none of them larger than these."""
        programs = (*forward, sampling)
        known = weight_bytes(blueprint) + page_table_bytes(blueprint) + num_pages * blueprint.page_bytes
        inputs = max(max(program.arguments for program in forward) - known, 0)
        return StepMemory(
            temporaries=max(program.beside_arguments for program in programs)
            + max(program.new_outputs for program in programs)
            + inputs,
            code=max(program.code for program in forward) * len(blueprint.buckets.all)
            + sampling.code * len(SamplingKey.all_of(blueprint.buckets.all)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What one device's memory is for, in bytes."""

    total: int
    others: int  # held by something else when the weights were loaded: the runtime, other programs
    weights: int
    row_tables: int  # what is kept per request row: penalty counts, biases, histories that drafts are looked up in
    page_table: int
    steps: StepMemory | None  # None: not compiled
    page_bytes: int  # of a page in all layers
    num_pages: int
    fitting_pages: int  # there is room for; more than num_pages where the request rows could not use them

    @property
    def temporaries(self) -> int:
        return 0 if self.steps is None else self.steps.temporaries

    @property
    def code(self) -> int:
        return 0 if self.steps is None else self.steps.code

    @property
    def kv_pool(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def free(self) -> int:
        used = self.others + self.weights + self.row_tables + self.page_table + self.temporaries + self.code + self.kv_pool
        return self.total - used


def measure(device: jax.Device) -> DeviceMemory:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return DeviceMemory(stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"])
    host = psutil.virtual_memory()
    return DeviceMemory(host.total, host.available)


def memory_budget(blueprint: Blueprint, device: DeviceMemory, steps: StepMemory | None) -> MemoryBudget:
    """Pages as --max-total-tokens says, or as many as fit and can be used. ValueError, with the numbers, if none fits."""
    weights, page_table = weight_bytes(blueprint), page_table_bytes(blueprint)
    spec = blueprint.spec(1)
    row_tables = _num_bytes(blueprint.programs(1).state_shapes()[1])
    num_pages = fitting_pages = _pages_asked_for(blueprint)
    if not num_pages:
        mem_fraction = blueprint.args.mem_fraction_static
        assert mem_fraction is not None
        fitting_pages = fit_pages(
            device,
            mem_fraction=mem_fraction,
            table_bytes=row_tables + page_table,
            step_bytes=0 if steps is None else steps.temporaries + steps.code,
            page_bytes=blueprint.page_bytes,
            page_size=blueprint.page_size,
        )
        num_pages = limit_to_use(
            fitting_pages,
            page_bytes=blueprint.page_bytes,
            max_rows=spec.max_rows,
            max_pages_per_row=spec.max_pages_per_row,
            cap_bytes=CPU_POOL_LIMIT_BYTES if blueprint.platform == "cpu" else None,
        )
    return MemoryBudget(
        total=device.total,
        others=max(device.total - device.free - weights, 0),
        weights=weights,
        row_tables=row_tables,
        page_table=page_table,
        steps=steps,
        page_bytes=blueprint.page_bytes,
        num_pages=num_pages,
        fitting_pages=fitting_pages,
    )


def fit_pages(
    device: DeviceMemory, *, mem_fraction: float, table_bytes: int, step_bytes: int, page_bytes: int, page_size: int
) -> int:
    """Pages (of all layers, on one device) that fit beside what is in use now and the tables.

    `mem_fraction` is the share of the memory that weights, tables and pages may take together; more is kept free only if steps
    take more. Raises ValueError with the numbers if not even one page fits.
    """
    kept = max(int(device.total * (1 - mem_fraction)), step_bytes)
    pages = (device.free - table_bytes - kept) // page_bytes
    if pages < 1:
        raise ValueError(
            f"No memory is left for the KV cache: {device.free / GIB:.2f} GiB are free, --mem-fraction-static "
            f"{mem_fraction} and what steps take keep {kept / GIB:.2f} GiB of it, tables {table_bytes / GIB:.2f}, and a page "
            f"of {page_size} tokens takes {page_bytes / 2**20:.2f} MiB. Raise --mem-fraction-static or use more devices."
        )
    return pages


def limit_to_use(pages: int, *, page_bytes: int, max_rows: int, max_pages_per_row: int, cap_bytes: int | None) -> int:
    """Cuts a pool to what the request rows could ever use twice over (once running, once cached) and to `cap_bytes`."""
    useful = 2 * max_rows * max_pages_per_row
    affordable = math.inf if cap_bytes is None else max(cap_bytes // page_bytes, 1)
    return int(min(pages, useful, affordable))


# --- what follows from shapes, in bytes of one device


def weight_bytes(blueprint: Blueprint) -> int:
    return _num_bytes(blueprint.abstract_params())


def row_table_bytes(max_rows: int, vocab_size: int) -> int:
    """The most of a row's tables, known without a blueprint. Each device has them whole, with a row for padding."""
    shapes = jax.tree.leaves(RowTables.shapes(max_rows + 1, vocab_size))
    return sum(shape.size * shape.dtype.itemsize for shape in shapes)


def page_table_bytes(blueprint: Blueprint) -> int:
    return _num_bytes(blueprint.programs(1).state_shapes()[0].page_table)


def _num_bytes(shapes: Any) -> int:
    """Of a pytree of ShapeDtypeStructs with shardings."""
    leaves = jax.tree.leaves(shapes)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _pages_asked_for(blueprint: Blueprint) -> int:
    """0 where the device's memory decides."""
    asked = blueprint.args.max_total_tokens
    return 0 if asked is None else max(asked // blueprint.page_size, 1)


def memory_lines(budget: MemoryBudget, blueprint: Blueprint) -> list[str]:
    """The budget as a table for people."""
    args = blueprint.args
    tokens = budget.num_pages * blueprint.page_size
    pool = f"{tokens} tokens, {tokens // (args.context_length or 1)} requests of {args.context_length}"
    if budget.fitting_pages > budget.num_pages:
        pool += f"; there is room for {budget.fitting_pages * blueprint.page_size}"
    measured = "" if budget.steps is not None else "not compiled"
    sizes = (
        ("weights", budget.weights, ""),
        ("KV cache", budget.kv_pool, pool),
        ("row tables", budget.row_tables, ""),
        ("page table", budget.page_table, ""),
        ("temporaries", budget.temporaries, measured or "of the largest step, and the logits of the one before it"),
        ("code", budget.code, measured or "of all programs, at most"),
        ("in use before", budget.others, ""),
        ("free", budget.free, f"--mem-fraction-static {args.mem_fraction_static}"),
        ("total", budget.total, ""),
    )
    lines = [f"  {name:<15}{size / GIB:>9.2f}  {note}".rstrip() for name, size, note in sizes]
    return ["Memory of each device, GiB", *lines]
