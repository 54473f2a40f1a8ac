"""TokenRules: which tokens the named processors of one request let come next.

Everything follows from the sequence so far: what is remembered of it only saves looking at it again, so nothing has to be told
of retraction, of drafts, or of tokens that are taken back.
"""

from __future__ import annotations

import copy
from typing import Protocol

import numpy as np

from jaxserve.logit_processors.masks import repeating_tokens
from jaxserve.types import LogitRules, NoRepeatNgram, ThinkingBudget, ThinkingTag

NEVER = np.iinfo(np.int32).max
# A model that thinks says so at once, perhaps behind some white space.
_MOST_BEFORE_THINKING = 16


class Decoder(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...


class TokenRules:
    def __init__(self, rules: LogitRules, prompt_len: int, decoder: Decoder | None) -> None:
        """`decoder` is needed for thinking alone."""
        self._prompt_len = prompt_len
        self._ngram = rules.ngram
        self._thinking: _Thinking | None = None
        if rules.budget is not None:
            assert decoder is not None, "a thinking budget needs a tokenizer"
            self._thinking = _Thinking(rules.budget, decoder)

    def free_len(self, ids: np.ndarray) -> int:
        """However `ids` goes on (int32 [T], the sequence as far as it is known): while it has fewer tokens than this, every
        token may come next."""
        if self._thinking is not None:
            self._thinking.follow(ids[self._prompt_len :])
        if self._ngram is not None:
            return self._ngram.ngram_size
        assert self._thinking is not None
        least = self._thinking.free_output_len
        return NEVER if least == NEVER else self._prompt_len + least

    def restrict(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Rules out in `mask` (int32 [words], as in `grammar.bits`) what may not follow `ids`: the known, perhaps drafts."""
        if self._thinking is not None:
            thinking = copy.copy(self._thinking)
            thinking.follow(ids[self._prompt_len :])
            forced = thinking.forced_token
            if forced is not None:
                _keep_only(mask, forced)
                return
        if self._ngram is not None:
            _rule_out(mask, ids, self._ngram)


def _keep_only(mask: np.ndarray, token_id: int) -> None:
    word, bit = token_id // 32, np.uint32(1 << token_id % 32)
    words = mask.view(np.uint32)
    kept = words[word] & bit
    words[:] = 0
    words[word] = kept


def _rule_out(mask: np.ndarray, ids: np.ndarray, rule: NoRepeatNgram) -> None:
    if len(ids) and ids[0] < 0:  # a prompt of embeddings, which repeat nothing
        ids = ids[ids >= 0]
    banned = repeating_tokens(ids, rule.ngram_size, rule.window_size)
    banned = banned[~np.isin(banned, rule.whitelist_token_ids)].astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), banned // 32, ~(np.uint32(1) << banned % np.uint32(32)))


class _Thinking:
    """Where the outputs stand in their thinking: before it, in it since some output, or behind it for good."""

    def __init__(self, budget: ThinkingBudget, decoder: Decoder) -> None:
        self._budget = budget
        self._decoder = decoder
        tags = budget.ends if budget.begin is None else [budget.begin, *budget.ends]
        self._most_tokens = max(len(tag.text.encode()) for tag in tags)  # of a tag: each of its bytes may be one
        self._forget()

    def _forget(self) -> None:
        self._outputs: list[int] = []  # the last, as far as a tag may begin in them
        self._num_seen = 0
        self._since = -self._budget.spent if self._budget.begin is None else None  # the output that thinking begins with
        self._is_over = False
        self._closing: tuple[int, ...] = ()  # from the output on that the budget has no room for

    @property
    def free_output_len(self) -> int:
        if self._is_over:
            return NEVER
        # Before thinking, the tag that begins it takes a token.
        return (self._num_seen + 1 if self._since is None else self._since) + self._budget.num_tokens

    @property
    def forced_token(self) -> int | None:
        """What must come next, if anything."""
        if self._is_over or self._since is None:
            return None
        place = self._num_seen - self._first_forced
        return self._closing[place] if 0 <= place < len(self._closing) else None

    @property
    def _first_forced(self) -> int:
        assert self._since is not None
        return max(self._since + self._budget.num_tokens, 0)

    def follow(self, outputs: np.ndarray) -> None:
        """Takes in what it has not seen of all outputs."""
        if len(outputs) < self._num_seen:  # the last was taken back
            self._forget()
        self._outputs = self._outputs[-self._most_tokens :]  # a copy's own
        self._choose_closing()
        for token_id in outputs[self._num_seen :].tolist():
            if self._is_over:
                break
            self._outputs.append(token_id)
            self._num_seen += 1
            self._look()
        self._num_seen = len(outputs)

    def _look(self) -> None:
        if self._since is None:
            assert self._budget.begin is not None
            if self._ends_with(self._budget.begin):
                self._since, self._outputs = self._num_seen, []
                self._choose_closing()
            elif self._num_seen >= _MOST_BEFORE_THINKING:
                self._is_over = True
        elif any(map(self._ends_with, self._budget.ends)):
            self._is_over = True
        else:
            self._choose_closing()
            # The closing should hold the tag; where the text came out otherwise, thinking goes on.
            self._is_over = self._num_seen - self._first_forced >= len(self._closing) > 0

    def _choose_closing(self) -> None:
        if self._since is None or self._is_over or self._num_seen != self._first_forced:
            return
        last = self._outputs[-1:]
        follows_newline = bool(last) and self._decoder.decode(last).endswith("\n")
        self._closing = tuple(self._budget.closing_behind_newline if follows_newline else self._budget.closing)

    def _ends_with(self, tag: ThinkingTag) -> bool:
        """Whether the newest output completes the tag."""
        if tag.token_id is not None:
            return self._outputs[-1] == tag.token_id
        return tag.text in self._decoder.decode(self._outputs[-self._most_tokens :])
