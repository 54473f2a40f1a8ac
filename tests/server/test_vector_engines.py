"""Whole Engines on small real models, side by side with sentence-transformers: texts, pairs, and what is cut of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer
from vector_checkpoints import texts

from jaxserve import Engine

OPTIONS = {"device": "cpu", "context_length": 256}
TEXTS = texts(10, longest=60)
TOO_LONG = " ".join(texts(40, longest=60))


@pytest.mark.parametrize("name", ["bert-mean", "qwen3-last"])
def test_embeddings(name: str, vector_checkpoint: Callable[[str], Path]) -> None:
    folder = vector_checkpoint(name)
    oracle = SentenceTransformer(str(folder), device="cpu")
    short = [" ".join(text.split()[:30]) for text in TEXTS]
    expected = oracle.encode([*short, TOO_LONG], show_progress_bar=False)
    with Engine(str(folder), **OPTIONS) as engine:
        replies = engine.encode([*short, TOO_LONG], truncate_prompt_tokens=-1)
        found = np.array([reply["embedding"] for reply in replies], np.float32)
        cut = engine.encode(short[0], dimensions=16)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    shortened = expected[0, :16] / np.linalg.norm(expected[0, :16])
    np.testing.assert_allclose(cut["embedding"], shortened, atol=1e-5)


@pytest.mark.parametrize("name", ["bert-cross", "xlm-roberta-cross"])
def test_reranking(name: str, vector_checkpoint: Callable[[str], Path]) -> None:
    folder = vector_checkpoint(name)
    oracle = CrossEncoder(str(folder), device="cpu")
    queries, documents = (TEXTS[0], TOO_LONG), [*TEXTS, TOO_LONG]
    with Engine(str(folder), **OPTIONS) as engine:
        found = [engine.rerank(query, documents, truncate_prompt_tokens=-1) for query in queries]
    for query, results in zip(queries, found, strict=True):
        expected = oracle.predict([(query, document) for document in documents], show_progress_bar=False)
        by_place = {result["index"]: result["relevance_score"] for result in results}
        np.testing.assert_allclose([by_place[place] for place in range(len(documents))], expected, atol=1e-5)
