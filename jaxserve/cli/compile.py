"""`jaxserve compile`: from a config.json alone, a plan for hardware that is not at hand, or programs for it or for what is."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxserve.cli.options import server_args, server_options
from jaxserve.config import ServerArgs
from jaxserve.models import model_folder

if TYPE_CHECKING:
    from jaxserve.aot.capacity_plan import CapacityPlan, PlanOptions
    from jaxserve.aot.targets import Target

# The options of a server that change what is compiled, or what fits.
_USED = frozenset(
    ("model_path", "json_model_override_args", "dtype", "quantization", "kv_cache_dtype", "page_size", "context_length",
     "tp_size", "pp_size", "pp_layer_partition", "attn_dp_size", "dcp_size", "ep_size", "ep_num_redundant_experts",
     "init_expert_location",
     "max_running_requests", "max_total_tokens", "swa_full_tokens_ratio", "mem_fraction_static",
     "chunked_prefill_size", "max_prefill_tokens", "enable_mixed_chunk", "attention_backend", "prefill_token_buckets",
     "decode_row_buckets", "max_top_logprobs", "grammar_backend")
)  # fmt: skip
_UNUSED = frozenset(field.name for field in dataclasses.fields(ServerArgs)) - _USED


@click.command("compile", short_help="Plan for a TPU or GPU, or compile ahead of a start.")
@click.argument("model", required=False)
@click.option("--topology", help="What to compile for: v5e:2x4, v6e:2x2, tpu7x:2x2x1, h200, h200:8, ...")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False),
    help="Plan nothing: compile for this machine's devices, or for --topology's, into the folder that a server there starts "
    "with as its --compilation-cache-dir.",
)
@click.option(
    "--programs",
    type=click.Choice(("all", "largest", "none")),
    default="all",
    show_default=True,
    help="Compile all that a server compiles, only the largest steps, or nothing: then memory is estimated from shapes.",
)
@click.option(
    "--assumed-context",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Tokens of each decoding request, for the predicted times (less where the KV cache is too small).",
)
@click.option("--out", type=click.Path(file_okay=False), help="Folder for plan.json and the compiled programs.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@server_options(without=_UNUSED, defaults={"tp_size": None})
def compile_command(
    model: str | None,
    topology: str | None,
    cache_dir: str | None,
    programs: str,
    assumed_context: int,
    out: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Compile a model for hardware that is not here, and say what fits on it and how fast it could be.

    MODEL is a folder with a config.json, the same as --model-path; neither weights nor a tokenizer are read. Every step is
    compiled by the target's own compiler (pip install 'jax[tpu]' or 'jax[cuda13]'; no device is needed). --tp-size is all
    devices of the topology by default, divided by --pp-size. The exit code is 0 only if the model fits.

    With --cache-dir nothing is planned: all programs of a server with these options are compiled, and it starts with them in
    seconds. Without --topology they are for the devices that are here; with it, the folder is carried to a machine that has
    them, and the same versions of JAX and jaxserve.
    """
    if topology is None and cache_dir is None:
        raise click.UsageError("Give --topology, for a plan, or --cache-dir, for programs, or both.")
    if topology is None:
        assert cache_dir is not None
        return _fill_cache(_args({**options, "tp_size": options["tp_size"] or 1}, model), cache_dir)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks about the device that is not there; read at JAX's import
    from jaxserve.aot.capacity_plan import PlanOptions
    from jaxserve.aot.targets import parse_target

    try:
        target = parse_target(topology)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    args = _args({**options, "tp_size": options["tp_size"] or max(target.num_devices // options["pp_size"], 1)}, model)
    if cache_dir is not None:
        return _fill_cache(args, cache_dir, target)
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    plan = _plan(args, target, PlanOptions(programs, assumed_context, folder))
    _print(plan, folder, as_json)
    if plan.failure is not None:
        raise click.ClickException(plan.failure)
    return 0


def _args(options: dict[str, Any], model: str | None) -> ServerArgs:
    args = server_args(options, model)
    try:
        return args.replace(model_path=model_folder(args.model_path, weights=False))
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _fill_cache(args: ServerArgs, cache_dir: str, target: Target | None = None) -> int:
    """For this machine's devices, or the target's."""
    from jaxserve.aot.carry import NOT_TIMED, fill_cache_for
    from jaxserve.executor import fill_cache

    try:
        filled = fill_cache(args, cache_dir) if target is None else fill_cache_for(target, args, cache_dir)
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{filled.programs} programs are in {cache_dir}, {filled.compiled} of them compiled now.")
    if target is not None and target.chip.platform == "gpu":
        click.echo(NOT_TIMED)
    return 0


def _plan(args: ServerArgs, target: Target, options: PlanOptions) -> CapacityPlan:
    from jaxserve.aot.planner import plan_capacity
    from jaxserve.models import ModelConfig

    try:
        overrides = json.loads(args.json_model_override_args)
        config = ModelConfig.from_pretrained(args.model_path, overrides, is_embedding=args.is_embedding)
        return plan_capacity(args, config, target, options)
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _print(plan: CapacityPlan, folder: Path | None, as_json: bool) -> None:
    from jaxserve.aot.report import plan_json, plan_text

    text = json.dumps(plan_json(plan), indent=2)
    click.echo(text if as_json else plan_text(plan))
    if folder is not None:
        (folder / "plan.json").write_text(text + "\n", encoding="utf-8")
        if not as_json:
            click.echo(f"\nWritten to {folder}")
