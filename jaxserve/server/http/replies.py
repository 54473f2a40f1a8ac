"""What routes reply, for /openapi.json: an example of each, from which its schema is made. A test asks every route.

A reply may hold more than its example: what is only there when a request or an option asks for it stands in docs/api.md.
"""

from __future__ import annotations

from typing import Any

_USAGE = {
    "prompt_tokens": 8,
    "completion_tokens": 16,
    "total_tokens": 24,
    "prompt_tokens_details": None,
    "completion_tokens_details": {"reasoning_tokens": 0},
    "reasoning_tokens": 0,
}
_MODEL = {
    "id": "demo",
    "object": "model",
    "created": 1790000000,
    "owned_by": "jaxserve",
    "root": "/models/demo",
    "parent": None,
    "max_model_len": 512,
    "is_generation": True,
    "vectors": None,
}
_USAGE_OF_TEXTS = {"prompt_tokens": 8, "total_tokens": 8, "completion_tokens": 0}
_SCORES = {
    "scores": [[0.8, 0.1], [0.2, 0.7]],
    "model": "default",
    "usage": {"prompt_tokens": 24, "completion_tokens": 0, "total_tokens": 24},
    "object": "scoring",
}
_VECTOR = {"embedding": [0.6, 0.8], "meta_info": {"id": "5f6a...", "prompt_tokens": 8, "e2e_latency": 0.02}}
_RANKING = {
    "id": "rerank-18ee...",
    "model": "demo",
    "usage": {"prompt_tokens": 24, "total_tokens": 24},
    "results": [{"index": 0, "relevance_score": 0.93, "document": {"text": "Paris is."}}],
}
_MODEL_INFO = {"model_path": "/models/demo", "weight_version": "default", "load_format": "auto", "context_length": 512}
_SERVER_INFO = {
    "model_path": "/models/demo",
    "page_size": 16,
    "version": "0.1.0",
    "kv_events": None,
    "status": "ready",
    "replicas": ["up"],
    "uptime_s": 12.5,
    "max_total_num_tokens": 65536,
    "internal_states": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "max_total_num_tokens": 65536}],
}
_TENSORS = {"success": True, "message": "Done.", "is_replaced": True, "is_flushed": True, "weight_version": None}
_OLLAMA_DETAILS = {
    "parent_model": "",
    "format": "auto",
    "family": "qwen3",
    "families": ["qwen3"],
    "parameter_size": "",
    "quantization_level": "",
}
_OLLAMA_MODEL = {"name": "demo", "model": "demo", "size": 0, "digest": "58f4...", "details": _OLLAMA_DETAILS}
_TOKENS = {"tokens": [785, 6722, 315, 9625, 374], "count": 5, "max_model_len": 512}
_PAUSED = {"message": "Generation paused successfully.", "status": "ok"}

_RESPONSE = {
    "id": "resp_7d31...",
    "object": "response",
    "created_at": 1790000000,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "model": "demo",
    "output": [
        {
            "id": "msg_0956...",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
        }
    ],
    "previous_response_id": None,
    "usage": None,
}

# Text is text/plain, anything else JSON. By path, or by method and path where methods answer differently.
TEXTS: dict[str, str] = {
    "/health": "ready\n",
    "/ready": "ready\n",
    "/metrics": 'jaxserve:num_running_reqs{dp_rank="0",engine_type="unified",model_name="demo"} 3.0\n',
    "/health_generate": "ready\n",
    "/abort_request": "",
    "/close_session": "",
    "/configure_logging": "Logging configured; the level is info.\n",
    "/start_profile": "Profiling to /tmp/jaxserve-profiles-1000/2026-11-23_17-15-47.\n",
    "/start_expert_distribution_record": "Recording the distribution of tokens over experts.\n",
    "/stop_expert_distribution_record": "The record is complete.\n",
    "/dump_expert_distribution_record": "The record is in /tmp/expert_distribution_recorder_1795497600000000000.json.\n",
    "/set_trace_level": "The trace level is 2.\n",
    "/stop_profile": "The profile is in /tmp/jaxserve-profiles-1000/2026-11-23_17-15-47.\n",
    "/flush_cache": "Cache flushed.\n",
    "/freeze_gc": "Garbage collection frozen.\n",
}

JSON: dict[str, Any] = {
    "/generate": {
        "text": " Paris.",
        "output_ids": [12095, 13],
        "meta_info": {
            "id": "5f6a...",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "cached_tokens_details": {"device": 0, "host": 0},
            "reasoning_tokens": 0,
            "weight_version": "default",
            "e2e_latency": 0.25,
        },
    },
    "/tokenize": _TOKENS,
    "/v1/tokenize": _TOKENS,
    "/detokenize": {"text": "The capital of France is"},
    "/v1/detokenize": {"text": "The capital of France is"},
    "/parse_function_call": {
        "normal_text": "",
        "calls": [{"tool_index": 0, "name": "get_weather", "parameters": '{"city": "Paris"}'}],
    },
    "/separate_reasoning": {"reasoning_text": "Hm.", "text": "Paris"},
    "/v1/models": {"object": "list", "data": [_MODEL]},
    "/v1/models/{model}": _MODEL,
    "/v1/score": _SCORES,
    "/score": _SCORES,
    "/v1/embeddings": {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
        "model": "demo",
        "usage": _USAGE_OF_TEXTS,
    },
    "/encode": [_VECTOR],
    "/classify": [_VECTOR],
    "/v1/classify": {
        "id": "classify-18ee...",
        "object": "list",
        "created": 1790000000,
        "model": "demo",
        "data": [{"index": 0, "label": "POSITIVE", "probs": [0.1, 0.9], "num_classes": 2}],
        "usage": _USAGE_OF_TEXTS,
    },
    "/v1/rerank": _RANKING,
    "/v2/rerank": _RANKING,
    "/rerank": _RANKING,
    "/v1/chat/completions/render": {"request_id": "chatcmpl-18ee...", "model": "default", "token_ids": [151644, 872, 198]},
    "/v1/completions/render": [{"request_id": "cmpl-18ee...", "model": "default", "token_ids": [785, 6722, 315]}],
    "/v1/completions": {
        "id": "cmpl-18ee...",
        "object": "text_completion",
        "created": 1790000000,
        "model": "demo",
        "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "length", "matched_stop": None}],
        "usage": _USAGE,
        "metadata": {"weight_version": "default"},
    },
    "/v1/chat/completions": {
        "id": "chatcmpl-6566...",
        "object": "chat.completion",
        "created": 1790000000,
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris.", "reasoning_content": None, "tool_calls": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": None,
            }
        ],
        "usage": _USAGE,
        "metadata": {"weight_version": "default"},
    },
    "/v1/responses": {**_RESPONSE, "usage": {"input_tokens": 8, "output_tokens": 3, "total_tokens": 11}},
    "/v1/responses/{response_id}": _RESPONSE,
    "delete /v1/responses/{response_id}": {"id": "resp_7d31...", "object": "response", "deleted": True},
    "/v1/responses/{response_id}/cancel": {**_RESPONSE, "status": "cancelled"},
    "/v1/messages": {
        "id": "msg_0956...",
        "type": "message",
        "role": "assistant",
        "model": "default",
        "content": [{"type": "text", "text": "Paris."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 14, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 3},
    },
    "/v1/messages/count_tokens": {"input_tokens": 14},
    "/api/chat": {
        "model": "default",
        "created_at": "2026-11-23T08:00:00.000000Z",
        "done": True,
        "message": {"role": "assistant", "content": "Paris."},
    },
    "/api/generate": {"model": "default", "created_at": "2026-11-23T08:00:00.000000Z", "done": True, "response": "Paris."},
    "/api/tags": {"models": [_OLLAMA_MODEL]},
    "/api/ps": {"models": [_OLLAMA_MODEL]},
    "/api/show": {"details": _OLLAMA_DETAILS, "model_info": {"general.architecture": "qwen3"}, "capabilities": ["completion"]},
    "/api/version": {"version": "0.12.11"},
    "/model_info": _MODEL_INFO,
    "/get_model_info": _MODEL_INFO,
    "/server_info": _SERVER_INFO,
    "/get_server_info": _SERVER_INFO,
    "/v1/loads": {
        "timestamp": "2026-11-23T08:00:00+00:00",
        "version": "0.1.0",
        "loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 0, "token_usage": 0.5, "num_live_sequences": 2}],
    },
    "/get_load": [{"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 0, "num_tokens": 512}],
    "/recent_requests": {"now_s": 1790000000.5, "requests": []},
    "/open_session": "9c1f...",
    "/pause_generation": _PAUSED,
    "/continue_generation": {"message": "Generation continued successfully.", "status": "ok"},
    "/block_input": {"message": "Input blocked successfully.", "status": "ok"},
    "/unblock_input": {"message": "Input unblocked successfully.", "status": "ok"},
    "/release_memory_occupation": {"released": ["kv_cache"]},
    "/resume_memory_occupation": {"released": []},
    "/set_internal_state": [True],
    "/slow_down": {"forward_sleep_time": 0.5},
    "/load_lora_adapter": {"success": True, "error_message": "", "loaded_adapters": {"sql": "/adapters/sql"}},
    "/load_lora_adapter_from_tensors": {
        "success": True,
        "error_message": "",
        "loaded_adapters": {"policy-7": "/tmp/jaxserve-k2v8/adapters/5d41..."},
    },
    "/unload_lora_adapter": {"success": True, "error_message": "", "loaded_adapters": {}},
    "/update_weight_version": {"success": True, "message": "The version of the weights is v2 now.", "new_version": "v2"},
    "/update_weights_from_disk": {"success": True, "message": "Done.", "num_paused_requests": 0},
    "/update_weights_from_tensor": _TENSORS,
    "/update_weights_from_distributed": _TENSORS,
    "/begin_weight_update": _TENSORS,
    "/end_weight_update": _TENSORS,
}


def described(path: str, method: str) -> dict[str, Any]:
    """The `content` of a route's reply; empty for a path that nobody wrote an example for."""
    if path in TEXTS:
        return {"text/plain": {"schema": {"type": "string"}, "example": TEXTS[path]}}
    example = JSON.get(f"{method} {path}", JSON.get(path))
    return {} if example is None else {"application/json": {"schema": _schema(example), "example": example}}


def _schema(example: Any) -> dict[str, Any]:
    """What the example shows must be there, of the same kind; null may be anything."""
    if isinstance(example, dict):
        return {"type": "object", "required": list(example), "properties": {k: _schema(v) for k, v in example.items()}}
    if isinstance(example, list):
        return {"type": "array", "items": _schema(example[0])} if example else {"type": "array"}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": kinds[type(example)]} if example is not None else {}
