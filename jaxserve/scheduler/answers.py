"""What a request has learnt of its tokens and not been sent yet: logprobs, hidden states, experts, and vectors made
of hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.messages import HiddenStates, TokenLogprobs
from jaxserve.runner import Scores, Vectors


class LogprobBuffer:
    """What belongs to outputs beside their own logprobs, which stand in the row table. Each step appends one token's to each
    row's, so it only keeps what it is given."""

    def __init__(self, top_num: int, token_ids: np.ndarray | None) -> None:
        """`top_num` likeliest tokens belong to each; `token_ids` int32 [I]: those whose logprobs are wanted besides."""
        self.top_num = top_num
        self.token_ids = token_ids
        self._top_ids: list[np.ndarray] = []
        self._top_logprobs: list[np.ndarray] = []
        self._id_logprobs: list[np.ndarray] = []

    def append(self, top_ids: np.ndarray | None, top_logprobs: np.ndarray | None, id_logprobs: np.ndarray | None) -> None:
        if self.top_num:
            assert top_ids is not None and top_logprobs is not None, f"{self.top_num} top logprobs wanted, none returned"
            self._top_ids.append(top_ids[: self.top_num])
            self._top_logprobs.append(top_logprobs[: self.top_num])
        if self.token_ids is not None:
            assert id_logprobs is not None, f"logprobs of {len(self.token_ids)} tokens wanted, none returned"
            self._id_logprobs.append(id_logprobs[: len(self.token_ids)])

    def drop_last(self) -> None:
        for values in (self._top_ids, self._top_logprobs, self._id_logprobs):
            del values[-1:]

    def take(self, logprobs: np.ndarray) -> TokenLogprobs:
        """Everything since the last call, with the tokens' own `logprobs`."""
        out = TokenLogprobs(logprobs=logprobs)
        if self.top_num:
            out.top_ids = _rows(self._top_ids, self.top_num, np.int32)
            out.top_logprobs = _rows(self._top_logprobs, self.top_num, np.float32)
        if self.token_ids is not None:
            out.id_logprobs = _rows(self._id_logprobs, len(self.token_ids), np.float32)
        self._top_ids, self._top_logprobs, self._id_logprobs = [], [], []
        return out


@dataclasses.dataclass(slots=True)
class PromptLogprobs:
    """Of the tokens behind the prompt's positions [start, end), as far as `next`. Filled over chunks and retractions; a chunk's
    stay arrays, since there may be millions."""

    start: int
    end: int  # the last position's token is the first output
    top_num: int  # as in LogprobBuffer
    num_ids: int
    next: int = -1
    _chunks: list[Scores] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.next = self.start

    def take_in(self, start: int, scores: Scores, lines: range) -> None:
        """The answers for positions from `start` on."""
        assert start == self.next, f"the prompt's logprobs go on at {self.next}, not at {start}"
        assert scores.top_ids is not None or not self.top_num, f"{self.top_num} top logprobs wanted, none returned"
        part = slice(lines.start, lines.stop)
        # Copied where a part is kept: the whole may be much wider.
        self._chunks.append(
            Scores(
                logprobs=scores.logprobs[part],
                id_logprobs=scores.id_logprobs[part, : self.num_ids].copy(),
                top_ids=None if scores.top_ids is None else scores.top_ids[part, : self.top_num].copy(),
                top_logprobs=None if scores.top_logprobs is None else scores.top_logprobs[part, : self.top_num].copy(),
            )
        )
        self.next += len(lines)

    def take(self) -> TokenLogprobs:
        """Everything since the last call."""
        chunks, self._chunks = self._chunks, []
        out = TokenLogprobs(logprobs=_joined([chunk.logprobs for chunk in chunks], (0,), np.float32))
        if self.top_num:
            out.top_ids = _joined([chunk.top_ids for chunk in chunks], (0, self.top_num), np.int32)
            out.top_logprobs = _joined([chunk.top_logprobs for chunk in chunks], (0, self.top_num), np.float32)
        if self.num_ids:
            out.id_logprobs = _joined([chunk.id_logprobs for chunk in chunks], (0, self.num_ids), np.float32)
        return out


class HiddenStateBuffer:
    """Hidden states of the prompt's tokens, then of each output that something was sampled behind."""

    def __init__(self, prompt_len: int, *, only_last: bool) -> None:
        self.only_last = only_last
        self.end = prompt_len
        self.next = prompt_len - 1 if only_last else 0  # positions before it have come
        self._prompt: list[np.ndarray] = []
        self._outputs: list[np.ndarray] = []

    def take_in_prompt(self, start: int, states: np.ndarray) -> None:
        """float32 [n, E] of positions from `start` on."""
        assert start == self.next, f"the prompt's hidden states go on at {self.next}, not at {start}"
        self._prompt.append(states)
        self.next += len(states)

    def append(self, state: np.ndarray) -> None:
        """float32 [E], of an output."""
        if self.only_last:
            self._prompt, self._outputs = [], []
        self._outputs.append(state)

    def take(self) -> HiddenStates | None:
        """Everything since the last call; None while the prompt's are not whole, and where there is nothing."""
        if self.next < self.end or not (self._prompt or self._outputs):
            return None
        out = HiddenStates(
            prompt=np.concatenate(self._prompt) if self._prompt else None,
            outputs=np.stack(self._outputs) if self._outputs else None,
        )
        self._prompt, self._outputs = [], []
        return out


class ExpertBuffer:
    """Experts of the prompt's tokens from position `start` on, then of each output that something was sampled behind."""

    def __init__(self, prompt_len: int, start: int) -> None:
        self.next, self.end = start, prompt_len  # the prompt's positions that have not come yet
        self._parts: list[np.ndarray] = []

    def take_in_prompt(self, start: int, experts: np.ndarray) -> None:
        """int32 [n, layers, K] of positions from `start` on."""
        assert start == self.next, f"the prompt's experts go on at {self.next}, not at {start}"
        self._parts.append(experts)
        self.next += len(experts)

    def append(self, experts: np.ndarray) -> None:
        """int32 [layers, K], of an output."""
        self._parts.append(experts[None])

    def take(self) -> np.ndarray | None:
        """int32 [n, layers, K]: everything since the last call; None where there is nothing."""
        parts, self._parts = self._parts, []
        return np.concatenate(parts) if parts else None


class VectorBuffer:
    """The vector of a text, or one of each of its tokens. They go out with the request's end; until then `first`, the first
    position that must be computed, stays the same."""

    def __init__(self, prompt_len: int, vectors: Vectors) -> None:
        self.first = 0 if vectors.needs_whole else prompt_len - 1
        self._of_tokens = vectors.of_tokens
        self._count = prompt_len if vectors.of_tokens else 1
        self._next = 0  # so many have come
        self._parts: list[np.ndarray] = []

    def take_in(self, start: int, vectors: np.ndarray) -> None:
        """float32 [n, size] of the tokens from position `start` on; [1, size] of all of the text, whose last part begins
        there."""
        if self._of_tokens and start == 0:  # perhaps anew, after a retraction
            self._next, self._parts = 0, []
        assert start == self._next or not self._of_tokens, f"the tokens' vectors go on at {self._next}, not at {start}"
        self._parts.append(vectors)
        self._next += len(vectors)

    def take(self) -> np.ndarray:
        """float32 [1, size] or [prompt_len, size], once they are complete."""
        assert self._next == self._count, f"{self._next} of {self._count} vectors have come"
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)


def _rows(rows: list[np.ndarray], width: int, dtype: type) -> np.ndarray:
    return np.array(rows, dtype).reshape(len(rows), width)


def _joined(parts: Sequence[np.ndarray | None], empty: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(empty, dtype), *(part for part in parts if part is not None)])
