"""The training-inference mismatch: how far a trainer's logprobs are from those that samples were drawn with.

    rollouts = engine.rollout(prompts, {"temperature": 1.0}, n=8)
    print(compare_logprobs(rollouts, trainers))

NumPy, over all tokens at once. It knows neither an Engine nor a trainer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxserve.server.rollouts import Rollouts

_FEWEST_TOKENS = 2  # of which there is a correlation
_ROUNDING = 0.01  # by which a trainer in bfloat16 may be above 0


@dataclasses.dataclass(frozen=True)
class TokenMismatch:
    """One token, by its place in the arrays."""

    row: int
    position: int
    token_id: int | None  # None: no tokens were given
    ours: float
    trainers: float


@dataclasses.dataclass(frozen=True)
class MismatchReport:
    """Of all tokens, with d = trainer's logprob - ours. As a text it is a short table.

    KL is that of ours from the trainer's distribution, estimated from tokens that were drawn from ours (J. Schulman,
    "Approximating KL Divergence", 2020): k1 has no bias and may be negative, k3 is never negative and varies less.
    """

    num_tokens: int
    max_abs_difference: float
    mean_abs_difference: float
    mean_difference: float
    kl_k1: float  # mean of -d
    kl_k3: float  # mean of exp(d) - 1 - d
    ratio_min: float  # of importance ratios, exp(d)
    ratio_mean: float
    ratio_max: float
    clip: float
    clipped_share: float  # of tokens whose ratio is outside of [1 - clip, 1 + clip]
    probability_correlation: float  # Pearson's, of exp(logprob); NaN where all tokens of one side are equally likely
    worst: tuple[TokenMismatch, ...]  # by |d|, the largest first

    def __str__(self) -> str:
        lines = [
            f"tokens       {self.num_tokens:,}",
            f"difference   max {self.max_abs_difference:.3g}  mean {self.mean_abs_difference:.3g}  "
            f"signed mean {self.mean_difference:+.3g}",
            f"KL           k1 {self.kl_k1:+.3g}  k3 {self.kl_k3:.3g}",
            f"ratio        min {self.ratio_min:.4f}  mean {self.ratio_mean:.4f}  max {self.ratio_max:.4f}  "
            f"outside of [{1 - self.clip:g}, {1 + self.clip:g}] {self.clipped_share:.2%}",
            f"correlation  {self.probability_correlation:.6f} of probabilities",
        ]
        if self.worst:
            lines.append("worst           row  position     token      ours  trainer's")
        lines += [
            f"             {token.row:>6}  {token.position:>8}  {'-' if token.token_id is None else token.token_id:>8}"
            f"  {token.ours:>8.4f}  {token.trainers:>9.4f}"
            for token in self.worst
        ]
        return "\n".join(lines)


def compare_logprobs(
    ours: Rollouts | Any,
    trainers: Any,
    *,
    mask: Any = None,
    token_ids: Any = None,
    clip: float = 0.2,
    num_worst: int = 5,
) -> MismatchReport:
    """Logprobs of the same tokens: `ours` are Rollouts, or an array [N, width]; `trainers` an array of that shape.

    `mask` bool [N, width] says what is compared: a rollout's tokens unless it is given, all of an array. `token_ids` [N, width]
    are for the report, of a rollout known. What is outside of the mask may be anything. ValueError for what cannot be compared.
    """
    if isinstance(ours, Rollouts):
        if ours.logprobs is None:
            raise ValueError("compare_logprobs needs the rollouts' logprobs; they were made with logprobs=False.")
        mask = ours.mask if mask is None else mask
        token_ids = ours.tokens if token_ids is None else token_ids
        ours = ours.logprobs
    whole = np.asarray(ours)
    if whole.ndim != 2:
        raise ValueError(f"Our logprobs must have the shape [rows, width]; got {_written(whole)}.")
    mask = np.ones(whole.shape, bool) if mask is None else _like(whole, mask, "mask")
    if mask.dtype != bool:
        raise ValueError(f"mask must be of bool; got {mask.dtype}.")
    if not clip > 0:
        raise ValueError(f"clip must be above 0; got {clip}.")
    if num_worst < 0:
        raise ValueError(f"num_worst must be at least 0; got {num_worst}.")
    if (num_tokens := int(mask.sum())) < _FEWEST_TOKENS:
        raise ValueError(f"compare_logprobs needs at least {_FEWEST_TOKENS} tokens; got {num_tokens} (mask).")
    places = np.argwhere(mask)
    of_ours = _logprobs(whole, mask, places, "Our")
    of_trainers = _logprobs(_like(whole, trainers, "The trainer's logprobs"), mask, places, "The trainer's")
    ids = None if token_ids is None else _like(whole, token_ids, "token_ids")[mask]
    return _report(places, ids, of_ours, of_trainers, clip, num_worst)


def _like(ours: np.ndarray, given: Any, name: str) -> np.ndarray:
    array = np.asarray(given)
    if array.shape != ours.shape:
        raise ValueError(f"{name} must have the shape of our logprobs, {_written(ours)}; got {_written(array)}.")
    return array


def _written(array: np.ndarray) -> str:
    return f"[{', '.join(map(str, array.shape))}]"


def _logprobs(array: np.ndarray, mask: np.ndarray, places: np.ndarray, whose: str) -> np.ndarray:
    """float64 [tokens]."""
    values: np.ndarray = array[mask].astype(np.float64)
    for is_wrong, rule in ((~np.isfinite(values), "finite"), (values > _ROUNDING, "at most 0")):
        if is_wrong.any():
            at = int(is_wrong.argmax())
            row, position = places[at].tolist()
            raise ValueError(f"{whose} logprobs must be {rule}; got {values[at]:g} at row {row}, position {position}.")
    return values


def _report(
    places: np.ndarray, token_ids: np.ndarray | None, ours: np.ndarray, trainers: np.ndarray, clip: float, num_worst: int
) -> MismatchReport:
    """places int [tokens, 2], the others [tokens]."""
    difference = trainers - ours
    distance = np.abs(difference)
    with np.errstate(over="ignore"):  # a ratio beyond all numbers is inf, and said so
        ratio = np.exp(difference)
        kl_k3 = float(np.mean(np.expm1(difference) - difference))
    worst = np.argsort(-distance, kind="stable")[:num_worst]
    return MismatchReport(
        num_tokens=len(ours),
        max_abs_difference=float(distance.max()),
        mean_abs_difference=float(distance.mean()),
        mean_difference=float(difference.mean()),
        kl_k1=float(-difference.mean()),
        kl_k3=kl_k3,
        ratio_min=float(ratio.min()),
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        clip=clip,
        clipped_share=float(np.mean(np.abs(ratio - 1) > clip)),
        probability_correlation=_correlation(np.exp(ours), np.exp(trainers)),
        worst=tuple(
            TokenMismatch(
                row=int(places[at, 0]),
                position=int(places[at, 1]),
                token_id=None if token_ids is None else int(token_ids[at]),
                ours=float(ours[at]),
                trainers=float(trainers[at]),
            )
            for at in worst.tolist()
        ),
    )


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / scale if scale else float("nan")
