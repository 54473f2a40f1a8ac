"""The ranges of sampling parameters: what passes can be computed with in float32."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from jaxserve.types import SamplingParams

VOCAB_SIZE = 100


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -1e-9, "non-negative"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", 1.1e6, "at most 1e+06"),
        ("temperature", 1e38, "at most 1e+06"),
        ("temperature", 1e39, "at most 1e+06"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", math.nan, "in (0, 1]"),
        ("min_p", -1e-45, "in [0, 1]"),
        ("min_p", math.nan, "in [0, 1]"),
        ("repetition_penalty", 1e-45, "at least 1e-06"),
        ("repetition_penalty", 0.0, "in (0, 2]"),
        ("repetition_penalty", math.nan, "in (0, 2]"),
        ("frequency_penalty", math.nan, "in [-2, 2]"),
        ("presence_penalty", math.inf, "in [-2, 2]"),
    ],
)
def test_a_number_that_cannot_be_computed_with_is_refused(field: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*{re.escape(rule)}.*, got {re.escape(repr(value))}\\.$"):
        SamplingParams(**{field: value}).verify(VOCAB_SIZE)


@pytest.mark.parametrize("bias", [4e38, 1e5, -4e38, math.inf, math.nan, 10**30])
def test_a_bias_beyond_its_range_is_refused(bias: float) -> None:
    with pytest.raises(ValueError, match=r"logit_bias of token 5 must be a number in \[-10000, 10000\], got"):
        SamplingParams(logit_bias={5: bias}).verify(VOCAB_SIZE)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-30},
        {"temperature": 1e6},
        {"top_p": 5e-324},
        {"top_p": 1e-40},
        {"min_p": 5e-324},
        {"repetition_penalty": 1e-6},
        {"logit_bias": {5: 1e4, 6: -1e4, 7: 100}},
        {"logit_bias": {5: -math.inf}},  # in Python one may say so: the token is forbidden
    ],
)
def test_the_ends_of_the_ranges_pass(params: dict[str, Any]) -> None:
    SamplingParams(**params).verify(VOCAB_SIZE)
