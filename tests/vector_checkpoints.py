"""Tiny random models that make vectors of texts, written by Transformers and sentence-transformers, which are the oracles too.

`CASES` names them; `make_vectors(name, folder)` writes one with its tokenizer; the session fixture `vector_checkpoint` makes
each at most once.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_tokenizer

MAX_LEN = 256
WORDS = """
    the a quick brown lazy fox dog house river mountain server request scheduler model token next answer order cold warm rain
    sun city train music guitar piano violin concert stage actor film bread cheese butter apple pear cherry garden flower tree
    doctor nurse hospital medicine heart lung bone school teacher pupil book page letter number sum product law judge court
""".split()  # noqa: SIM905

_ENCODER: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN, "initializer_range": 0.1,
}  # fmt: skip
_DECODER: dict[str, Any] = {
    **_ENCODER, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False, "num_hidden_layers": 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    config: str  # Transformers' class of the config, without Config
    model: str = ""  # its class of the model; "": an embedder of sentence-transformers
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    pooling: tuple[str, ...] = ()  # of an embedder, sentence-transformers' modes
    dense: tuple[tuple[int, str | None], ...] = ()  # its Dense modules: size and torch's activation
    normalizes: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # that a server needs
    is_decoder: bool = False
    pairs: bool = False  # it reads two texts

    @property
    def of_tokens(self) -> bool:
        return self.model.endswith("ForTokenClassification")


def _encoder(config: str, model: str = "", **how: Any) -> Case:
    kwargs = how.pop("kwargs", {})
    return Case(config, model, kwargs={**_ENCODER, **kwargs}, **how)


def _decoder(config: str, model: str = "", **how: Any) -> Case:
    kwargs = how.pop("kwargs", {})
    return Case(config, model, kwargs={**_DECODER, **kwargs}, is_decoder=True, **how)


_ROBERTA = {"max_position_embeddings": MAX_LEN + 2, "pad_token_id": 1, "type_vocab_size": 1}
_MODERN_BERT = {"global_attn_every_n_layers": 2, "local_attention": 16, "pad_token_id": 0, "reference_compile": False}

CASES: dict[str, Case] = {
    # embedders
    "bert-mean": _encoder("Bert", pooling=("mean",), normalizes=True),
    "bert-cls": _encoder("Bert", pooling=("cls",)),
    "bert-joined": _encoder(
        "Bert", pooling=("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"), dense=((24, "Tanh"),)
    ),
    "xlm-roberta-mean": _encoder("XLMRoberta", pooling=("mean",), kwargs=_ROBERTA),
    "modern-bert-mean": _encoder("ModernBert", pooling=("mean",), normalizes=True, kwargs=_MODERN_BERT),
    "nomic-bert-mean": _encoder("NomicBert", pooling=("mean",), normalizes=True),
    "qwen3-last": _decoder("Qwen3", pooling=("lasttoken",), normalizes=True),
    "qwen2-mean": _decoder("Qwen2", pooling=("mean",), normalizes=True),
    "mistral-weighted": _decoder("Mistral", pooling=("weightedmean",), kwargs={"sliding_window": None}),
    "embedding-gemma": _decoder(
        "Gemma3Text", pooling=("mean",), dense=((96, None), (64, None)), normalizes=True,
        kwargs={
            "use_bidirectional_attention": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # scores
    "bert-cross": _encoder("Bert", "BertForSequenceClassification", kwargs={"num_labels": 1}, pairs=True),
    "bert-labels": _encoder("Bert", "BertForSequenceClassification", kwargs={"num_labels": 4}),
    "xlm-roberta-cross": _encoder(
        "XLMRoberta", "XLMRobertaForSequenceClassification", kwargs={**_ROBERTA, "num_labels": 1}, pairs=True
    ),
    "modern-bert-labels": _encoder(
        "ModernBert", "ModernBertForSequenceClassification",
        kwargs={**_MODERN_BERT, "num_labels": 3, "classifier_pooling": "mean"},
    ),
    "qwen3-score": _decoder("Qwen3", "Qwen3ForSequenceClassification", kwargs={"num_labels": 1}),
    "qwen2-labels": _decoder("Qwen2", "Qwen2ForSequenceClassification", kwargs={"num_labels": 3}),
    "llama-reward": _decoder("Llama", "LlamaForSequenceClassification", kwargs={"num_labels": 1}),
    "gemma2-labels": _decoder(
        "Gemma2", "Gemma2ForSequenceClassification",
        kwargs={"num_labels": 2, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    # scores of tokens
    "bert-tokens": _encoder("Bert", "BertForTokenClassification", kwargs={"num_labels": 5}),
    "xlm-roberta-tokens": _encoder("XLMRoberta", "XLMRobertaForTokenClassification", kwargs={**_ROBERTA, "num_labels": 3}),
    "qwen3-tokens": _decoder("Qwen3", "Qwen3ForTokenClassification", kwargs={"num_labels": 3}),
}  # fmt: skip


def texts(count: int, *, longest: int = 180, seed: int = 0) -> list[str]:
    """Of one word to `longest`, in no order."""
    rng = np.random.default_rng(seed)
    lengths = np.unique(np.geomspace(1, longest, count).astype(int))
    lengths = rng.permutation(np.concatenate([lengths, rng.integers(1, longest, count - len(lengths))]))
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def word_piece_tokenizer(*, roberta: bool = False) -> Any:
    """Of words, [CLS] before and [SEP] behind a text, types 0 and 1 of the texts of a pair."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if roberta else ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    unknown = special[3]
    tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=_ENCODER["vocab_size"], special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*WORDS, " ".join(WORDS)], trainer)
    cls, sep, pad = ("<s>", "</s>", "<pad>") if roberta else ("[CLS]", "[SEP]", "[PAD]")
    pair = f"{cls} $A {sep} {sep} $B {sep}" if roberta else f"{cls} $A {sep} $B:1 {sep}:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=pair, special_tokens=[(name, tokenizer.token_to_id(name)) for name in (cls, sep)]
    )
    names = ["input_ids", "attention_mask"] if roberta else ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token=cls, sep_token=sep, pad_token=pad, unk_token=unknown, mask_token=special[4],
        model_input_names=names, model_max_length=MAX_LEN, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def tokenizer_of(case: Case) -> Any:
    if not case.is_decoder:
        return word_piece_tokenizer(roberta=case.config == "XLMRoberta")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = None  # else sentence-transformers makes a conversation of each text
    tokenizer.model_max_length = MAX_LEN
    return tokenizer


def make_vectors(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes the model of CASES[name] and its tokenizer, and returns the folder."""
    import torch
    import transformers

    case = CASES[name]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = tokenizer_of(case)
    kwargs = {**case.kwargs, "vocab_size": max(case.kwargs["vocab_size"], len(tokenizer))}
    kwargs.setdefault("pad_token_id", tokenizer.pad_token_id)
    config = getattr(transformers, f"{case.config}Config")(**kwargs)
    config._attn_implementation = "eager"
    model_class = case.model or f"{case.config}Model"
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                is_centered = parameter_name.endswith("bias") or case.config.startswith("Gemma")
                parameter.normal_(0.0 if is_centered else 1.0, 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not case.model:
        _save_modules(case, folder)
    return folder


def _save_modules(case: Case, folder: Path) -> None:
    """As sentence-transformers writes them."""
    from sentence_transformers import SentenceTransformer, models
    from torch import nn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = models.Transformer(str(folder), max_seq_length=MAX_LEN)
        size = case.kwargs["hidden_size"]
        modules: list[Any] = [whole, models.Pooling(size, pooling_mode=case.pooling)]
        size *= len(case.pooling)
        for size_out, act in case.dense:
            activation = nn.Identity() if act is None else getattr(nn, act)()
            modules.append(models.Dense(size, size_out, activation_function=activation))
            size = size_out
        if case.normalizes:
            modules.append(models.Normalize())
        SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


class VectorOracle:
    """What a model makes of texts, in float32 on the CPU: each alone, without padding."""

    def __init__(self, name: str, folder: Path) -> None:
        self.case, self.folder = CASES[name], folder
        from transformers import AutoTokenizer

        # Not made once more: training breaks ties as it likes.
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @functools.cached_property
    def _model(self) -> Any:
        import torch
        import transformers

        torch.set_num_threads(1)
        if not self.case.model:
            from sentence_transformers import SentenceTransformer

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return SentenceTransformer(str(self.folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
        model_class = getattr(transformers, self.case.model)
        return model_class.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="eager").eval()

    @property
    def transformer(self) -> Any:
        """Of an embedder: Transformers' model inside, for whoever changes it."""
        return self._model[0].auto_model

    def encode(self, text: str, second: str | None = None) -> Any:
        """The tokenizer's arrays: input_ids and, of models with types, token_type_ids."""
        return self.tokenizer(text, second) if second is not None else self.tokenizer(text)

    def ids(self, text: str, second: str | None = None) -> list[int]:
        """As our messages have them: a token's type stands in its id."""
        encoded = self.encode(text, second)
        types = encoded.get("token_type_ids") if self.case.config == "Bert" else None
        vocab_size = self.vocab_size
        ids: list[int] = encoded["input_ids"]
        return ids if types is None else [token + kind * vocab_size for token, kind in zip(ids, types, strict=True)]

    @property
    def vocab_size(self) -> int:
        return int(self.case.kwargs["vocab_size"])

    def vectors(self, text: str, second: str | None = None) -> np.ndarray:
        """float32 [1, size], or [tokens, labels] where tokens have scores: before an activation."""
        import torch

        if not self.case.model:
            return np.asarray(self._model.encode([text], show_progress_bar=False), np.float32)
        encoded = self.encode(text, second)
        if "token_type_ids" in encoded and self.case.config != "Bert":
            del encoded["token_type_ids"]
        with torch.inference_mode():
            logits = self._model(**{name: torch.tensor([value]) for name, value in encoded.items()}).logits
        return np.asarray(logits[0] if self.case.of_tokens else logits, np.float32)

    def prompts(self, count: int) -> list[tuple[str, str | None]]:
        """Texts, or pairs of them."""
        if not self.case.pairs:
            longest = 45 if self.case.is_decoder else 180  # words, of which decoders' tokenizer makes five tokens each
            return [(text, None) for text in texts(count, longest=longest)]
        return list(zip(texts(count, longest=60), texts(count, longest=60, seed=1), strict=True))


def check(found: np.ndarray, expected: np.ndarray, case: Case) -> None:
    """Embeddings point where they should, and are as long; scores are equal."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not case.model:
        cosine = np.sum(found * expected, axis=-1) / (np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1))
        assert (cosine > 1 - 1e-5).all(), cosine
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-4)
