"""The arguments of a call as JSON, for protocols that tell them as an object rather than as a text."""

from __future__ import annotations

import msgspec

# Under this name stand arguments that are no object, as Anthropic advises its users.
_INVALID = "INVALID_JSON"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def arguments_object(text: str) -> msgspec.Raw:
    """The text as it stands, if it is an object; of what was cut off or is none, an object that holds the text."""
    try:
        _OBJECT.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode({_INVALID: text}))
    return msgspec.Raw((text or "{}").encode())
