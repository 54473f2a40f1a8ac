"""The arguments of Engine.generate: SGLang's names, in SGLang's order."""

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


def generate_body(prompt: Any, sampling_params: Any, input_ids: Any, others: Sequence[Any], fields: Mapping[str, Any]) -> Any:
    """The body of /generate. Raises TypeError for positions that do not exist and for what is given twice."""
    if len(others) > len(POSITIONS):
        raise TypeError(f"generate takes at most {3 + len(POSITIONS)} positions, got {3 + len(others)}.")
    positional = dict(zip(POSITIONS, others, strict=False))
    if twice := sorted(positional.keys() & fields.keys()):
        raise TypeError(f"generate got {', '.join(twice)} twice.")
    body = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **positional, **fields}
    return {name: value for name, value in body.items() if value is not None}
