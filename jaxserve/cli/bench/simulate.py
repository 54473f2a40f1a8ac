"""`jaxserve bench simulate`: replicas, policies and options compared without devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from jaxserve.bench.record import append_record, header
from jaxserve.cli.bench.output import output_file
from jaxserve.cli.options import ListOf, flag, server_options
from jaxserve.config import ServerArgs
from jaxserve.config.names import LOAD_BALANCE_METHODS, SCHEDULER_OPTIONS

if TYPE_CHECKING:
    from jaxserve.bench.simulate import Arrival
    from jaxserve.bench.simulate.plan import ReplicaPlan
    from jaxserve.bench.simulate.step_times import StepTimes

# Of a server's options: what a model's steps take and what fits beside it, with --topology.
_OF_MODEL = frozenset(
    ("model_path", "json_model_override_args", "dtype", "quantization", "kv_cache_dtype", "mem_fraction_static",
     "swa_full_tokens_ratio", "pp_layer_partition", "attn_dp_size", "dcp_size", "ep_size", "ep_num_redundant_experts",
     "init_expert_location")
)  # fmt: skip
_USED = frozenset(SCHEDULER_OPTIONS) | _OF_MODEL
_UNUSED = frozenset(field.name for field in dataclasses.fields(ServerArgs)) - _USED
_STEP_TIMES = ("step_times", "step_ms", "prefill_token_us", "decode_row_us", "context_token_ns", "pair_ps")
_COLUMNS = (
    ("rate", "request_rate", 8), ("done/s", "request_throughput", 8), ("out tok/s", "output_throughput", 10),
    ("TTFT p50", "median_ttft_ms", 9), ("p99 ms", "p99_ttft_ms", 9), ("TPOT p50", "median_tpot_ms", 9),
    ("p99 ms", "p99_tpot_ms", 8), ("cached %", "cache_hit_rate_pct", 8), ("good %", "goodput_pct", 7),
    ("good/s/chip", "goodput_per_chip", 11), ("bubble %", "bubble_pct", 8),
)  # fmt: skip


@click.command("simulate", short_help="Compare replicas, policies and options without devices.")
@click.option("--replicas", type=ListOf(int), default=(1,), show_default="1", help="As --dp-size; several with commas.")
@click.option(
    "--load-balance-method", "methods", type=ListOf(str), default=("cache_aware",), show_default="cache_aware",
    help="As of a server; several with commas.",
)  # fmt: skip
@click.option(
    "--request-rate", type=ListOf(float), default=(16.0,), show_default="16", help="Requests per second; several with commas."
)
@click.option(
    "--target-pct", type=click.FloatRange(0, 100, min_open=True),
    help="Find the highest rate at which so many of 100 requests keep the limits of --goodput.",
)  # fmt: skip
@click.option("--goodput", multiple=True, help="Limits in ms, as ttft:200,tpot:30 or e2el:5000.")
@click.option("--gsp-num-groups", type=click.IntRange(1), default=64, show_default=True, help="Shared beginnings of prompts.")
@click.option("--gsp-prompts-per-group", type=click.IntRange(1), default=16, show_default=True, help="Prompts behind each.")
@click.option("--gsp-system-prompt-len", type=click.IntRange(0), default=2048, show_default=True, help="Tokens of a beginning.")
@click.option("--gsp-question-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens behind it.")
@click.option("--gsp-output-len", type=click.IntRange(1), default=256, show_default=True, help="Tokens of an answer.")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Requests from a file in Mooncake's form instead, at its times; --request-rate is how many times as fast then.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option(
    "--topology",
    help="Chips of a replica: v5e:2x4, tpu7x:2x2x1, h200, h200:8, ... Steps take what the roofline says of --model-path there.",
)
@click.option(
    "--step-times", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Lines of `jaxserve bench latency --output-file`: what steps take, and the options of that server.",
)  # fmt: skip
@click.option("--step-ms", type=float, default=8.0, show_default=True, help="Without them: what any step takes.")
@click.option("--prefill-token-us", type=float, default=50.0, show_default=True, help="And more for each token of a prompt.")
@click.option("--decode-row-us", type=float, default=20.0, show_default=True, help="And for each row that decodes.")
@click.option(
    "--context-token-ns", type=float, default=0.0, show_default=True, help="And for each token that such rows look back at."
)
@click.option(
    "--pair-ps",
    type=float,
    default=0.0,
    show_default=True,
    help="And for each pair of a prompt's token and one before it.",
)
@click.option("--host-us", type=float, default=300.0, show_default=True, help="What a round of the scheduler takes the host.")
@click.option(
    "--path-ms", type=float, default=2.0, show_default=True, help="A request's way in and its text's way out, together."
)
@output_file
@server_options(without=_UNUSED, defaults={"tp_size": None})
@click.pass_context
def simulate(context: click.Context, output_file: str | None, **options: Any) -> int:
    """Let the real schedulers, caches and routing serve a workload in virtual time, around devices that only take time.

    Every combination of --replicas, --load-balance-method and --request-rate is one line. With --target-pct each line is the
    highest rate that keeps the promise. --tp-size times --pp-size are the chips of each replica.

    What steps take says --step-times, or --topology, or the five numbers from --step-ms to --pair-ps. --topology needs a
    --model-path with a config.json (no weights, no device, nothing is compiled): --tp-size is then all devices of it by
    default, divided by --pp-size, and --max-total-tokens what fits beside the weights. Without it, --max-total-tokens is the KV
    cache of each replica, and the stages of a pipeline take equal parts of a step.
    """
    from jaxserve.bench.serving.options import slo_limits

    _check(options)
    try:
        slo_ms = slo_limits(options["goodput"])
        if options["target_pct"] and not slo_ms:
            raise ValueError("--target-pct needs limits: --goodput ttft:200,tpot:30.")
        setup = _Setup.of(context, options, slo_ms)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    if options["topology"]:
        args = setup.plan.args
        click.echo(f"Each replica: {args.num_devices} of {options['topology']}, a KV cache of {args.max_total_tokens} tokens.")
    click.echo(f"{'replicas':>8} {'method':>15} " + " ".join(f"{title:>{width}}" for title, _, width in _COLUMNS))
    for replicas, method in itertools.product(options["replicas"], options["methods"]):
        for record in _records(setup, replicas, method):
            click.echo(_line(replicas, method, record))
            if output_file is not None and record is not None:
                append_record(output_file, {**header("simulate"), "replicas": replicas, "method": method, **record})
    return 0


def _check(options: dict[str, Any]) -> None:
    for method in options["methods"]:
        if method not in LOAD_BALANCE_METHODS:
            known = ", ".join(LOAD_BALANCE_METHODS)
            raise click.BadParameter(f"{method!r} is none of {known}.", param_hint="--load-balance-method")
    for name, least in (("replicas", 1), ("request_rate", 1e-3)):
        if min(options[name]) < least:
            hint = f"--{name.replace('_', '-')}"
            raise click.BadParameter(f"{min(options[name]):g} is less than {least:g}.", param_hint=hint)


def _records(setup: _Setup, replicas: int, method: str) -> Iterator[dict[str, Any] | None]:
    """Of each rate, or of the highest that keeps the promise; None: none does."""
    from jaxserve.bench.simulate.plan import highest_rate

    rates, run = setup.options["request_rate"], functools.partial(setup.run, replicas, method)
    if setup.options["target_pct"]:
        yield highest_rate(run, setup.options["target_pct"], rates[0])
    else:
        yield from map(run, rates)


def _line(replicas: int, method: str, record: dict[str, Any] | None) -> str:
    if record is None:
        return f"{replicas:>8} {method:>15}  no rate keeps these limits"
    cells = (f"{record[key]:>{width}.1f}" if key in record else f"{'-':>{width}}" for _, key, width in _COLUMNS)
    return f"{replicas:>8} {method:>15} " + " ".join(cells)


@dataclasses.dataclass(frozen=True)
class _Setup:
    """What all lines share."""

    options: dict[str, Any]
    plan: ReplicaPlan
    slo_ms: dict[str, float]

    @staticmethod
    def of(context: click.Context, options: dict[str, Any], slo_ms: dict[str, float]) -> _Setup:
        """ValueError or OSError with a sentence for what cannot be."""
        was_given = [name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
        given = {name: options[name] for name in was_given if name in _USED}
        longest = _longest(options)
        if options["topology"]:
            return _Setup(options, _plan_on_topology(options["topology"], given, was_given, longest), slo_ms)
        for name in given:
            if name in _OF_MODEL:
                raise ValueError(f"{flag(name)} needs --topology: without it no model is looked at.")
        return _Setup(options, _plan_of_step_times(options, given, longest), slo_ms)

    def run(self, replicas: int, method: str, rate: float) -> dict[str, Any]:
        from jaxserve.bench.simulate import Simulation
        from jaxserve.progress import progress_bar

        options, plan = self.options, self.plan
        args = plan.args.replace(dp_size=replicas, load_balance_method=method)
        with progress_bar(_num_requests(options), f"{replicas} replicas, {method}, {rate:g}/s", "request") as progress:
            simulation = Simulation(
                args, plan.spec, plan.stage_times,
                host_s=options["host_us"] * 1e-6, path_s=options["path_ms"] * 1e-3, on_served=progress.update,
            )  # fmt: skip
            report = simulation.run(_arrivals(options, rate))
        return {"request_rate": rate, **report.record(self.slo_ms, plan.num_chips)}


def _plan_on_topology(topology: str, given: dict[str, Any], was_given: Collection[str], longest: int) -> ReplicaPlan:
    from jaxserve.aot.targets import parse_target
    from jaxserve.bench.simulate.roofline import plan_replica

    for name in _STEP_TIMES:
        if name in was_given:
            raise ValueError(f"{flag(name)} and --topology cannot be combined: both say what steps take.")
    return plan_replica(given, parse_target(topology), longest)


def _plan_of_step_times(options: dict[str, Any], given: dict[str, Any], longest: int) -> ReplicaPlan:
    from jaxserve.bench.record import read_records
    from jaxserve.bench.simulate import LinearStepTimes, MeasuredStepTimes
    from jaxserve.bench.simulate.plan import ReplicaPlan, resolved

    step_times: StepTimes
    if options["step_times"] is None:
        micro = 1e-6
        step_times = LinearStepTimes(
            options["step_ms"] * 1e-3, options["prefill_token_us"] * micro, options["decode_row_us"] * micro,
            options["context_token_ns"] * 1e-9, options["pair_ps"] * 1e-12,
        )  # fmt: skip
    else:
        lines = list(read_records(options["step_times"]))
        step_times = MeasuredStepTimes.of_records(lines)
        given = {name: value for name, value in lines[-1]["server_args"].items() if name in SCHEDULER_OPTIONS} | given
    return ReplicaPlan.of_step_times(resolved(given, "gpu", longest), step_times)


def _arrivals(options: dict[str, Any], rate: float) -> Iterable[Arrival]:
    from jaxserve.bench.simulate import SharedPrefixes, read_trace

    if options["trace"] is not None:
        return read_trace(options["trace"], rate)
    return SharedPrefixes(
        rate=rate, num_groups=options["gsp_num_groups"], prompts_per_group=options["gsp_prompts_per_group"],
        shared_len=options["gsp_system_prompt_len"], question_len=options["gsp_question_len"],
        output_len=options["gsp_output_len"], seed=options["seed"],
    )  # fmt: skip


def _longest(options: dict[str, Any]) -> int:
    if options["trace"] is None:
        return int(options["gsp_system_prompt_len"] + options["gsp_question_len"] + options["gsp_output_len"])
    return max((len(one.prompt) + one.output_len for one in _arrivals(options, 1.0)), default=1)


def _num_requests(options: dict[str, Any]) -> int:
    if options["trace"] is None:
        return int(options["gsp_num_groups"] * options["gsp_prompts_per_group"])
    return len(options["trace"].read_text().splitlines())
