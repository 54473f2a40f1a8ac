"""ModelConfig: everything the decoder and the weight loader need to know about a model, read from its folder.

Reads config.json and generation_config.json as JSON; neither torch nor Transformers nor JAX is imported, so the server process
can ask for a model's vocabulary and context length cheaply. What differs between families comes from `families`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxserve.kernels.spec import ProjectedHead
from jaxserve.models.expert_placement import ExpertPlacement
from jaxserve.models.families import Family, find_family, renamed, required_int
from jaxserve.models.families.bidirectional import read_causality
from jaxserve.models.json_files import errors_of, read_json
from jaxserve.models.pooling import read_modules, read_purpose
from jaxserve.models.rope_config import merge_overrides
from jaxserve.models.specs import AttentionMixer, EmbeddingSpec, LayerSpec, MoESpec, NormSpec, PoolingSpec, StateMixer
from jaxserve.models.stage import Stage
from jaxserve.models.tensor_names import LLAMA_NAMES, TensorNames

STORED_FORMATS = ("fp8", "mxfp4")  # of quantized checkpoints, what quant_method may be
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One language model: a decoder, or an encoder, whose attention is not causal. Sizes are those of the whole model, before
    it is split over devices.

    Properties that speak of all layers at once raise ValueError where layers differ; `layers` always answers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None = dataclasses.field(default_factory=NormSpec)
    embedding: EmbeddingSpec = dataclasses.field(default_factory=EmbeddingSpec)
    generates: bool = True  # there are logits; False: the model is for vectors alone, as `pooling` makes them
    pooling: PoolingSpec = dataclasses.field(default_factory=PoolingSpec)
    max_len: int | None = None  # most tokens in one sequence, if the model's folder has another file that says it
    embedding_scale: float = 1.0  # what embedded tokens are multiplied with
    scales_given_embeddings: bool = False  # and embeddings that come in place of tokens, as Transformers does in some families
    logit_scale: float = 1.0  # what logits are multiplied with
    logit_soft_cap: float | None = None  # c: a logit x becomes c * tanh(x / c)
    lm_head_bias: bool = False
    fp32_lm_head: bool = False  # hidden states and the output matrix are multiplied in float32; the server's option
    lm_head_has_unit_rows: bool = False  # they are divided by their length while they are loaded
    tensor_names: TensorNames = LLAMA_NAMES  # of checkpoints
    tie_word_embeddings: bool = False
    dtype: str = "float32"  # of the checkpoint, as config.json says
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None  # what matrices become while they are loaded (`Declare.weight`); the server's option
    native_products: bool = False  # those of few rows are computed in C++ (`Declare.weight`); the server's machine decides
    expert_placement: ExpertPlacement | None = None  # on several devices; None: in order. The server's options
    attn_dp_size: int = 1  # groups of devices that have attention of their own, on several devices; the server's option
    batch_invariant: bool = False  # what a token gets must not depend on the rest of the step; the server's option
    stage: Stage | None = None  # of a pipeline, the part that is described; None: the whole model

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return int(self._of_all_attention("num_heads"))

    @property
    def num_kv_heads(self) -> int:
        return int(self._of_all_attention("num_kv_heads"))

    @property
    def head_dim(self) -> int:
        return int(self._of_all_attention("head_dim"))

    @property
    def latent_dim(self) -> int | None:
        """Of what stands for keys and values (num_kv_heads is 1 then, head_dim a row's); None where these are kept."""
        dim: int | None = self._of_all_attention("latent_dim")
        return dim

    @property
    def projected(self) -> ProjectedHead | None:
        """What latents are projected to, per head; None where keys and values are kept."""
        head: ProjectedHead | None = self._of_all_attention("projected")
        return head

    @property
    def attention(self) -> tuple[AttentionMixer, ...]:
        """Of the layers that attend, in order."""
        return tuple(layer.mixer for layer in self.layers if not isinstance(layer.mixer, StateMixer))

    @property
    def state_layers(self) -> tuple[StateMixer, ...]:
        """Mixers of the layers that keep a state instead, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, StateMixer))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer that attends: tokens visible including the newest; None: all."""
        return tuple(mixer.window for mixer in self.attention)

    @property
    def is_causal(self) -> bool:
        """False: an encoder. Its texts are computed whole, and nothing is kept of them."""
        return all(mixer.is_causal for mixer in self.attention)

    @property
    def pooled_size(self) -> int:
        return self.pooling.size(self.hidden_size)

    @property
    def num_token_ids(self) -> int:
        """Ids that a token may have, its type included (`EmbeddingSpec`)."""
        return self.vocab_size * max(self.embedding.token_types, 1)

    @property
    def chunk_sizes(self) -> frozenset[int]:
        """The windows that are chunks: a token sees its own chunk of so many positions."""
        return frozenset(mixer.window for mixer in self.attention if mixer.window and mixer.is_chunked)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Of each KV group, the widest first: layers of one window share a pool of pages."""
        windows = {mixer.kv_window for mixer in self.attention}
        return tuple(sorted(windows, key=lambda window: math.inf if window is None else window, reverse=True))

    @property
    def own_layers(self) -> range:
        """Numbers of the layers that are computed here."""
        return range(self.num_layers) if self.stage is None else self.stage.layers

    @property
    def embeds(self) -> bool:
        """Tokens are embedded here."""
        return self.stage is None or self.stage.is_first

    @property
    def has_head(self) -> bool:
        """Logits are computed here, or vectors where there are no logits."""
        return self.stage is None or self.stage.is_last

    @property
    def makes_logits(self) -> bool:
        return self.has_head and self.generates

    @property
    def own_sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts that are computed here."""
        return tuple(index for index in self.sparse_layers if index in self.own_layers)

    @property
    def own_cache_groups(self) -> tuple[int | Literal["states"] | None, ...]:
        """Per layer that is computed here: the window of its KV group, or that it keeps a state."""
        return tuple(getattr(self.layers[index].mixer, "kv_window", "states") for index in self.own_layers)

    def num_kv_layers(self, window: int | None) -> int:
        """Of the layers that are computed here: how many have keys and values of their own in the KV group of that window."""
        count = self.own_cache_groups.count(window)
        return count if self.is_causal else min(count, 1)

    @property
    def kv_indices(self) -> tuple[int, ...]:
        """Per layer that is computed here: its number among those of its KV group, or among those that keep a state. Layers of
        an encoder write over each other's keys and values, which nobody reads later."""
        groups = self.own_cache_groups
        if not self.is_causal:
            return (0,) * len(groups)
        return tuple(groups[:layer].count(group) for layer, group in enumerate(groups))

    @property
    def mixtures(self) -> tuple[MoESpec | None, ...]:
        """Per layer: its mixture of experts, if it has one."""
        return tuple(layer.mlp if isinstance(layer.mlp, MoESpec) else None for layer in self.layers)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        return tuple(index for index, mixture in enumerate(self.mixtures) if mixture is not None)

    @property
    def num_experts(self) -> int:
        """Of each layer that has some; 0 if none has."""
        return self._of_mixtures("num_experts")

    @property
    def experts_per_token(self) -> int:
        """Likewise, to how many of them a token goes."""
        return self._of_mixtures("experts_per_token")

    def _of_mixtures(self, name: str) -> int:
        counts = {int(getattr(mixture, name)) for mixture in self.mixtures if mixture is not None}
        if len(counts) > 1:
            raise ValueError(f"the layers of {self.architecture} differ in {name}: {', '.join(map(str, sorted(counts)))}.")
        return counts.pop() if counts else 0

    @property
    def uses_soft_cap(self) -> bool:
        return any(mixer.soft_cap is not None for mixer in self.attention)

    @property
    def uses_sinks(self) -> bool:
        return any(mixer.sinks for mixer in self.attention)

    @property
    def context_len(self) -> int:
        """Most tokens in one sequence: max_position_embeddings, or more where rope scaling comes on top of it; no more than
        there are vectors of positions, if positions have some, and no more than `max_len`."""
        longest = max(mixer.rope.extended_len(self.max_position_embeddings) for mixer in self.attention)
        return min(self.embedding.context_len(longest), self.max_len or longest)

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)

    def for_context(self, context_len: int) -> ModelConfig:
        """The same model for sequences of at most `context_len` tokens: without the windows that none of them outgrows."""
        return self.replace(layers=tuple(layer.for_context(context_len) for layer in self.layers))

    @staticmethod
    def from_pretrained(
        path: str | Path, overrides: Mapping[str, Any] | None = None, *, is_embedding: bool = False
    ) -> ModelConfig:
        """Reads `path`/config.json, and the files of sentence-transformers if they are there; `overrides` replaces keys of the
        first. `is_embedding`: a model that could generate is for vectors. ValueError says what is missing or not supported."""
        folder = Path(path)
        whole = read_json(folder / "config.json", required=True)
        generation = read_json(folder / "generation_config.json", required=False)
        if overrides and "eos_token_id" in overrides:
            generation = {**generation, "eos_token_id": None}
        with errors_of(folder / "config.json"):
            raw = merge_overrides(_text_part(whole), _text_part(overrides or {}))
            family = find_family(raw)
            raw = {**family.defaults, **renamed(raw, family.keys)}
            config = _read_config(family, raw, generation)
        modules = read_modules(folder, config.hidden_size)
        with errors_of(folder / "config.json"):
            purpose = read_purpose(raw, modules, config.architecture, is_causal=config.is_causal, is_embedding=is_embedding)
        return config.replace(pooling=purpose.pooling, generates=purpose.generates, max_len=purpose.max_len)

    def _of_all_attention(self, name: str) -> Any:
        values = dict.fromkeys(getattr(mixer, name) for mixer in self.attention)
        if len(values) != 1:
            raise ValueError(f"the layers of {self.architecture} differ in {name}: {', '.join(map(str, values))}.")
        return next(iter(values))


def generation_defaults(path: str | Path) -> dict[str, float | int]:
    """The sampling defaults of `path`/generation_config.json under SamplingParams' names; {} without the file."""
    raw = read_json(Path(path) / "generation_config.json", required=False)
    defaults = {name: raw[name] for name in _SAMPLING_DEFAULTS if raw.get(name) is not None}
    if defaults.get("top_k") == 0:  # Transformers' spelling of "the whole vocabulary"
        defaults["top_k"] = -1
    return defaults


def _text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Models that also take images keep what describes the language model in `text_config`. What stands outside goes first."""
    return {**(raw.get("text_config") or {}), **raw}


def _read_config(family: Family, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    read_quantization(raw)
    traits = family.read(raw)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=required_int(raw, "vocab_size"),
        hidden_size=required_int(raw, "hidden_size"),
        max_position_embeddings=required_int(raw, "max_position_embeddings"),
        layers=read_causality(raw, traits.layers),
        final_norm=traits.layers[-1].norm if traits.has_final_norm else None,
        embedding=traits.embedding,
        embedding_scale=traits.embedding_scale,
        scales_given_embeddings=traits.scales_given_embeddings,
        logit_scale=traits.logit_scale,
        logit_soft_cap=traits.logit_soft_cap,
        lm_head_bias=traits.lm_head_bias,
        lm_head_has_unit_rows=traits.lm_head_has_unit_rows,
        tensor_names=traits.tensor_names,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_read_eos(raw, generation),
    )


def read_quantization(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How config.json says that its checkpoint is quantized; None: not. ValueError for what is not read (`stored_formats`)."""
    found: Mapping[str, Any] | None = _text_part(raw).get("quantization_config")
    if not found:
        return None
    method, block = found.get("quant_method", "unknown"), found.get("weight_block_size")
    if method not in STORED_FORMATS:
        known = " and ".join(STORED_FORMATS)
        raise ValueError(
            f"quantized weights (quant_method {method!r}) are not supported; use {known}, or an unquantized checkpoint."
        )
    if method == "fp8" and not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ValueError(f"weight_block_size of quant_method 'fp8' must be two numbers of at least 1, got {block!r}.")
    return found


def _read_eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(token) is int for token in ids):
        raise ValueError(f"eos_token_id must be a whole number or a list of them, got {eos!r}.")
    return ids
