"""Draws texts from a grammar: uniform over what the masks allow, then in a hurry to come to an end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer

from jaxserve.grammar import Matcher


@dataclasses.dataclass(frozen=True)
class Drawn:
    token_ids: list[int]  # without the eos
    is_complete: bool


def allow_all(rows: int, vocab_size: int) -> np.ndarray:
    """int32 [rows, words], every token allowed: what is to be filled."""
    return np.full((rows, -(-vocab_size // 32)), -1, np.int32)


def allowed_ids(mask: np.ndarray) -> np.ndarray:
    """The token ids of one mask's set bits."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def accept_all(matcher: Matcher, token_ids: Iterable[int]) -> int:
    """Takes in tokens up to the first that the grammar refuses; returns how many."""
    count = 0
    for token_id in token_ids:
        if not matcher.accept(token_id):
            break
        count += 1
    return count


class GrammarSampler:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        # What ends strings, lists and objects soonest; what gets on in addresses and times; what is a number.
        self._closers = [
            np.array([tokenizer.token_to_id(text) for text in texts]) for texts in ('"}],)', "@.:DSZ", "0")
        ]  # tried in any order

    def draw(self, matcher: Matcher, rng: np.random.Generator, max_tokens: int, hurry_after: int) -> Drawn:
        mask = allow_all(1, self._vocab_size)[0]
        token_ids: list[int] = []
        while len(token_ids) < max_tokens and not matcher.is_terminated:
            matcher.fill_mask(mask)
            choices = allowed_ids(mask)
            assert len(choices) and not matcher.error, matcher.error
            if len(token_ids) >= hurry_after:
                wanted = [np.array(self._eos)] if matcher.may_end else [self._closers[i] for i in rng.permutation(3)]
                choices = next((fit for some in wanted if len(fit := np.intersect1d(choices, some))), choices)
            token = int(rng.choice(choices))
            assert matcher.accept(token), f"the mask allows token {token}, the matcher refuses it"
            if token not in self._eos:
                token_ids.append(token)
        return Drawn(token_ids, matcher.is_terminated)
