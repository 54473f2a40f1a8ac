"""Exaone 4: norms behind both blocks and of each head of queries and keys; where some layers have a window, the others do not
rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_norm,
    read_sliding,
    repeated,
    required_int,
    with_mixer,
)
from jaxserve.models.rope_config import NO_ROPE
from jaxserve.models.specs import LayerSpec

_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}


def read_exaone4(raw: Mapping[str, Any]) -> FamilyTraits:
    norm, window = read_norm(raw), raw["sliding_window"]
    mixer = read_attention(raw, qk_norm=norm)
    layer = LayerSpec(mixer=mixer, mlp=read_dense_mlp(raw), norm=norm, norms_inputs=False, norms_outputs=True)
    if window is None:
        return repeated(raw, layer)
    local, full = with_mixer(layer, window=window), with_mixer(layer, rope=NO_ROPE)
    return FamilyTraits(tuple(local if is_sliding else full for is_sliding in _is_sliding(raw)))


def _is_sliding(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """layer_types, or a pattern: "LLLG" for three local layers and a global one, or 4, which is the same."""
    pattern = raw["sliding_window_pattern"]
    if isinstance(pattern, str) and raw.get("layer_types") is None:
        if not pattern or set(pattern) - {"L", "G"}:
            raise ValueError(f"sliding_window_pattern must be a number or letters L (local) and G (global), got {pattern!r}.")
        return tuple(pattern[layer % len(pattern)] == "L" for layer in range(required_int(raw, "num_hidden_layers")))
    return read_sliding(raw, pattern)


FAMILIES = (Family("Exaone4ForCausalLM", "exaone4", read_exaone4, _DEFAULTS),)
