"""What is made of a model's hidden states, read from its folder: logits, or vectors as a PoolingSpec says.

Three things tell, in this order: the files of sentence-transformers (`modules`), the head that config.json's architecture has
(`heads`), and where there is neither, what is usual. Plain data, without JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.architectures import GENERATING, split_architecture
from jaxserve.models.pooling.heads import read_head
from jaxserve.models.pooling.modules import Modules, read_modules
from jaxserve.models.specs import PoolingSpec

__all__ = ["Modules", "Purpose", "read_modules", "read_purpose"]


@dataclasses.dataclass(frozen=True)
class Purpose:
    """What a model is for."""

    pooling: PoolingSpec
    generates: bool
    max_len: int | None = None  # most tokens of a text, if the folder says it beside config.json


def read_purpose(
    raw: Mapping[str, Any], modules: Modules, architecture: str, *, is_causal: bool, is_embedding: bool = False
) -> Purpose:
    """`raw`: config.json. `architecture`: the family's, for files that name none. `is_embedding`: it is not to generate.
    ValueError says what is not supported."""
    names = [name for name in raw.get("architectures") or () if isinstance(name, str)] or [architecture]
    generates = any(split_architecture(name)[1] in GENERATING for name in names) and is_causal
    if modules.scores_words and not (generates and not is_embedding):
        raise ValueError("modules.json has a LogitScore module, which is not supported: the model can generate, and no more.")
    pooling = modules.pooling or read_head(raw, names[0], modules.activation)
    if pooling is not None:
        return Purpose(pooling, generates=False, max_len=modules.max_len)
    if modules.are_there and not modules.scores_words:
        raise ValueError(f"modules.json must name a Pooling module, as {names[0]} has no head for scores.")
    return Purpose(_usual(is_causal=is_causal), generates=generates and not is_embedding)


def _usual(*, is_causal: bool) -> PoolingSpec:
    """Of decoders the last token's state, which has seen all others, normalized: vLLM's choice. sentence-transformers takes it
    of a ...ForCausalLM, and of a ...Model the mean. Of encoders what it makes of a folder that it has not written."""
    return PoolingSpec(kinds=("last",), normalizes=True) if is_causal else PoolingSpec(kinds=("mean",))
