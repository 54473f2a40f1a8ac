"""What a file of this package says of its families: tiny models (`Case`), and how tests serve them (`Served`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

# From config.json and tensors, as Transformers writes them, to those of the checkpoint: of families that it does not know (it
# computes a relative's), of older or quantized forms.
Rewrite: TypeAlias = Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]
NUM_CLIENTS = 32
SEVERAL: dict[str, Any] = {"rows": (4, NUM_CLIENTS), "tokens": (32, 512)}  # buckets, for `Served`


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration: the family (as in Transformers' class names) and what differs from `checkpoints._BASE`."""

    family: str
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()  # options of that base that the family has not
    config_class: str | None = None  # None: family + "Config"
    takes_images: bool = False  # the language model is part of a larger one
    is_encoder: bool = False  # no logits: hidden states are compared
    has_centered_norms: bool = False  # norms multiply with 1 + weight
    prepare: Callable[[Any], None] | None = None  # what is done to the torch model before it is written
    rewrite: Rewrite | None = None  # None: the checkpoint is as Transformers writes it


@dataclasses.dataclass(frozen=True)
class Served:
    """A checkpoint and the options it is served with."""

    case: str
    page_size: int
    chunk: int
    tp: int = 1
    pp: int = 1  # stages, of so many devices each
    attn_dp: int = 1  # groups of the devices with attention of their own
    dcp: int = 1  # devices that share latents by tokens
    dp: int = 1  # replicas, of live servers
    hosts: int = 1  # processes, each with its part of the devices, of live servers
    ep: int | None = None
    redundant: int = 0  # experts
    mixed: bool = False
    overlap: bool = True
    radix: bool = True
    drafts: bool = False
    states: int | None = None  # --max-mamba-cache-size
    in_matrix: bool = False  # a variant of an architecture that another stands for: `make families` alone has it
    rows: tuple[int, ...] = (NUM_CLIENTS,)  # buckets of decode rows; the largest is --max-running-requests
    tokens: tuple[int, ...] = (512,)  # buckets of prefill tokens. Compiling is most of a test's time

    def options(self, context_len: int) -> dict[str, Any]:
        """Of ServerArgs."""
        return {
            "context_length": context_len,
            "max_running_requests": self.rows[-1],
            "max_total_tokens": 16384,
            "max_prefill_tokens": 512,
            "page_size": self.page_size,
            "chunked_prefill_size": self.chunk,
            "tp_size": self.tp,
            "pp_size": self.pp,
            "attn_dp_size": self.attn_dp,
            "dcp_size": self.dcp,
            "dp_size": self.dp,
            "decode_row_buckets": self.rows,
            "prefill_token_buckets": self.tokens,
            "enable_mixed_chunk": self.mixed,
            "disable_overlap_schedule": not self.overlap,
            "disable_radix_cache": not self.radix,
            **({} if self.states is None else {"max_mamba_cache_size": self.states}),
            **({} if self.ep is None else {"ep_size": self.ep, "ep_num_redundant_experts": self.redundant}),
            **({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3} if self.drafts else {}),
        }

    def __str__(self) -> str:
        flags = [f"page{self.page_size}", f"chunk{self.chunk}", f"tp{self.tp}"]
        flags += [f"pp{self.pp}"] * (self.pp > 1)
        flags += [f"attndp{self.attn_dp}"] * (self.attn_dp > 1) + [f"dcp{self.dcp}"] * (self.dcp > 1)
        flags += [f"dp{self.dp}"] * (self.dp > 1) + [f"hosts{self.hosts}"] * (self.hosts > 1)
        flags += [f"ep{self.ep}"] * (self.ep is not None) + [f"redundant{self.redundant}"] * (self.redundant > 0)
        flags += ["mixed"] * self.mixed + ["plain"] * (not self.overlap) + ["noradix"] * (not self.radix)
        flags += ["buckets"] * (len(self.rows) > 1) + ["drafts"] * self.drafts
        return "-".join([self.case, *flags])


def rope(kind: str, **params: Any) -> dict[str, Any]:
    """rope_parameters of config.json."""
    return {"rope_type": kind, "rope_theta": 10000.0, **params}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
