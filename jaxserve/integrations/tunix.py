"""Rollouts for tunix (google-tunix): its RLCluster takes a class, so

    ClusterConfig(rollout_engine=functools.partial(JaxserveRollout, model_path="Qwen/Qwen3-8B"), ...)

makes an Engine on the mesh of Role.ROLLOUT, in the trainer's process. Of `model_path` only the configuration is read; the
weights are the actor's, which go from its devices to the engine's before the first rollout and whenever tunix has trained.
Further keyword arguments are options of the Engine. Prompts are tokenized, and tokens decoded, by tunix' tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxserve.integrations.tunix_names import is_lora, mapping_of, with_lora
from jaxserve.models.leaf_names import named_leaves
from jaxserve.server.engine import Engine


class JaxserveSampler(BaseSampler):
    """An Engine behind tunix' sampler interface. `options` are the Engine's."""

    def __init__(self, tokenizer: Any, mesh: jax.sharding.Mesh, *, model_path: str, **options: Any) -> None:
        is_adapted = isinstance(tokenizer, TokenizerAdapter)
        self.tokenizer = tokenizer if is_adapted else TokenizerAdapter(tokenizer)
        ours = {"load_format": "dummy", "skip_tokenizer_init": True, "logprobs_after_temperature": True}
        self.engine = Engine(model_path, in_process=True, mesh=mesh, **{**ours, **options})

    @property
    def transformer(self) -> None:
        """None: the engine's model is no module of flax, and tunix syncs weights only with what is not the trainer's own."""

    @property
    def transformer_state(self) -> nnx.State:
        raise NotImplementedError("The engine's weights are laid out for serving; update_params takes the trainer's.")

    def tokenize(self, input_string: str) -> list[int]:
        bos = self.tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self.tokenizer.encode(input_string)]
        return list(self.tokenizer.dedup_bos_ids(ids))

    def __call__(
        self,
        input_strings: str | list[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: Any = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
        **sampling: Any,
    ) -> SamplerOutput:
        """Rows are prompt * multi_sampling + sample; their tokens have the one that ended them. Prompts are padded to
        max_prompt_length or, if one is longer, to the next power of two, as by tunix' own samplers. `sampling`: further
        sampling parameters of the engine. ValueError for beam_size, return_logits, echo and pad_output."""
        refused = {"beam_size": beam_size, "return_logits": return_logits, "echo": echo, "pad_output": pad_output}
        for name, value in refused.items():
            if value:
                raise ValueError(f"{name} is not supported by this sampler; got {value}.")
        known = {"top_p": top_p, "top_k": top_k, "stop_token_ids": [self.tokenizer.eos_id()]}
        params = {name: value for name, value in known.items() if value is not None} | sampling
        params |= {"temperature": temperature, "max_new_tokens": max_generation_steps}
        prompts = [self.tokenize(text) for text in ([input_strings] if isinstance(input_strings, str) else input_strings)]
        drawn = self.engine.rollout(
            input_ids=prompts,
            sampling_params=params if seed is None else _seeded(params, seed, len(prompts), multi_sampling),
            n=multi_sampling,
            pad_token_id=self.tokenizer.pad_id(),
            max_prompt_len=_padded_len(max(map(len, prompts)), max_prompt_length),
        )
        tokens = [row[:length] for row, length in zip(drawn.tokens, drawn.lengths, strict=True)]
        assert drawn.logprobs is not None  # which it gives unless told otherwise
        ends = params["stop_token_ids"]
        return SamplerOutput(
            text=[self.tokenizer.decode(_without_end(row.tolist(), ends)) for row in tokens],
            logits=None,
            tokens=tokens,
            padded_prompt_tokens=drawn.prompt_tokens,
            logprobs=[row[:length] for row, length in zip(drawn.logprobs, drawn.lengths, strict=True)],
        )


class JaxserveRollout(BaseRollout):
    """What RLCluster makes: see the module's docstring."""

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        *,
        model_path: str,
        mapping: Any = None,
        lora_scaling: float | None = None,
        **options: Any,
    ) -> None:
        """`mapping`: of the actor's arrays to tensors of a checkpoint, as `Engine.update_weights` takes it; None: it is one of
        tunix' models. `lora_scaling`: alpha / rank, if the actor has LoRA; its matrices are added to the weights."""
        if rollout_config.rollout_mapping_config is not None:
            raise ValueError(
                "rollout_mapping_config must be None: it is of other engines' arrays. Give this rollout `mapping`."
            )
        self._actor = rollout_actor
        self._mapping = mapping
        self._lora_scaling = lora_scaling
        self._drawn: dict[tuple[bytes, bytes], np.ndarray] = {}  # prompt and sample -> logprobs, since the last weights
        self.sampler = JaxserveSampler(tokenizer, mesh, model_path=model_path, **{**_sizes(rollout_config, mesh), **options})
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """`kwargs`: further sampling parameters of the engine."""
        ends = rollout_config.eos_tokens
        further: dict[str, Any] = {} if ends is None else {"stop_token_ids": list(ends)}
        drawn = self.sampler(
            prompts,
            max_generation_steps=rollout_config.max_tokens_to_generate,
            max_prompt_length=rollout_config.max_prompt_length,
            temperature=rollout_config.temperature,
            top_p=rollout_config.top_p,
            top_k=rollout_config.top_k,
            seed=rollout_config.seed,
            **{**further, **kwargs},
        )
        rows = zip(drawn.padded_prompt_tokens, drawn.tokens, drawn.logprobs, strict=True)
        self._drawn |= {self._key(prompt, sample): logprobs for prompt, sample, logprobs in rows}
        return RolloutOutput(
            text=drawn.text,
            logits=None,
            tokens=drawn.tokens,
            left_padded_prompt_tokens=drawn.padded_prompt_tokens,
            logprobs=drawn.logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """[B, C] of completions [B, C] to prompts [B, P]: those that they were drawn with, 0 behind their ends. ValueError for
        one that this rollout has not drawn since the last weights."""
        samples = np.asarray(completion_tokens)
        logprobs = np.zeros(samples.shape, np.float32)
        for row, prompt, sample in zip(logprobs, np.asarray(prompt_tokens), samples, strict=True):
            drawn = self._drawn.get(self._key(prompt, sample))
            if drawn is None:
                raise ValueError("completion_tokens must be samples that this rollout drew since the last weights; one is not.")
            row[: len(drawn)] = drawn
        return jax.numpy.asarray(logprobs)

    def _key(self, prompt: np.ndarray, sample: np.ndarray) -> tuple[bytes, bytes]:
        pad = self.pad_id()
        return prompt[prompt != pad].astype(np.int32).tobytes(), sample[sample != pad].astype(np.int32).tobytes()

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """`params`: all of the actor's, or only its LoRA matrices. `filter_types` says which; their names do too."""
        given = named_leaves(params)
        lora = {name: array for name, array in given.items() if is_lora(name)}
        if lora:
            if self._lora_scaling is None:
                raise ValueError("The actor has LoRA: the rollout needs lora_scaling, its alpha / rank.")
            whole = {**named_leaves(nnx.state(self._actor, nnx.Param)), **given}
            given = with_lora({name: array for name, array in whole.items() if not is_lora(name)}, lora, self._lora_scaling)
        self.sampler.engine.update_weights(given, mapping_of(given) if self._mapping is None else self._mapping)
        self._drawn.clear()

    def pad_id(self) -> int:
        return int(self.sampler.tokenizer.pad_id())

    def eos_id(self) -> int:
        return int(self.sampler.tokenizer.eos_id())

    def model(self) -> None:
        """See `JaxserveSampler.transformer`."""

    def shutdown(self) -> None:
        """Ends the engine and gives its memory back."""
        self.sampler.engine.shutdown()


def _sizes(config: RolloutConfig, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Options of the Engine that tunix has names for. A size of -1 is what the other leaves of the mesh."""
    tp, dp = config.tensor_parallel_size, config.data_parallel_size
    tp = mesh.size // max(dp, 1) if tp < 1 else tp
    dp = mesh.size // tp if dp < 1 else dp
    dtype = {} if config.data_type is None else {"dtype": np.dtype(config.data_type).name}
    experts = {} if config.expert_parallel_size == 1 else {"ep_size": config.expert_parallel_size}
    return {"tp_size": tp, "dp_size": dp, **experts, **dtype}


def _without_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in ends else ids


def _padded_len(longest: int, wanted: int | None) -> int:
    if wanted is None or wanted >= longest:
        return wanted or longest
    return int(1 << (longest - 1).bit_length())


def _seeded(params: dict[str, Any], seed: Any, num_prompts: int, num_samples: int) -> list[dict[str, Any]]:
    """For each prompt seeds of its own, though prompts may be equal. `seed`: a number, or a key of jax.random."""
    if isinstance(seed, jax.Array) and jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    first = int(np.asarray(seed).ravel()[-1]) % 2**30
    return [{**params, "sampling_seed": first + prompt * num_samples} for prompt in range(num_prompts)]
