"""Small tokenizers of encoders: BERT's, whose pairs have token types, and RoBERTa's, whose have none."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "what",
    "is",
    "capital",
    "of",
    "france",
    "paris",
    "berlin",
    "yes",
    "no",
]
CLS, SEP = 2, 3


def word_id(word: str) -> int:
    return len(SPECIAL) + WORDS.index(word)


def _word_piece() -> Tokenizer:
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS, "##s", "##ed"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def bert_folder(folder: Path, **config: object) -> Path:
    """A folder that AutoTokenizer loads as a BertTokenizer."""
    from transformers import BertTokenizerFast

    tokenizer = _word_piece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    BertTokenizerFast(tokenizer_object=tokenizer, **config).save_pretrained(folder)
    return folder


def roberta_folder(folder: Path) -> Path:
    """Pairs as RoBERTa's: two separators between them, and no types."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = _word_piece()
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
