"""Processors on their way to a server."""

from __future__ import annotations

import json
import sys

import dill
import user_code

from jaxserve.logit_processors.names import user_code as code_of
from jaxserve.types import UserProcessor


def as_text(kind: type) -> str:
    """What `to_str` writes where the class is defined in a script: the class itself, not where to find it."""
    module = sys.modules[kind.__module__]
    with_value = dill.settings["byref"]
    kind.__module__ = "__main__"
    try:
        del sys.modules[module.__name__]
        return json.dumps({"callable": dill.dumps(kind, byref=False, recurse=True).hex()})
    finally:
        kind.__module__ = module.__name__
        sys.modules[module.__name__] = module
        dill.settings["byref"] = with_value


def sent(name: str, **params: object) -> UserProcessor:
    return UserProcessor(code_of(as_text(getattr(user_code, name))), json.dumps(params).encode())
