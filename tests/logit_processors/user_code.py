"""Processors as users write them. Tests send them by value: the process that runs them does not know this module."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.logit_processors import CustomLogitProcessor


class ForceToken(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        for line, params in zip(logits, custom_param_list, strict=True):
            line[:] = -float("inf")
            line[params["token_id"]] = 0.0
        return logits


class AddBias(CustomLogitProcessor):
    """Depends on the place: the n-th output likes token n * step."""

    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        for line, params in zip(logits, custom_param_list, strict=True):
            request = params["__req__"]
            liked = (len(request.output_ids) + 1) * params["step"] + len(request.origin_input_ids)
            line[liked % logits.shape[1]] += 1e6
        return logits


class Echo(CustomLogitProcessor):
    """Forces what it sees: the number of the outputs, then their last, and so on."""

    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        for line, params in zip(logits, custom_param_list, strict=True):
            outputs = params["__req__"].output_ids
            line[(outputs[-1] * 3 + len(outputs) if outputs else 1) % logits.shape[1]] = 1e9
        return logits


class Unchanged(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        return logits


class Raises(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        raise RuntimeError("no such luck")


class Loops(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        while True:
            pass


class LoopsWhenMade(Unchanged):
    def __init__(self) -> None:
        while True:
            pass


class Exits(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        import os

        os._exit(0)


class ExitsPolitely(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        import sys

        sys.exit(3)


class Allocates(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        return logits + np.zeros(1 << 40, np.float32)[0]


class Prints(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        import sys

        for stream in (sys.stdout, sys.stderr):
            print("x" * 100_000, file=stream, flush=True)
        return logits


class Babbles(CustomLogitProcessor):
    """Writes to everything that is open."""

    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        import contextlib
        import os

        for number in range(3, 256):
            with contextlib.suppress(OSError):
                os.write(number, b"\xff" * 64)
        return logits


class HalfPrecision(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        return logits.astype(np.float64)


class OneLine(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        return logits[0]


class AList(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> Any:
        return logits.tolist()


class Nan(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        return logits * np.float32("nan")


class Nothing(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        logits[:] = -np.inf
        return logits


class NotCallable:
    pass
