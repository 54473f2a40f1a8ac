"""The memory budget of a device: what weights, tables, programs and KV pages take of it, and so how many pages fit.

A starting server and `jaxserve compile` ask the same function. What differs is where the numbers come from: a server measures
the device once its weights are loaded, a plan takes a chip's data sheet less the weights. Knows shapes, not arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import psutil

from jaxserve.executor.blueprint import Blueprint, NumPages
from jaxserve.executor.pool_sizes import first_pool_that_fits, num_requests, pool_bytes, pools_of, useful_pages
from jaxserve.executor.programs import SamplingKey
from jaxserve.executor.row_tables import RowTables
from jaxserve.runner import KVGroup

# On CPU the pool is ordinary host memory, which other programs need too: without --max-total-tokens no more is taken. The
# replicas of a server take that much together: it is what a server may take of the host, into however many it is divided.
CPU_POOL_LIMIT_BYTES = 2 * 2**30
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device."""

    total: int  # on a CPU: what other programs leave
    free: int  # with the weights loaded
    held: int = 0  # by the program that gives us the device, and keeps it for itself


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
    def of(blueprint: Blueprint, programs: Sequence[ProgramMemory], num_pages: NumPages) -> StepMemory:
        """From those of ProgramSet.largest, compiled with pools of `num_pages`. The logits of the step before the one that runs
        are still there; an input, and what the compiler pads, come with the arguments. Code is that of all programs a server
        compiles, none of them larger than these."""
        num_forward = len(blueprint.buckets.largest)
        forward, of_tokens = programs[:num_forward], programs[num_forward:]
        known = weight_bytes(blueprint) + page_table_bytes(blueprint) + hidden_bytes(blueprint)
        known += pool_bytes(num_pages, blueprint.page_bytes) + state_bytes(blueprint) + adapter_bytes(blueprint)
        counts = len(SamplingKey.all_of(blueprint.buckets.all, blueprint.program_set.modes)), len(blueprint.program_set.scoring)
        inputs = max(max(program.arguments for program in forward) - known, 0)
        return StepMemory(
            temporaries=max(program.beside_arguments for program in programs)
            + max(program.new_outputs for program in programs)
            + inputs,
            code=max(program.code for program in forward) * blueprint.program_set.num_forward
            + sum(program.code * count for program, count in zip(of_tokens, counts, strict=False)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What one device's memory is for, in bytes."""

    total: int
    others: int  # held by something else when the weights were loaded: the runtime, other programs
    weights: int
    row_tables: int  # what is kept per request row: penalty counts, biases, histories that drafts are looked up in
    page_table: int
    hidden: int  # the newest step's hidden states, and its tokens' experts where they are told
    states: int  # of the request rows, in the layers that keep some
    adapters: int  # slots of them
    steps: StepMemory | None  # None: not compiled
    page_bytes: tuple[int, ...]  # per KV group: of a page in all its layers
    kv_groups: tuple[KVGroup, ...]  # with their pools, of this device's shard
    fitting_pages: int  # of the first group that there is room for; more than its own where request rows could not use them

    @property
    def temporaries(self) -> int:
        return 0 if self.steps is None else self.steps.temporaries

    @property
    def code(self) -> int:
        return 0 if self.steps is None else self.steps.code

    @property
    def num_pages(self) -> NumPages:
        return tuple(group.num_pages for group in self.kv_groups)

    @property
    def kv_pool(self) -> int:
        return pool_bytes(self.num_pages, self.page_bytes)

    @property
    def free(self) -> int:
        tables = self.row_tables + self.page_table + self.hidden + self.states + self.adapters
        return self.total - (self.others + self.weights + tables + self.temporaries + self.code + self.kv_pool)


def measure(device: jax.Device, dp_size: int = 1) -> DeviceMemory:
    """As it is now. On CPU a replica's part: `dp_size` of them share the host, none knows how far the others are."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return DeviceMemory(stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"])
    # A host is shared: what its other programs hold is not ours to divide, and may be more than half.
    available = psutil.virtual_memory().available
    replicas = dp_size if device.platform == "cpu" else 1
    return DeviceMemory((available + psutil.Process().memory_info().rss) // replicas, available // replicas)


def memory_budget(blueprint: Blueprint, device: DeviceMemory, steps: StepMemory | None) -> MemoryBudget:
    """Pages as --max-total-tokens says, or as many as fit and can be used. ValueError, with the numbers, if none fits."""
    weights, page_table, hidden = weight_bytes(blueprint), page_table_bytes(blueprint), hidden_bytes(blueprint)
    spec, ratio = blueprint.spec(blueprint.pages_each(1)), blueprint.args.swa_full_tokens_ratio
    row_tables, states = _num_bytes(blueprint.programs(blueprint.pages_each(1)).state_shapes()[1]), state_bytes(blueprint)
    adapters = adapter_bytes(blueprint)
    first_pages = fitting_pages = _pages_asked_for(blueprint)
    if not first_pages:
        mem_fraction = blueprint.args.mem_fraction_static
        assert mem_fraction is not None
        available = bytes_for_pools(
            device,
            mem_fraction=mem_fraction,
            table_bytes=row_tables + page_table + hidden + states + adapters,
            step_bytes=0 if steps is None else steps.temporaries + steps.code,
            page_bytes=sum(blueprint.page_bytes),
            page_size=blueprint.page_size,
        )
        fit = functools.partial(first_pool_that_fits, spec, ratio, blueprint.page_bytes)
        fitting_pages = fit(available)
        if device.held or (blueprint.platform == "cpu" and blueprint.args.dp_size > 1):
            fitting_pages = _alike(fitting_pages)
        first_pages = min(fitting_pages, useful_pages(spec, spec.kv_groups[0]))
        if blueprint.platform == "cpu":
            pools = blueprint.args.dp_size * blueprint.args.attn_dp_size * blueprint.args.pp_size
            first_pages = min(first_pages, max(fit(CPU_POOL_LIMIT_BYTES // pools), 1))
    return MemoryBudget(
        total=device.total,
        others=max(device.total - device.free - weights, 0),
        weights=weights,
        row_tables=row_tables,
        page_table=page_table,
        hidden=hidden,
        states=states,
        adapters=adapters,
        steps=steps,
        page_bytes=blueprint.page_bytes,
        kv_groups=blueprint.spec(pools_of(spec, ratio, first_pages)).kv_groups,
        fitting_pages=fitting_pages,
    )


def alike_budgets(
    plans: Sequence[tuple[Blueprint, DeviceMemory, StepMemory | None]], least: Callable[[int], int] = int
) -> tuple[MemoryBudget, ...]:
    """Of all stages, with as many pages as the one with the least room has; `least`: of what all hosts say. ValueError if
    one has no room."""
    budgets = [memory_budget(*plan) for plan in plans]
    pages = least(min(budget.num_pages[0] for budget in budgets))
    for index, (blueprint, device, steps) in enumerate(plans):
        if pages < budgets[index].num_pages[0]:  # another stage or host has less room
            args = blueprint.args.replace(max_total_tokens=pages * blueprint.page_size * blueprint.args.attn_dp_size)
            budgets[index] = memory_budget(dataclasses.replace(blueprint, args=args), device, steps)
    return tuple(budgets)


def _alike(pages: int) -> int:
    """At most a sixteenth less. Replicas measure one host a moment apart, and a program that has the device holds now more and
    now less of it; with the same pool they find the same compiled programs."""
    shift = max(pages.bit_length() - 5, 0)
    return pages >> shift << shift


def bytes_for_pools(
    device: DeviceMemory, *, mem_fraction: float, table_bytes: int, step_bytes: int, page_bytes: int, page_size: int
) -> int:
    """What is left for pages beside what is in use now and the tables.

    `mem_fraction` is the share of the memory, less what is held, that weights, tables and pages may take together; more is kept
    free only if steps take more. Raises ValueError with the numbers if not even one page (of all layers, `page_bytes`) fits.
    """
    kept = max(int((device.total - device.held) * (1 - mem_fraction)), step_bytes)
    available = device.free - table_bytes - kept
    if available < page_bytes:
        raise ValueError(
            f"No memory is left for the KV cache: {device.free / GIB:.2f} GiB are free, --mem-fraction-static "
            f"{mem_fraction} and what steps take keep {kept / GIB:.2f} GiB of it, tables {table_bytes / GIB:.2f}, and a page "
            f"of {page_size} tokens takes {page_bytes / 2**20:.2f} MiB. Raise --mem-fraction-static, lower "
            "--max-running-requests or use more devices."
        )
    return available


# --- what follows from shapes, in bytes of one device


def weight_bytes(blueprint: Blueprint) -> int:
    return _num_bytes(blueprint.abstract_params())


def row_table_bytes(max_rows: int, vocab_size: int) -> int:
    """The most of a row's tables, known without a blueprint. Each device has them whole, with a row for padding."""
    shapes = jax.tree.leaves(RowTables.shapes(max_rows + 1, vocab_size))
    return sum(shape.size * shape.dtype.itemsize for shape in shapes)


def page_table_bytes(blueprint: Blueprint) -> int:
    return _num_bytes(blueprint.programs(blueprint.pages_each(1)).state_shapes()[0].page_table)


def hidden_bytes(blueprint: Blueprint) -> int:
    state = blueprint.programs(blueprint.pages_each(1)).state_shapes()[0]
    return _num_bytes((state.hidden, state.experts))


def state_bytes(blueprint: Blueprint) -> int:
    layout = blueprint.states
    return 0 if layout is None else layout.count * sum(array.nbytes for array in layout.arrays.values())


def adapter_bytes(blueprint: Blueprint) -> int:
    if blueprint.adapters is None:
        return 0
    return _num_bytes(blueprint.programs(blueprint.pages_each(1)).adapter_shapes())


def _num_bytes(shapes: Any) -> int:
    """Of a pytree of ShapeDtypeStructs with shardings."""
    leaves = jax.tree.leaves(shapes)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _pages_asked_for(blueprint: Blueprint) -> int:
    """0 where the device's memory decides. With attention by data parallelism of each shard."""
    asked = blueprint.args.max_total_tokens
    return 0 if asked is None else max(asked // (blueprint.page_size * blueprint.args.attn_dp_size), 1)


def _state_lines(budget: MemoryBudget, blueprint: Blueprint) -> list[tuple[str, int, str]]:
    if not budget.states:
        return []
    per_row = "of" if blueprint.num_draft_tokens == 1 else f"{blueprint.num_draft_tokens} of each of"
    rows, snapshots = blueprint.args.max_running_requests, blueprint.num_snapshots
    return [("states", budget.states, f"{per_row} {rows} requests, {snapshots} behind cached prefixes")]


def _adapter_lines(budget: MemoryBudget, blueprint: Blueprint) -> list[tuple[str, int, str]]:
    layout = blueprint.adapters
    if layout is None:
        return []
    return [("adapters", budget.adapters, f"{layout.num_slots} slots of rank {layout.rank}")]


def _pool_lines(budget: MemoryBudget, blueprint: Blueprint) -> list[tuple[str, int, str]]:
    """Of the whole KV cache, and where there are several pools, of each."""
    page_size, length, shards = blueprint.page_size, blueprint.args.context_length or 1, blueprint.args.attn_dp_size
    of_all = "" if shards == 1 else f" in {shards} shards"
    is_one = len(budget.kv_groups) == 1
    pools = []
    for group, page_bytes in zip(budget.kv_groups, budget.page_bytes, strict=True):
        requests = f"{shards * num_requests((group,), page_size, length)} requests" + (f" of {length}" if is_one else "")
        seen = "" if group.window is None else f", the last {group.window} of each"
        name = "all tokens" if group.window is None else f"window {group.window}"
        pools.append(
            (
                f"  {name}",
                group.num_pages * page_bytes,
                f"{shards * group.num_pages * page_size} tokens{of_all}, {requests}{seen}",
            )
        )
    if budget.fitting_pages > budget.kv_groups[0].num_pages:
        pools[0] = (*pools[0][:2], f"{pools[0][2]}; there is room for {shards * budget.fitting_pages * page_size}")
    if is_one:
        return [("KV cache", *pools[0][1:])]
    return [
        ("KV cache", budget.kv_pool, f"{shards * num_requests(budget.kv_groups, page_size, length)} requests of {length}"),
        *pools,
    ]


def memory_lines(budget: MemoryBudget, blueprint: Blueprint) -> list[str]:
    """The budget as a table for people."""
    args = blueprint.args
    measured = "" if budget.steps is not None else "not compiled"
    sizes = (
        ("weights", budget.weights, ""),
        *_pool_lines(budget, blueprint),
        *_state_lines(budget, blueprint),
        *_adapter_lines(budget, blueprint),
        ("row tables", budget.row_tables, ""),
        ("page table", budget.page_table, ""),
        ("hidden states", budget.hidden, f"of the newest step{', and its experts' * (blueprint.experts_shape is not None)}"),
        ("temporaries", budget.temporaries, measured or "of the largest step, and the logits of the one before it"),
        ("code", budget.code, measured or "of all programs, at most"),
        ("in use before", budget.others, ""),
        ("free", budget.free, f"--mem-fraction-static {args.mem_fraction_static}"),
        ("total", budget.total, ""),
    )
    lines = [f"  {name:<15}{size / GIB:>9.2f}  {note}".rstrip() for name, size, note in sizes]
    return ["Memory of each device, GiB", *lines]
