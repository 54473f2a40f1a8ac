"""Fields of Anthropic's requests that are not served: which are refused, and which change nothing.

Claude Code and the `anthropic` package send most of what is accepted here to every server. What asks for a tool, a file or an
agent of Anthropic's is refused by name.
"""

from __future__ import annotations

from typing import Any

from jaxserve.server.foreign_fields import OFF, ForeignFields

_CACHE_CONTROL = {"cache_control": "all prefixes are cached"}
_NO_CITATIONS: tuple[Any, ...] = (*OFF, {"enabled": False})

# Accepted without effect, with the reason.
WITHOUT_EFFECT = {
    **_CACHE_CONTROL,
    "metadata": "names the end user in Anthropic's records",
    "service_tier": "Anthropic's price for waiting less",
    "speed": "Anthropic's price for waiting less",
    "inference_geo": "where Anthropic computes",
    "user_profile_id": "whom Anthropic bills",
    "workspace_id": "whom Anthropic bills",
    "diagnostics": "asks why Anthropic's cache missed",
    "betas": "features of Anthropic's server; the package sends them as a header",
}
REQUEST = ForeignFields(
    dict.fromkeys(
        ("container", "mcp_servers", "fallbacks", "fallback_credit_token", "compaction", "thread", "billing_policy"), OFF
    ),
    WITHOUT_EFFECT,
)
# Kinds of context_management.edits that leave out what the model may do without; here it stays.
EDITS_WITHOUT_EFFECT = ("clear_thinking_", "clear_tool_uses_")

MESSAGE = ForeignFields()
TEXT = ForeignFields({"citations": _NO_CITATIONS}, _CACHE_CONTROL)
THINKING = ForeignFields({}, {"signature": "proves to Anthropic that the thinking is its own"})
REDACTED_THINKING = ForeignFields({}, {"data": "only Anthropic can read it"})
TOOL_USE = ForeignFields(
    {"toolset_name": OFF, "caller": ({"type": "direct"},)},
    _CACHE_CONTROL,
)
TOOL_RESULT = ForeignFields(
    {"toolset_name": OFF},
    {**_CACHE_CONTROL, "is_error": "templates have no place for it; the content says what failed"},
)
TOOL_REFERENCE = ForeignFields({}, _CACHE_CONTROL)
SEARCH_RESULT = ForeignFields({"citations": _NO_CITATIONS}, _CACHE_CONTROL)
TOOL = ForeignFields(
    {"allowed_callers": (["direct"],)},
    {
        **_CACHE_CONTROL,
        "defer_loading": "all tools are shown from the beginning",
        "eager_input_streaming": "arguments are always streamed as they come",
        "input_examples": "templates have no place for them",
    },
)
