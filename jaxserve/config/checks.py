"""What must hold of options: each alone, and together. Every failure is a sentence that names the option and its value."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxserve.config.addresses import split_address
from jaxserve.config.lora import check_lora
from jaxserve.config.names import LARGEST_PAGE_SIZE, METRIC_BUCKETS, MOST_WORKERS

if TYPE_CHECKING:
    from jaxserve.config.args import ServerArgs

# Labels that metrics have anyway.
_TAKEN_LABELS = frozenset(
    ("model_name", "engine_type", "dp_rank", "le", "quantile", "stage", "mode", "kind", "group", "cache_source", "status_code",
     "endpoint", "method", "component", "job", "instance")
)  # fmt: skip
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+", re.IGNORECASE)


def check(args: ServerArgs) -> None:
    """Raises ValueError with a sentence that names the option."""
    _check_ranges(args)
    _check_json(args)
    if args.enable_mixed_chunk and args.chunked_prefill_size == -1:
        raise ValueError("--enable-mixed-chunk needs chunked prefill; do not set --chunked-prefill-size -1.")
    if args.speculative_num_draft_tokens is not None and args.speculative_algorithm is None:
        raise ValueError("--speculative-num-draft-tokens needs --speculative-algorithm.")
    _check_browsers_and_keys(args)
    _check_white_space(args)
    _check_labels(args)
    _check_hosts(args)
    _check_stages(args)
    check_lora(args)
    _check_deterministic(args)
    if args.tp_size % args.attn_dp_size:
        raise ValueError(
            f"--attn-dp-size {args.attn_dp_size} must divide --tp-size {args.tp_size}, which counts all devices"
            f"{' (with --enable-dp-attention, --dp-size is --attn-dp-size)' if args.enable_dp_attention else ''}."
        )
    if args.attn_tp_size % args.dcp_size:
        groups = f" over --attn-dp-size {args.attn_dp_size}" if args.attn_dp_size > 1 else ""
        raise ValueError(
            f"--dcp-size {args.dcp_size} must divide the {args.attn_tp_size} devices that share attention "
            f"(--tp-size {args.tp_size}{groups})."
        )
    if args.kv_events is not None and args.disable_radix_cache:
        raise ValueError("--kv-events-config needs the prefix cache, which --disable-radix-cache turns off.")
    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ValueError("--ssl-keyfile and --ssl-certfile must be given together.")
    if args.chat_template is not None and args.hf_chat_template_name is not None:
        raise ValueError("Give --chat-template or --hf-chat-template-name, not both.")
    for name in ("ssl_ca_certs", "ssl_keyfile_password", "enable_ssl_refresh"):
        if getattr(args, name) and args.ssl_certfile is None:
            raise ValueError(f"{flag(name)} needs --ssl-certfile and --ssl-keyfile.")


def _check_browsers_and_keys(args: ServerArgs) -> None:
    for name in ("api_key", "admin_api_key"):
        if (key := getattr(args, name)) is not None:
            check_key(key, flag(name))
    if args.fastapi_root_path and not re.fullmatch(r"(/[^/\s?#]+)+", args.fastapi_root_path):
        raise ValueError(f"--fastapi-root-path begins with / and does not end with it; got {args.fastapi_root_path!r}.")
    for origin in [] if args.allowed_origins is None else args.allowed_origins.split(","):
        if not _ORIGIN.fullmatch(origin.strip()):
            raise ValueError(f"--allowed-origins holds scheme://host or scheme://host:port, or *; got {origin!r}.")


def _check_white_space(args: ServerArgs) -> None:
    pattern = args.constrained_json_whitespace_pattern
    if pattern is None:
        return
    if args.constrained_json_disable_any_whitespace:
        raise ValueError("--constrained-json-whitespace-pattern has no effect with --constrained-json-disable-any-whitespace.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--constrained-json-whitespace-pattern must be a regular expression: {error}.") from error


def _check_hosts(args: ServerArgs) -> None:
    if args.dist_init_addr is not None:
        split_address("--dist-init-addr", args.dist_init_addr)
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank must be in [0, {args.nnodes - 1}] with --nnodes {args.nnodes}; got {args.node_rank}.")
    if args.nnodes == 1:
        return
    together = f"--nnodes {args.nnodes}"
    if args.dist_init_addr is None:
        raise ValueError(f"{together} needs --dist-init-addr, where host 0 waits for the others.")
    if args.pp_size * args.tp_size % args.nnodes:
        stages = "" if args.pp_size == 1 else f"--pp-size {args.pp_size} times "
        raise ValueError(f"{stages}--tp-size {args.tp_size} cannot be divided among {args.nnodes} hosts (--nnodes).")
    if args.dp_size > 1:
        raise ValueError(f"{together} with --dp-size {args.dp_size}: run a server for each replica, and a router before them.")
    if args.restart_workers:
        raise ValueError(
            f"--restart-workers with {together}: a lost host ends all of them; whoever started them starts them again."
        )
    if args.warmup == "early":
        raise ValueError(f"--warmup early with {together}: hosts must have the same programs at any time; leave it at full.")


def _check_stages(args: ServerArgs) -> None:
    stages, partition = f"--pp-size {args.pp_size}", args.pp_layer_partition
    if partition is not None and (len(partition) != args.pp_size or min(partition, default=0) < 1):
        numbers = ",".join(map(str, partition))
        raise ValueError(
            f"--pp-layer-partition must hold a number of layers, at least 1, for each stage of {stages}; got {numbers}."
        )
    if args.enable_dynamic_chunking and args.chunked_prefill_size == -1:
        raise ValueError("--enable-dynamic-chunking needs chunked prefill; do not set --chunked-prefill-size -1.")
    if args.pp_size == 1:
        return
    if args.enable_return_routed_experts:
        raise ValueError(f"--enable-return-routed-experts needs --pp-size 1, so that one stage has all layers; got {stages}.")
    if args.nnodes > 1:
        _check_stages_on_hosts(args)
    if args.warmup == "early":
        raise ValueError(f"--warmup early with {stages}: all stages need a program before a step can use it; leave it at full.")


def _check_stages_on_hosts(args: ServerArgs) -> None:
    stages, per_host = f"--pp-size {args.pp_size} with --nnodes {args.nnodes}", args.pp_size * args.tp_size // args.nnodes
    if args.tp_size % per_host and per_host % args.tp_size:
        raise ValueError(
            f"{stages} and --tp-size {args.tp_size}: a stage must have whole hosts, or a host whole stages; each host has "
            f"{per_host} devices."
        )
    if args.expert_distribution_recorder_mode is not None:
        raise ValueError(
            f"--expert-distribution-recorder-mode with {stages}: no host sees the experts of all stages; record on one host."
        )


def _check_labels(args: ServerArgs) -> None:
    extra = json.loads(args.extra_metric_labels or "{}")
    for name in (*extra, *(args.tokenizer_metrics_allowed_custom_labels or ())):
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in _TAKEN_LABELS:
            raise ValueError(f"A metric's label must be a word of letters, digits and _ that is not in use; got {name!r}.")
    if not all(isinstance(value, str) for value in extra.values()):
        raise ValueError(f"--extra-metric-labels must hold texts; got {args.extra_metric_labels!r}.")
    if both := set(extra) & set(args.tokenizer_metrics_allowed_custom_labels or ()):
        raise ValueError(f"--extra-metric-labels must not name labels that requests may bring; got {min(both)!r}.")


def _check_deterministic(args: ServerArgs) -> None:
    """What would give a token's computation another shape, or another order of sums."""
    if not args.enable_deterministic_inference:
        return
    for name, value in (("speculative_algorithm", None), ("attn_dp_size", 1), ("dcp_size", 1)):
        if (given := getattr(args, name)) != value:
            raise ValueError(f"--enable-deterministic-inference must be off with {flag(name)}; got {flag(name)} {given}.")


def _check_ranges(args: ServerArgs) -> None:
    at_least_one = (
        "context_length", "max_running_requests", "max_total_tokens", "max_prefill_tokens", "prefill_max_requests",
        "stream_interval", "tp_size", "pp_size", "pp_max_micro_batch_size", "ep_size", "dp_size", "attn_dp_size", "dcp_size",
        "scheduler_recv_interval", "decode_log_interval",
        "max_body_size_mb", "max_mamba_cache_size", "mamba_track_interval", "limit_concurrency", "max_reply_numbers",
        "speculative_ngram_min_match_window_size", "nnodes", "max_lora_rank", "max_loras_per_batch",
    )  # fmt: skip
    for name in at_least_one:
        _require(args, name, lambda v: v >= 1, "at least 1")
    for name in (
        "max_queued_requests",
        "max_stored_responses",
        "prefill_decode_interval",
        "max_top_logprobs",
        "ep_num_redundant_experts",
        "shutdown_timeout_s",
    ):
        _require(args, name, lambda v: v >= 0, "at least 0")
    for name in (
        "request_waiting_timeout_s",
        "request_running_timeout_s",
        "watchdog_timeout",
        "soft_watchdog_timeout",
        "grammar_compile_timeout_s",
        "custom_logit_processor_timeout_s",
        "stream_stall_timeout_s",
        "dist_timeout",
    ):
        _require(args, name, lambda v: v > 0, "above 0")
    least = args.speculative_ngram_min_match_window_size
    _require(args, "speculative_ngram_max_match_window_size", lambda v: v >= least, f"at least {least}, the smallest window")
    _require(args, "speculative_num_draft_tokens", lambda v: v >= 2, "at least 2: the certain token and one guess")
    _require(args, "log_requests_level", lambda v: 0 <= v <= 3, "in [0, 3]")
    _require(args, "schedule_conservativeness", lambda v: v >= 0, "at least 0")
    _require(args, "page_size", lambda v: 1 <= v <= LARGEST_PAGE_SIZE, f"in [1, {LARGEST_PAGE_SIZE}]")
    _require(args, "chunked_prefill_size", lambda v: v == -1 or v >= 1, "-1 (off) or at least 1")
    _require(args, "mem_fraction_static", lambda v: 0 < v <= 1, "in (0, 1]")
    _require(args, "swa_full_tokens_ratio", lambda v: 0 < v <= 1, "in (0, 1]")
    for name in ("tokenizer_worker_num", "detokenizer_worker_num"):
        _require(args, name, lambda v: 1 <= v <= MOST_WORKERS, f"in [1, {MOST_WORKERS}]")
    _require(args, "port", lambda v: 0 <= v <= 65535, "in [0, 65535]")
    for name in ("prefill_token_buckets", "decode_row_buckets"):
        _require(args, name, lambda v: v and min(v) >= 1 and list(v) == sorted(set(v)), "increasing positive numbers")
    for name in METRIC_BUCKETS:
        _require(args, name, _are_buckets, "up to 100 increasing positive numbers")


def _are_buckets(bounds: tuple[float, ...]) -> bool:
    return 1 <= len(bounds) <= 100 and min(bounds) > 0 and list(bounds) == sorted(set(bounds)) and max(bounds) < float("inf")


def _require(args: ServerArgs, name: str, holds: Callable[[Any], Any], rule: str) -> None:
    value = getattr(args, name)
    if value is not None and not holds(value):
        raise ValueError(f"{flag(name)} must be {rule}; got {value!r}.")


def _check_json(args: ServerArgs) -> None:
    for name in (field.name for field in dataclasses.fields(args) if field.metadata["is_json"]):
        text = getattr(args, name)
        try:
            ok = text is None or isinstance(json.loads(text), dict)
        except ValueError:
            ok = False
        if not ok:
            raise ValueError(f"{flag(name)} must be a JSON object; got {text!r}.")


def flag(name: str) -> str:
    """Of an option, as the command line has it."""
    return "--" + name.replace("_", "-")


def check_key(key: str, source: str) -> None:
    """Raises ValueError if no request could bring the key, or any could."""
    if not key.strip():
        raise ValueError(f"{source} is empty: anybody could bring that key. Leave it away for a server without a key.")
    if key != key.strip() or not key.isprintable():
        raise ValueError(f"{source} holds blanks around the key or characters that no header can carry: it would never match.")
