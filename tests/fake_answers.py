"""What FakeRunner gives for a token, known from where the token stands: scores, hidden states, logprobs, embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.runner import RunnerSpec, ScoreQuery, Scores

_MASK = (1 << 64) - 1


def expected_score(position: int, token: int, asked: int) -> float:
    """What the fake gives as logprob of `asked` behind a token, from where that stands."""
    return -float(mixed(position * 1009 + token * 31 + asked) % 1000) / 64


def expected_scores(asked: list[tuple[int, int]], query: ScoreQuery, spec: RunnerSpec) -> Scores:
    def of(at: tuple[int, int], tokens: np.ndarray) -> list[float]:
        return [expected_score(*at, int(token)) for token in tokens]

    rank = np.arange(spec.max_top_logprobs, dtype=np.int32)
    top_ids = np.array([(token + rank) % spec.vocab_size for _, token in asked], np.int32)
    return Scores(
        logprobs=np.array(
            [expected_score(*at, int(target)) for at, target in zip(asked, query.targets, strict=True)], np.float32
        ),
        id_logprobs=np.array([of(*pair) for pair in zip(asked, query.token_ids, strict=True)], np.float32),
        top_ids=top_ids if query.needs_top else None,
        top_logprobs=np.array([of(*pair) for pair in zip(asked, top_ids, strict=True)], np.float32)
        if query.needs_top
        else None,
    )


def expected_hidden(position: int, token: int) -> list[float]:
    return [float(position), float(token)]


def expected_experts(position: int, token: int) -> list[list[int]]:
    """Of two layers, three each."""
    return [[position, token, layer] for layer in range(2)]


def expected_logprobs(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """What the fake gives as logprobs: known from the token alone."""
    return (-(tokens + 1.0) / vocab_size).astype(np.float32)


def embeddings_of(token_ids: Sequence[int]) -> np.ndarray:
    """What the fake takes for these very tokens: float32 [n, 2]."""
    return np.stack([np.array(token_ids, np.float32), np.full(len(token_ids), 0.5, np.float32)], axis=1)


def mixed(value: int) -> int:
    """A 64-bit finalizer: neighbouring inputs give unrelated outputs."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
