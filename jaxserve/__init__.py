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
    from jaxserve.server.mismatch import MismatchReport as MismatchReport
    from jaxserve.server.mismatch import compare_logprobs as compare_logprobs
    from jaxserve.server.remote import RemoteEngine as RemoteEngine
    from jaxserve.server.rollouts import Rollouts as Rollouts
    from jaxserve.server.weight_sender import WeightSender as WeightSender
    from jaxserve.types import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "MismatchReport",
    "RemoteEngine",
    "Rollouts",
    "SamplingParams",
    "ServerArgs",
    "WeightSender",
    "__version__",
    "compare_logprobs",
]

_HOMES = {
    "Engine": "jaxserve.server.engine",
    "MismatchReport": "jaxserve.server.mismatch",
    "RemoteEngine": "jaxserve.server.remote",
    "Rollouts": "jaxserve.server.rollouts",
    "SamplingParams": "jaxserve.types",
    "ServerArgs": "jaxserve.config",
    "WeightSender": "jaxserve.server.weight_sender",
    "compare_logprobs": "jaxserve.server.mismatch",
}

point_jax_to_toolkit()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
