"""The demo model's tokenizer, and a compiler for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from grammar_sampler import GrammarSampler
from tokenizers import Tokenizer

from jaxserve.demo import demo_model_path
from jaxserve.grammar import GrammarCompiler

VOCAB_SIZE = 2080  # larger than the tokenizer's, as a padded embedding table is
EOS = (2041, 2042)


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    return (Path(demo_model_path()) / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_json: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json)


@pytest.fixture(scope="session")
def special_ids(tokenizer_json: str) -> set[int]:
    return {token["id"] for token in json.loads(tokenizer_json)["added_tokens"] if token["special"]}


@pytest.fixture(scope="session")
def compiler(tokenizer_json: str) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer_json, VOCAB_SIZE, EOS)
    yield made
    made.close()


@pytest.fixture(scope="session")
def sampler(tokenizer: Tokenizer) -> GrammarSampler:
    return GrammarSampler(tokenizer, VOCAB_SIZE, EOS)
