"""What `jaxserve bench serving` can be told: names and defaults are those of SGLang's bench_serving wherever it has them.

Each default stands here alone; the command line reads names, types, defaults and help from the fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

NATIVE, COMPLETIONS, CHAT = "native", "completions", "chat"
# Which API each backend speaks.
APIS = {
    "jaxserve": NATIVE, "sglang": NATIVE, "sglang-native": NATIVE,
    "sglang-oai": COMPLETIONS, "vllm": COMPLETIONS, "sglang-oai-chat": CHAT, "vllm-chat": CHAT,
}  # fmt: skip
DATASETS = ("random", "random-ids", "sharegpt", "generated-shared-prefix", "multi-turn", "json-schema", "custom")
_FROM_FILES = ("sharegpt", "custom")
_PORTS = {"vllm": 8000, "vllm-chat": 8000}
_DEFAULT_PORT = 30000
# Limits of --goodput, with the field of a request's times that each is about.
SLO_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}


def opt(default: Any, help: str, *, choices: Sequence[str] = (), repeated: bool = False) -> Any:
    metadata = {"help": help, "choices": tuple(choices) or None, "repeated": repeated}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions:
    # --- the server
    backend: str = opt("jaxserve", "Which API is spoken: /generate (jaxserve, sglang, sglang-native), OpenAI's completions "
                       "(sglang-oai, vllm) or OpenAI's chat (-chat).", choices=tuple(APIS))  # fmt: skip
    base_url: str | None = opt(None, "Address of the server, instead of --host and --port.")
    host: str = opt("127.0.0.1", "Host of the server.")
    port: int | None = opt(None, "Port of the server; by default 30000, for vllm 8000.")
    model: str | None = opt(None, "Name of the served model; by default the first that /v1/models names.")
    tokenizer: str | None = opt(None, "Folder or name of the tokenizer, or demo; by default the server's, if it is found here.")
    api_key: str | None = opt(None, "The server's API key; by default JAXSERVE_API_KEY of the environment.")
    header: tuple[str, ...] = opt((), "A header for every request, as Name=value; may be repeated.", repeated=True)
    # --- what is sent
    dataset_name: str = opt("random", "Where prompts come from.", choices=DATASETS)
    dataset_path: str = opt("", "File of prompts: for sharegpt JSON, for custom and json-schema JSON lines; for random a text.")
    num_prompts: int = opt(1000, "Requests (of multi-turn: conversations).")
    random_input_len: int = opt(1024, "Tokens of a random prompt (of multi-turn: of each turn).")
    random_output_len: int = opt(1024, "Tokens asked for.")
    random_range_ratio: float = opt(
        0.0, "Lengths are uniform between this share of the full length (at least 1) and all of it."
    )
    num_turns: int = opt(3, "Turns of a multi-turn conversation.")
    sharegpt_output_len: int | None = opt(None, "Tokens asked for, instead of the length of each answer in the file.")
    sharegpt_context_len: int | None = opt(None, "Leave out prompts that are longer than this together with their answer.")
    gsp_num_groups: int = opt(64, "generated-shared-prefix: system prompts.")
    gsp_prompts_per_group: int = opt(16, "generated-shared-prefix: prompts behind each system prompt.")
    gsp_system_prompt_len: int = opt(2048, "generated-shared-prefix: tokens of a system prompt.")
    gsp_question_len: int = opt(128, "generated-shared-prefix: tokens of a question.")
    gsp_output_len: int = opt(256, "generated-shared-prefix: tokens asked for.")
    gsp_range_ratio: float = opt(1.0, "generated-shared-prefix: as --random-range-ratio.")
    gsp_num_turns: int = opt(1, "generated-shared-prefix: questions of each conversation.")
    gsp_ordered: bool = opt(False, "generated-shared-prefix: send group after group instead of shuffled.")
    tokenize_prompt: bool = opt(False, "Send token ids instead of text; not with chat.")
    seed: int = opt(42, "Seed of prompts, lengths and arrivals.")
    temperature: float = opt(0.0, "Sampling temperature.")
    top_p: float = opt(1.0, "Sampling top_p.")
    disable_ignore_eos: bool = opt(False, "Let answers end where the model ends them.")
    disable_stream: bool = opt(False, "Ask for whole replies: no TTFT, TPOT and ITL then.")
    lora_name: tuple[str, ...] = opt((), "A LoRA adapter of the server's; may be repeated: each request has one of them, at "
                                     "random.", repeated=True)  # fmt: skip
    extra_request_body: str | None = opt(None, "JSON object of more fields for every request.")
    # --- how it is sent
    request_rate: float = opt(math.inf, "Requests per second, arriving at random (Poisson); inf: all at once.")
    ramp_up_strategy: str | None = opt(None, "Let the rate grow over the run, from --ramp-up-start-rps to --ramp-up-end-rps.",
                                       choices=("linear", "exponential"))  # fmt: skip
    ramp_up_start_rps: float | None = opt(None, "Requests per second at the start.")
    ramp_up_end_rps: float | None = opt(None, "Requests per second at the end.")
    max_concurrency: int | None = opt(None, "At most so many requests at once; the others wait here.")
    request_timeout_s: float = opt(21600.0, "Give a request up after so many seconds.")
    warmup_requests: int = opt(1, "Requests before the run, which do not count.")
    flush_cache: bool = opt(False, "Empty the server's prefix cache before the run.")
    client_processes: int = opt(0, "Processes that send; 0: as many as concurrency and cores suggest.")
    client_ceiling: str = opt("auto", "Measure how many events per second the client itself can take: auto (once for this "
                              "machine), measure (now), off.", choices=("auto", "measure", "off"))  # fmt: skip
    # --- what is told
    goodput: tuple[str, ...] = opt((), "Limits in ms, as ttft:200, tpot:30 or e2el:5000; may be repeated or joined by commas. "
                                   "Goodput is what kept them all.", repeated=True)  # fmt: skip
    output_file: str | None = opt(None, "Append the run to this file, as one line of JSON.")
    output_details: bool = opt(False, "Add every request's numbers and text to that line.")
    cache_report: bool = opt(False, "Ask OpenAI APIs for cached tokens, too (sglang-oai, sglang-oai-chat).")
    tag: str | None = opt(None, "A word of yours for the output file.")
    disable_tqdm: bool = opt(False, "No progress bar.")
    # --- profile
    profile: bool = opt(False, "Take a profile of the run: /start_profile before it, /stop_profile behind it.")
    profile_activities: tuple[str, ...] = opt((), "What to record, in the server's words; may be repeated.", repeated=True)
    profile_start_step: int | None = opt(None, "Forward steps before it begins.")
    profile_num_steps: int | None = opt(None, "Forward steps after which it ends by itself.")
    profile_by_stage: bool = opt(False, "Prefill and decode steps apart (5 steps unless --profile-num-steps).")
    profile_stages: tuple[str, ...] = opt((), "Stages to record; may be repeated.", repeated=True)
    profile_output_dir: str | None = opt(None, "The server's folder for it.")
    profile_prefix: str | None = opt(None, "How its files' names begin.")

    def __post_init__(self) -> None:
        """Raises ValueError with a sentence for the user."""
        self._check_numbers()
        if self.dataset_name in _FROM_FILES and not self.dataset_path:
            raise ValueError(f"--dataset-name {self.dataset_name} needs a file: --dataset-path.")
        if self.tokenize_prompt and (self.api == CHAT or self.dataset_name in ("multi-turn", "json-schema", *_FROM_FILES)):
            raise ValueError("--tokenize-prompt is for random, random-ids and generated-shared-prefix, and not for chat.")
        if self.tokenize_prompt and self.gsp_num_turns > 1:
            raise ValueError("--tokenize-prompt is for conversations of one turn.")
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if (self.ramp_up_strategy is None) != (ramp == (None, None)) or (self.ramp_up_strategy and None in ramp):
            raise ValueError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together.")
        if self.ramp_up_strategy and math.isfinite(self.request_rate):
            raise ValueError("Give --request-rate or --ramp-up-strategy, not both.")
        for line in self.header:
            if not line.partition("=")[0].strip() or "=" not in line:
                raise ValueError(f"--header is Name=value; got {line!r}.")
        _ = self.extra_body, self.slo_ms

    def _check_numbers(self) -> None:
        from_0 = ("warmup_requests", "client_processes", "temperature", "seed", "profile_start_step")
        from_1 = ("num_prompts", "random_input_len", "random_output_len", "num_turns", "sharegpt_output_len",
                  "sharegpt_context_len", "gsp_num_groups", "gsp_prompts_per_group", "gsp_system_prompt_len",
                  "gsp_question_len", "gsp_output_len", "gsp_num_turns", "max_concurrency", "profile_num_steps")  # fmt: skip
        for name in (*from_0, *from_1):
            value, least = getattr(self, name), int(name in from_1)
            if value is not None and not value >= least:
                raise ValueError(f"{_flag(name)} must be at least {least}; got {value}.")
        for name in ("request_rate", "ramp_up_start_rps", "ramp_up_end_rps", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{_flag(name)} must be above 0; got {value}.")
        for name in ("random_range_ratio", "gsp_range_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{_flag(name)} must be between 0 and 1; got {getattr(self, name)}.")
        if self.port is not None and not 0 < self.port < 1 << 16:
            raise ValueError(f"--port must be between 1 and 65535; got {self.port}.")

    @property
    def api(self) -> str:
        return APIS[self.backend]

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port or _PORTS.get(self.backend, _DEFAULT_PORT)}"

    @property
    def headers(self) -> dict[str, str]:
        pairs = (line.partition("=") for line in self.header)
        own = {name.strip(): value.strip() for name, _, value in pairs}
        return ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}) | own

    @property
    def extra_body(self) -> dict[str, Any]:
        try:
            body = json.loads(self.extra_request_body or "{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ValueError(f"--extra-request-body must be a JSON object; got {self.extra_request_body!r}.")
        return body

    @property
    def slo_ms(self) -> dict[str, float]:
        return slo_limits(self.goodput)

    def profile_body(self) -> dict[str, Any]:
        num_steps = self.profile_num_steps or (5 if self.profile_by_stage else None)
        body = {
            "activities": list(self.profile_activities), "start_step": self.profile_start_step, "num_steps": num_steps,
            "profile_by_stage": self.profile_by_stage, "profile_stages": list(self.profile_stages),
            "output_dir": self.profile_output_dir, "profile_prefix": self.profile_prefix,
        }  # fmt: skip
        return {name: value for name, value in body.items() if value not in (None, [], False)}


def slo_limits(goodput: Sequence[str]) -> dict[str, float]:
    """What --goodput says, in ms. ValueError for what it may not say."""
    limits = {}
    for part in (part for line in goodput for part in line.replace(",", " ").split()):
        name, _, text = part.partition(":")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = math.nan
        if name not in SLO_NAMES or not limits[name] > 0:
            raise ValueError(f"--goodput is ttft:MS, tpot:MS or e2el:MS; got {part!r}.")
    return limits


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
