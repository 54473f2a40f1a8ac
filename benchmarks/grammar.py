"""What constrained decoding costs the host: compiling grammars, and masks along random outputs.

    python -m benchmarks.grammar [--rows 1,64] [--tokens 48] [--synthetic-vocabulary 128000]

No device and no model is used: the demo model's tokenizer, and a made-up one of 128,000 byte pair tokens. Outputs are drawn
uniformly from the masks; every row has its own. Times are per step of the whole batch and per row, in microseconds: median and
99th percentile. The first steps of a fresh grammar are in the 99th.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve.demo import demo_model_path
from jaxserve.grammar import CompiledGrammar, GrammarCompiler, MaskFiller
from jaxserve.types import Grammar

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "home": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["zip"]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
_WIDE = {"type": "object", "properties": {f"field_{i}": {"type": ["string", "integer", "null"]} for i in range(200)}}
GRAMMARS = {
    "regex: phone number": Grammar("regex", r"\(\d{3}\) \d{3}-\d{4}( ext \d{1,5})?"),
    "regex: any text": Grammar("regex", r"(.|\n)*"),
    "json: person": Grammar("json_schema", json.dumps(_PERSON)),
    "json: any object": Grammar("json_schema", '{"type": "object"}'),
    "json: 200 optional fields": Grammar("json_schema", json.dumps(_WIDE)),
    "ebnf: arithmetic": Grammar("ebnf", 'root ::= t ([-+*/] t)*\nt ::= [0-9]+ | "(" root ")"'),
}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    name: str
    tokenizer_json: str
    size: int
    eos_token_id: int


def demo_vocabulary() -> Vocabulary:
    folder = Path(demo_model_path())
    config = json.loads((folder / "config.json").read_text())
    return Vocabulary("demo", (folder / "tokenizer.json").read_text(), config["vocab_size"], config["eos_token_id"])


def synthetic_vocabulary(size: int) -> Vocabulary:
    """All bytes, and made-up words of two to nine frequent characters, about half of them with a space in front."""
    rng = np.random.default_rng(0)
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    characters = np.array(list('etaoinshrdlucmfwypvbgkqjxzETAOINS0123456789_-."{}:,['))
    weights = 1 / np.arange(1, len(characters) + 1)
    weights /= weights.sum()
    while len(vocabulary) < size - 1:
        word = "".join(rng.choice(characters, rng.integers(2, 10), p=weights))
        vocabulary.setdefault("Ġ" + word if rng.random() < 0.45 else word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return Vocabulary("synthetic", tokenizer.to_str(), size, tokenizer.token_to_id("<eos>"))


def step_times_us(compiled: CompiledGrammar, vocabulary: Vocabulary, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each step: the time to fill all masks, and to take in all tokens."""
    rng = np.random.default_rng(1)
    filler, out = MaskFiller(), np.zeros((rows, -(-vocabulary.size // 32)), np.int32)
    matchers = [compiled.matcher() for _ in range(rows)]
    fills, accepts = [], []
    for _ in range(tokens):
        begun = time.perf_counter()
        filler.fill(matchers, range(rows), out)
        fills.append(time.perf_counter() - begun)
        bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
        drawn = [int(rng.choice(np.flatnonzero(row))) for row in bits]
        begun = time.perf_counter()
        for matcher, token in zip(matchers, drawn, strict=True):
            matcher.accept(token)
        accepts.append(time.perf_counter() - begun)
        matchers = [compiled.matcher() if matcher.is_terminated else matcher for matcher in matchers]
    return np.array(fills) * 1e6, np.array(accepts) * 1e6


def measure(vocabulary: Vocabulary, rows: list[int], tokens: int) -> None:
    compiler = GrammarCompiler(vocabulary.tokenizer_json, vocabulary.size, (vocabulary.eos_token_id,))
    begun = time.perf_counter()
    compiler.submit(Grammar("regex", "warm-up")).result()
    print(f"\n{vocabulary.name}: {vocabulary.size} tokens; the first grammar takes {time.perf_counter() - begun:.2f} s\n")
    print("| grammar | compile ms | rows | fill us: median | p99 | per row | accept us per row |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, grammar in GRAMMARS.items():
        begun = time.perf_counter()
        compiled = compiler.submit(grammar).result()
        compile_ms = (time.perf_counter() - begun) * 1e3
        for count in rows:
            fills, accepts = step_times_us(compiled, vocabulary, count, tokens)
            median, late = np.percentile(fills, [50, 99])
            print(
                f"| {name} | {compile_ms:.1f} | {count} | {median:.0f} | {late:.0f} | {median / count:.1f} "
                f"| {np.median(accepts) / count:.1f} |"
            )
    compiler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--tokens", default=48, type=int, help="steps per row")
    parser.add_argument("--synthetic-vocabulary", default=128_000, type=int)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    for vocabulary in (demo_vocabulary(), synthetic_vocabulary(options.synthetic_vocabulary)):
        measure(vocabulary, options.rows, options.tokens)


if __name__ == "__main__":
    main()
