"""Outputs that think before they answer: free text up to a tag, and the grammar behind it.

opening     the tag before thinking may come, or the answer's first token: the masks of both, as long as both are possible
thinking    everything is allowed; the end tag is looked for in the tokens' text, however it is cut into tokens
answering   the grammar's own matcher goes on alone: see `ThinkingMatcher.current`
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from jaxserve.grammar.bits import is_allowed
from jaxserve.grammar.matcher import CompiledGrammar, Matcher
from jaxserve.grammar.tokenizer import GrammarTokenizer
from jaxserve.types import Grammar, Thinking


def opening(begin: str) -> Grammar:
    """What an output follows that begins with thinking: white space, the tag, and any text."""
    space = {"type": "optional", "content": {"type": "regex", "pattern": "[ \\n\\r\\t]{1,8}"}}
    tag = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": ""}
    whole = {"type": "sequence", "elements": [space, tag]}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": whole}))


class ThinkingGrammar:
    """A grammar behind thinking, ready for use."""

    def __init__(
        self, answer: CompiledGrammar, begin: CompiledGrammar | None, thinking: Thinking, tokenizer: GrammarTokenizer
    ) -> None:
        """`begin` is the compiled `opening(thinking.begin)`, if there is such a tag."""
        self._answer = answer
        self._begin = begin
        self._thinking = thinking
        self._tokenizer = tokenizer

    def matcher(self, *, ignore_eos: bool = False) -> ThinkingMatcher:
        answer = self._answer.matcher(ignore_eos=ignore_eos)
        begin = None if self._begin is None else self._begin.matcher(ignore_eos=ignore_eos)
        return ThinkingMatcher(answer, begin, self._thinking, self._tokenizer)


class ThinkingMatcher:
    """Where an output stands that has not begun to answer. What a Matcher does, but for taking back."""

    def __init__(self, answer: Matcher, begin: Matcher | None, thinking: Thinking, tokenizer: GrammarTokenizer) -> None:
        self._answer = answer  # at its beginning until the thinking is over
        self._begin = begin  # while opening, if the tag is still possible
        self._early_answer = answer.copy() if begin is not None else None  # while opening: the answer, if there is no thinking
        self._thinking = thinking
        self._tokenizer = tokenizer
        self._tail = b""  # the last bytes of the text: the beginning of a tag may be among them
        self._answers = False

    def copy(self) -> ThinkingMatcher:
        begin = None if self._begin is None else self._begin.copy()
        other = ThinkingMatcher(self._answer.copy(), begin, self._thinking, self._tokenizer)
        other._early_answer = None if self._early_answer is None else self._early_answer.copy()
        other._tail, other._answers = self._tail, self._answers
        return other

    # --- where it stands

    @property
    def current(self) -> Matcher | ThinkingMatcher:
        """What is to be asked from now on: the grammar's own matcher once the answer has begun."""
        return self._answer if self._answers else self

    def is_free_along(self, drafts: Sequence[int]) -> bool:
        """As Matcher.is_free_along: it thinks, and none of these ends that."""
        if self._answers or self._begin is not None:
            return False
        ahead = self._tokenizer.ll.decode_bytes(list(drafts)) if drafts else b""
        return self._thinking.end.encode() not in self._tail + ahead

    @property
    def is_terminated(self) -> bool:
        return self._answers and self._answer.is_terminated

    @property
    def error(self) -> str | None:
        return self._answer.error

    # --- tokens

    def forced_tokens(self) -> list[int]:
        """As Matcher.forced_tokens; asked before the answer begins, there are none."""
        return []

    def accept(self, token_id: int) -> bool:
        """Takes in the next token. False if what it adds to the answer is not allowed; then nothing else can be done."""
        if self._answers:
            return self._answer.accept(token_id)
        text = self._tokenizer.ll.decode_bytes([token_id])
        if self._begin is None:
            return self._think(text)
        return self._open(token_id, text)

    def _open(self, token_id: int, text: bytes) -> bool:
        assert self._begin is not None and self._thinking.begin is not None
        if self._early_answer is not None and not self._early_answer.accept(token_id):
            self._early_answer = None
        if not self._begin.accept(token_id):
            self._begin = None
            if self._early_answer is None:
                return False
            self._answer, self._answers = self._early_answer, True
            return True
        _, tag, behind = (self._tail + text).partition(self._thinking.begin.encode())
        if not tag:
            self._tail += text
            return True
        self._begin = self._early_answer = None
        self._tail = b""
        return self._think(behind)

    def _think(self, text: bytes) -> bool:
        end = self._thinking.end.encode()
        _, tag, behind = (self._tail + text).partition(end)
        if not tag:
            self._tail = (self._tail + text)[-len(end) + 1 :] if len(end) > 1 else b""
            return True
        self._answers = True
        # White space that shares a token with the tag is nobody's.
        return self._answer_with(behind) or self._answer_with(behind.lstrip())

    def _answer_with(self, text: bytes) -> bool:
        """What shares a token with the end tag."""
        token_ids = self._tokenizer.ll.tokenize_bytes(text) if text else []
        for count, token_id in enumerate(token_ids):
            if not self._answer.accept(token_id):
                self._answer.rollback(count)
                return False
        return True

    # --- masks

    def fill_mask(self, out: np.ndarray) -> None:
        """Which tokens may come next, as Matcher.fill_mask."""
        if self._answers:
            self._answer.fill_mask(out)
        elif self._begin is None:
            out[:] = -1
        else:
            self._begin.fill_mask(out)
            if self._early_answer is not None:
                other = np.empty_like(out)
                self._early_answer.fill_mask(other)
                out |= other

    def fill_masks_along(self, drafts: Sequence[int], out: np.ndarray) -> int:
        """As Matcher.fill_masks_along."""
        if self.is_free_along(drafts):
            out[:] = -1
            return len(drafts)
        ahead = self.copy()
        count = 0
        for draft in drafts:
            ahead.fill_mask(out[count])
            if not is_allowed(out[count], draft) or not ahead.accept(draft):
                break
            count += 1
        else:
            ahead.fill_mask(out[count])
        out[count + 1 :] = -1
        return count
