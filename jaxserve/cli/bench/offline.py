"""`jaxserve bench offline`: the throughput of an Engine in this terminal."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import click

from jaxserve.bench.record import Record, append_record
from jaxserve.bench.serving.options import DATASETS, ServingOptions
from jaxserve.cli.bench.output import output_file
from jaxserve.cli.engine import start_engine
from jaxserve.cli.options import HTTP_ONLY, option_of, server_options

# Of bench serving's options, those that make sense without a server. A conversation needs the answers before it goes on.
_SHARED = (
    "dataset_name", "dataset_path", "num_prompts", "random_input_len", "random_output_len", "random_range_ratio",
    "sharegpt_output_len", "sharegpt_context_len", "gsp_num_groups", "gsp_prompts_per_group", "gsp_system_prompt_len",
    "gsp_question_len", "gsp_output_len", "gsp_range_ratio", "gsp_ordered", "tokenize_prompt", "seed", "temperature", "top_p",
    "disable_ignore_eos", "extra_request_body", "warmup_requests", "output_details", "tag", "profile", "profile_activities",
    "profile_start_step", "profile_num_steps", "profile_by_stage", "profile_stages", "profile_output_dir", "profile_prefix",
)  # fmt: skip
_CONVERSATIONS = "multi-turn"
# One program brings all requests; nothing is compiled while it is measured.
_ENGINE_DEFAULTS = {"log_level": "warning", "max_queued_requests": None, "max_reply_numbers": None, "warmup": "full"}


def _shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    hints = typing.get_type_hints(ServingOptions)
    fields = {field.name: field for field in dataclasses.fields(ServingOptions)}
    for name in reversed(_SHARED):
        command = option_of(fields[name], hints[name], fields[name].default)(command)
    return command


@click.command("offline", short_help="Throughput of an engine, without a server.")
@click.argument("model", required=False)
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Times that all prompts are answered.")
@_shared_options
@output_file
@server_options(without=HTTP_ONLY, defaults=_ENGINE_DEFAULTS)
def offline(model: str | None, runs: int, output_file: str | None, **options: Any) -> int:
    """Answer all prompts of a dataset with an engine in this terminal, as fast as it can, and tell how fast that is.

    MODEL and its options are as for `serve`, prompts as for `bench serving`. Ctrl-C shows what there is until then.
    """
    asked = _asked({name: options.pop(name) for name in _SHARED})
    from jaxserve.bench.offline import OfflineBench
    from jaxserve.bench.serving.datasets import make_tasks
    from jaxserve.bench.serving.tokens import Tokens
    from jaxserve.server.requests import RequestError

    with start_engine(options, model) as engine:
        try:
            tokens = Tokens.load(engine.server_args.tokenizer_path or engine.server_args.model_path)
            bench = OfflineBench(engine, asked, make_tasks(asked, tokens))
            bench.warm_up()
        except ValueError as error:
            raise click.ClickException(str(error)) from None
        except RequestError as error:
            raise click.ClickException(f"The warm-up request failed, so nothing was measured: {error.message}") from None
        records = []
        for _ in range(runs):
            records.append(_run(bench, asked, output_file))
            if records[-1]["interrupted"]:
                raise click.Abort
    if not any(record["successful_requests"] for record in records):
        raise click.ClickException("No request went well: there is nothing to measure. The failures are listed above.")
    return 0


def _asked(given: dict[str, Any]) -> ServingOptions:
    if given["dataset_name"] == _CONVERSATIONS:
        names = ", ".join(name for name in DATASETS if name != _CONVERSATIONS)
        raise click.UsageError(f"--dataset-name {_CONVERSATIONS} is for bench serving; here: {names}.")
    try:
        return ServingOptions(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _run(bench: Any, asked: ServingOptions, output_file: str | None) -> Record:
    from jaxserve.progress import progress_bar

    with progress_bar(asked.num_prompts, "Requests", "request") as progress:
        record: Record = bench.run(progress.update)
    click.echo("\n".join(_lines(record)))
    if output_file is not None:
        append_record(output_file, record)
    return record


def _lines(record: Record) -> list[str]:
    shown = [
        ("Successful requests:", record["successful_requests"]),
        *([("Failed requests:", record["failed"])] if record["failed"] else []),
        ("Benchmark duration (s):", record["total_latency"]),
        ("Total input tokens:", record["total_input_tokens"]),
        ("Total generated tokens:", record["total_output_tokens"]),
        ("Last generation throughput (tok/s):", record["last_gen_throughput"]),
        ("Request throughput (req/s):", record["request_throughput"]),
        ("Input token throughput (tok/s):", record["input_throughput"]),
        ("Output token throughput (tok/s):", record["output_throughput"]),
        ("Total token throughput (tok/s):", record["total_throughput"]),
    ]
    lines = [f"{label:<40} {value:.2f}" if isinstance(value, float) else f"{label:<40} {value}" for label, value in shown]
    failures = [f"  {seen['count']} x {seen['message']}" for seen in record["failures"].values()]
    title = " Offline Throughput Benchmark Result" + (" (interrupted) " if record["interrupted"] else " ")
    return [f"{title:=^50}", *lines, *failures, "=" * 50]
