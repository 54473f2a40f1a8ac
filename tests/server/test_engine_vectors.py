"""Engine.encode, classify, rerank and score, over a fake scheduler whose model makes vectors and generates nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_scheduler
import numpy as np
import pytest
from bert_tokenizers import CLS, SEP, bert_folder, word_id
from server_process import serving

from jaxserve import Engine
from jaxserve.demo import demo_model_path
from jaxserve.server.remote import RemoteEngine
from jaxserve.server.requests import RequestError

LABELS = ["A", "B", "C", "D", "E"]


def engine(monkeypatch: pytest.MonkeyPatch, folder: Path, vectors: dict[str, Any]) -> Engine:
    spec = {"generates": False, "num_token_ids": 2 * fake_scheduler.VOCAB_SIZE, "vectors": {"needs_whole": True, **vectors}}
    monkeypatch.setenv("FAKE_SPEC", json.dumps(spec))
    commands = fake_scheduler.commands()
    return Engine(demo_model_path(), worker_commands=commands, tokenizer_path=str(bert_folder(folder)))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch, engine(patch, tmp_path_factory.mktemp("bert"), {}) as ready:
        yield ready


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    vectors = {"gives": "scores", "labels": LABELS, "activation": "softmax"}
    with pytest.MonkeyPatch.context() as patch, engine(patch, tmp_path_factory.mktemp("bert"), vectors) as ready:
        yield ready


def test_encode(embedder: Engine) -> None:
    fox = word_id("fox")
    one = embedder.encode("fox", rid="r")
    assert isinstance(one, dict) and one["embedding"][1:4] == [3.0, CLS, SEP]
    assert one["meta_info"]["id"] == "r" and one["meta_info"]["prompt_tokens"] == 3
    several = embedder.encode(["fox", "the fox"], dimensions=2)
    assert [reply["embedding"][1] for reply in several] == [3.0, 4.0] and len(several[0]["embedding"]) == 2
    for ids in ([CLS, fox, SEP], np.array([CLS, fox, SEP]), [np.array([CLS, fox, SEP])]):
        reply = embedder.encode(input_ids=ids)
        assert (reply if isinstance(reply, dict) else reply[0])["embedding"] == one["embedding"]
    assert embedder.encode("fox", None, None, None, 2)["embedding"] == one["embedding"][:2]  # at SGLang's place
    assert asyncio.run(embedder.async_encode("fox"))["embedding"] == one["embedding"]


def test_what_encode_refuses(embedder: Engine) -> None:
    with pytest.raises(RequestError, match="text must not hold an empty string"):
        embedder.encode("")
    with pytest.raises(RequestError, match="image_data is not supported yet"):
        embedder.encode("fox", "a picture")
    with pytest.raises(RequestError, match="colour is not a field this server knows"):
        embedder.encode("fox", colour="red")
    with pytest.raises(TypeError, match="encode got dimensions twice"):
        embedder.encode("fox", None, None, None, 2, dimensions=2)
    with pytest.raises(TypeError, match="encode takes at most 10 positions, got 11"):
        embedder.encode("fox", *[None] * 10)
    with pytest.raises(RequestError, match="does not generate text"):
        embedder.generate("fox")
    with pytest.raises(RequestError, match="gives no scores: it makes embeddings"):
        embedder.classify("fox")
    with pytest.raises(RequestError, match="gives no scores: it makes embeddings"):
        embedder.score("fox", ["dog"])


def test_rerank_by_embeddings(embedder: Engine) -> None:
    best = embedder.rerank("the fox", ["a lazy dog", "the fox"], top_n=1)
    assert best == [{"index": 1, "relevance_score": pytest.approx(1.0), "document": {"text": "the fox"}}]
    assert asyncio.run(embedder.async_rerank("the fox", ["a lazy dog", "the fox"], top_n=1)) == best
    of_pairs = embedder.rerank([["the fox", "the fox"], ["the fox", "a lazy dog"]])
    assert of_pairs[0]["embedding"] == pytest.approx(1.0) and of_pairs[1]["embedding"] < of_pairs[0]["embedding"]
    for arguments, words in (
        (("the fox", []), "documents must hold at least one text"),
        (([],), "documents must hold at least one text"),
        (("the fox",), "query must hold pairs"),
        (([["the fox", "a dog"]], ["x"]), "query must be one text"),
    ):
        with pytest.raises(RequestError, match=words):
            embedder.rerank(*arguments)


def test_scores_and_classes(classifier: Engine) -> None:
    alone = classifier.classify("the fox")
    assert alone["embedding"][1:4] == [4.0, CLS, SEP]
    assert asyncio.run(classifier.async_classify(["the fox"]))[0]["embedding"] == alone["embedding"]
    result = classifier.score("the fox", ["dog", "a dog"])
    assert [row[1:3] for row in result.scores] == [[6.0, CLS], [7.0, CLS]] and result.prompt_tokens == 13
    assert [row[3] for row in result.scores] == [SEP + fake_scheduler.VOCAB_SIZE] * 2  # the second of a pair
    softened = asyncio.run(classifier.async_score("the fox", ["dog"], apply_softmax=True))
    assert sum(softened.scores[0]) == pytest.approx(1.0)
    raw = np.array(classifier.score("the fox", ["dog"]).scores[0])
    hot = asyncio.run(classifier.async_score("the fox", ["dog"], apply_softmax=True, temperature=1000.0))
    weights = np.exp((raw - raw.max()) / 1000)
    np.testing.assert_allclose(hot.scores[0], weights / weights.sum(), rtol=1e-5)
    assert hot.token_logprobs is None
    for wrong in ({"return_token_logprobs": True}, {"temperature": float("nan"), "apply_softmax": True}, {"temperature": 2.0}):
        with pytest.raises(RequestError) as caught:
            classifier.score("the fox", ["dog"], **wrong)
        assert caught.value.param == next(iter(wrong))
    with pytest.raises(RequestError, match="scores of 5 labels"):
        classifier.rerank("the fox", ["dog"])
    assert classifier.get_model_info()["vectors"] == {"gives": "scores", "labels": LABELS, "activation": "softmax"}


def test_a_server_of_several_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by a RemoteEngine, which says what an Engine does."""
    spec = {"generates": False, "num_token_ids": 2 * fake_scheduler.VOCAB_SIZE, "vectors": {"needs_whole": True}}
    monkeypatch.setenv("FAKE_SPEC", json.dumps(spec))
    tokenizer = str(bert_folder(folder / "bert"))
    with serving(folder, tokenizer_path=tokenizer, tokenizer_worker_num=2, detokenizer_worker_num=2, dp_size=2) as server:
        server.wait_for("/ready", 200)
        assert server.status("/health_generate") == 200
        remote = RemoteEngine(server.url)
        assert remote.encode("fox", dimensions=4)["embedding"][1:] == [3.0, CLS, SEP]
        assert len(asyncio.run(remote.async_encode(["the fox", "a dog"]))) == 2
        assert remote.rerank("the fox", ["a dog", "the fox"], top_n=1)[0]["index"] == 1
        assert asyncio.run(remote.async_rerank("the fox", ["a dog", "the fox"]))[0]["index"] == 1
        for refused in (lambda: remote.classify("fox"), lambda: asyncio.run(remote.async_classify("fox"))):
            with pytest.raises(RequestError, match="gives no scores"):
                refused()
        with pytest.raises(RequestError, match="does not generate text"):
            remote.generate("fox")
        assert remote.get_model_info()["is_generation"] is False
        server.stop()
    assert "Traceback" not in server.log
