"""Small tokenizers of the two families that matter: byte-level BPE (GPT, Llama 3, Qwen) and SentencePiece with byte fallback
(Llama 2, Mistral)."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Hello world, hello there! How are you today?",
    "naïve café über straße œuvre",
    "日本語のテキスト 中文 한국어",
    "🙂 🚀 👩‍👩‍👧‍👦 é",
]


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


@functools.cache
def sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁The", "▁quick", "▁fox", "▁Hello", "▁world", "Hello", "world", "ing"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *words, *"▁.,!é日本abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_folder(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """A folder that AutoTokenizer can load."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **config).save_pretrained(folder)
    return folder
