"""Which files of the two projects speak to a server, and what is known of tests that fail.

Left out are files that

- need what no server on two CPU cores has: several devices or hosts, kernels of a device, models of many GB;
- are about a whole field that we lack: vision and audio, embeddings, rewards, LoRA, quantized checkpoints, draft models,
  disaggregation, tiers of caches, tracing, profiles, weights from other processes; or read SGLang's own files (dumps are
  pickles there);
- only measure a score (MMLU, GSM8K) or a speed, or compare with baselines that they would fetch;
- try their own classes, without a server or an `Engine`, or read a scheduler's state, as sglang-jax's tests of its Engine and
  of pauses do.

A checkout has the files of its age: what is not there is passed over.
"""

from __future__ import annotations

FILES: dict[str, tuple[str, ...]] = {
    "sglang": (
        # Newer layout.
        "test/registered/core/test_basic_sanity.py",
        "test/registered/core/test_engine_child_pids.py",
        "test/registered/core/test_hidden_states.py",
        "test/registered/core/test_request_queue_validation.py",
        "test/registered/core/test_srt_engine.py",
        "test/registered/core/test_srt_endpoint.py",
        "test/registered/constrained_decoding/test_constrained_decoding.py",
        "test/registered/observability/test_metrics.py",
        "test/registered/observability/test_priority_metrics.py",
        "test/registered/openai_server/basic/test_http2_server.py",
        "test/registered/openai_server/basic/test_openai_server.py",
        "test/registered/openai_server/features/test_openai_server_hidden_states.py",
        "test/registered/openai_server/function_call/test_anthropic_tool_use.py",
        "test/registered/openai_server/function_call/test_openai_function_calling.py",
        "test/registered/openai_server/validation/test_large_max_new_tokens.py",
        "test/registered/openai_server/validation/test_matched_stop.py",
        "test/registered/openai_server/validation/test_request_length_validation.py",
        "test/registered/prefill_only/test_score_api.py",
        "test/registered/prefill_only/test_score_engine.py",
        "test/registered/radix_cache/test_radix_attention.py",
        "test/registered/radix_cache/test_radix_cache_hit.py",
        "test/registered/reasoning/test_reasoning.py",
        "test/registered/rl/test_update_weights_from_disk.py",
        "test/registered/sampling/test_original_logprobs.py",
        "test/registered/sampling/test_penalty.py",
        "test/registered/sampling/test_pytorch_sampling_backend.py",
        "test/registered/sampling/test_sampling_mask.py",
        "test/registered/scheduler/test_priority_scheduling.py",
        "test/registered/scheduler/test_routing_key_scheduling.py",
        "test/registered/scheduler/test_scheduler_control.py",
        "test/registered/sessions/test_session_control.py",
        "test/registered/sessions/test_streaming_session.py",
        "test/registered/spec/test_spec_ngram.py",
        "test/registered/tokenizer/test_multi_tokenizer.py",
        "test/registered/tokenizer/test_skip_tokenizer_init.py",
        "test/manual/entrypoints/http_server/test_abort_request.py",
        "test/manual/openai_server/features/test_cache_report.py",
        "test/manual/openai_server/features/test_continuous_usage_stats.py",
        "test/manual/openai_server/features/test_structural_tag.py",
        "test/manual/openai_server/function_call/test_tool_choice.py",
        "test/manual/test_fim_completion.py",
        "test/manual/test_health_check.py",
        "test/manual/test_sagemaker_server.py",
        "test/manual/test_vertex_endpoint.py",
        "test/manual/test_weight_version.py",
        # Older layout.
        "test/srt/entrypoints/http_server/test_abort_request.py",
        "test/srt/openai_server/basic/test_openai_server.py",
        "test/srt/openai_server/features/test_cache_report.py",
        "test/srt/openai_server/features/test_continuous_usage_stats.py",
        "test/srt/openai_server/features/test_enable_thinking.py",
        "test/srt/openai_server/features/test_json_constrained.py",
        "test/srt/openai_server/features/test_json_mode.py",
        "test/srt/openai_server/features/test_openai_server_ebnf.py",
        "test/srt/openai_server/features/test_openai_server_hidden_states.py",
        "test/srt/openai_server/features/test_reasoning_content.py",
        "test/srt/openai_server/features/test_structural_tag.py",
        "test/srt/openai_server/function_call/test_openai_function_calling.py",
        "test/srt/openai_server/function_call/test_tool_choice.py",
        "test/srt/openai_server/validation/test_large_max_new_tokens.py",
        "test/srt/openai_server/validation/test_matched_stop.py",
        "test/srt/openai_server/validation/test_openai_server_ignore_eos.py",
        "test/srt/openai_server/validation/test_request_length_validation.py",
        "test/srt/rl/test_update_weights_from_disk.py",
        "test/srt/test_abort.py",
        "test/srt/test_ebnf_constrained.py",
        "test/srt/test_fim_completion.py",
        "test/srt/test_health_check.py",
        "test/srt/test_hidden_states.py",
        "test/srt/test_input_embeddings.py",
        "test/srt/test_metrics.py",
        "test/srt/test_multi_tokenizer.py",
        "test/srt/test_original_logprobs.py",
        "test/srt/test_penalty.py",
        "test/srt/test_priority_scheduling.py",
        "test/srt/test_pytorch_sampling_backend.py",
        "test/srt/test_radix_attention.py",
        "test/srt/test_regex_constrained.py",
        "test/srt/test_request_queue_validation.py",
        "test/srt/test_sagemaker_server.py",
        "test/srt/test_score_api.py",
        "test/srt/test_session_control.py",
        "test/srt/test_skip_tokenizer_init.py",
        "test/srt/test_srt_engine.py",
        "test/srt/test_srt_endpoint.py",
        "test/srt/test_vertex_endpoint.py",
        "test/srt/test_weight_version.py",
    ),
    "sgl_jax": (
        "test/srt/openai_server/basic/test_openai_server.py",
        "test/srt/openai_server/basic/test_tool_calls.py",
        "test/srt/openai_server/features/test_ebnf.py",
        "test/srt/openai_server/features/test_json_mode.py",
        "test/srt/openai_server/features/test_structural_tag.py",
        "test/srt/openai_server/nightly/test_openai_api_surface.py",
        "test/srt/openai_server/validation/test_openai_server_params_validation.py",
        "test/srt/test_chunked_prefill_size.py",
        "test/srt/test_features.py",
        "test/srt/test_penalty.py",
        "test/srt/test_retract_decode.py",
        "test/srt/test_unified_radix_cache_serving.py",
    ),
}

# These use ids beyond the demo model's 2,048.
LARGE_VOCABULARY = (
    "test_cache_report.py",
    "test_constrained_decoding.py",
    "test_json_constrained.py",
    "test_radix_attention.py",
    "test_score_api.py",
    "test_skip_tokenizer_init.py",
    "test_srt_endpoint.py",
)

# What the server of a file is given besides, if the file does not say otherwise. Random weights: a model that goes on until it
# is stopped, whatever it says; the other way to have that keeps what it says. Pages of one token, SGLang's default: tests that
# count what they find in the cache.
_RANDOM_WEIGHTS = (("--load-format", "dummy"),)
_GOES_ON = (("--preferred-sampling-params", '{"ignore_eos": true}'),)
OPTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "test_abort.py": _RANDOM_WEIGHTS,
    "test_abort_request.py": _RANDOM_WEIGHTS,
    "test_cache_report.py": (("--page-size", "1"),),
    "test_hidden_states.py": _GOES_ON,
    "test_original_logprobs.py": (("--max-top-logprobs", "50"),),
    "test_priority_scheduling.py": _RANDOM_WEIGHTS,
    "test_scheduler_control.py": (*_RANDOM_WEIGHTS, *_GOES_ON),
    "test_session_control.py": _GOES_ON,
    "test_srt_endpoint.py": (("--page-size", "1"),),
    "test_streaming_session.py": (("--page-size", "1"),),
}

FEATURE = "a feature we lack"
OPTION = "an option we lack"
THEIRS = "uses SGLang itself"
MODEL = "needs a real model"
PURPOSE = "differs on purpose"
DEVICE = "needs a GPU"
SLOW = "too long for two cores"
BUG = "OURS, or not looked at"

# What explains a failure: a pattern of "file Class.test: error | place | last refusals" and the column it counts in. The first
# that fits holds.
RULES: tuple[tuple[str, str], ...] = (
    (r"needs the option ", OPTION),
    (r"LlamaForCausalLMForHealthTest", PURPOSE),  # expects a server that hangs; ours ends at once and says why
    # A value of an option.
    (r"ended at its start with .*--(schedule-policy routing-key|tool-call-parser lfm2|page-size 256)", OPTION),
    # A word for each: hundreds of thousands of prompt tokens in chunks of 128; logprobs of each token of long prompts, and of a
    # vocabulary of 131,072; 51 tests before and after.
    (r"test_(radix_attention|srt_endpoint): .*not done within", SLOW),
    (r"test_(logprob_mixed|ebnf_generate_custom_log_format): not done within", SLOW),
    (r"test_update_weights_non_blocking: not done within", PURPOSE),  # weights stay while requests are paused in place
    (r"Torch not compiled with CUDA", DEVICE),
    (r"stop_token_ids must lie in \[0, 2048\)", MODEL),  # ids of a Llama
    (r"uses pandas|uses \S*run_eval|fetches from openaipublic|MMLU|mmlu", MODEL),  # scores
    (r"uses \S+ReasoningParser", MODEL),  # for the token that ends thinking, which the demo model's vocabulary lacks
    (r"uses \S+ of SGLang itself|'EngineTokenizerManager' object has no attribute", THEIRS),
    (r"There is no endpoint|test_generate_from_file", FEATURE),
    (r"concurrent answers correct|'391' not found|'yellow' not found|looks like gibberish", MODEL),
    # The demo model never thinks, nor calls a tool unless it must; forced, it calls one and says more than there is room for.
    (r"enable_thinking.* unexpectedly None|reasoning content is not included|separate_reasoning_true.*len\(", MODEL),
    (r"anthropic_tool_use.* (Expected tool_use|.*'tool_use')", MODEL),
    (
        r"function_calling.*("
        r"No tool_calls found|tool_calls should be|found in the streaming chunks|Function name should|Parameter city|"
        r"got length|'NoneType' object is not subscriptable)",
        MODEL,
    ),
    (r"test_tool_choice.*(Invalid JSON in comp|Expected (2 )?tool calls)", MODEL),
    (r"test_(tool_calls|openai_api_surface).*(Expected tool.calls?|No tool_call chunks)", MODEL),
    (r"test_structural_tag.*Tagged date call not found", MODEL),
    (r"test_conflicting_defs_\w+: .*BadRequestError not raised", PURPOSE),  # each tool's $defs are its own
    (r"Failed to download image|VLM\.test_\w+: .*fetches from|modalities is not supported", FEATURE),  # vision
    (r"ForSequenceClassification' is not supported", FEATURE),
    (r"is not supported|unknown field|does not serve", FEATURE),
    # Fields of their replies about their own machinery.
    (r"cache_miss_count|KeyError: '(startup_time|waiting_queue_size)'", FEATURE),
    (r"Penalty should (increase|decrease|reduce)|Negative penalty", MODEL),  # the demo model is sure of its words
    (r"test_cache_salt_effectiveness: .* for salt2", MODEL),  # expects the count of its chat template (0, then 15 of 16 here)
    (r"(context length \(|context length of )16384", MODEL),  # 50,000 to 100,000 tokens
    # Babbles up to its last token.
    (r"(generate_custom_log_format|generate_complex_json): .*does not match|JSONDecodeError: Unterminated string", MODEL),
    (r"selective_abort: .*Other 2 requests should complete", MODEL),  # a story of 100 tokens
    (r"test_logprob_grammar: AssertionError: False", MODEL),  # " Yes" is no token of its vocabulary
    (r"test_logprob_start_len: AssertionError: \d != \d", MODEL),  # ends before it has said so much
    (r"test_skip_tokenizer_init\.py .*2042 != 2041", MODEL),  # ends with another token than its tokenizer's
    # Two tests on one server, of which the first in the alphabet changes what the second begins with.
    (r"test_weight_version_comprehensive: .*'disk_update_v2.0.0' != ", THEIRS),
    (r"detokenize_invalid_tokens: AssertionError: 400 != 500", PURPOSE),  # a client's mistake is no server error
    (r"test_retrieve_model: .* != ", PURPOSE),  # `root` of a model is its path
    # Sends requests at once and expects the first to run before the others are there; here the most urgent of all goes first.
    (r"test_priority_scheduling_\w+_validation: .*assert (e2e_latencies\[|got_status)", PURPOSE),
    (r"assert has_new_server", PURPOSE),  # waits for a line of uvicorn's log; our log has its own words
    # Asks for an unknown model.
    (r'test_response_prefill: .*model \\?"meta-llama/Llama-3.1-8B-Instruct\\?" does not exist', PURPOSE),
    (r"test_finish_stop_(eos|str|regex_str): .*Expected matched_stop", MODEL),  # a Llama's end; an answer of many lines
    (r"test_fim_completion: .*62 vs 18", MODEL),  # whose vocabulary has the three marks as tokens
    (r"'context_length_exceeded' != 400", PURPOSE),  # the code is OpenAI's
    # The sentences are SGLang's.
    (r"not found in .*max_completion_tokens is too large|'Token ID 999999 is out of vocabulary' not found", PURPOSE),
    (r"token_ids_logprob_rejects_nested_list: .*200 != 400", PURPOSE),  # a list for each prompt, also where there is one prompt
    (r"v1Responses.*'prompt_tokens'", PURPOSE),  # the names are OpenAI's, as newer SGLang's are
    (r"test_kv_cache_inheritance: .*inherited 23 not in \[24\]", PURPOSE),  # an answer's last token, which no step computed
    (r"'ScoreResult' has no len", PURPOSE),  # newer SGLang's result
    (r"\[logprobs SGLang vs HF: .*mismatch", PURPOSE),  # with a temperature: named tokens' logprobs are the model's own
)
