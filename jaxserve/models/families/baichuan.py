"""Baichuan and Baichuan 2 of 7B: Llama with one tensor for q, k and v. The second divides the rows of its head by their length.

Those of 13B know positions by ALiBi, which attention here has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_attention, read_dense_mlp, read_norm, required_int
from jaxserve.models.specs import LayerSpec
from jaxserve.models.tensor_names import Packed, TensorNames

_NAMES = TensorNames(packed=(Packed("W_pack", ("q_proj", "k_proj", "v_proj")),))
_BAICHUAN2_VOCAB = 125_696  # nothing else in config.json tells them apart


def read_baichuan(raw: Mapping[str, Any]) -> FamilyTraits:
    if raw.get("max_position_embeddings") is None:  # what files of 13B have not
        raise ValueError(
            "max_position_embeddings must be given: models of the Baichuan family without it, those of 13B, know positions by "
            "ALiBi, which is not supported."
        )
    layer = LayerSpec(mixer=read_attention(raw), mlp=read_dense_mlp(raw), norm=read_norm(raw))
    return FamilyTraits(
        (layer,) * required_int(raw, "num_hidden_layers"),
        lm_head_has_unit_rows=raw.get("vocab_size") == _BAICHUAN2_VOCAB,
        tensor_names=_NAMES,
    )


FAMILIES = (
    Family("BaichuanForCausalLM", "baichuan", read_baichuan),
    Family("BaiChuanForCausalLM", "baichuan", read_baichuan),  # the first one's spelling
)
