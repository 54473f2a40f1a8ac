"""What a request has learnt of its tokens and not been sent yet: logprobs and hidden states."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.messages import HiddenStates, TokenLogprobs
from jaxserve.runner import Scores


@dataclasses.dataclass(slots=True)
class _Parts:
    """Arrays of so many tokens each."""

    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    id_logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)


class LogprobBuffer:
    """Logprobs of one token after the other."""

    def __init__(self, top_num: int, token_ids: np.ndarray | None) -> None:
        """`top_num` likeliest tokens belong to each; `token_ids` int32 [I]: those whose logprobs are wanted besides."""
        self.top_num = top_num
        self.token_ids = token_ids
        self._parts = _Parts()

    def append(
        self, logprob: float, top_ids: np.ndarray | None, top_logprobs: np.ndarray | None, id_logprobs: np.ndarray | None
    ) -> None:
        """Of one token."""
        rows = (None if part is None else part[None] for part in (top_ids, top_logprobs, id_logprobs))
        self.extend(np.array([logprob], np.float32), *rows)

    def extend(
        self,
        logprobs: np.ndarray,
        top_ids: np.ndarray | None,
        top_logprobs: np.ndarray | None,
        id_logprobs: np.ndarray | None,
    ) -> None:
        """Of n tokens, [n] and [n, ...]; what is wider than needed is cut."""
        parts = self._parts
        parts.logprobs.append(logprobs)
        if self.top_num:
            assert top_ids is not None and top_logprobs is not None, f"{self.top_num} top logprobs wanted, none returned"
            parts.top_ids.append(top_ids[:, : self.top_num].copy())
            parts.top_logprobs.append(top_logprobs[:, : self.top_num].copy())
        if self.token_ids is not None:
            assert id_logprobs is not None, f"logprobs of {len(self.token_ids)} tokens wanted, none returned"
            parts.id_logprobs.append(id_logprobs[:, : len(self.token_ids)].copy())

    def drop_last(self) -> None:
        """What was appended last."""
        parts = self._parts
        for values in (parts.logprobs, parts.top_ids, parts.top_logprobs, parts.id_logprobs):
            del values[-1:]

    def take(self) -> TokenLogprobs:
        """Everything since the last call."""
        parts, self._parts = self._parts, _Parts()
        out = TokenLogprobs(logprobs=_joined(parts.logprobs, (), np.float32))
        if self.top_num:
            out.top_ids = _joined(parts.top_ids, (self.top_num,), np.int32)
            out.top_logprobs = _joined(parts.top_logprobs, (self.top_num,), np.float32)
        if self.token_ids is not None:
            out.id_logprobs = _joined(parts.id_logprobs, (len(self.token_ids),), np.float32)
        return out


@dataclasses.dataclass(slots=True)
class PromptLogprobs:
    """Of the tokens behind the prompt's positions [start, end), as far as `next`. Filled over chunks and retractions."""

    start: int
    end: int  # the last position's token is the first output
    buffer: LogprobBuffer
    next: int = -1

    def __post_init__(self) -> None:
        self.next = self.start

    def take_in(self, start: int, scores: Scores, lines: range) -> None:
        """The answers for positions from `start` on."""
        assert start == self.next, f"the prompt's logprobs go on at {self.next}, not at {start}"
        part = slice(lines.start, lines.stop)
        top_ids = None if scores.top_ids is None else scores.top_ids[part]
        top_logprobs = None if scores.top_logprobs is None else scores.top_logprobs[part]
        self.buffer.extend(scores.logprobs[part], top_ids, top_logprobs, scores.id_logprobs[part])
        self.next += len(lines)


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


def _joined(parts: list[np.ndarray], shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros((0, *shape), dtype)
