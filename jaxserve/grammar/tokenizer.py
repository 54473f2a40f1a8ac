"""The vocabulary as llguidance needs it: which bytes each token id stands for, and which ids are no text at all."""

from __future__ import annotations

import dataclasses

import msgspec
from llguidance import LLTokenizer

from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.setup import Setup


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool


class _TokenizerFile(msgspec.Struct):
    """What matters here of a file of megabytes: reading all of it would keep the process busy."""

    added_tokens: list[_AddedToken] = []


@dataclasses.dataclass(frozen=True)
class GrammarTokenizer:
    ll: LLTokenizer
    eos_token_ids: frozenset[int]
    # Tokens with a meaning of their own which are text all the same, as the tokenizer says; to llguidance they are special.
    marked_text_ids: tuple[int, ...]
    special_texts: tuple[str, ...]

    def pieces(self, text: str) -> list[str | int]:
        """Texts, none of them empty, and the special tokens between them."""
        pieces: list[str | int] = []
        for token_id in self.ll.tokenize_str(text, parse_special=True):
            if self.ll.is_special_token(token_id):
                before, _, text = text.partition(self.text_of(token_id))
                pieces += [before, token_id] if before else [token_id]
        return [*pieces, text] if text else pieces

    def text_of(self, token_id: int) -> str:
        return self.ll.decode_bytes([token_id]).decode(errors="replace")


def build_tokenizer(setup: Setup) -> GrammarTokenizer:
    """Takes about 5 us per token. Raises GrammarError."""
    eos = setup.eos_token_ids
    try:
        ll = LLTokenizer(setup.tokenizer_json, n_vocab=setup.vocab_size, eos_token=list(eos) or None)
    except Exception as error:  # whatever the Rust side says about a tokenizer it cannot read
        raise GrammarError(f"Constrained output is not possible with this model's tokenizer: {error}.") from error
    added = msgspec.json.decode(setup.tokenizer_json, type=_TokenizerFile).added_tokens
    special = [token for token in added if token.id < setup.vocab_size and ll.is_special_token(token.id)]
    marked = tuple(token.id for token in special if not token.special and token.id not in eos)
    return GrammarTokenizer(ll, frozenset(eos), marked, tuple(token.content for token in special))
