"""ModelConfig: everything the decoder and the weight loader need to know about a model, read from its folder.

Reads config.json and generation_config.json as JSON; neither torch nor Transformers nor JAX is imported, so the server process
can ask for a model's vocabulary and context length cheaply. What differs between families comes from `registry`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.models.registry import find_family
from jaxserve.models.rope_config import RopeConfig, merge_overrides, read_rope

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
_ALIASES = {"swish": "silu"}
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only language model. Sizes are those of the whole model, before it is split over devices."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # per layer: tokens visible including the newest; None: all
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before rope
    dtype: str = "float32"  # of the checkpoint, as config.json says
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}.")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}; got {self.hidden_act!r}.")
        for window in self.windows:
            if window is not None and window < 1:
                raise ValueError(f"sliding_window must be at least 1 token, got {window}.")
        assert len(self.windows) == self.num_layers, (len(self.windows), self.num_layers)

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def context_len(self) -> int:
        """Most tokens in one sequence: max_position_embeddings, or more where rope scaling comes on top of it."""
        return self.rope.extended_len(self.max_position_embeddings)

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)

    @staticmethod
    def from_pretrained(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads `path`/config.json; `overrides` replaces keys of it. ValueError says what is missing or not supported."""
        folder = Path(path)
        raw = merge_overrides(read_json(folder / "config.json", required=True), overrides or {})
        generation = read_json(folder / "generation_config.json", required=False)
        if overrides and "eos_token_id" in overrides:
            generation = {**generation, "eos_token_id": None}
        try:
            return _read_config(raw, generation)
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from error


def generation_defaults(path: str | Path) -> dict[str, float | int]:
    """The sampling defaults of `path`/generation_config.json under SamplingParams' names; {} without the file."""
    raw = read_json(Path(path) / "generation_config.json", required=False)
    defaults = {name: raw[name] for name in _SAMPLING_DEFAULTS if raw.get(name) is not None}
    if defaults.get("top_k") == 0:  # Transformers' spelling of "the whole vocabulary"
        defaults["top_k"] = -1
    return defaults


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """A JSON object from a file. ValueError names the file; a missing file is {} unless required."""
    if not path.is_file():
        if not required:
            return {}
        raise ValueError(f"{path} does not exist; the model folder must hold a Hugging Face {path.name}.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def _read_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = find_family(raw)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantized weights (quant_method {method!r}) are not supported; use an unquantized checkpoint.")
    num_layers, num_heads = _required_int(raw, "num_hidden_layers"), _required_int(raw, "num_attention_heads")
    hidden_size = _required_int(raw, "hidden_size")
    traits = family.read(raw)
    act = raw.get("hidden_act") or "silu"
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=_required_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required_int(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or traits.default_head_dim or hidden_size // num_heads,
        max_position_embeddings=_required_int(raw, "max_position_embeddings"),
        windows=traits.windows,
        rope=read_rope(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        hidden_act=_ALIASES.get(act, act),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_read_eos(raw, generation),
    )


def _required_int(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return value


def _read_eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
