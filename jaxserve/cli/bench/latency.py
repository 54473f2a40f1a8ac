"""`jaxserve bench latency`: prompts and decode steps of one batch, without a scheduler."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxserve.bench.record import append_record, header
from jaxserve.cli.bench.output import output_file
from jaxserve.cli.options import ListOf, server_args, server_options
from jaxserve.config import ServerArgs

if TYPE_CHECKING:
    from jaxserve.aot.roofline import Prediction
    from jaxserve.bench.latency import Case, LatencyBench, Timed

# The options of a server that change how a step runs. Drafts would make a row's length the device's secret.
_USED = frozenset(
    ("model_path", "revision", "download_dir", "load_format", "json_model_override_args", "dtype", "quantization",
     "kv_cache_dtype", "page_size", "context_length", "device", "tp_size", "pp_size", "pp_layer_partition", "ep_size",
     "ep_num_redundant_experts", "init_expert_location", "max_running_requests", "max_total_tokens",
     "swa_full_tokens_ratio", "mem_fraction_static", "chunked_prefill_size", "max_prefill_tokens", "attention_backend",
     "prefill_token_buckets", "decode_row_buckets", "compilation_cache_dir", "log_level")
)  # fmt: skip
_UNUSED = frozenset(field.name for field in dataclasses.fields(ServerArgs)) - _USED
_HEADER = (
    f"{'batch':>5} {'in':>6} {'out':>5}  {'prefill':>10} {'tok/s':>9} {'least':>18}  {'decode':>10} {'tok/s':>9} {'least':>18}"
)


@click.command("latency", short_help="Time prompts and decode steps of one batch.")
@click.argument("model", required=False)
@click.option("--batch-size", type=ListOf(int), default=(1,), show_default="1", help="Rows of a batch; several with commas.")
@click.option("--input-len", type=ListOf(int), default=(1024,), show_default="1024", help="Tokens of each prompt.")
@click.option("--output-len", type=ListOf(int), default=(16,), show_default="16", help="Tokens of each answer.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times that each batch is measured.")
@click.option("--profile", is_flag=True, help="Trace one more round of each batch with JAX's profiler.")
@click.option(
    "--profile-output-dir", type=click.Path(file_okay=False, path_type=Path), default=Path("profile"), show_default=True,
    help="Folder for the traces.",
)  # fmt: skip
@output_file
@server_options(without=_UNUSED, defaults={"log_level": "warning"})
def latency(
    model: str | None,
    batch_size: tuple[int, ...],
    input_len: tuple[int, ...],
    output_len: tuple[int, ...],
    rounds: int,
    profile: bool,
    profile_output_dir: Path,
    output_file: str | None,
    **options: Any,
) -> int:
    """Time the prompts and the decode steps of batches by the model's own runner: no server, no scheduler, no text.

    MODEL is as for `serve`. Every combination of --batch-size, --input-len and --output-len is a batch, whose steps overlap as
    a server's do. Beside each time stands the least that the device's memory and arithmetic allow.
    """
    for name, values in (("--batch-size", batch_size), ("--input-len", input_len)):
        _at_least(name, values, 1)
    _at_least("--output-len", output_len, 2)
    args = server_args(options, model)
    from jaxserve.bench.latency import Case, LatencyBench
    from jaxserve.server.located import located

    cases = [Case(*sizes) for sizes in itertools.product(batch_size, input_len, output_len)]
    click.echo(f"Loading {args.model_path} ...", err=True)
    try:
        if profile:
            profile_output_dir.mkdir(parents=True, exist_ok=True)
        bench = LatencyBench(located(args), cases)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    peaks = bench.roofline.source if bench.roofline else "unknown, this device is not in the table of chips"
    click.echo(f"Least times: {peaks}")
    click.echo(_HEADER)
    for case in cases:
        _one(bench, case, rounds, output_file)
    for case in cases if profile else ():
        bench.trace(case, profile_output_dir)
    if profile:
        click.echo(f"Traces are in {profile_output_dir}.")
    return 0


def _at_least(name: str, values: tuple[int, ...], least: int) -> None:
    for value in values:
        if value < least:
            raise click.BadParameter(f"{value} is less than {least}.", param_hint=name)


def _one(bench: LatencyBench, case: Case, rounds: int, output_file: str | None) -> None:
    from jaxserve.progress import progress_bar

    with progress_bar(rounds, str(case), "round") as progress:
        timed = bench.measure(case, rounds, progress.update)
    click.echo(_line(timed))
    if output_file is not None:
        append_record(output_file, {**header("latency"), **bench.about, **timed.record()})


def _line(timed: Timed) -> str:
    case, record = timed.case, timed.record()
    return (
        f"{case.batch_size:>5} {case.input_len:>6} {case.output_len:>5}  "
        f"{1e3 * timed.prefill_latency:>7.2f} ms {record['prefill_throughput']:>9.0f} {_of(timed.prefill_least)}  "
        f"{1e3 * timed.decode_latency:>7.2f} ms {record['median_decode_throughput']:>9.0f} {_of(timed.decode_least)}"
    )


def _of(least: Prediction | None) -> str:
    return f"{'-':>18}" if least is None else f"{1e3 * least.step_s:>7.2f} ms {least.bound:>7}"
