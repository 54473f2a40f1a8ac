"""From ServerArgs to a warm ModelRunner: mesh, config, weights, memory, compilation, in that order."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config import ServerArgs
from jaxserve.executor.buckets import Buckets
from jaxserve.executor.memory import CPU_POOL_LIMIT_BYTES, fit_pages, limit_to_use, measure
from jaxserve.executor.mesh import make_mesh, platform_of, select_devices
from jaxserve.executor.model_runner import ModelRunner
from jaxserve.executor.resolve import resolve_args
from jaxserve.executor.step import Params, Step
from jaxserve.executor.warmup import CompileCounter, use_compilation_cache
from jaxserve.kernels.api import AttentionBackend, AttentionSpec, choose_backend
from jaxserve.models import ModelConfig, build_decoder, load_params, param_specs
from jaxserve.models.params import TENSOR_AXIS, kv_copies
from jaxserve.runner import RunnerSpec

logger = logging.getLogger(__name__)

# Pages of the throw-away pool that the largest step is compiled with to learn what its temporaries take.
_PROBE_PAGES = 64


@dataclasses.dataclass(frozen=True)
class BuiltRunner:
    """A runner that is ready to serve, and the options as they were resolved."""

    runner: ModelRunner
    args: ServerArgs
    model_config: ModelConfig


def build_runner(args: ServerArgs, *, show_progress: bool = True) -> BuiltRunner:
    """Raises ValueError or OSError with a sentence for what a user can mend (options, checkpoint, memory)."""
    select_devices(args.device, args.tp_size)
    use_compilation_cache(args.compilation_cache_dir)
    counter = CompileCounter()
    mesh = make_mesh(args.tp_size)
    platform = platform_of(mesh)

    config = ModelConfig.from_pretrained(args.model_path, json.loads(args.json_model_override_args))
    backend = _attention_backend(args, config, platform)
    args = resolve_args(
        args,
        platform=platform,
        model_context_len=config.context_len,
        default_page_size=backend.default_page_size,
    )
    started_s = time.monotonic()
    params = load_params(
        args.model_path, config, mesh, jnp.dtype(args.dtype), load_format=args.load_format, progress=show_progress
    )
    logger.info("Weights loaded in %.1f s", time.monotonic() - started_s)
    builder = _Builder(args, config, mesh, backend, params, counter)
    num_pages = builder.choose_num_pages()
    runner = builder.runner(num_pages)
    started_s = time.monotonic()
    runner.warm_up(show_progress=show_progress)
    logger.info("Compiled in %.1f s; KV cache of %d tokens", time.monotonic() - started_s, runner.spec.max_total_tokens)
    return BuiltRunner(runner, args, config)


def _attention_backend(args: ServerArgs, config: ModelConfig, platform: str) -> AttentionBackend:
    try:
        return choose_backend(args.attention_backend, AttentionSpec.of(config, platform=platform))
    except NotImplementedError as error:
        raise ValueError(f"--attention-backend {args.attention_backend} cannot serve this model: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Builder:
    args: ServerArgs  # resolved
    config: ModelConfig
    mesh: Mesh
    backend: AttentionBackend
    params: Params
    counter: CompileCounter

    @property
    def page_size(self) -> int:
        assert self.args.page_size is not None
        return self.args.page_size

    @property
    def buckets(self) -> Buckets:
        assert self.args.prefill_token_buckets and self.args.decode_row_buckets
        return Buckets.build(self.args.prefill_token_buckets, self.args.decode_row_buckets, self.page_size)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one layer, all shards together: KV heads are repeated where there are fewer than devices."""
        num_kv_heads = self.config.num_kv_heads * kv_copies(self.config, self.args.tp_size)
        return self.backend.kv_page_shape(num_kv_heads, self.config.head_dim, self.page_size)

    def spec(self, num_pages: int) -> RunnerSpec:
        args = self.args
        assert args.max_running_requests and args.context_length
        largest = self.buckets.extend[-1]
        return RunnerSpec(
            page_size=self.page_size,
            num_pages=num_pages,
            max_rows=args.max_running_requests,
            context_len=args.context_length,
            max_step_tokens=largest.num_tokens,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            max_top_logprobs=min(args.max_top_logprobs, self.config.vocab_size),
        )

    def runner(self, num_pages: int) -> ModelRunner:
        spec = self.spec(num_pages)
        page_shape = self.page_shape
        decoder = build_decoder(self.config, self.args.tp_size)
        step = Step(decoder, self.backend, num_pages, self.page_size, spec.max_top_logprobs)
        sharded: list[str | None] = [None] * (1 + len(page_shape))
        sharded[1 + self.backend.kv_head_axis] = TENSOR_AXIS
        return ModelRunner(
            step=step,
            params=self.params,
            param_specs=param_specs(self.config, jnp.dtype(self.args.dtype), self.args.tp_size),
            kv_shape=(self.config.num_layers * num_pages, *page_shape),
            kv_spec=PartitionSpec(*sharded),
            kv_dtype=self.backend.kv_storage_dtype(jnp.dtype(self.args.dtype), platform_of(self.mesh)),
            mesh=self.mesh,
            buckets=self.buckets,
            spec=spec,
            compile_counter=self.counter,
        )

    def choose_num_pages(self) -> int:
        args = self.args
        if args.max_total_tokens is not None:
            return max(args.max_total_tokens // self.page_size, 1)
        assert args.mem_fraction_static and args.max_running_requests
        on_cpu = platform_of(self.mesh) == "cpu"
        page_bytes = self._page_bytes()
        pages = fit_pages(
            measure(self.mesh.devices.flat[0]),
            mem_fraction=args.mem_fraction_static,
            temp_bytes=0 if on_cpu else self._temp_bytes(),
            page_bytes=page_bytes,
            page_size=self.page_size,
        )
        return limit_to_use(
            pages,
            page_bytes=page_bytes,
            max_rows=args.max_running_requests,
            max_pages_per_row=self.spec(1).max_pages_per_row,
            cap_bytes=CPU_POOL_LIMIT_BYTES if on_cpu else None,
        )

    def _page_bytes(self) -> int:
        """Of one page in all layers, on one device."""
        elements = self.config.num_layers * math.prod(self.page_shape)
        return elements * jnp.dtype(self.args.dtype).itemsize // self.args.tp_size

    def _temp_bytes(self) -> int:
        """Temporaries of the largest step, learnt by compiling it beside a small pool."""
        probe = self.runner(_PROBE_PAGES)
        analysis: Any = probe.lower(self.buckets.extend[-1]).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0
