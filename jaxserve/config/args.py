"""ServerArgs: every option of a server or an Engine, its default and its help text, in one place.

Names and defaults are SGLang's where SGLang has the option (`--model-path` is `model_path`). The command line is generated
from these fields, so a default stands here and nowhere else. A ServerArgs is frozen: resolving an "auto" returns a new one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jaxserve.config.arg import arg
from jaxserve.config.checks import check, flag
from jaxserve.config.kv_events import KVEventsConfig, read_kv_events_config
from jaxserve.config.lora import lora_paths_of
from jaxserve.config.names import (
    ALIASES,
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    EVICTION_POLICIES,
    EXPERT_RECORDER_MODES,
    GRAMMAR_BACKENDS,
    KV_CACHE_DTYPES,
    LARGEST_PAGE_SIZE,
    LOAD_BALANCE_METHODS,
    LOAD_FORMATS,
    LOG_LEVELS,
    QUANTIZATIONS,
    SCHEDULE_POLICIES,
    SPECULATIVE_ALGORITHMS,
    WARMUPS,
)
from jaxserve.parsers.names import REASONING_NAMES, TOOL_NAMES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerArgs:
    # --- model
    model_path: str = arg(
        "",
        "Folder with a Hugging Face checkpoint (config.json, *.safetensors, tokenizer files), a name on the Hugging Face Hub "
        "(org/name), or demo: the built-in model.",
    )
    revision: str | None = arg(None, "Branch, tag or commit of a model on the Hugging Face Hub; default: main.")
    download_dir: str | None = arg(None, "Folder for what is fetched from the Hugging Face Hub; default: HF_HOME's cache.")
    tokenizer_path: str | None = arg(None, "Folder or name of the tokenizer, if it is not the model's.")
    tokenizer_mode: str = arg("auto", "Which kind of tokenizer is loaded: transformers has one of each.", choices=("auto",))
    skip_tokenizer_init: bool = arg(
        False, "Run without a tokenizer: requests bring input_ids, replies hold output_ids; what needs a text is refused."
    )
    served_model_name: str | None = arg(None, "Name under which /v1/models lists the model; default: model_path.")
    model_impl: str = arg("auto", "Whose code the model runs: jaxserve's.", choices=("auto",))
    load_format: str = arg("auto", "Where weights come from; dummy: random ones from config.json.", choices=LOAD_FORMATS)
    dtype: str = arg(
        "auto",
        "Type of weights and activations; auto: float32 on CPU, where bfloat16 is several times slower, else bfloat16.",
        choices=DTYPES,
    )
    enable_fp32_lm_head: bool = arg(
        False, "Multiply hidden states and the output matrix in float32, as trainers with a float32 head do; logits always are."
    )
    is_embedding: bool = arg(False, "Make vectors of texts, with a model that could generate: without its output head.")
    quantization: str | None = arg(
        None,
        "Quantize matrices while they are loaded; int8wo: int8 weights, a scale per output channel, activations as they are.",
        choices=QUANTIZATIONS,
    )
    context_length: int | None = arg(None, "Longest sequence; default: the model's max_position_embeddings.")
    trust_remote_code: bool = arg(False, "Allow a tokenizer that brings its own Python code.")
    json_model_override_args: str = arg("{}", "JSON object whose keys replace those of config.json.", is_json=True)
    weight_version: str = arg("default", "A label for the weights, returned in meta_info.")
    chat_template: str | None = arg(
        None, "Jinja chat template file to use instead of the tokenizer's, or the name of one of the tokenizer's."
    )
    hf_chat_template_name: str | None = arg(
        None, "Which of a tokenizer's several chat templates to use; default: default, or the first."
    )
    default_chat_template_kwargs: str | None = arg(
        None,
        "JSON object with values for the chat template, where chat_template_kwargs of a request do not say otherwise.",
        is_json=True,
    )
    completion_template: str | None = arg(
        None,
        "How the suffix of a completion is written: deepseek_coder, qwen_coder, star_coder, or a JSON file; default: by the "
        "tokens of the vocabulary.",
    )
    trust_request_chat_template: bool = arg(
        False,
        "Let requests bring a chat_template in chat_template_kwargs; one can keep a thread busy for as long as it likes.",
    )
    reasoning_parser: str | None = arg(
        None,
        "How the model marks its thinking, which chat then answers apart from the content; default: it stays in the text.",
        choices=REASONING_NAMES,
    )
    tool_call_parser: str | None = arg(None, "How the model calls tools; default: chat takes no tools.", choices=TOOL_NAMES)

    # --- HTTP server
    host: str = arg("127.0.0.1", "Address to listen on.")
    port: int = arg(30000, "Port to listen on.")
    api_key: str | None = arg(None, "Key that every request must bring as a bearer token (health checks excepted).")
    api_key_file: str | None = arg(
        None, "File with that key; or the environment's JAXSERVE_API_KEY is it. Processes' lists show neither."
    )
    admin_api_key: str | None = arg(None, "Key for control endpoints; if set, the only one they accept.")
    admin_api_key_file: str | None = arg(None, "File with that key, or JAXSERVE_ADMIN_API_KEY in the environment.")
    allowed_origins: str | None = arg(
        None,
        "Web pages that may use the server beside those of this machine: origins (https://chat.example.com) with commas "
        "between them, or * for all.",
    )
    fastapi_root_path: str = arg("", "Path before all of the server's, as /llm, where a proxy leaves it in place.")
    disable_web: bool = arg(False, "Serve no /playground and no /dashboard.")
    ssl_keyfile: str | None = arg(None, "TLS private key file.")
    ssl_certfile: str | None = arg(None, "TLS certificate file.")
    ssl_ca_certs: str | None = arg(None, "Certificates above it, sent along where the certificate file lacks them.")
    ssl_keyfile_password: str | None = arg(None, "Password of the private key file.")
    enable_ssl_refresh: bool = arg(False, "Use new certificates when the files change, without a restart.")
    max_body_size_mb: int = arg(64, "Largest request body accepted, in MiB.")
    limit_concurrency: int | None = arg(
        None, "Most connections at a time; more are answered 503; default: by the limit on open files, which is raised."
    )
    log_level: str = arg("info", "Verbosity of the logs.", choices=LOG_LEVELS)
    log_level_http: str | None = arg(None, "Verbosity of the HTTP server's own logs; default: warning.", choices=LOG_LEVELS)
    log_requests: bool = arg(False, "Log each request when it is accepted and when it ends.")
    log_requests_level: int = arg(
        2, "0: ids, counts and times; 1: and sampling parameters; 2: and the ends of texts; 3: and all of the texts."
    )
    log_requests_format: str = arg("text", "Form of these lines.", choices=("text", "json"))
    log_requests_target: tuple[str, ...] | None = arg(
        None, "Where these lines go: stdout and folders, with commas between them; default: the server's log."
    )
    enable_request_time_stats_logging: bool = arg(False, "Log the times of each request when it ends.")
    enable_metrics: bool = arg(True, "Show metrics for Prometheus at /metrics.")
    extra_metric_labels: str | None = arg(None, "JSON object of labels that all metrics get.", is_json=True)
    tokenizer_metrics_allowed_custom_labels: tuple[str, ...] | None = arg(
        None, "Names of labels that requests may bring for the metrics about them, with commas between them."
    )
    tokenizer_metrics_custom_labels_header: str = arg("x-custom-labels", "Header that holds them, as a JSON object.")
    bucket_time_to_first_token: tuple[float, ...] | None = arg(None, "Buckets of time_to_first_token_seconds.")
    bucket_inter_token_latency: tuple[float, ...] | None = arg(None, "Buckets of inter_token_latency_seconds.")
    bucket_e2e_request_latency: tuple[float, ...] | None = arg(None, "Buckets of e2e_request_latency_seconds.")
    prompt_tokens_buckets: tuple[float, ...] | None = arg(None, "Buckets of prompt_tokens_histogram.")
    generation_tokens_buckets: tuple[float, ...] | None = arg(None, "Buckets of generation_tokens_histogram.")
    uvicorn_access_log_exclude_prefixes: tuple[str, ...] | None = arg(
        None, "Paths that the access log leaves out, by their beginnings, with commas between them."
    )
    enable_trace: bool = arg(False, "Send a trace of each request to an OpenTelemetry collector (needs jaxserve[tracing]).")
    otlp_traces_endpoint: str = arg("localhost:4317", "The collector, by OTLP over gRPC; https:// in front: with TLS.")
    profile_dir: str | None = arg(
        None,
        "Where /start_profile puts traces unless told; default: JAXSERVE_PROFILER_DIR in the environment, else a folder of the "
        "user's under the temporary one.",
    )
    crash_dump_folder: str | None = arg(
        None,
        "Write what ran and what ended in the last five minutes to a file in this folder when a worker dies, or on SIGQUIT.",
    )
    kv_events_config: str | None = arg(
        None,
        'JSON object: tell routers what the prefix cache gains and loses, over ZeroMQ; {"publisher": "zmq"} does so at '
        "tcp://*:5557, for whoever asks.",
        is_json=True,
    )
    enable_cache_report: bool = arg(False, "Report cached tokens in the usage of OpenAI replies.")
    stream_interval: int = arg(1, "Send a chunk to a streaming client every so many tokens.")
    incremental_streaming_output: bool = arg(False, "/generate streams new text only, not all text so far.")
    stream_stall_timeout_s: float = arg(
        60.0, "Close a client's connection, and abort its request, when data waits for it and it took none for so long."
    )
    stream_response_default_include_usage: bool = arg(False, "Streamed OpenAI replies end with usage unless declined.")
    allow_auto_truncate: bool = arg(False, "Shorten prompts that are too long instead of answering 400.")
    sampling_defaults: str = arg(
        "model",
        "Sampling defaults for chat: the model's generation_config.json or OpenAI's.",
        choices=("model", "openai"),
    )
    preferred_sampling_params: str | None = arg(None, "JSON object of sampling defaults for /generate.", is_json=True)
    max_top_logprobs: int = arg(20, "Most alternatives per token a request may ask for (sizes a compiled output).")
    max_reply_numbers: int | None = arg(
        4 * 1024 * 1024,
        "Most logprobs, of tokens and their alternatives, and components of hidden states or embeddings, and experts in the "
        "reply to one request. Engine: no limit.",
    )
    logprobs_after_temperature: bool = arg(
        False,
        "Logprobs of generated tokens and their alternatives after penalties, biases, grammars and temperature, as SGLang's "
        "are; else they are the model's own.",
    )
    enable_return_hidden_states: bool = arg(False, "Let requests ask for hidden states (return_hidden_states).")
    enable_return_routed_experts: bool = arg(
        False, "Let requests ask which experts each token went to (return_routed_experts), of a model that has some."
    )
    enable_custom_logit_processor: bool = arg(
        False, "Let requests bring code of their own as a custom_logit_processor; it runs in a process of its own."
    )
    custom_logit_processor_timeout_s: float = arg(
        1.0, "End a request whose own code takes longer than this, for loading it or for a call; the others wait meanwhile."
    )
    warmup: str = arg(
        "auto",
        "Say ready with all programs compiled (full), or with those that serve anything while the rest is compiled (early); "
        "auto: early on CPU, else full.",
        choices=WARMUPS,
    )
    skip_server_warmup: bool = arg(False, "Say ready without sending a first request through the whole pipeline.")
    shutdown_timeout_s: float = arg(20.0, "After SIGTERM, abort requests still running when this many seconds are over.")

    # --- scheduling
    max_running_requests: int | None = arg(None, "Most requests in one batch; default: by device.")
    max_queued_requests: int | None = arg(
        16384,
        "Answer 503 to requests beyond this many that must wait, 400 to a batch that could never fit. Engine: no limit.",
    )
    max_stored_responses: int = arg(
        1024, "Keep so many responses of /v1/responses in memory, to be asked for and gone on with, up to 256 MiB; 0: none."
    )
    max_total_tokens: int | None = arg(None, "Size of the KV cache in tokens; default: from free memory.")
    max_mamba_cache_size: int | None = arg(
        None,
        "States that layers keep in place of KV (Mamba 2, gated delta nets): one of each request (with drafts it has one for "
        "each draft token, not counted here), and snapshots behind cached prefixes. Default: 3 for each of "
        "--max-running-requests.",
    )
    mamba_track_interval: int = arg(64, "Generated tokens from one snapshot of a request's states to the next; whole pages.")
    swa_full_tokens_ratio: float = arg(
        0.5, "Layers with a sliding window keep this many tokens for each token that layers without one keep."
    )
    mem_fraction_static: float | None = arg(None, "Share of device memory for weights, tables and KV cache.")
    chunked_prefill_size: int | None = arg(None, "Most prompt tokens in a step; longer prompts are split; -1: never split one.")
    max_prefill_tokens: int = arg(16384, "Most prompt tokens of all requests in a step.")
    prefill_max_requests: int | None = arg(None, "Most requests in a prefill step; default: no limit.")
    enable_dynamic_chunking: bool = arg(
        False, "Make the chunks of a long prompt shorter as it goes on, so that each takes about as long as the first."
    )
    prefill_decode_interval: int | None = arg(
        None, "Decode steps that follow each prefill step while requests run; default 1 (0: prefill always goes first)."
    )
    enable_mixed_chunk: bool = arg(False, "Put running requests' decode rows into the steps that prefill a chunk.")
    schedule_policy: str = arg("fcfs", "Order of the waiting queue.", choices=SCHEDULE_POLICIES)
    schedule_conservativeness: float = arg(1.0, "Above 1 reserves more memory for running requests: fewer retractions.")
    enable_priority_scheduling: bool = arg(False, "Order by the requests' priority first (larger first).")
    schedule_low_priority_values_first: bool = arg(False, "Smaller priority values go first.")
    priority_scheduling_preemption_threshold: int = arg(10, "Preempt a running request if priorities differ by more.")
    disable_priority_preemption: bool = arg(False, "Never preempt a running request.")
    default_priority_value: int | None = arg(None, "Priority of requests that bring none.")
    abort_on_priority_when_disabled: bool = arg(False, "Answer 400 to a priority when priority scheduling is off.")
    retraction_policy: str = arg("length", "Whom to retract first when memory is short.", choices=("length", "priority"))
    page_size: int | None = arg(
        None,
        f"Tokens per KV page, 1 to {LARGEST_PAGE_SIZE}; of each device, where --dcp-size share it. Default: by attention "
        "backend.",
    )
    radix_eviction_policy: str = arg("lru", "Which cached prefixes go first.", choices=EVICTION_POLICIES)
    disable_radix_cache: bool = arg(False, "Do not reuse the KV cache of shared prefixes.")
    disable_overlap_schedule: bool = arg(False, "Wait for each step's result before preparing the next step.")
    request_waiting_timeout_s: float | None = arg(None, "Abort (503) a request that waited longer than this in the queue.")
    request_running_timeout_s: float | None = arg(None, "Abort (503) a request that ran longer than this.")
    decode_log_interval: int = arg(40, "Log a line every so many decode steps.")
    watchdog_timeout: float = arg(300.0, "End the server if one step takes longer than this many seconds.")
    soft_watchdog_timeout: float | None = arg(
        None, "Write the stacks of a step that takes longer than this many seconds to the log, and go on."
    )
    scheduler_recv_interval: int = arg(
        1, "Look for new requests every so many decode steps; more than 1 delays requests, and aborts, to decode faster."
    )
    sleep_on_idle: bool = arg(True, "Wait on the socket instead of spinning when there is nothing to do.")

    # --- replicas
    dp_size: int = arg(
        1, "Replicas of the model, each with a scheduler process, a KV cache and --tp-size devices of its own, on this host."
    )
    load_balance_method: str = arg(
        "auto",
        "Which replica a request goes to. round_robin: in turn; shortest_queue, also called total_requests: the one with the "
        "fewest; total_tokens: the fewest tokens; cache_aware: where most of its prompt is cached, unless another has so much "
        "less to do that computing it there is sooner. auto: cache_aware; shortest_queue with --disable-radix-cache.",
        choices=LOAD_BALANCE_METHODS,
    )
    restart_workers: bool = arg(
        False, "Start a replica again when its process has died; the others serve meanwhile. Its requests end with an error."
    )

    # --- processes
    tokenizer_worker_num: int = arg(
        1,
        "Processes that share the port, for HTTP, chat templates and tokenizing; if more than 1, all beside the main process, "
        "which then answers what is about the server as a whole.",
    )
    detokenizer_worker_num: int = arg(1, "Processes that turn tokens into text.")

    # --- several hosts
    nnodes: int = arg(1, "Hosts that run the model together, each with its part of --pp-size times --tp-size devices.")
    node_rank: int = arg(0, "Which of them this one is: 0 schedules and answers requests, the others do as it says.")
    dist_init_addr: str | None = arg(
        None, "Where host 0 waits for the others, as host:port, the same on all; it takes that port and the two behind it."
    )
    dist_timeout: float = arg(600.0, "How long hosts wait for each other at the start, in seconds.")
    dist_secret_file: str | None = arg(
        None,
        "File with a secret of 16 characters or more that all hosts share, or JAXSERVE_DIST_SECRET in the environment; only on "
        "an address of this machine alone (127.0.0.1) it can be left away.",
    )

    # --- speculative decoding
    speculative_algorithm: str | None = arg(
        None,
        "Guess tokens and verify several a step; NGRAM: what followed the last tokens before.",
        choices=SPECULATIVE_ALGORITHMS,
    )
    speculative_num_draft_tokens: int | None = arg(
        None, "Tokens of a request verified in one step, the certain one included; default: by device."
    )
    speculative_ngram_min_match_window_size: int = arg(1, "NGRAM: tokens that must agree before something is guessed.")
    speculative_ngram_max_match_window_size: int = arg(12, "NGRAM: most tokens compared; the longest agreement wins.")

    # --- constrained output
    grammar_backend: str = arg(
        "llguidance",
        "What follows json_schema, regex, ebnf and structural_tag; none: such requests are refused.",
        choices=GRAMMAR_BACKENDS,
    )
    grammar_compile_timeout_s: float = arg(10.0, "Answer 400 to a grammar that takes longer than this to compile.")

    constrained_json_whitespace_pattern: str | None = arg(
        None, "Regular expression for white space where JSON allows it; default: up to 32 blanks, tabs and line ends."
    )
    constrained_json_disable_any_whitespace: bool = arg(False, "No white space between the parts of constrained JSON.")

    disable_jump_forward: bool = arg(False, "Sample also the tokens that a grammar leaves no choice about, one by one.")

    # --- LoRA
    enable_lora: bool = arg(False, "Serve LoRA adapters beside the model; --lora-paths says so, too.")
    lora_paths: tuple[str, ...] | None = arg(
        None, "Adapters to load at the start, folders in PEFT's format: NAME=PATH, or PATH, which is then the name as well."
    )
    max_lora_rank: int | None = arg(None, "Largest rank of an adapter; default: that of --lora-paths, else 64.")
    lora_target_modules: tuple[str, ...] | None = arg(
        None,
        "Modules that adapters may change, by the last part of their names (q_proj), or all. Default: those of --lora-paths, "
        "else all.",
    )
    max_loras_per_batch: int = arg(8, "Most adapters on the devices, and so in one batch.")
    max_loaded_loras: int | None = arg(
        None, "Most adapters in the host's memory; others are read from their folders when they are asked for. Default: all."
    )
    lora_eviction_policy: str = arg(
        "lru", "Which adapter leaves the devices for another: used longest ago, or loaded first.", choices=("lru", "fifo")
    )

    # --- execution
    device: str = arg("auto", "Platform to run on.", choices=DEVICES)
    tp_size: int = arg(1, "Devices over which weights, KV cache and attention are sharded.")
    pp_size: int = arg(1, "Stages: parts of the model's layers, each on --tp-size devices of its own (pipeline parallelism).")
    pp_layer_partition: tuple[int, ...] | None = arg(None, "How many layers each stage has; default: as many as the others.")
    pp_max_micro_batch_size: int | None = arg(
        None, "Most running requests that decode in one step of a pipeline; default: those there are, divided by --pp-size."
    )
    attn_dp_size: int = arg(
        1,
        "Attention by data parallelism: so many groups of the --tp-size devices, each with requests and a KV cache of its own; "
        "MLPs, experts and the vocabulary stay sharded over all devices.",
    )
    dcp_size: int = arg(
        1,
        "Context parallelism: so many neighbours of the devices that attention is divided over share the latents of each "
        "request by tokens, where each would have a copy; for models with latent attention (DeepSeek, Kimi).",
    )
    enable_dp_attention: bool = arg(False, "SGLang's older way to say it: --dp-size becomes --attn-dp-size.")
    ep_size: int | None = arg(
        None,
        "Groups of devices that a mixture's experts are dealt out to; those of a group share each expert's columns. "
        "Default: --tp-size, whole experts on each device.",
    )
    ep_num_redundant_experts: int = arg(0, "Experts in each layer that are held a second time, by another group of devices.")
    init_expert_location: str = arg(
        "trivial",
        "JSON, or a .json file, that says where experts are: logical_count, tokens of each to spread evenly (as "
        "/dump_expert_distribution_record writes it), or physical_to_logical_map. trivial: in order.",
    )
    attention_backend: str = arg("auto", "Attention implementation.", choices=ATTENTION_BACKENDS)
    kv_cache_dtype: str = arg(
        "auto",
        "Type of stored keys and values; auto: the model's. fp8_e4m3 and int8 keep a scale per token and KV head.",
        choices=tuple(KV_CACHE_DTYPES),
    )
    expert_distribution_recorder_mode: str | None = arg(
        None,
        "Let /start_expert_distribution_record count how many tokens go to each expert; stat: of all steps, in each layer.",
        choices=EXPERT_RECORDER_MODES,
    )
    enable_deterministic_inference: bool = arg(
        False,
        "A token's logprobs are the same, bit for bit, whatever else is in its batch, however its prompt came in steps, and "
        "whatever was cached: all steps have one size. Requests that bring no seed have 42.",
    )
    random_seed: int | None = arg(None, "Seed for requests that bring none; default: a fresh one.")
    compilation_cache_dir: str | None = arg(None, "Folder of compiled programs, for the next start; default: in ~/.cache.")
    prefill_token_buckets: tuple[int, ...] | None = arg(
        None, "Token counts prefill steps are compiled for; default: powers of 4."
    )
    decode_row_buckets: tuple[int, ...] | None = arg(None, "Row counts decode steps are compiled for; default: powers of 2.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_paths", lora_paths_of(self.lora_paths))
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            if isinstance(value, list):  # as Python's callers and JSON write what is a tuple here
                object.__setattr__(self, field.name, tuple(value))
            if choices and value is not None and value not in choices:
                raise ValueError(f"{flag(field.name)} must be one of {', '.join(map(str, choices))}; got {value!r}.")
        if self.enable_dp_attention and self.attn_dp_size == 1:
            object.__setattr__(self, "attn_dp_size", self.dp_size)
            object.__setattr__(self, "dp_size", 1)
        check(self)

    @staticmethod
    def of(options: Mapping[str, Any]) -> ServerArgs:
        """With options under any of their names. ValueError for one that is unknown or given twice."""
        return ServerArgs(**by_field(options))

    @property
    def follows_grammars(self) -> bool:
        """Requests may constrain their output."""
        return self.grammar_backend != "none" and not self.skip_tokenizer_init

    @property
    def serves_lora(self) -> bool:
        """Requests may name LoRA adapters."""
        return self.enable_lora or bool(self.lora_paths)

    @property
    def attn_tp_size(self) -> int:
        """Devices over which attention is divided."""
        return self.tp_size // self.attn_dp_size

    @property
    def page_tokens(self) -> int | None:
        """Of a KV page, all devices' parts together. None: not known before there is a backend."""
        return None if self.page_size is None else self.page_size * self.dcp_size

    @property
    def num_devices(self) -> int:
        """That the model runs on, of all stages."""
        return self.pp_size * self.tp_size

    @property
    def num_local_devices(self) -> int:
        """Those of this host."""
        return self.num_devices // self.nnodes

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """None if nobody wants events."""
        if self.kv_events_config is None:
            return None
        config = read_kv_events_config(self.kv_events_config, self.dp_size)
        return config if config.is_on else None

    def describe_kv_events(self, page_size: int) -> dict[str, Any] | None:
        """For /server_info."""
        return None if self.kv_events is None else self.kv_events.describe(page_size, self.dp_size)

    @property
    def effective_tokenizer_path(self) -> str:
        return self.tokenizer_path or self.model_path

    @property
    def effective_served_model_name(self) -> str:
        return self.served_model_name or self.model_path

    def replace(self, **changes: Any) -> ServerArgs:
        return dataclasses.replace(self, **changes)

    def public_dict(self) -> dict[str, Any]:
        """All options for /server_info, without the secrets."""
        secret = {"api_key", "admin_api_key", "ssl_keyfile_password"}
        return {k: "***" if k in secret and v else v for k, v in dataclasses.asdict(self).items()}


def by_field(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under any of their names, by those of ServerArgs' fields. ValueError for one that is unknown or given twice."""
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    given: dict[str, Any] = {}
    for name, value in options.items():
        field = ALIASES.get(name, name)
        if field not in known:
            close = difflib.get_close_matches(name, [*known, *ALIASES], 1)
            raise ValueError(f"There is no option {name}." + (f" Did you mean {close[0]}?" if close else ""))
        if field in given:
            raise ValueError(f"{field} is given twice, also as {name}.")
        given[field] = value
    return given
