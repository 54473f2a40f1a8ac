"""From options to simulations, and the highest rate that keeps a promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.bench.simulate.step_times import StageTimes, StepTimes, evenly
from jaxserve.config import ServerArgs
from jaxserve.executor.resolve import resolve_args
from jaxserve.runner import KVGroup, RunnerSpec

_DEFAULT_PAGE_SIZE, _DEFAULT_TOKENS = 64, 512 * 1024


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """What each replica of a simulation is."""

    args: ServerArgs  # resolved; what differs between simulations (--dp-size, --load-balance-method) is not looked at
    spec: RunnerSpec
    stage_times: StageTimes
    num_chips: float

    @staticmethod
    def of_step_times(args: ServerArgs, step_times: StepTimes) -> ReplicaPlan:
        """Of resolved options. The stages of a pipeline take equal parts of a step."""
        spec = runner_spec(args, step_times.work_ratio)
        return ReplicaPlan(args, spec, evenly(step_times, args.pp_size), args.num_devices)


def resolved(given: Mapping[str, Any], platform: str, longest: int) -> ServerArgs:
    """As an accelerator's server would resolve them, for sequences of up to `longest` tokens. ValueError with a sentence."""
    args = ServerArgs(model_path="simulated", **given)
    page_size, context_len = args.page_size or _DEFAULT_PAGE_SIZE, max(args.context_length or 0, longest + 1)
    args = resolve_args(
        args.replace(context_length=None), platform=platform, model_context_len=context_len, page_size=page_size
    )
    return args.replace(max_total_tokens=args.max_total_tokens or _DEFAULT_TOKENS)


def runner_spec(
    args: ServerArgs, attention_work_ratio: float = 0.0, kv_groups: tuple[KVGroup, ...] | None = None
) -> RunnerSpec:
    """Of resolved options. `kv_groups`: of each shard; None: one, of --max-total-tokens, and ValueError if a sequence would not
    fit it."""
    assert args.page_tokens and args.max_running_requests and args.context_length and args.prefill_token_buckets, args
    if kv_groups is None:
        assert args.max_total_tokens, args
        if args.max_total_tokens < args.context_length:
            raise ValueError(
                f"--max-total-tokens {args.max_total_tokens} has no room for one sequence of {args.context_length} tokens."
            )
        kv_groups = (KVGroup(args.max_total_tokens // args.page_tokens),)
    shards = args.attn_dp_size
    return RunnerSpec(
        page_size=args.page_tokens,
        kv_groups=kv_groups,
        max_rows=-(-args.max_running_requests // shards) * shards,
        context_len=args.context_length,
        max_step_tokens=-(-args.prefill_token_buckets[-1] // shards) * shards,
        vocab_size=1 << 20,
        hidden_size=1,
        eos_token_ids=(0,),
        max_top_logprobs=0,
        num_shards=shards,
        num_stages=args.pp_size,
        attention_work_ratio=attention_work_ratio,
    )


def highest_rate(simulate: Callable[[float], dict[str, Any]], least_pct: float, first: float) -> dict[str, Any] | None:
    """The record of the highest rate, to within 5 %, of which `least_pct` % of the requests keep their limits: doubling from
    `first`, or halving, then in between. None if none down to a thousandth of it does."""

    def keeps(rate: float) -> dict[str, Any] | None:
        record = simulate(rate)
        return record if record["goodput_pct"] >= least_pct else None

    low, best = first, keeps(first)
    while best is None:
        low /= 2
        if low < first / 1000:
            return None
        best = keeps(low)
    high = low * 2
    if low == first:
        while (record := keeps(high)) is not None:
            low, best, high = high, record, high * 2
    while high / low > 1.05:
        middle = (low + high) / 2
        if (record := keeps(middle)) is not None:
            low, best = middle, record
        else:
            high = middle
    return best
