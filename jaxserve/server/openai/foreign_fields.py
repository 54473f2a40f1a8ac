"""Fields of OpenAI's and SGLang's requests that are not served, in one place: which are refused, and which change nothing.

A field that stands neither here nor in a request's struct is refused by name, too: a misspelt one must not be dropped silently.
"""

from __future__ import annotations

from typing import Any

from jaxserve.server.foreign_fields import OFF, ForeignFields

# Accepted without effect, with the reason.
WITHOUT_EFFECT = {
    "user": "names the end user in OpenAI's records",
    "safety_identifier": "names the end user in OpenAI's records",
    "metadata": "labels what OpenAI stores",
    "store": "whether OpenAI keeps the reply; nothing is kept here",
    "service_tier": "OpenAI's price for waiting less",
    "prompt_cache_key": "helps OpenAI's routing; prefixes are found without a key here",
    "prompt_cache_retention": "how long OpenAI keeps a prefix; it stays here while there is room",
    "session_id": "for SGLang's cache of sessions; prefixes are found without it here",
    "prompt_cache_options": "how OpenAI keeps prefixes; all are kept here while there is room",
}

# Not served yet; accepted with these values only.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("watermark", "return_sampling_mask", "return_spec_tokens_details",
         "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank",
         "images_config", "mm_processor_kwargs"),
        OFF,
    ),
}  # fmt: skip
_UNSERVED_CHAT = {
    **_UNSERVED,
    **dict.fromkeys(
        ("functions", "audio", "prediction", "moderation", "chat_template", "task", "return_input_ids_in_sglext",
         "return_output_ids_in_sglext", "sampling_logprobs_mode", "return_flat_raw_output_top_logprobs",
         "return_flat_raw_top_logprobs_b64", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "video_config"),
        OFF,
    ),
    "function_call": (*OFF, "none", "auto"),
    "include_reasoning": (True,),  # vLLM's; its router sends it with every request
    "modalities": ([], ["text"]),
    "verbosity": ("medium",),
    "web_search_options": (),  # {} asks for a search
}  # fmt: skip

COMPLETION = ForeignFields(_UNSERVED, WITHOUT_EFFECT)
CHAT = ForeignFields(_UNSERVED_CHAT, WITHOUT_EFFECT)
# Of a chat that is only rendered; llm-d says that the answer follows.
RENDERED_CHAT = ForeignFields({**_UNSERVED_CHAT, "documents": OFF, "add_generation_prompt": (True,)}, WITHOUT_EFFECT)

# Of a message.
MESSAGE = ForeignFields(
    dict.fromkeys(("tools", "prefix", "phase", "audio", "function_call"), OFF),
    {
        "refusal": "comes with the messages of OpenAI's replies",
        "annotations": "comes with the messages of OpenAI's replies",
    },
)
# Of a content part.
TEXT_PART = ForeignFields({}, dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), "all prefixes are cached"))
