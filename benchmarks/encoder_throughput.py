"""Embeddings per second of one encoder: a server of jaxserve against sentence-transformers, on the same CPUs.

    python -m benchmarks.encoder_throughput [--rounds 5] [--texts 1024] [--layers 6] [--hidden-size 384] [--pairs]

The model has the shape of all-MiniLM-L6 (or of ms-marco-MiniLM-L6, a cross-encoder, with --pairs) and random weights: what they
are makes no difference to the time. Texts are of random words, half of them as short as questions, half as long as passages.
Both get all texts in one call, in turns within each round: sentence-transformers sorts them by length and pads batches of 32,
its default, of 8 and of 128; jaxserve gets them through its Engine, with processes that tokenize, schedule and pass on. Prints
tokens per second (those of the texts, padding not counted), medians of the rounds, and of ratios within a round to the best of
sentence-transformers. Vectors are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import Engine

VOCAB = 4000  # words; each is a token
LONGEST = 256


def write_model(folder: Path, *, layers: int, hidden_size: int, pairs: bool) -> None:
    """As sentence-transformers and Transformers write it."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {token: i for i, token in enumerate([*special, *(f"w{i}" for i in range(VOCAB))])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], model_max_length=2 * LONGEST,
    )  # fmt: skip
    config = BertConfig(
        vocab_size=30522, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=hidden_size // 32,
        intermediate_size=4 * hidden_size, max_position_embeddings=2 * LONGEST, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config) if pairs else BertModel(config)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if pairs:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [
            models.Transformer(str(folder), max_seq_length=2 * LONGEST),
            models.Pooling(hidden_size, pooling_mode="mean"),
        ]
        SentenceTransformer(modules=[*modules, models.Normalize()], device="cpu").save(str(folder), create_model_card=False)


def some_texts(count: int, seed: int) -> list[str]:
    """Half of them short as questions, half as passages."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(count) < 0.5, rng.integers(4, 24, count), rng.integers(40, LONGEST - 40, count))
    return [" ".join(f"w{i}" for i in rng.integers(0, VOCAB, length)) for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--pairs", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers=args.layers, hidden_size=args.hidden_size, pairs=args.pairs)
        reference, batch_sizes = _reference(folder, pairs=args.pairs), (8, 32, 128)
        with Engine(model_path=folder, warmup="full", log_level="error") as engine:
            ways: dict[str, Callable[[list[str]], np.ndarray]] = {
                "jaxserve Engine": (lambda texts: _scores(engine, texts))
                if args.pairs
                else (lambda texts: _embeddings(engine, texts))
            }
            for size in batch_sizes:
                ways[f"sentence-transformers, batches of {size}"] = lambda texts, size=size: reference(texts, size)
            runs: dict[str, list[float]] = {name: [] for name in ways}
            for seed in range(-1, args.rounds):  # the first warms up
                texts = some_texts(args.texts, seed + 1)
                num_tokens = sum(text.count(" ") + 3 for text in texts)
                found = {}
                for name in np.random.default_rng(seed + 1).permutation(list(ways)).tolist():
                    began_s = time.perf_counter()
                    found[name] = ways[name](texts)
                    value = num_tokens / (time.perf_counter() - began_s)
                    if seed >= 0:
                        runs[name].append(value)
                    print(f"round {seed}: {name:40}{value:10.0f} tokens/s", flush=True)
                theirs = found["sentence-transformers, batches of 32"]
                np.testing.assert_allclose(found["jaxserve Engine"], theirs, atol=1e-4)
    best = [max(values) for values in zip(*(values for name, values in runs.items() if "jaxserve" not in name), strict=True)]
    print(f"\n{args.texts} texts, {args.layers} layers of {args.hidden_size}, medians of {args.rounds} rounds")
    for name, values in runs.items():
        ratio = statistics.median(value / one for value, one in zip(values, best, strict=True))
        print(f"{name:40}{statistics.median(values):10.0f} tokens/s{ratio:8.3f} of their best")


def _reference(folder: str, *, pairs: bool) -> Callable[[list[str], int], np.ndarray]:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    if pairs:
        cross = CrossEncoder(folder, device="cpu")
        return lambda texts, size: np.asarray(
            cross.predict(list(zip(texts[::2], texts[1::2], strict=True)), batch_size=size, show_progress_bar=False)
        )
    model = SentenceTransformer(folder, device="cpu")
    return lambda texts, size: np.asarray(model.encode(texts, batch_size=size, show_progress_bar=False))


def _embeddings(engine: Engine, texts: list[str]) -> np.ndarray:
    replies: Any = engine.encode(texts)
    return np.array([reply["embedding"] for reply in replies], np.float32)


def _scores(engine: Engine, texts: list[str]) -> np.ndarray:
    """Of each two texts, as probabilities."""
    replies: Any = engine.encode(list(zip(texts[::2], texts[1::2], strict=True)))
    return np.array([1 / (1 + np.exp(-reply["embedding"][0])) for reply in replies], np.float32)


if __name__ == "__main__":
    main()
