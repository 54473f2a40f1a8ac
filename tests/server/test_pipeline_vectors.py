"""Vectors through a whole pipeline: a FakeRunner that makes vectors and generates nothing, and BERT's tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from bert_tokenizers import CLS, SEP, bert_folder, word_id
from fake_scheduler import CONTEXT_LEN, VOCAB_SIZE
from pipeline_harness import collect, refused, request, running

from jaxserve.server.pipeline import Pipeline
from jaxserve.server.reply_limits import ReplyLimits
from jaxserve.server.requests import GenerateReqInput, TextPair
from jaxserve.server.vectors import Pooled, pooled, pooling_request


def encoder(**vectors: Any) -> str:
    spec = {"generates": False, "num_token_ids": 2 * VOCAB_SIZE, "vectors": {"needs_whole": True, **vectors}}
    return json.dumps(spec)


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_SPEC", encoder())
        async with running(tokenizer_path=str(bert_folder(tmp_path_factory.mktemp("bert")))) as ready:
            yield ready


async def ask(pipeline: Pipeline, **fields: Any) -> Pooled:
    return await pooled(pipeline.manager.generate, pooling_request(**fields))


def said(ids: Sequence[int]) -> list[float]:
    """What the fake's vector says of a text's tokens, without what the model expects behind them."""
    weighted = sum((token + 1) * (position + 1) for position, token in enumerate(ids))
    return [weighted % (1 << 20), len(ids), ids[0], ids[-1]]


async def test_texts_pairs_and_ids(server: Pipeline) -> None:
    the, fox, a, dog = map(word_id, ("the", "fox", "a", "dog"))
    texts = await ask(server, texts=["the fox", "dog"], rids=["x", "y"])
    assert [part.tolist()[0][:4] for part in texts.parts] == [said([CLS, the, fox, SEP]), said([CLS, dog, SEP])]
    assert texts.prompt_tokens == 7 and [chunk.rid for chunk in texts.chunks] == ["x", "y"]
    second = [token + VOCAB_SIZE for token in (a, dog, SEP)]
    for fields in ({"pairs": [TextPair("the fox", "a dog")]}, {"input_ids": [[CLS, the, fox, SEP, *second]]}):
        (pair,) = (await ask(server, **fields)).parts
        assert pair.tolist()[0][:4] == said([CLS, the, fox, SEP, *second])
    (chunk,) = texts.chunks[:1]
    assert chunk.finish_reason is not None and chunk.completion_tokens == 0 and "e2e_latency" in chunk.meta


async def test_thousands_in_one_request(server: Pipeline) -> None:
    texts = [" ".join(["fox"] * (i % 50 + 1)) for i in range(3000)]
    got = await ask(server, texts=texts)
    assert got.matrix().shape == (3000, 5)
    assert got.matrix()[:, 1].tolist() == [i % 50 + 3 for i in range(3000)]


async def test_a_text_may_fill_the_context(server: Pipeline) -> None:
    whole = " ".join(["fox"] * (CONTEXT_LEN - 2))
    assert (await ask(server, texts=[whole])).matrix()[0, 1] == CONTEXT_LEN
    error = await refused(server, pooling_request(texts=[f"{whole} fox"]))
    assert error.code == "context_length_exceeded" and f"({CONTEXT_LEN} tokens)." in error.message
    for wanted, length in ((-1, CONTEXT_LEN), (9, 9)):
        (cut,) = (await ask(server, texts=[f"{whole} fox"], truncate_prompt_tokens=wanted)).parts
        assert cut.tolist()[0][1:4] == [length, CLS, SEP]
        (cut,) = (await ask(server, input_ids=[[5] * (CONTEXT_LEN + 1)], truncate_prompt_tokens=wanted)).parts
        assert cut.tolist()[0][1] == length


async def test_nothing_is_generated(server: Pipeline) -> None:
    error = await refused(server, request("the fox"))
    assert error.status_code == 400 and "does not generate text" in error.message
    with pytest.raises(ValueError, match="does not generate text"):
        server.manager.apply_chat_template([{"role": "user", "content": "the fox"}])
    info = server.manager.model_info
    assert info["is_generation"] is False and info["vectors"] == {"gives": "embedding", "size": 5, "normalized": False}
    assert await server.manager.health_check(5.0)


async def test_what_a_reply_may_hold(server: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(server.manager.limits, reply=ReplyLimits(499, 2))
    monkeypatch.setattr(server.manager, "_limits", limits)
    error = await refused(server, pooling_request(input_ids=[[5]] * 100))
    assert "100 texts hold 500 numbers; one reply may hold at most 499 (--max-reply-numbers)" in error.message
    assert (await ask(server, input_ids=[[5]] * 99)).matrix().shape == (99, 5)


async def test_a_model_that_generates_may_make_vectors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SPEC", json.dumps({"vectors": {}}))
    async with running() as pipeline:
        generated = GenerateReqInput(input_ids=[[5, 6, 7]], sampling_params=request().sampling_params)
        assert (await collect(pipeline, generated))[0][-1].completion_tokens == 8
        (vector,) = (await ask(pipeline, input_ids=[[5, 6, 7]])).parts
        assert vector.tolist()[0][2:4] == [7, 7]  # of the last token
        error = await refused(pipeline, pooling_request(texts=["a", ""]))
        assert error.message == "text must not hold an empty string."
        assert pipeline.manager.model_info["is_generation"] is True


async def test_a_vector_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SPEC", encoder(gives="token_scores", of_tokens=True, labels=["A", "B", "C", "D", "E"]))
    async with running(skip_tokenizer_init=True) as pipeline:
        (scores,) = (await ask(pipeline, input_ids=[[5, 6, 7]])).parts
        assert scores.shape == (3, 5) and scores[:, 2].tolist() == [5, 6, 7]
        error = await refused(pipeline, pooling_request(texts=["a"]))
        assert "needs a tokenizer" in error.message
