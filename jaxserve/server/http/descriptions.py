"""What request fields mean: a sentence each, and the limits that are checked in code; /openapi.json and /docs show both.

Text only. Which fields exist, and their defaults, follow from the structs. Tests hold that every field is described, and that
the limits are those that `SamplingParams.verify` enforces.
"""

from __future__ import annotations

from typing import Any

from jaxserve.server.openai.params import MAX_CHOICES
from jaxserve.server.request_checks import MOST_SAMPLES
from jaxserve.types import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, MAX_STOP_REGEX_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_JSON = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}
_GRAMMAR = f"of up to {MAX_GRAMMAR_BYTES // 1024} KiB; at most one of json_schema, regex, ebnf and structural_tag"

_SAMPLING_LIMITS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"minimum": 0},
    "min_new_tokens": {"minimum": 0},
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "stop": {**_STRINGS, "maxItems": MAX_STOP_STRINGS},
    "stop_regex": {**_STRINGS, "maxItems": MAX_STOP_STRINGS},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "n": {"minimum": 1, "maximum": MOST_SAMPLES},
    "stream_interval": {"minimum": 1},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIAS},
    "json_schema": _JSON,
    "structural_tag": _JSON,
}

_OPENAI_LIMITS: dict[str, dict[str, Any]] = {
    **_SAMPLING_LIMITS,
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
}
# JSON schema keywords by struct and field.
LIMITS: dict[str, dict[str, dict[str, Any]]] = {
    "SamplingParams": _SAMPLING_LIMITS,
    "CompletionRequest": _OPENAI_LIMITS,
    "ChatCompletionRequest": _OPENAI_LIMITS,
}

# A field means the same wherever it stands, under whichever of its names.
FIELDS: dict[str, str] = {
    # sampling
    "max_new_tokens": "Most tokens to generate; null: as many as the context has room for.",
    "max_tokens": "Most tokens to generate. Default: 16 for completions; chat: as many as the context has room for.",
    "max_completion_tokens": "The newer name of max_tokens; goes before it.",
    "min_new_tokens": "No end of sequence and no stop token before this many tokens.",
    "min_tokens": "No end of sequence and no stop token before this many tokens (default 0).",
    "temperature": "0 is greedy; above 1 flattens the distribution.",
    "top_p": "Draw from the likeliest tokens that together have this probability; 1: all.",
    "top_k": "Draw from this many likeliest tokens; -1: all.",
    "min_p": "Drop tokens less likely than this share of the likeliest; 0: none.",
    "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
    "presence_penalty": "Subtracted from a token's logit if it was generated.",
    "repetition_penalty": "Above 1 makes tokens that were generated less likely; 1: off.",
    "stop": "Strings that end the text; they are cut off it, see no_stop_trim.",
    "stop_regex": f"Regular expressions that end the text, of up to {MAX_STOP_REGEX_BYTES} bytes each.",
    "stop_token_ids": "Tokens that end the text.",
    "n": "How many continuations of each prompt.",
    "ignore_eos": "Go on after the model's end of sequence.",
    "skip_special_tokens": "Leave special tokens out of the text (default true).",
    "spaces_between_special_tokens": "Put spaces between special tokens in the text (default true).",
    "no_stop_trim": "Keep the stop string in the text.",
    "stream_interval": "Stream an event every so many tokens; null: the server's --stream-interval.",
    "logit_bias": f"Token id to what is added to its logit, for up to {MAX_LOGIT_BIAS} tokens.",
    "sampling_seed": "The same seed draws the same tokens, alone or in any batch; sample j of n has the seed plus j.",
    "seed": "The same seed draws the same tokens, alone or in any batch; choice j of n has the seed plus j.",
    "json_schema": f"A JSON schema that the output must match, as an object or a string {_GRAMMAR}.",
    "regex": f"A regular expression that the whole output must match, {_GRAMMAR}.",
    "ebnf": f"A grammar in xgrammar's EBNF that the output must match, {_GRAMMAR}.",
    "structural_tag": f"A structural tag that the output must match, as an object or a string {_GRAMMAR}.",
    # the request
    "model": 'The served model\'s name, "default" or nothing.',
    "text": "A prompt or a list of prompts; exactly one of text and input_ids.",
    "input_ids": "Token ids instead of text, of one prompt or of many.",
    "prompt": "A text, a list of texts, token ids, or a list of lists of token ids.",
    "messages": 'The conversation: objects with "role" and "content".',
    "sampling_params": "How to draw tokens and when to stop; a list has one entry per prompt.",
    "rid": "An id of your own, of up to 512 characters (a list for many prompts); /abort_request takes it.",
    "stream": "Answer with server-sent events as tokens come.",
    "stream_options": "What else a stream tells.",
    "include_usage": "End the stream with an event that holds the usage.",
    "continuous_usage_stats": "Put the usage so far into each event.",
    "include_obfuscation": "Not served; only false is taken.",
    "return_logprob": "Tell the logprob of each generated token. Like the next ones: one value, or one for each prompt.",
    "top_logprobs_num": "Tell so many likeliest alternatives of each token, up to --max-top-logprobs; needs return_logprob.",
    "return_text_in_logprobs": "Put the tokens' text beside their ids.",
    "logprob_start_len": "With return_logprob: tell logprobs of the prompt's tokens from this one on; -1: none of them.",
    "token_ids_logprob": "With return_logprob: tell the logprobs of these tokens at each place; lists: for each prompt.",
    "return_hidden_states": "Tell hidden states, of all tokens or the last; needs --enable-return-hidden-states.",
    "top_logprobs": "Tell so many alternatives of each token, up to --max-top-logprobs; needs logprobs.",
    "priority": "Larger goes first, with --enable-priority-scheduling.",
    "extra_key": "Requests share cached prefixes only with those of the same key.",
    "cache_salt": "As extra_key; both may be given.",
    "require_reasoning": "The output begins with thinking: a grammar applies behind it. Needs --reasoning-parser.",
    "return_token_ids": "Tell the generated token ids.",
    "return_prompt_token_ids": "Tell the prompt's token ids.",
    "return_meta_info": "Tell what meta_info of /generate tells.",
    "best_of": "Draw so many, at least n, and return the n that are likeliest per token; not with stream.",
    "echo": "Begin the text with the prompt.",
    "suffix": "What follows the text to be filled in, of models that have tokens for this.",
    "response_format": "What the output must match: json_object, json_schema, structural_tag, or text for anything.",
    "tools": "Functions that the model may call; how it writes calls, --tool-call-parser says.",
    "tool_choice": "auto, none, required, a function by its name, or allowed_tools; required and a name do without a parser.",
    "parallel_tool_calls": "false: at most one call.",
    "reasoning_effort": "How hard to think: none, minimal, low, medium, high, xhigh, max, or a number in [0, 0.99].",
    "reasoning": "effort, as reasoning_effort, and enabled.",
    "thinking": 'Whether to think: {"type": "enabled"} or {"type": "disabled"}.',
    "separate_reasoning": "Tell thinking as reasoning_content (default true), with --reasoning-parser.",
    "stream_reasoning": "Stream thinking as it comes (default true), or at once when it is over.",
    "return_cached_tokens_details": "Tell where cached tokens of the prompt were, as sglext.",
    "continue_final_message": "Go on with the last message instead of answering it.",
    "chat_template_kwargs": "Further values for the chat template.",
    "add_special_tokens": "Add the tokenizer's special tokens (default true for prompts).",
    "add_generation_prompt": "End with the beginning of an answer (default true).",
    "tokens": "Token ids, or a list of lists of them.",
    # control
    "abort_all": "End all requests.",
    "mode": "What becomes of running requests.",
    "tags": 'What is meant: "kv_cache", "weights"; null: both.',
    "forward_sleep_time": "Seconds between two steps; null or 0: none.",
    "timeout": "Seconds to wait until nothing runs.",
    "server_args": "Options by their names with underscores, and their new values.",
    "model_path": "A folder with weights of the model that is served.",
    "load_format": "auto, safetensors, orbax or dummy; null: that of the start.",
    "abort_all_requests": "End all requests instead of waiting for them.",
    "weight_version": "A new label; null: the old one stays.",
    "flush_cache": "Forget all cached prefixes; only true is taken.",
    "torch_empty_cache": "Taken without effect.",
    "recapture_cuda_graph": "Taken without effect.",
    "is_async": "Not served; only false is taken.",
    "keep_pause": "Not served; only false is taken.",
    "token_step": "Not served; only 0 is taken.",
    "manifest": "Not served; only null is taken.",
    "log_requests": "Log each request when it is accepted and when it ends.",
    "log_requests_level": "0: ids, counts, times; 1: and sampling parameters; 2: and the ends of texts; 3: all of the texts.",
    "log_requests_format": "Form of these lines.",
    "log_level": "Verbosity of the logs of all processes.",
    "dump_requests_folder": "Write finished requests to files in this folder of the server; empty: no more.",
    "dump_requests_threshold": "So many to a file.",
    "crash_dump_folder": "Folder for what ran when a worker dies; empty: none.",
}
# Where a field means something else.
FIELDS_OF: dict[str, dict[str, str]] = {
    "AbortRequest": {"rid": "What the ids of the requests to end begin with."},
    "CompletionRequest": {"logprobs": "Tell each token's logprob and so many alternatives, up to --max-top-logprobs."},
    "ChatCompletionRequest": {"logprobs": "Tell each token's logprob."},
}

# Bodies to begin with, by struct.
EXAMPLES: dict[str, dict[str, Any]] = {
    "TokenizeRequest": {"prompt": "The capital of France is"},
    "DetokenizeRequest": {"tokens": [1, 2, 3]},
    "CompletionRequest": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    "ChatCompletionRequest": {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64},
    "AbortRequest": {"abort_all": True},
    "ConfigureLoggingReq": {"log_requests": True, "log_requests_level": 0},
    "PauseGenerationReqInput": {"mode": "retract"},
    "SetInternalStateReq": {"server_args": {"max_queued_requests": 1000}},
    "UpdateWeightFromDiskReqInput": {"model_path": "/models/other"},
}
