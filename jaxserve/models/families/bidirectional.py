"""Decoders that were trained on as encoders: their attention is not causal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.specs import LayerSpec, SelfAttentionSpec


def read_causality(raw: Mapping[str, Any], layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The layers as they are, or with is_causal false as Transformers reads it of every decoder. A window is of so many tokens
    on each side then, beside the token itself."""
    if raw.get("is_causal") is not False:
        return layers
    return tuple(dataclasses.replace(layer, mixer=_bidirectional(layer.mixer)) for layer in layers)


def _bidirectional(mixer: Any) -> SelfAttentionSpec:
    if not isinstance(mixer, SelfAttentionSpec) or mixer.is_chunked:
        raise ValueError("is_causal must be true where layers keep latents or states, or attend in chunks.")
    return (
        mixer if not mixer.is_causal else dataclasses.replace(mixer, is_causal=False, window=mixer.window and mixer.window + 1)
    )
