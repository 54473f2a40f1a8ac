"""Fields of SGLang's /generate that are not served: which are refused, and which change nothing."""

from __future__ import annotations

from jaxserve.server.foreign_fields import OFF, ForeignFields

GENERATE = ForeignFields(
    unserved=dict.fromkeys(
        ("image_data", "video_data", "audio_data", "mm_hashes",
         "mm_content_hashes", "use_audio_in_video", "video_config", "modalities", "max_dynamic_patch", "min_dynamic_patch",
         "image_max_dynamic_patch", "video_max_dynamic_patch", "images_config", "mm_processor_kwargs", "return_sampling_mask",
         "sampling_logprobs_mode", "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs",
         "return_flat_raw_top_logprobs_b64", "return_indexer_topk",
         "return_entropy", "return_bytes", "lora_id", "positional_embed_overrides",
         "watermark", "background", "bootstrap_host", "bootstrap_port",
         "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank",
         "kv_hints", "multi_item_delimiter_indices", "token_indices_to_pool"),
        OFF,
    ),
    without_effect={
        "log_metrics": "what SGLang counts",
        "no_logs": "what SGLang logs",
        "session_id": "for SGLang's cache of sessions; prefixes are found without it here",
        "model": "for routers before the server, which serves one; requests in OpenAI's form have it checked",
        "routing_key": "for routers before the server",
        "conversation_id": "for routers before the server",
    },
)  # fmt: skip
