"""Fields of the Responses API that are not served: which are refused, and which change nothing."""

from __future__ import annotations

from typing import Any

from jaxserve.server.foreign_fields import OFF, ForeignFields
from jaxserve.server.openai.foreign_fields import WITHOUT_EFFECT as CHATS_WITHOUT_EFFECT

_WITHOUT_EFFECT = {name: reason for name, reason in CHATS_WITHOUT_EFFECT.items() if name not in ("metadata", "store")}
REQUEST = ForeignFields(
    {
        **dict.fromkeys(
            ("conversation", "prompt", "max_tool_calls", "moderation", "context_management", "image", "access_programs",
             "background_options", "session_id"),
            OFF,
        ),
        "stream_options": (*OFF, {"include_obfuscation": False}),
    },
    {**_WITHOUT_EFFECT, "client_metadata": "labels what OpenAI records"},
)  # fmt: skip
# Values of `include`; only logprobs are anything that there is here.
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")

_OF_REPLIES = {"id": "comes with the items of replies", "status": "comes with the items of replies"}
MESSAGE = ForeignFields({}, {**_OF_REPLIES, "phase": "comes with the items of replies"})
_CALLER: dict[str, tuple[Any, ...]] = {"caller": (*OFF, {"type": "direct"})}
_OF_CALLS = {**_OF_REPLIES, "namespace": "names are unique without it"}
CALL = ForeignFields(_CALLER, _OF_CALLS)
CALL_OUTPUT = ForeignFields(_CALLER, {**_OF_CALLS, "name": "the call has it"})
REASONING = ForeignFields({}, {**_OF_REPLIES, "summary": "the whole is there", "encrypted_content": "only OpenAI can read it"})
TEXT = ForeignFields(
    {},
    dict.fromkeys(("annotations", "logprobs"), "comes with the items of replies")
    | {"prompt_cache_breakpoint": "all are cached"},
)
TOOL = ForeignFields({"defer_loading": OFF, "output_schema": OFF})
NAMESPACE = ForeignFields({}, {"description": "the tools have their own"})
