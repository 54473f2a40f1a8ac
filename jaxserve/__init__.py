"""jaxserve: an LLM inference runtime on JAX with SGLang's serving architecture.

    import jaxserve
    with jaxserve.Engine(model_path="...") as engine:
        print(engine.generate("Hello", {"max_new_tokens": 8})["text"])

The names below are imported when they are first used, so that worker processes load only what they need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.cuda_toolkit import point_jax_to_toolkit

if TYPE_CHECKING:
    from jaxserve.config import ServerArgs as ServerArgs
    from jaxserve.server.engine import Engine as Engine
    from jaxserve.server.remote import RemoteEngine as RemoteEngine
    from jaxserve.types import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "RemoteEngine", "SamplingParams", "ServerArgs", "__version__"]

_HOMES = {
    "Engine": "jaxserve.server.engine",
    "RemoteEngine": "jaxserve.server.remote",
    "SamplingParams": "jaxserve.types",
    "ServerArgs": "jaxserve.config",
}

point_jax_to_toolkit()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
