"""Matcher: where one request's output stands in its grammar, and what may come next.

The end of sequence is kept apart from the grammar's own tokens: an eos id is allowed exactly where the grammar may end, and
once it is accepted nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from jaxserve.grammar.bits import allow_only, hold_back, is_allowed
from jaxserve.grammar.prototype import reason


class CompiledGrammar:
    """A grammar ready for use, shared by all requests that bring the same text. Making a matcher of it takes microseconds."""

    def __init__(
        self,
        prototype: LLMatcher,
        eos_token_ids: frozenset[int],
        *,
        text_eos_token_ids: Sequence[int] = (),
        hidden_token_ids: Sequence[int] = (),
    ) -> None:
        """`text_eos_token_ids`: eos ids that are text as well, such as a newline; they end the output all the same.
        `hidden_token_ids`: what llguidance takes for the end of sequence although the model does not end with it."""
        self._prototype = prototype
        self._eos = eos_token_ids
        self._text_eos = tuple(text_eos_token_ids)
        self._hidden = tuple(hidden_token_ids)

    def matcher(self, *, ignore_eos: bool = False) -> Matcher:
        """At the grammar's beginning. With `ignore_eos` the output goes on as long as the grammar can."""
        hidden = (*self._hidden, *self._eos) if ignore_eos else self._hidden
        return Matcher(self._prototype.deep_copy(), self._eos, self._text_eos, hidden)


class Matcher:
    def __init__(
        self, state: LLMatcher, eos_token_ids: frozenset[int], text_eos: tuple[int, ...], hidden: tuple[int, ...]
    ) -> None:
        self.state = state  # llguidance's; for MaskFiller
        self._eos = eos_token_ids
        self._text_eos = text_eos
        self._hidden = hidden
        self._has_ended = False  # an eos was accepted

    def copy(self) -> Matcher:
        """A matcher of its own at the same place."""
        other = Matcher(self.state.deep_copy(), self._eos, self._text_eos, self._hidden)
        other._has_ended = self._has_ended
        return other

    # --- where it stands

    @property
    def current(self) -> Matcher:
        """What is to be asked from now on."""
        return self

    def is_free_along(self, drafts: Sequence[int]) -> bool:
        """Whether every token may come next, and behind each of the drafts."""
        return False

    @property
    def may_end(self) -> bool:
        """What was accepted so far is a whole output; eos is allowed."""
        return self._has_ended or self.state.is_accepting()

    @property
    def is_terminated(self) -> bool:
        """Whole, and nothing but eos can follow, or eos has come: end the request without sampling again."""
        return self._has_ended or (self.state.is_stopped() and not self.state.is_error())

    @property
    def error(self) -> str | None:
        """Why it cannot go on, as a sentence: following the grammar took more work than is allowed. End the request."""
        if not self.state.is_error():
            return None
        return f"The grammar is too complex to follow: {reason(self.state)}."

    # --- tokens

    def forced_tokens(self) -> list[int]:
        """Those that must come next, one after the other, as the tokenizer spells them; the masks allow no others."""
        return [] if self._has_ended else list(self.state.compute_ff_tokens())

    def accept(self, token_id: int) -> bool:
        """Takes in the next token of the output, of the vocabulary. False, and nothing changes, if the grammar refuses it.

        Any token whose text fits is taken; a mask may allow fewer, where the grammar forces a text that has a usual spelling.
        """
        if self._has_ended:
            return False
        if token_id in self._eos:
            self._has_ended = self.state.is_accepting()
            return self._has_ended
        return bool(self.state.try_consume_tokens([token_id]))

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens that were accepted back."""
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            rolled_back = self.state.rollback(num_tokens)
            assert rolled_back, f"cannot take back {num_tokens} tokens: {self.state.get_error()}"

    # --- masks

    def fill_mask(self, out: np.ndarray) -> None:
        """Which tokens may come next: int32 [words], bits as in `bits`. At the end, and in error, only eos."""
        fill_next_token_bitmask(self.state, out[None], 0)
        self.finish_mask(out)

    def finish_mask(self, out: np.ndarray) -> None:
        """What llguidance does not know about a mask it has filled."""
        if self._has_ended:
            allow_only(out, self._eos)
            return
        if self._text_eos and not self.may_end:
            hold_back(out, self._text_eos)
        if self._hidden:
            hold_back(out, self._hidden)

    def fill_masks_along(self, drafts: Sequence[int], out: np.ndarray) -> int:
        """Masks before each of k draft tokens and after the last, int32 [k + 1, words]; the matcher stays where it is.

        Returns how many drafts the masks allow. The masks behind a refused draft are of no use: they allow everything.
        """
        count = 0
        for draft in drafts:
            self.fill_mask(out[count])
            # The mask decides: where text is forced, it allows one way to write it, and `accept` would take others.
            if not is_allowed(out[count], draft) or not self.accept(draft):
                break
            count += 1
        else:
            self.fill_mask(out[count])
        out[count + 1 :] = -1
        self.rollback(count)
        return count
