"""RooflineTimes: steps that take no longer than a chip's peaks allow, stage by stage; and a replica whose cache is what is left
beside the weights.

Both follow from options, config.json and a topology, by the arithmetic of `jaxserve compile` (`aot.roofline`, `aot.fitting`,
`executor.pool_sizes`): nothing is compiled, and no compiler of the target need be installed. So temporaries of programs are
not known; they have what --mem-fraction-static leaves. Launches, latencies of links, sampling and what kernels lose are not
counted, and what stages hand on takes no time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.aot.fitting import GIB, Demand, weights_too_large
from jaxserve.aot.roofline import Interconnect, ModelShard, StepShape, StepWork, predict, step_work
from jaxserve.aot.targets import Target, links_per_chip, without_devices
from jaxserve.bench.simulate.plan import ReplicaPlan, runner_spec
from jaxserve.bench.simulate.step_times import padded
from jaxserve.config import KV_CACHE_DTYPES, ServerArgs
from jaxserve.executor.blueprint import STATES_PER_ROW, placement_of
from jaxserve.executor.memory import DeviceMemory, bytes_for_pools, row_table_bytes
from jaxserve.executor.pool_sizes import first_pool_that_fits, pool_bytes, pools_of, useful_pages
from jaxserve.executor.resolve import resolve_args
from jaxserve.kernels.api import BACKENDS, LATENT_BACKENDS
from jaxserve.models import ModelConfig, check_tp, model_folder
from jaxserve.models.step_work import attention_work_ratio
from jaxserve.runner import KVGroup, RunnerSpec, StepInput

_COARSE = 64  # tokens: the roofline, which takes milliseconds, is asked about contexts and long chunks of whole multiples
_REMEMBERED = 1 << 16


class RooflineTimes:
    """`StageTimes` of a model's stages. Attention by data parallelism: a step takes as long as its fullest shard."""

    def __init__(
        self, target: Target, shards: Sequence[ModelShard], rows_per_shard: int = 1, token_buckets: Sequence[int] = ()
    ) -> None:
        """`shards`: a device's part of each stage. The others are of use with attention by data parallelism alone."""
        self._chip = target.chip
        self._shards = tuple(shards)
        self._num_shards = shards[0].config.attn_dp_size
        self._rows_per_shard = rows_per_shard
        self._token_buckets = token_buckets
        tp_size = shards[0].tp_size
        self._links = Interconnect.of(target.chip, tp_size, links_per_chip(target, tp_size))
        self._seconds = functools.lru_cache(maxsize=_REMEMBERED)(self._predict)
        self._work = functools.lru_cache(maxsize=_REMEMBERED)(self._count)

    def __call__(self, step: StepInput) -> Sequence[float]:
        return self._seconds(tuple(self._shapes(step)))

    def _shapes(self, step: StepInput) -> list[StepShape]:
        """Decode rows together, as if they were equally long, and each prompt by itself."""
        num_decode, shards = step.num_decode_rows, self._num_shards
        most, prompts, is_packed = num_decode, np.arange(num_decode, step.num_rows), False
        if shards > 1:
            shard_of = step.rows // self._rows_per_shard
            most = int(np.bincount(shard_of[:num_decode]).max(initial=0))
            tokens = np.bincount(shard_of, step.extend_lens)
            is_packed = tokens.max() * shards > padded(int(tokens.sum()), self._token_buckets)
            if not is_packed:  # the other shards are padded to as many tokens as the fullest
                prompts = prompts[shard_of[prompts] == tokens.argmax()]
        shapes = []
        if num_decode:
            shapes.append(StepShape(most, 1, _coarse(step.seq_lens[:num_decode].mean()), num_shards=shards))
        for new, length in zip(step.extend_lens[prompts].tolist(), step.seq_lens[prompts].tolist(), strict=True):
            new = _coarse(new) if new > _COARSE else new
            shapes.append(StepShape(1, new, max(_coarse(length), new), num_shards=shards, is_packed=is_packed))
        return shapes

    def _predict(self, shapes: tuple[StepShape, ...]) -> tuple[float, ...]:
        """Of all in one step: weights are read once."""
        times = []
        for stage, shard in enumerate(self._shards):
            works = [self._work(stage, shape) for shape in shapes]
            fields = {name: sum(getattr(work, name) for work in works) for name in StepWork.__dataclass_fields__}
            work = StepWork(**{**fields, "weight_bytes": max(work.weight_bytes for work in works)})
            times.append(predict(work, self._chip, shard.dtype, self._links).step_s)
        return tuple(times)

    def _count(self, stage: int, shape: StepShape) -> StepWork:
        return step_work(self._shards[stage], shape)


def _coarse(tokens: float) -> int:
    return max(round(tokens / _COARSE), 1) * _COARSE


def stage_shards(
    demand: Demand, tp_size: int, pp_size: int = 1, partition: Sequence[int] | None = None
) -> tuple[ModelShard, ...]:
    """What one device of each stage holds. ValueError if the model cannot be divided so."""
    check_tp(demand.config, tp_size)
    of_token = dataclasses.replace(demand, context_len=1, dcp_size=1)
    shards = []
    for stage in demand.stages(pp_size, partition):
        shard = ModelShard(stage, demand.dtype, tp_size, 0.0, demand.dcp_size)
        kv_bytes = of_token.request_bytes(stage, tp_size) - shard.state_bytes
        token_bytes = kv_bytes / max(len(shard.windows), 1) / demand.dcp_size
        shards.append(dataclasses.replace(shard, kv_token_bytes=token_bytes))
    return tuple(shards)


def plan_replica(given: Mapping[str, Any], target: Target, longest: int) -> ReplicaPlan:
    """As a server with the options `given` would be on this target, for sequences of up to `longest` tokens. ValueError or
    OSError with a sentence for what cannot be."""
    without_devices()
    args = ServerArgs(**{"tp_size": max(target.num_devices // max(given.get("pp_size", 1), 1), 1), "model_path": "", **given})
    target.check(args.pp_size, args.tp_size)
    args = args.replace(model_path=model_folder(args.model_path, weights=False))
    overrides = json.loads(args.json_model_override_args)
    config = ModelConfig.from_pretrained(args.model_path, overrides, is_embedding=args.is_embedding)
    args, demand = _resolve(args, config, target)
    if longest >= demand.context_len:
        raise ValueError(f"A request has {longest} tokens, and --context-length {demand.context_len} must be more.")
    too_large = weights_too_large(demand, target, args.tp_size, args.pp_size, args.pp_layer_partition)
    if too_large:
        raise ValueError(too_large)
    shards = stage_shards(demand, args.tp_size, args.pp_size, args.pp_layer_partition)
    spec = _spec(args, demand, target, shards)
    if longest >= spec.max_sequence_tokens:
        raise ValueError(f"The KV cache has {spec.max_sequence_tokens} tokens for one request, and one has {longest}.")
    times = RooflineTimes(target, shards, spec.rows_per_shard, args.prefill_token_buckets or ())
    args = args.replace(max_total_tokens=spec.max_total_tokens)
    return ReplicaPlan(args, spec, times, num_chips=args.num_devices / target.chip.devices_per_chip)


def _resolve(args: ServerArgs, config: ModelConfig, target: Target) -> tuple[ServerArgs, Demand]:
    """As `executor.blueprint` does, but for the attention backend, which is the first that the platform has."""
    platform = target.chip.platform
    config = config.replace(
        quantization=args.quantization, expert_placement=placement_of(args, config), attn_dp_size=args.attn_dp_size
    ).for_context(args.context_length or config.context_len)
    backends = BACKENDS if config.latent_dim is None else LATENT_BACKENDS
    page_size = args.page_size or next(one.default_page_size for one in backends if platform in one.platforms)
    args = resolve_args(args, platform=platform, model_context_len=config.context_len, page_size=page_size)
    assert args.context_length and args.max_running_requests and args.mem_fraction_static
    kv_dtype = KV_CACHE_DTYPES[args.kv_cache_dtype]
    return args, Demand(
        config,
        args.dtype,
        args.dtype if kv_dtype == "auto" else kv_dtype,
        args.context_length,
        args.mem_fraction_static,
        row_table_bytes(args.max_running_requests, config.vocab_size),
        args.dcp_size,
    )


def _spec(args: ServerArgs, demand: Demand, target: Target, shards: Sequence[ModelShard]) -> RunnerSpec:
    """With as many pages as the stage with the least room has, or as --max-total-tokens says."""
    config, assumed = demand.config, (KVGroup(1),)
    spec = runner_spec(args, attention_work_ratio(config), assumed)
    rows = spec.rows_per_shard
    has_snapshots = bool(config.state_layers) and not args.disable_radix_cache
    spec = dataclasses.replace(
        spec,
        kv_groups=tuple(KVGroup(1, window) for window in config.kv_windows),
        num_snapshots=(STATES_PER_ROW - 1) * rows if has_snapshots else 0,
    )
    ratio, asked = args.swa_full_tokens_ratio, args.max_total_tokens
    rooms = [_Room.of(demand, target, spec, shard) for shard in shards]
    if asked is None:
        fitting = min(first_pool_that_fits(spec, ratio, room.page_bytes, room.available_bytes) for room in rooms)
        first = min(fitting, useful_pages(spec, spec.kv_groups[0]))
    else:
        first = max(asked // (spec.page_size * spec.num_shards), 1)
    pools = pools_of(spec, ratio, first)
    for room in rooms:
        taken = pool_bytes(pools, room.page_bytes)
        if taken > room.available_bytes:
            raise ValueError(
                f"--max-total-tokens {asked} takes {taken / GIB:.1f} GiB of each device, and must be at most what is left of "
                f"it: {room.available_bytes / GIB:.1f} GiB."
            )
    groups = tuple(dataclasses.replace(group, num_pages=pages) for group, pages in zip(spec.kv_groups, pools, strict=True))
    return dataclasses.replace(spec, kv_groups=groups)


@dataclasses.dataclass(frozen=True)
class _Room:
    """For pages, on a device of a stage."""

    available_bytes: int
    page_bytes: tuple[int, ...]  # per KV group: of a page in all its layers here

    @staticmethod
    def of(demand: Demand, target: Target, spec: RunnerSpec, shard: ModelShard) -> _Room:
        """ValueError if not even one page fits."""
        stage, hbm = shard.config, target.chip.hbm_bytes
        layer_bytes = round(shard.kv_token_bytes * spec.page_size)
        page_bytes = tuple(stage.own_cache_groups.count(group.window) * layer_bytes for group in spec.kv_groups)
        states = (spec.rows_per_shard + 1 + spec.num_snapshots) * shard.state_bytes
        available = bytes_for_pools(
            DeviceMemory(hbm, hbm - demand.weight_bytes(stage, shard.tp_size)),
            mem_fraction=demand.mem_fraction,
            table_bytes=stage.makes_logits * demand.row_table_bytes + states,
            step_bytes=0,
            page_bytes=sum(page_bytes),
            page_size=spec.page_size,
        )
        return _Room(available, page_bytes)
