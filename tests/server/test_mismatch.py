"""compare_logprobs: its numbers by hand and by the plainest loops, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import jaxserve
from jaxserve import Rollouts, compare_logprobs
from jaxserve.server.mismatch import TokenMismatch

HALF, QUARTER, EIGHTH = (math.log(share) for share in (0.5, 0.25, 0.125))


def rollouts_of(logprobs: np.ndarray | None, lengths: list[int], tokens: np.ndarray) -> Rollouts:
    count = len(tokens)
    return Rollouts(
        prompt_tokens=np.zeros((count, 1), np.int32),
        prompt_lengths=np.ones(count, np.int32),
        tokens=tokens,
        lengths=np.array(lengths, np.int32),
        logprobs=logprobs,
        finishes=np.zeros(count, np.int8),
        texts=[""] * count,
        versions=["1"],
        token_versions=np.zeros(tokens.shape, np.int32),
        num_samples=1,
        pad_token_id=0,
    )


def test_numbers_that_one_can_compute_by_hand() -> None:
    ours = np.array([[HALF, QUARTER, 0.0], [QUARTER, 0.0, 0.0]], np.float32)
    trainers = np.array([[HALF, EIGHTH, math.nan], [HALF, 7.0, 7.0]], np.float32)
    tokens = np.array([[5, 6, 0], [7, 0, 0]], np.int32)
    report = compare_logprobs(rollouts_of(ours, [2, 1], tokens), trainers, num_worst=2)
    assert report.num_tokens == 3
    log2 = math.log(2)
    found = (report.max_abs_difference, report.mean_abs_difference, report.mean_difference, report.kl_k1)
    assert found == pytest.approx((log2, 2 * log2 / 3, 0.0, 0.0), abs=1e-7)
    # exp(d) - 1 - d: 0, 1/2 - 1 + log 2, 2 - 1 - log 2
    assert report.kl_k3 == pytest.approx(0.5 / 3)
    assert (report.ratio_min, report.ratio_mean, report.ratio_max) == pytest.approx((0.5, 3.5 / 3, 2.0))
    assert report.clipped_share == pytest.approx(2 / 3)
    # (1/2, 1/4, 1/4) and (1/2, 1/8, 1/2)
    assert report.probability_correlation == pytest.approx(np.corrcoef([0.5, 0.25, 0.25], [0.5, 0.125, 0.5])[0, 1])
    assert report.worst == (
        TokenMismatch(0, 1, 6, pytest.approx(QUARTER), pytest.approx(EIGHTH)),
        TokenMismatch(1, 0, 7, pytest.approx(QUARTER), pytest.approx(HALF)),
    )


def test_numbers_are_those_of_loops() -> None:
    rng = np.random.default_rng(0)
    ours = -rng.exponential(1.0, (7, 11))
    trainers = np.minimum(ours + rng.normal(0, 0.2, ours.shape), 0)
    mask = rng.random(ours.shape) < 0.7
    report = compare_logprobs(ours, trainers, mask=mask, clip=0.1)
    pairs = [(ours[at], trainers[at]) for at in np.ndindex(ours.shape) if mask[at]]
    differences = [theirs - mine for mine, theirs in pairs]
    ratios = [math.exp(d) for d in differences]
    assert report.num_tokens == len(pairs)
    assert report.kl_k1 == pytest.approx(-sum(differences) / len(pairs))
    assert report.kl_k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / len(pairs))
    assert report.mean_abs_difference == pytest.approx(sum(map(abs, differences)) / len(pairs))
    assert report.clipped_share == pytest.approx(sum(not 0.9 <= ratio <= 1.1 for ratio in ratios) / len(pairs))
    assert [abs(token.trainers - token.ours) for token in report.worst] == pytest.approx(
        sorted(map(abs, differences), reverse=True)[:5]
    )
    assert all(mask[token.row, token.position] and token.token_id is None for token in report.worst)


def test_equal_logprobs_have_nothing_to_report() -> None:
    logprobs = np.log(np.array([[0.5, 0.1], [0.9, 0.2]]))
    report = compare_logprobs(logprobs, logprobs)
    assert (report.max_abs_difference, report.kl_k1, report.kl_k3, report.clipped_share) == (0, 0, 0, 0)
    assert report.probability_correlation == pytest.approx(1)
    assert math.isnan(compare_logprobs(np.full((1, 3), -1.0), np.full((1, 3), -2.0)).probability_correlation)
    assert compare_logprobs(np.full((1, 2), -1000.0), np.zeros((1, 2))).ratio_max == math.inf


def test_the_table() -> None:
    ours = np.array([[HALF, QUARTER]])
    text = str(compare_logprobs(ours, np.array([[HALF, EIGHTH]]), token_ids=np.array([[5, 1234]])))
    assert text.splitlines() == [
        "tokens       2",
        "difference   max 0.693  mean 0.347  signed mean -0.347",
        "KL           k1 +0.347  k3 0.0966",
        "ratio        min 0.5000  mean 0.7500  max 1.0000  outside of [0.8, 1.2] 50.00%",
        "correlation  1.000000 of probabilities",
        "worst           row  position     token      ours  trainer's",
        "                  0         1      1234   -1.3863    -2.0794",
        "                  0         0         5   -0.6931    -0.6931",
    ]
    assert "worst" not in str(compare_logprobs(ours, ours, num_worst=0))
    assert str(compare_logprobs(ours, ours)).endswith("         -   -1.3863    -1.3863")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainers": np.zeros((2, 2))}, r"trainer's logprobs must have the shape of our logprobs, \[2, 3\]; got \[2, 2\]\."),
        ({"trainers": np.zeros(())}, r"got \[\]\."),
        ({"ours": np.zeros(3)}, r"Our logprobs must have the shape \[rows, width\]; got \[3\]\."),
        ({"mask": np.ones((1, 3), bool)}, r"mask must have the shape of our logprobs, \[2, 3\]; got \[1, 3\]\."),
        ({"mask": np.ones((2, 3))}, r"mask must be of bool; got float64\."),
        ({"mask": np.eye(2, 3, dtype=bool) & [True, False, False]}, r"needs at least 2 tokens; got 1 \(mask\)\."),
        ({"token_ids": np.zeros((2, 4))}, r"token_ids must have the shape of our logprobs, \[2, 3\]; got \[2, 4\]\."),
        ({"trainers": np.array([[0, 0, 0], [0, np.nan, 0]])}, r"trainer's logprobs must be finite; got nan at row 1"),
        ({"ours": np.array([[0, 0, -np.inf], [0, 0, 0]])}, r"Our logprobs must be finite; got -inf at row 0, position 2\."),
        ({"trainers": np.array([[0, 0.9, 0], [0, 0, 0]])}, r"trainer's logprobs must be at most 0; got 0\.9 at row 0"),
        ({"clip": 0.0}, r"clip must be above 0; got 0\.0\."),
        ({"num_worst": -1}, r"num_worst must be at least 0; got -1\."),
    ],
)  # fmt: skip
def test_what_cannot_be_compared(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"ours": np.zeros((2, 3)), "trainers": np.zeros((2, 3))} | changes
    with pytest.raises(ValueError, match=message):
        compare_logprobs(given.pop("ours"), given.pop("trainers"), **given)


def test_rollouts_without_logprobs_are_refused() -> None:
    tokens = np.zeros((1, 2), np.int32)
    with pytest.raises(ValueError, match=r"needs the rollouts' logprobs; they were made with logprobs=False\."):
        compare_logprobs(rollouts_of(None, [2], tokens), np.zeros((1, 2)))


def test_what_a_user_imports() -> None:
    assert {"Rollouts", "compare_logprobs", "MismatchReport"} <= set(jaxserve.__all__)
    assert all(getattr(jaxserve, name) is not None for name in jaxserve.__all__)
