"""The arguments of Engine.generate and Engine.encode: SGLang's names, in SGLang's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Behind prompt, sampling_params and input_ids. All are fields of /generate; those that are not served are refused there.
POSITIONS = (
    "image_data", "audio_data", "video_data", "mm_hashes", "mm_content_hashes", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "token_ids_logprob", "lora_path", "custom_logit_processor", "require_reasoning",
    "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "stream", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "external_trace_header", "rid",
    "session_params", "priority", "session_id",
)  # fmt: skip


# Of Engine.encode, behind prompt.
ENCODE_POSITIONS = (
    "image_data", "audio_data", "video_data", "dimensions", "lora_path", "embed_override_token_id", "embed_overrides",
    "external_trace_header", "rid",
)  # fmt: skip


def generate_body(prompt: Any, sampling_params: Any, input_ids: Any, others: Sequence[Any], fields: Mapping[str, Any]) -> Any:
    """The body of /generate. Raises TypeError for positions that do not exist and for what is given twice."""
    first = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids}
    return _body("generate", first, POSITIONS, others, fields)


def encode_body(prompt: Any, others: Sequence[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same of /encode."""
    return _body("encode", {"text": prompt}, ENCODE_POSITIONS, others, fields)


def _body(
    method: str, first: dict[str, Any], positions: Sequence[str], others: Sequence[Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    if len(others) > len(positions):
        most, given = len(first) + len(positions), len(first) + len(others)
        raise TypeError(f"{method} takes at most {most} positions, got {given}.")
    positional = dict(zip(positions, others, strict=False))
    if twice := sorted(positional.keys() & fields.keys()):
        raise TypeError(f"{method} got {', '.join(twice)} twice.")
    return {name: value for name, value in {**first, **positional, **fields}.items() if value is not None}
