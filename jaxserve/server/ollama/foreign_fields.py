"""Fields of Ollama's requests that are not served: which are refused, and which change nothing."""

from __future__ import annotations

from jaxserve.server.foreign_fields import OFF, ForeignFields

_WITHOUT_EFFECT = {
    "truncate": "a conversation that is too long is refused",
    "shift": "a reply ends where the context ends",
}
CHAT = ForeignFields({"debug_render_only": OFF, "_debug_render_only": OFF}, _WITHOUT_EFFECT)
GENERATE = ForeignFields(
    dict.fromkeys(
        ("suffix", "template", "context", "images", "width", "height", "steps", "debug_render_only", "_debug_render_only"), OFF
    ),
    _WITHOUT_EFFECT,
)
SHOW = ForeignFields({"system": OFF, "template": OFF}, {"verbose": "all that is known is told", "options": "Ollama's own"})
MESSAGE = ForeignFields({"images": OFF})
CALL = ForeignFields({}, {"type": "there are only functions"})
# Options that change what is drawn, with the values that do not.
OPTIONS_OFF = {"typical_p": (1.0,), "tfs_z": (1.0,), "mirostat": (0,)}
