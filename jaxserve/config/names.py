"""What options are called, and what they may be where that is a choice."""

from __future__ import annotations

SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "priority")
DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
DEVICES = ("auto", "cpu", "cuda", "tpu")
ATTENTION_BACKENDS = ("auto", "pallas", "native", "reference")
# In --kv-cache-dtype -> dtype of the stored keys and values; "auto": the model's.
KV_CACHE_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}
# How requests are spread over replicas; SGLang's names, but for the last, which is that of its router.
LOAD_BALANCE_METHODS = ("auto", "round_robin", "shortest_queue", "total_requests", "total_tokens", "cache_aware")
QUANTIZATIONS = ("int8wo",)
SPECULATIVE_ALGORITHMS = ("NGRAM",)
EXPERT_RECORDER_MODES = ("stat",)
GRAMMAR_BACKENDS = ("llguidance", "none")
WARMUPS = ("auto", "full", "early")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LARGEST_PAGE_SIZE = 128
MOST_WORKERS = 64  # processes of a kind
# Option -> the histogram whose buckets it sets.
METRIC_BUCKETS = {
    "bucket_time_to_first_token": "time_to_first_token_seconds",
    "bucket_inter_token_latency": "inter_token_latency_seconds",
    "bucket_e2e_request_latency": "e2e_request_latency_seconds",
    "prompt_tokens_buckets": "prompt_tokens_histogram",
    "generation_tokens_buckets": "generation_tokens_histogram",
}
# Other names of options, of which SGLang's users know some.
ALIASES = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "decode_context_parallel_size": "dcp_size",
    "api_server_count": "tokenizer_worker_num",
}
# Options that the scheduler goes by, and so a simulation of servers.
SCHEDULER_OPTIONS = (
    "max_running_requests", "max_total_tokens", "page_size", "chunked_prefill_size", "max_prefill_tokens",
    "prefill_max_requests", "prefill_decode_interval", "enable_mixed_chunk", "schedule_policy", "schedule_conservativeness",
    "disable_radix_cache", "radix_eviction_policy", "disable_overlap_schedule", "scheduler_recv_interval", "tp_size",
    "pp_size", "pp_max_micro_batch_size", "enable_dynamic_chunking",
    "context_length", "prefill_token_buckets", "decode_row_buckets",
)  # fmt: skip
