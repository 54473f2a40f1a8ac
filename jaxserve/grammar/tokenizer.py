"""The vocabulary as llguidance needs it: which bytes each token id stands for, and which ids are no text at all."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer

from jaxserve.grammar.errors import GrammarError


def build_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """`vocab_size` is the model's: ids that the tokenizer does not have are never allowed. Takes about 5 us per token.

    Raises GrammarError.
    """
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # whatever the Rust side says about a tokenizer it cannot read
        raise GrammarError(f"Constrained output is not possible with this model's tokenizer: {error}.") from error
