"""A model's tokenizer: text to ids for the TokenizerManager, ids to text for the detokenizer.

Wraps the Hugging Face tokenizer of a folder. Where there is a Rust tokenizer behind it, encoding and decoding go straight to
it: that path has no mutable padding state, so it may be used from several threads, and it is several times faster. Knows
nothing of requests; `jaxserve.text.incremental` turns decoding into streaming.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import decoders

from jaxserve.server.chat_templates import chosen_template
from jaxserve.server.conversation_spellings import other_spellings
from jaxserve.server.prompt_encoding import encode_within, lengths_within
from jaxserve.text.byte_level import byte_alphabet

# One of these must be in a tokenizer's folder.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip


# How vocabularies of whole characters write single bytes.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# Longest token of a vocabulary whose tokens are all shorter: a normalizer may drop some of a text.
_LEAST_LONGEST_TOKEN = 64


class TextDecoder(Protocol):
    """Ids to text: all that the worker processes need of a tokenizer."""

    def decode_batch(
        self, batch: list[list[int]], *, skip_special_tokens: bool = True, spaces_between: bool = True
    ) -> list[str]: ...

    def token_bytes(self, *, skip_special_tokens: bool) -> Callable[[int], bytes] | None:
        """The bytes of a token, if a text is nothing but its tokens' bytes as UTF-8; None: it is not that simple."""


class TextTokenizer(Protocol):
    """Text to ids, for whoever needs no more of a Tokenizer; may be used from any thread."""

    @property
    def separates_pairs(self) -> bool:
        """Special tokens stand between the texts of a pair."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class RustDecoder:
    """Decodes with a `tokenizers.Tokenizer`; `spaces_between` has no meaning to it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def decode_batch(
        self, batch: list[list[int]], *, skip_special_tokens: bool = True, spaces_between: bool = True
    ) -> list[str]:
        texts: list[str] = self._backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)
        return texts

    def token_bytes(self, *, skip_special_tokens: bool) -> Callable[[int], bytes] | None:
        if type(self._backend.decoder) is not decoders.ByteLevel:
            return None
        backend, alphabet = self._backend, byte_alphabet()
        added = backend.get_added_tokens_decoder().values() if skip_special_tokens else ()
        silent = {None, *(token.content for token in added if token.special)}

        def bytes_of(token_id: int) -> bytes:
            token = backend.id_to_token(token_id)
            if token in silent:
                return b""
            if all(char in alphabet for char in token):
                return bytes([alphabet[char] for char in token])
            encoded: bytes = token.encode()  # an added token: its text as it is
            return encoded

        return bytes_of


class NoText:
    """Of a server without a tokenizer."""

    def decode_batch(
        self, batch: list[list[int]], *, skip_special_tokens: bool = True, spaces_between: bool = True
    ) -> list[str]:
        return [""] * len(batch)

    def token_bytes(self, *, skip_special_tokens: bool) -> Callable[[int], bytes] | None:
        return lambda token_id: b""


class PythonDecoder:
    """Decodes with transformers: for tokenizers written in Python, and for those that tidy up spaces afterwards."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._is_fast = bool(getattr(hf, "is_fast", False))

    def decode_batch(
        self, batch: list[list[int]], *, skip_special_tokens: bool = True, spaces_between: bool = True
    ) -> list[str]:
        options: dict[str, Any] = {"skip_special_tokens": skip_special_tokens}
        if not self._is_fast:
            options["spaces_between_special_tokens"] = spaces_between
        return [self._hf.decode(ids, **options) for ids in batch]

    def token_bytes(self, *, skip_special_tokens: bool) -> Callable[[int], bytes] | None:
        return None


class Tokenizer:
    def __init__(self, hf: Any) -> None:
        self.hf = hf  # the transformers tokenizer, for whoever needs more than this class offers
        self._backend = hf.backend_tokenizer if getattr(hf, "is_fast", False) else None
        if self._backend is not None:
            # Some folders carry the padding and truncation of their training set-up; a served prompt is never cut silently.
            self._backend.no_truncation()
            self._backend.no_padding()
        tidies_up = hf.clean_up_tokenization_spaces and type(getattr(self._backend, "model", None)).__name__ != "BPE"
        self._decoder: TextDecoder = PythonDecoder(hf) if self._backend is None or tidies_up else RustDecoder(self._backend)

    @property
    def decoder(self) -> TextDecoder:
        return self._decoder

    @property
    def rust_json(self) -> str | None:
        """The tokenizer as JSON for `tokenizers`, if that decodes exactly as this does."""
        return self._backend.to_str() if self._backend is not None and isinstance(self._decoder, RustDecoder) else None

    @staticmethod
    def load(
        path: str,
        *,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        hide_torch: bool = False,
    ) -> Tokenizer:
        """Raises ValueError with a sentence for the user. Templates: see `chosen_template`. `hide_torch`: see `without_torch`;
        for our own processes only."""
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"The tokenizer folder {path!r} does not exist.")
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ValueError(f"The folder {path!r} holds no tokenizer files (tokenizer.json, tokenizer.model, ...).")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        with without_torch() if hide_torch else contextlib.nullcontext():
            from transformers import AutoTokenizer

            try:
                hf = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
            except Exception as error:  # transformers raises whatever its parsers raise
                raise ValueError(f"The tokenizer in {path!r} cannot be loaded: {error}") from error
        hf.chat_template = chosen_template(hf.chat_template, chat_template, chat_template_name)
        return Tokenizer(hf)

    def __len__(self) -> int:
        return len(self.hf)

    @property
    def eos_token_id(self) -> int | None:
        eos: int | None = self.hf.eos_token_id
        return eos

    @property
    def bos_token_id(self) -> int | None:
        bos: int | None = self.hf.bos_token_id
        return bos

    @functools.cached_property
    def longest_token_chars(self) -> int:
        """Of the vocabulary, as it is written there: no token stands for more characters of a text."""
        return max(_LEAST_LONGEST_TOKEN, max(map(len, self.hf.get_vocab()), default=0))

    @functools.cached_property
    def text_tail(self) -> list[int]:
        """Ids behind which tokens are decoded as in the middle of a text: the first word keeps its space."""
        ids = self.encode("a", add_special_tokens=False)[-1:]
        return ids if self.decode(ids) == "a" else []

    def encode_prompt(self, text: str, most_tokens: int, *, cut: bool, add_special_tokens: bool = True) -> list[int]:
        """See `encode_within`."""
        encode = functools.partial(self.encode, add_special_tokens=add_special_tokens)
        return encode_within(encode, text, most_tokens, self.longest_token_chars, cut=cut)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        if self._backend is not None:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        return [self.hf.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_texts(
        self, texts: Sequence[str | tuple[str, str]], *, type_stride: int = 0, cut_to: int | None = None
    ) -> list[list[int]]:
        """The ids of texts and of pairs, with special tokens as the tokenizer puts them. Of a token of type t (BERT's
        token_type_ids) the id plus t times `type_stride`. `cut_to`: what is longer is cut as transformers does (longest_first);
        special tokens stay, so that a text never gets shorter than those."""
        if "token_type_ids" not in self.hf.model_input_names:
            type_stride = 0
        if self._backend is None:
            made = [self._encode_in_python(text, cut_to) for text in texts]
        else:
            encodings = self._backend.encode_batch_fast(list(texts))
            if cut_to is not None:
                pairs = zip(encodings, texts, strict=True)
                encodings = [whole if len(whole) <= cut_to else self._encode_cut(text, cut_to) for whole, text in pairs]
            made = [(encoding.ids, encoding.type_ids if type_stride else None) for encoding in encodings]
        return [
            ids if not type_stride or types is None else [i + t * type_stride for i, t in zip(ids, types, strict=True)]
            for ids, types in made
        ]

    def _encode_cut(self, text: str | tuple[str, str], length: int) -> Any:
        """An encoding of so many tokens. The truncation that the tokenizer offers itself is a state of it, for all threads."""
        assert self._backend is not None
        parts = [text] if isinstance(text, str) else list(text)
        encodings = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        room = max(length - self._backend.num_special_tokens_to_add(len(parts) == 2), 0)
        for encoding, kept in zip(encodings, lengths_within([len(one) for one in encodings], room), strict=True):
            encoding.truncate(kept, direction=self.hf.truncation_side)
        return self._backend.post_process(*encodings, add_special_tokens=True)

    def _encode_in_python(self, text: str | tuple[str, str], cut_to: int | None) -> tuple[list[int], list[int] | None]:
        # As lists: an empty text alone would be no second one.
        parts = ([text],) if isinstance(text, str) else ([text[0]], [text[1]])
        made = self.hf(*parts, truncation="longest_first" if cut_to is not None else False, max_length=cut_to)
        return made["input_ids"][0], made["token_type_ids"][0] if "token_type_ids" in made else None

    @property
    def cuts_ends(self) -> bool:
        """A text that is cut loses its end, not its beginning."""
        return str(self.hf.truncation_side) == "right"

    @functools.cached_property
    def separates_pairs(self) -> bool:
        """Special tokens stand between the texts of a pair."""
        return bool(self.hf.num_special_tokens_to_add(pair=True) > self.hf.num_special_tokens_to_add(pair=False))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between: bool = True) -> str:
        return self.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens, spaces_between=spaces_between)[0]

    def decode_batch(
        self, batch: list[list[int]], *, skip_special_tokens: bool = True, spaces_between: bool = True
    ) -> list[str]:
        """`spaces_between` (special tokens) matters to tokenizers written in Python only."""
        return self._decoder.decode_batch(batch, skip_special_tokens=skip_special_tokens, spaces_between=spaces_between)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, be it a part of a character."""
        bytes_of = self._decoder.token_bytes(skip_special_tokens=False)
        if bytes_of is not None:
            return bytes_of(token_id)
        byte = _BYTE_TOKEN.fullmatch(str(self.hf.convert_ids_to_tokens(token_id)))
        return bytes([int(byte[1], 16)]) if byte else self.decode([token_id], skip_special_tokens=False).encode()

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """A conversation as the model's text. Raises ValueError with a sentence if there is no template or it refuses the
        messages."""
        if not (self.hf.chat_template or kwargs.get("chat_template")):
            raise ValueError("The model has no chat template; start the server with --chat-template or send a plain prompt.")
        render = functools.partial(
            self.hf.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        try:
            return str(render(messages, tools=tools or None))
        except Exception as error:  # whatever a template of the model's author raises for messages it cannot render
            for other_messages, other_tools in other_spellings(messages, tools):
                with contextlib.suppress(Exception):
                    return str(render(other_messages, tools=other_tools))
            raise ValueError(f"The chat template cannot render these messages: {error}") from error


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Lets transformers believe that torch is not installed while it is imported.

    Tokenizers need no torch, and importing it costs seconds and 200 MB. transformers remembers the answer, so this is for
    processes that are ours from start to end, not for an Engine inside somebody's program.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
