"""What users derive their processors from, and how code travels: SGLang's string, JSON around the hexadecimals of a pickle."""

from __future__ import annotations

import abc
import json
from types import ModuleType
from typing import Any

import numpy as np


class CustomLogitProcessor(abc.ABC):
    """Changes logits before tokens are sampled. An instance is made in a process of its own and serves every request that
    brings the same code; that process may be started anew at any time."""

    @abc.abstractmethod
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        """`logits` float32 [rows, vocabulary], which may be written to -> the same shape and type, without NaN.

        A row's dict holds the request's custom_params, and as "__req__" an object with `rid`, `origin_input_ids` (the prompt)
        and `output_ids` (what was generated so far), both lists of token ids.
        """

    @classmethod
    def to_str(cls) -> str:
        """What goes into a request's custom_logit_processor."""
        return json.dumps({"callable": load_dill().dumps(cls).hex()})

    @classmethod
    def from_str(cls, text: str) -> CustomLogitProcessor:
        """Runs whatever code the text holds."""
        processor: CustomLogitProcessor = load_dill().loads(bytes.fromhex(json.loads(text)["callable"]))()
        return processor


def load_dill() -> ModuleType:
    """ImportError, with a sentence, if it is not installed."""
    try:
        import dill
    except ImportError:
        raise ImportError(
            "Logit processors of users' own travel as dill writes them: `pip install dill`, or jaxserve[processors]."
        ) from None
    module: ModuleType = dill
    return module
