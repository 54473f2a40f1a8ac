"""A capacity plan for people and for programs: an aligned text, a JSON object."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from jaxserve.aot.planner import CapacityPlan, StepPlan
from jaxserve.aot.programs import ProgramReport
from jaxserve.executor.memory import MemoryBudget

GIB, MIB = 1 << 30, 1 << 20
# Options that shape a plan; what else a server takes is of no meaning here.
_ARGS = (
    "model_path", "tp_size", "attn_dp_size", "dtype", "kv_cache_dtype", "page_size", "context_length", "max_running_requests",
    "max_total_tokens", "swa_full_tokens_ratio", "mem_fraction_static", "chunked_prefill_size", "prefill_token_buckets",
    "decode_row_buckets",
)  # fmt: skip


def plan_json(plan: CapacityPlan) -> dict[str, Any]:
    """Bytes, seconds and operations, of one device where not said otherwise."""
    memory = plan.memory
    return {
        "fits": plan.failure is None,
        "failure": plan.failure,
        "topology": plan.target.name,
        "num_chips": plan.target.num_chips,
        "num_devices": plan.target.num_devices,
        "device_kind": plan.target.chip.kind,
        "model": plan.config.architecture,
        "options": {name: getattr(plan.args, name) for name in _ARGS},
        "attention_backend": plan.backend,
        "versions": compiler_versions(),
        "notes": list(plan.notes),
        "memory_bytes": None if memory is None else _memory_json(memory),
        "kv_cache": {
            "num_pages": 0 if memory is None else memory.num_pages[0],
            "num_pages_that_would_fit": 0 if memory is None else memory.fitting_pages,
            "tokens": plan.kv_tokens,
            "groups": [] if memory is None else [dataclasses.asdict(group) for group in memory.kv_groups],
            "requests_of_full_length": plan.full_requests,
        },
        "compile_s": {"sum_over_programs": sum(program.compile_s for program in plan.programs)},
        "steps": [_step_json(step) for step in plan.steps],
        "other_programs": [dataclasses.asdict(program) for program in plan.others],
    }


def _memory_json(memory: MemoryBudget) -> dict[str, int]:
    return {
        "hbm": memory.total,
        "weights": memory.weights,
        "kv_pool": memory.kv_pool,
        "states": memory.states,
        "row_tables": memory.row_tables,
        "page_table": memory.page_table,
        "hidden": memory.hidden,
        "temporaries": memory.temporaries,
        "code": memory.code,
        "free": memory.free,
    }


def _step_json(step: StepPlan) -> dict[str, Any]:
    return {
        "name": step.bucket.name,
        "decode_only": step.bucket.decode_only,
        "num_tokens": step.bucket.num_tokens,
        "assumed": dataclasses.asdict(step.shape),
        "counted": {**dataclasses.asdict(step.work), "memory_bytes": step.work.memory_bytes, "flops": step.work.flops},
        "roofline": {
            **dataclasses.asdict(step.prediction),
            "step_s": step.prediction.step_s,
            "bound": step.prediction.bound,
        },
        "compiled": None if step.program is None else dataclasses.asdict(step.program),
    }


def compiler_versions() -> dict[str, str]:
    found = {}
    for name in ("jaxserve", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plan_text(plan: CapacityPlan) -> str:
    blocks = [_heading(plan)]
    if plan.notes:
        blocks.append("\n".join(f"Note: {note}" for note in plan.notes))
    if plan.memory is not None:
        blocks += [plan.memory_text, _steps_text(plan)]
        if plan.others:
            blocks.append(_others_text(plan))
    return "\n\n".join(blocks)


def _heading(plan: CapacityPlan) -> str:
    args, chip = plan.args, plan.target.chip
    words = [
        f"{plan.config.architecture}, {plan.config.num_layers} layers, on {plan.target.name} ({chip.kind})",
        f"--tp-size {args.tp_size}",
        *([f"--attn-dp-size {args.attn_dp_size}"] if args.attn_dp_size > 1 else []),
        f"weights {args.dtype}",
        f"KV {args.dtype if args.kv_cache_dtype == 'auto' else args.kv_cache_dtype}",
    ]
    if plan.backend:
        words += [f"pages of {args.page_size} tokens", f"attention: {plan.backend}"]
    versions = compiler_versions()
    compiler = ("jax", "libtpu") if chip.platform == "tpu" else ("jax", "jax-cuda13-plugin")
    return f"{', '.join(words)}\nCompilers: {', '.join(f'{name} {versions[name]}' for name in compiler if name in versions)}"


def _steps_text(plan: CapacityPlan) -> str:
    header = (
        "step", "context", "temp MiB", "out MiB", "VMEM MiB", "launches", "GB", "GFLOP", "memory ms", "compute ms", "links ms",
        "step ms", "bound", "tokens/s", "compile s",
    )  # fmt: skip
    return "\n".join(
        [
            "Steps of each device: compiled size, and bytes, operations and time at the chip's peaks (a bound, not a forecast)",
            *table(header, [_step_row(step) for step in plan.steps]),
        ]
    )


def _step_row(step: StepPlan) -> tuple[str, ...]:
    program, work, predicted = step.program, step.work, step.prediction
    tokens = step.shape.all_tokens
    sizes = ("-", "-", "-", "-")
    if program is not None:
        vmem = f"{max(program.kernel_vmem.values()) / MIB:.1f}" if program.kernel_vmem else "-"
        launches = "-" if program.launches is None else str(program.launches)
        sizes = (_mib(program.temp_bytes), _mib(program.new_output_bytes), vmem, launches)
    times = (predicted.memory_s, predicted.compute_s, predicted.interconnect_s, predicted.step_s)
    return (
        step.bucket.name,
        str(step.shape.context_len),
        *sizes,
        f"{work.memory_bytes / 1e9:.3f}",
        f"{work.flops / 1e9:.1f}",
        *(f"{seconds * 1e3:.3f}" for seconds in times),
        predicted.bound,
        f"{tokens / predicted.step_s:.0f}",
        "-" if program is None else f"{program.compile_s:.1f}",
    )


def _others_text(plan: CapacityPlan) -> str:
    rows = [_program_row(program) for program in plan.others]
    total = sum(program.compile_s for program in plan.programs)
    return "\n".join(
        [
            "Other programs",
            *table(("program", "temp MiB", "out MiB", "compile s"), rows),
            f"{len(plan.programs)} programs, {total:.0f} s of compilation one after the other.",
        ]
    )


def _program_row(program: ProgramReport) -> tuple[str, ...]:
    return program.name, _mib(program.temp_bytes), _mib(program.new_output_bytes), f"{program.compile_s:.1f}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns; the first column to the left."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    return lines
