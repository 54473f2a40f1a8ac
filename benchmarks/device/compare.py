"""How far a kernel's result is from the reference, and whether that is near enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# ||got - expected|| / ||expected||: of everything, and of the worst single vector (one token, one head), in which one wrong
# value cannot hide. Rounding of inputs to the type is in both; of a product in float32 nothing is left.
LIMITS = {"float32": (1e-4, 1e-3), "float16": (2e-3, 1e-2), "bfloat16": (1e-2, 4e-2)}


@dataclasses.dataclass(frozen=True)
class Comparison:
    error: float
    worst_vector: float
    is_finite: bool
    zeros_kept: bool  # padding tokens gave exact zeros
    is_repeatable: bool  # the same inputs gave the same bits again: if not, something races

    def as_dict(self, dtype: str) -> dict[str, Any]:
        """With "status" failed where a limit is broken."""
        limit, vector_limit = LIMITS[dtype]
        problems = {
            f"error {self.error:.2e} is above {limit}": not self.error <= limit,
            f"the worst vector's error {self.worst_vector:.2e} is above {vector_limit}": not self.worst_vector <= vector_limit,
            "the result is not finite": not self.is_finite,
            "padding tokens are not zero": not self.zeros_kept,
            "two runs differ": not self.is_repeatable,
        }
        reason = "; ".join(text for text, holds in problems.items() if holds)
        numbers = {"error": self.error, "worst_vector_error": self.worst_vector, "limit": limit, "vector_limit": vector_limit}
        return {"status": "failed" if reason else "ok", **({"reason": reason} if reason else {}), **numbers}


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30)


def compare(run: Callable[[], jax.Array], expected: np.ndarray) -> Comparison:
    """`run` is called twice. `expected` [..., D] float32; its all-zero vectors must be met exactly."""
    first, second = (np.asarray(run()) for _ in range(2))
    got = first.astype(np.float32)
    assert got.shape == expected.shape, f"{got.shape}, expected {expected.shape}"
    norms = np.linalg.norm(expected.astype(np.float64), axis=-1)
    errors = np.linalg.norm(got.astype(np.float64) - expected, axis=-1)
    live = norms > 0
    return Comparison(
        error=relative_error(got, expected),
        worst_vector=float(np.max(errors[live] / norms[live], initial=0.0)),
        is_finite=bool(np.isfinite(got).all()),
        zeros_kept=not got[~live].any(),
        is_repeatable=first.tobytes() == second.tobytes(),
    )
