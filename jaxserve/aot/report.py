"""A capacity plan for people and for programs: an aligned text, a JSON object."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from jaxserve.aot.capacity_plan import CapacityPlan, StagePlan, StepPart, StepPlan
from jaxserve.aot.fitting import stage_name
from jaxserve.aot.programs import ProgramReport
from jaxserve.aot.roofline import Prediction
from jaxserve.executor.memory import MemoryBudget

GIB, MIB = 1 << 30, 1 << 20
# Options that shape a plan; what else a server takes is of no meaning here.
_ARGS = (
    "model_path", "tp_size", "pp_size", "pp_layer_partition", "attn_dp_size", "dcp_size", "dtype", "kv_cache_dtype",
    "page_size", "context_length", "max_running_requests", "max_total_tokens", "swa_full_tokens_ratio", "mem_fraction_static",
    "chunked_prefill_size", "prefill_token_buckets", "decode_row_buckets",
)  # fmt: skip


def plan_json(plan: CapacityPlan) -> dict[str, Any]:
    """Bytes, seconds and operations, of one device where not said otherwise; of a pipeline of one of the stage that decides
    about the KV cache."""
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
        "stages": [_stage_json(stage) for stage in plan.stages],
        "stage_that_decides": plan.decides,
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


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    layers = stage.config.own_layers
    return {
        "layers": [layers[0], layers[-1]],
        "embeds": stage.config.embeds,
        "has_head": stage.config.has_head,
        "memory_bytes": _memory_json(stage.memory),
        "other_programs": [program.name for program in stage.others],
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
    """`counted`, `roofline` and `compiled` are of the slowest stage, `stages` of each, `pipeline` of all together."""
    predicted = step.prediction
    parts = [_part_json(part, stage) for part, stage in zip(step.parts, predicted.stages, strict=True)]
    return {
        "name": step.bucket.name,
        "decode_only": step.bucket.decode_only,
        "num_tokens": step.bucket.num_tokens,
        "assumed": dataclasses.asdict(step.shape),
        **parts[predicted.slowest],
        "stages": parts if len(parts) > 1 else [],
        "pipeline": {
            "slowest_stage": predicted.slowest,
            "hand_over_s": predicted.hand_over_s,
            "latency_s": predicted.latency_s,
            "steps_at_once": predicted.steps_at_once,
            "interval_s": predicted.interval_s,
            "tokens_per_s": step.tokens_per_s,
            "undivided_tokens_per_s": step.undivided_tokens_per_s,
        },
    }


def _part_json(part: StepPart, predicted: Prediction) -> dict[str, Any]:
    return {
        "counted": {**dataclasses.asdict(part.work), "memory_bytes": part.work.memory_bytes, "flops": part.work.flops},
        "roofline": {**dataclasses.asdict(predicted), "step_s": predicted.step_s, "bound": predicted.bound},
        "compiled": None if part.program is None else dataclasses.asdict(part.program),
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
    if plan.stages:
        blocks += [*_stages_text(plan), plan.stages[plan.decides].memory_text, *_steps_texts(plan)]
        if plan.others:
            blocks.append(_others_text(plan))
    return "\n\n".join(blocks)


def _heading(plan: CapacityPlan) -> str:
    args, chip = plan.args, plan.target.chip
    words = [
        f"{plan.config.architecture}, {plan.config.num_layers} layers, on {plan.target.name} ({chip.kind})",
        *([f"--pp-size {args.pp_size}"] if args.pp_size > 1 else []),
        f"--tp-size {args.tp_size}",
        *([f"--attn-dp-size {args.attn_dp_size}"] if args.attn_dp_size > 1 else []),
        *([f"--dcp-size {args.dcp_size}"] if args.dcp_size > 1 else []),
        f"weights {args.dtype}",
        f"KV {args.dtype if args.kv_cache_dtype == 'auto' else args.kv_cache_dtype}",
    ]
    if plan.backend:
        words += [f"pages of {args.page_tokens} tokens", f"attention: {plan.backend}"]
    versions = compiler_versions()
    compiler = ("jax", "libtpu") if chip.platform == "tpu" else ("jax", "jax-cuda13-plugin")
    return f"{', '.join(words)}\nCompilers: {', '.join(f'{name} {versions[name]}' for name in compiler if name in versions)}"


def _stages_text(plan: CapacityPlan) -> list[str]:
    """What a device of each has, and which of them decides; nothing of a model that is not divided."""
    if len(plan.stages) == 1:
        return []
    header = ("stage", "layers", "weights", "KV cache", "states", "tables", "temporaries", "code", "free")
    rows = []
    for number, stage in enumerate(plan.stages):
        memory, layers = stage.memory, stage.config.own_layers
        tables = memory.row_tables + memory.page_table + memory.hidden
        sizes = (memory.weights, memory.kv_pool, memory.states, tables, memory.temporaries, memory.code, memory.free)
        rows.append((str(number + 1), f"{layers[0]}-{layers[-1]}", *(f"{size / GIB:.2f}" for size in sizes)))
    decides = stage_name(plan.stages[plan.decides].config, plan.decides, len(plan.stages))
    lines = ["Memory of each device of a stage, GiB", *table(header, rows)]
    return ["\n".join(lines), f"All stages cache the same tokens: {decides} decides how many, which has this room:"]


def _steps_texts(plan: CapacityPlan) -> list[str]:
    if len(plan.stages) == 1:
        return [_parts_text(plan, 0, "Steps of each device")]
    parts = [
        _parts_text(plan, number, f"Steps of each device of {stage_name(stage.config, number, len(plan.stages))}")
        for number, stage in enumerate(plan.stages)
    ]
    return [*parts, _pipeline_text(plan)]


def _parts_text(plan: CapacityPlan, number: int, title: str) -> str:
    """Of one stage."""
    header = (
        "step", "context", "temp MiB", "out MiB", "VMEM MiB", "launches", "GB", "GFLOP", "memory ms", "compute ms", "links ms",
        "step ms", "bound", "tokens/s", "compile s",
    )  # fmt: skip
    return "\n".join(
        [
            f"{title}: compiled size, and bytes, operations and time at the chip's peaks (a bound, not a forecast)",
            *table(header, [_step_row(step, number) for step in plan.steps]),
        ]
    )


def _step_row(step: StepPlan, number: int) -> tuple[str, ...]:
    part, predicted = step.parts[number], step.prediction.stages[number]
    program, work, tokens = part.program, part.work, step.shape.all_tokens
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


def _pipeline_text(plan: CapacityPlan) -> str:
    tp_size = plan.args.num_devices
    header = (
        "step", "slowest ms", "stage", "hand-over ms", "latency ms", "at once", "interval ms", "tokens/s", "one by one",
        f"--tp-size {tp_size}",
    )  # fmt: skip
    title = (
        "Steps through the pipeline, at the same peaks. At once: steps of different requests under way, of those that a server "
        "takes;\nprompts need not wait for each other. Tokens/s of these, of one step at a time, and of the same requests with "
        "the devices as one stage"
    )
    return "\n".join([title, *table(header, [_pipeline_row(step) for step in plan.steps])])


def _pipeline_row(step: StepPlan) -> tuple[str, ...]:
    predicted, undivided = step.prediction, step.undivided_tokens_per_s
    return (
        step.bucket.name,
        f"{predicted.stages[predicted.slowest].step_s * 1e3:.3f}",
        str(predicted.slowest + 1),
        f"{max(predicted.hand_over_s) * 1e3:.3f}",
        f"{predicted.latency_s * 1e3:.3f}",
        "all" if predicted.steps_at_once is None else str(predicted.steps_at_once),
        f"{predicted.interval_s * 1e3:.3f}",
        f"{step.tokens_per_s:.0f}",
        f"{step.shape.all_tokens / predicted.latency_s:.0f}",
        "-" if undivided is None else f"{undivided:.0f}",
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
