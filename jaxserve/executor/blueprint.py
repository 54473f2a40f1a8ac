"""Blueprint: everything about a runner that follows from options, config.json and the mesh, before there are weights.

The mesh may be of devices that are not there: then the blueprint can be lowered and compiled, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxserve.config import KV_CACHE_DTYPES, ServerArgs
from jaxserve.executor.attention_chunks import check_page_size
from jaxserve.executor.buckets import Buckets
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.kv_cache import ArraysLayout, KVCacheLayout, KVPool
from jaxserve.executor.ngram import NgramDrafter
from jaxserve.executor.pooling import keeps_sums, line_counts
from jaxserve.executor.program_set import ProgramSet
from jaxserve.executor.programs import StepPrograms
from jaxserve.executor.resolve import resolve_args, resolve_dtype, resolve_lora
from jaxserve.executor.sampler import SamplingMode
from jaxserve.executor.scoring import LINE_COUNTS
from jaxserve.executor.step import Params, Step
from jaxserve.kernels.api import AttentionBackend, AttentionSpec, Chip, LatentBackend, choose_backend, choose_latent_backend
from jaxserve.kernels.context import ContextGroup
from jaxserve.kernels.native import few_rows
from jaxserve.models import (
    TENSOR_AXIS,
    Decoder,
    ModelConfig,
    ParamTree,
    abstract_params,
    build_decoder,
    check_tp,
    divide_layers,
)
from jaxserve.models.adapters.layout import AdapterLayout, check_targets
from jaxserve.models.blocks.state_inputs import state_arrays
from jaxserve.models.expert_placement import ExpertPlacement, place_experts
from jaxserve.models.step_work import attention_work_ratio
from jaxserve.runner import KVGroup, RunnerSpec, Vectors

STATES_PER_ROW = 3  # one that runs, and snapshots: of it, and behind cached prefixes (SGLang's number)

# Options of models that generate.
_OF_LOGITS = (
    "speculative_algorithm", "enable_custom_logit_processor", "enable_fp32_lm_head", "enable_deterministic_inference",
    "enable_return_routed_experts",
)  # fmt: skip

NumPages: TypeAlias = tuple[int, ...]  # of each KV group's pool, in the order of ModelConfig.kv_windows


def placement_of(args: ServerArgs, config: ModelConfig) -> ExpertPlacement | None:
    """What options say of experts. ValueError for what cannot be."""
    return place_experts(
        layers=config.mixtures,
        architecture=config.architecture,
        tp_size=args.tp_size,
        ep_size=args.ep_size,
        num_redundant=args.ep_num_redundant_experts,
        location=args.init_expert_location,
    )


def _check_states(args: ServerArgs, config: ModelConfig) -> None:
    """ValueError for what cannot be with a model whose layers keep states."""
    if len(set(config.state_layers)) > 1:
        raise ValueError(f"the layers of {config.architecture} differ in the states that they keep.")
    if args.enable_deterministic_inference and config.state_layers:
        raise ValueError(
            f"--enable-deterministic-inference needs a model whose layers keep no states: what these sum up depends on how a "
            f"prompt came in steps. Those of {config.architecture} do."
        )
    if args.max_mamba_cache_size is not None and not config.state_layers:
        raise ValueError(f"--max-mamba-cache-size needs a model whose layers keep states; {config.architecture} has none.")


def _check_vectors_only(args: ServerArgs, config: ModelConfig) -> None:
    """ValueError for what only a model that generates has, or only one that computes prompts in parts."""
    for name in () if config.generates else _OF_LOGITS:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} needs a model that generates; {config.architecture} makes vectors.")
    if config.is_causal:
        return
    if args.attn_dp_size > 1:
        raise ValueError(f"--attn-dp-size must be 1 for encoders such as {config.architecture}; got {args.attn_dp_size}.")
    if KV_CACHE_DTYPES[args.kv_cache_dtype] != "auto":
        raise ValueError(f"--kv-cache-dtype must be auto for encoders such as {config.architecture}, which keep no KV cache.")


def _check_experts(args: ServerArgs, config: ModelConfig) -> None:
    """ValueError for what only a model with experts has."""
    for name in () if config.experts_per_token else ("expert_distribution_recorder_mode", "enable_return_routed_experts"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} needs a model with experts; {config.architecture} has none.")


def _context(args: ServerArgs, config: ModelConfig) -> ContextGroup | None:
    """ValueError for a model whose devices have no copies."""
    if args.dcp_size == 1:
        return None
    if config.latent_dim is None:
        raise ValueError(
            f"--dcp-size {args.dcp_size} is for models with latent attention; {config.architecture} keeps keys and values of "
            "heads, which --tp-size deals out."
        )
    return ContextGroup(TENSOR_AXIS, args.attn_tp_size, args.dcp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blueprint:
    args: ServerArgs  # without an "auto" left
    config: ModelConfig  # without windows that no sequence can outgrow
    mesh: Mesh
    backend: AttentionBackend | LatentBackend

    @staticmethod
    def draw(args: ServerArgs, config: ModelConfig, mesh: Mesh) -> Blueprint:
        """ValueError with the reason if the model cannot be split so, or if no attention backend serves it."""
        placement = placement_of(args, config)
        config = config.replace(
            quantization=args.quantization,
            expert_placement=placement,
            attn_dp_size=args.attn_dp_size,
            batch_invariant=args.enable_deterministic_inference,
        ).for_context(args.context_length or config.context_len)
        check_tp(config, args.tp_size)
        _check_states(args, config)
        _check_vectors_only(args, config)
        _check_experts(args, config)
        chip = Chip.of(mesh.devices.flat[0])
        dtype = resolve_dtype(args, chip.platform)
        if chip.platform == "cpu" and dtype == "float32":
            config = config.replace(native_products=few_rows.are_available())
        config = config.replace(fp32_lm_head=args.enable_fp32_lm_head and dtype != "float32")  # where it changes something
        spec = AttentionSpec.of(
            config,
            chip=chip,
            tp_size=args.attn_tp_size,
            dtype=dtype,
            kv_dtype=KV_CACHE_DTYPES[args.kv_cache_dtype],
            page_size=args.page_size,
            context=_context(args, config),
            batch_invariant=args.enable_deterministic_inference,
        )
        try:
            choose = choose_backend if spec.latent_dim is None else choose_latent_backend
            backend: AttentionBackend | LatentBackend = choose(args.attention_backend, spec)
        except NotImplementedError as error:
            raise ValueError(f"--attention-backend {args.attention_backend} cannot serve this model: {error}") from error
        page_size = backend.spec.page_size
        assert page_size is not None
        for chunk_size in config.chunk_sizes:
            check_page_size(chunk_size, page_size)
        args = resolve_lora(args)
        args = resolve_args(
            args,
            platform=chip.platform,
            model_context_len=config.context_len,
            page_size=page_size,
            generates=config.generates,
            is_causal=config.is_causal,
        )
        if args.max_mamba_cache_size is not None and args.max_mamba_cache_size < (args.max_running_requests or 0):
            raise ValueError(
                f"--max-mamba-cache-size must be at least --max-running-requests={args.max_running_requests}, as each request "
                f"has a state; got {args.max_mamba_cache_size}."
            )
        blueprint = Blueprint(args=args, config=config, mesh=mesh, backend=backend)
        if args.lora_target_modules is not None:
            check_targets(blueprint.arrays, args.lora_target_modules)
        return blueprint

    @staticmethod
    def draw_stages(args: ServerArgs, config: ModelConfig, meshes: Sequence[Mesh]) -> tuple[Blueprint, ...]:
        """Of a pipeline a blueprint for each stage; of a model that is not divided, the one. ValueError as `draw`."""
        stages = divide_layers(config.num_layers, args.pp_size, args.pp_layer_partition)
        whole = Blueprint.draw(args, config, meshes[0])
        return tuple(
            dataclasses.replace(whole, config=whole.config.replace(stage=stage), mesh=mesh)
            for stage, mesh in zip(stages, meshes, strict=True)
        )

    @property
    def platform(self) -> str:
        return self.backend.spec.chip.platform

    @property
    def page_size(self) -> int:
        """Tokens of a page, all devices' parts together."""
        return self.backend.spec.page_tokens

    @property
    def buckets(self) -> Buckets:
        assert self.args.prefill_token_buckets and self.args.decode_row_buckets
        if self._step_size is not None:
            groups = len(self.config.kv_windows)
            return Buckets.one(self._step_size, self.page_size, groups, adapts=self.args.serves_lora)
        return Buckets.build(
            self.args.prefill_token_buckets,
            self.args.decode_row_buckets,
            self.page_size,
            self.num_draft_tokens,
            len(self.config.kv_windows) + bool(self.num_snapshots),
            self.args.attn_dp_size,
            decodes=self.config.generates,
        )

    @property
    def _step_size(self) -> int | None:
        """Tokens and rows of every step, and lines of every call that scores, where all are alike."""
        assert self.args.prefill_token_buckets
        return self.args.prefill_token_buckets[-1] if self.args.enable_deterministic_inference else None

    @property
    def program_set(self) -> ProgramSet:
        """What is compiled for these devices."""
        return self.server_programs.of_stage(is_first=self.config.embeds, is_last=self.config.has_head)

    @property
    def server_programs(self) -> ProgramSet:
        """What a server compiles, for all stages together. Without grammars nothing masks but EVERYTHING."""
        generates = self.config.generates
        left_out = {SamplingMode.MASKED} if self.args.grammar_backend == "none" else set()
        modes = tuple(mode for mode in SamplingMode if generates and mode not in left_out)
        drafts, hidden_states = self.drafter is not None, self.args.enable_return_hidden_states
        moves_logits = self.args.enable_custom_logit_processor
        return ProgramSet(
            self.buckets,
            modes,
            drafts=drafts,
            hidden_states=hidden_states,
            routed_experts=self.args.enable_return_routed_experts,
            moves_logits=moves_logits,
            adapts=self.args.serves_lora,
            samples=generates,
            scoring_lines=LINE_COUNTS if self._step_size is None else (self._step_size,),
            pools=line_counts(self.config),
            pools_parts=keeps_sums(self.config),
        )

    def description(self, num_pages: NumPages) -> str:
        """All that shapes the programs of one server beside code, versions and devices: their key in a cache."""
        parts = (self.config, self.args.dtype, self.args.tp_size, self.backend.name, self.backend.spec, self.spec(num_pages))
        lora = (self.args.max_lora_rank, self.args.lora_target_modules) if self.args.serves_lora else None
        return repr((*parts, num_pages, self.drafter, lora))

    @property
    def counts_experts(self) -> bool:
        return self.args.expert_distribution_recorder_mode is not None

    @property
    def experts_shape(self) -> tuple[int, int] | None:
        """Of what is told of a token: layers with experts, and experts in each. None: nothing is."""
        if not self.args.enable_return_routed_experts:
            return None
        return len(self.config.sparse_layers), self.config.experts_per_token

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of a row that a decode step verifies; 1 without speculative decoding."""
        return self.args.speculative_num_draft_tokens or 1

    @property
    def drafter(self) -> NgramDrafter | None:
        args = self.args
        if args.speculative_algorithm is None:
            return None
        return NgramDrafter(
            num_drafts=self.num_draft_tokens - 1,
            min_match=args.speculative_ngram_min_match_window_size,
            max_match=args.speculative_ngram_max_match_window_size,
        )

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Per KV group: of one page in all its layers here, on one device that holds it."""
        layer_bytes = sum(page.nbytes for page in jax.tree.leaves(self.backend.kv_pages()))
        return tuple(self.config.num_kv_layers(window) * layer_bytes for window in self.config.kv_windows)

    def pools(self, num_pages: NumPages) -> dict[int | None, KVPool]:
        """Of the KV groups, by their window: one behind the other."""
        pools: dict[int | None, KVPool] = {}
        base = 0
        for window, pages in zip(self.config.kv_windows, num_pages, strict=True):
            pools[window] = KVPool(base, self.config.num_kv_layers(window), pages)
            base = pools[window].end
        return pools

    def pages_each(self, count: int) -> NumPages:
        """Pools of so many pages, for what does not depend on their size."""
        return (count,) * len(self.config.kv_windows)

    def spec(self, num_pages: NumPages) -> RunnerSpec:
        args = self.args
        assert args.max_running_requests and args.context_length
        return RunnerSpec(
            page_size=self.page_size,
            kv_groups=tuple(map(KVGroup, num_pages, self.config.kv_windows)),
            max_rows=args.attn_dp_size * self._rows_per_shard,
            context_len=args.context_length,
            max_step_tokens=self.buckets.extend[-1].total_tokens,
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            eos_token_ids=self.config.eos_token_ids,
            max_top_logprobs=min(args.max_top_logprobs, self.config.vocab_size),
            num_draft_tokens=self.num_draft_tokens,
            returns_hidden_states=args.enable_return_hidden_states,
            experts_shape=self.experts_shape,
            logprobs_after_temperature=args.logprobs_after_temperature,
            moves_logits=args.enable_custom_logit_processor,
            counts_experts=self.counts_experts,
            num_snapshots=self.num_snapshots,
            num_shards=args.attn_dp_size,
            num_stages=args.pp_size,
            keeps_kv=self.config.is_causal,
            generates=self.config.generates,
            vectors=self.vectors,
            num_token_ids=self.config.num_token_ids,
            num_adapter_slots=args.max_loras_per_batch if args.serves_lora else 0,
            attention_work_ratio=attention_work_ratio(self.config),
        )

    @property
    def vectors(self) -> Vectors:
        """What the model makes of texts."""
        pooling = self.config.pooling
        return Vectors(
            size=self.config.pooled_size,
            gives=pooling.gives,
            of_tokens=pooling.of_tokens,
            needs_whole=pooling.needs_whole,
            normalizes=pooling.normalizes,
            labels=pooling.labels,
            activation=pooling.activation,
        )

    @functools.cached_property
    def arrays(self) -> ParamTree:
        """The weights' ArrayInfo."""
        return abstract_params(self.config, jnp.dtype(self.args.dtype), self.args.tp_size)

    @functools.cached_property
    def adapters(self) -> AdapterLayout | None:
        """The slots for LoRA adapters, if there are any."""
        args = self.args
        if not args.serves_lora:
            return None
        assert args.max_lora_rank is not None and args.lora_target_modules is not None, "options are resolved"
        return AdapterLayout.of(
            self.arrays,
            num_slots=args.max_loras_per_batch,
            rank=args.max_lora_rank,
            dtype=jnp.dtype(args.dtype),
            targets=args.lora_target_modules,
        )

    @functools.cached_property
    def decoder(self) -> Decoder:
        return build_decoder(self.config, self.args.tp_size)

    def abstract_params(self) -> Params:
        """The weights' shapes, types and shardings, to lower with in place of weights."""
        return jax.tree.map(
            lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(self.mesh, info.spec)), self.arrays
        )

    def kv_cache(self, num_pages: NumPages) -> KVCacheLayout:
        """The arrays that hold all pools, and the states."""
        total = max(pool.end for pool in self.pools(num_pages).values())
        return KVCacheLayout(self._layout(self.backend.kv_pages(), total), self.states)

    @property
    def states(self) -> ArraysLayout | None:
        """For each layer that keeps states: those of each request row and of padding rows, and the snapshots."""
        mixers = self.config.state_layers
        if not mixers:
            return None
        arrays = state_arrays(mixers[0], jnp.dtype(self.args.dtype), self.args.attn_tp_size)
        return self._layout(arrays, self.config.own_cache_groups.count("states") * self._num_state_lines)

    def _layout(self, arrays: Any, count: int) -> ArraysLayout:
        # At least one, also for a stage without such layers: an array of nothing has no sharding.
        return ArraysLayout(arrays, max(count, 1), self.args.attn_tp_size, self.args.attn_dp_size)

    @property
    def _rows_per_shard(self) -> int:
        assert self.args.max_running_requests
        return -(-self.args.max_running_requests // self.args.attn_dp_size)

    @property
    def num_snapshots(self) -> int:
        """Of states behind cached pages, in each shard: what of --max-mamba-cache-size request rows leave."""
        rows, asked = self._rows_per_shard, self.args.max_mamba_cache_size
        if not self.config.state_layers or self.args.disable_radix_cache:
            return 0
        states = STATES_PER_ROW * rows if asked is None else asked // self.args.attn_dp_size
        return max(states - rows, 0)

    @property
    def _num_state_lines(self) -> int:
        return (self._rows_per_shard + 1) * self.num_draft_tokens + self.num_snapshots

    def programs(self, num_pages: NumPages) -> StepPrograms:
        return StepPrograms(
            Step(
                self.decoder,
                self.backend,
                self.pools(num_pages),
                self.page_size,
                self._rows_per_shard + 1,
                counts_experts=self.counts_experts,
                returns_experts=self.experts_shape is not None,
                num_state_lines=self._num_state_lines,
                states_per_row=self.num_draft_tokens,
                keeps_snapshots=self.num_snapshots > 0,
            ),
            jax.tree.map(lambda info: info.spec, self.arrays),
            self.kv_cache(num_pages),
            self.spec(num_pages),
            self.mesh,
            self.drafter,
            self.adapters,
        )

    def lower(self, bucket: Bucket, num_pages: NumPages) -> Any:
        """The forward half of a step of one bucket as a jax.stages.Lowered; needs neither weights nor devices."""
        return self.programs(num_pages).lower_forward(bucket, self.abstract_params())
