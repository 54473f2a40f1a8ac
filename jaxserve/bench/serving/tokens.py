"""The tokenizer as a benchmark needs it: prompts of an exact length, and how many tokens a text has. Without JAX or torch."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from jaxserve.demo import demo_model_path

# Of a prompt whose text does not have the wanted number of tokens, so many others are tried.
_MAX_TRIES = 5


class Tokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        # Sorted: the order of a vocabulary is no property of the seed.
        self.plain_ids = sorted(set(tokenizer.get_vocab().values()) - special)

    @staticmethod
    def load(name: str) -> Tokens:
        """Of a folder, of a name on the Hugging Face Hub, or of `demo`. Raises ValueError with a sentence for the user."""
        folder = Path(demo_model_path() if name == "demo" else name)
        try:
            if (folder / "tokenizer.json").is_file():
                return Tokens(Tokenizer.from_file(str(folder / "tokenizer.json")))
            from transformers import AutoTokenizer

            return Tokens(AutoTokenizer.from_pretrained(name).backend_tokenizer)
        except Exception as error:  # whatever its parsers raise
            raise ValueError(f"The tokenizer {name!r} cannot be loaded: {error}") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def prompt_len(self, text: str) -> int:
        """As a server counts it, with what it puts in front (a BOS token)."""
        return len(self._tokenizer.encode(text).ids)

    def counts(self, texts: list[str]) -> list[int]:
        return [len(one.ids) for one in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def text_of_len(self, ids: list[int], length: int) -> tuple[str, int]:
        """The beginning of `ids` as a text of `length` tokens as a server counts them, and how many it really has.

        Text that is cut between tokens may be read as other tokens: then the cut moves until the length is right, or nearest.
        """
        num_special = self.prompt_len("")
        cut = max(1, length - num_special)
        best = ("", -1)
        for _ in range(_MAX_TRIES):
            text = self.decode(ids[:cut])
            got = self.prompt_len(text)
            if abs(got - length) < abs(best[1] - length):
                best = (text, got)
            if got == length:
                break
            cut = max(1, cut + length - got)
        return best
