"""POST /v1/rerank and its other names, /v1/score of pairs and labels, and /v1/classify: whichever kind of model serves them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import cohere
import httpx
import numpy as np
import pytest
from fake_service import LIMITS, FakeService
from http_harness import app_client, error_message, live_server
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from pydantic import SecretStr

from jaxserve.runner import Vectors
from jaxserve.server.requests import TextPair

CROSS_ENCODER = Vectors(size=1, gives="scores", activation="sigmoid")
EMBEDDING = Vectors(size=2, gives="embedding", normalizes=True)
CLASSIFIER = Vectors(size=3, gives="scores", labels=("sad", "so", "glad"), activation="softmax")
RERANKER_TEMPLATE = 'The answer can only be "yes" or "no". <Query>: ... <Document>: ...'
PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
BODY = {"query": "q", "documents": ["a", "abc", {"text": "ab"}]}


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def serving(vectors: Vectors | None, **limits: Any) -> FakeService:
    """A cross-encoder's score is the pair's length less 4: 0, 2 and 1 for the documents of BODY."""
    service = FakeService()
    service.limits = dataclasses.replace(LIMITS, **{"vectors": vectors, "generates": False} | limits)
    service.vectors_of = lambda ids: [len(ids) - 4.0]
    return service


def embedding() -> FakeService:
    """The angle between a text's vector and that of "q" is its length less 2, in tenths."""
    service = serving(EMBEDDING)
    service.vectors_of = lambda ids: [7 * math.cos((len(ids) - 2) / 10), 7 * math.sin((len(ids) - 2) / 10)]
    return service


def asked_in_words() -> FakeService:
    service = serving(None, generates=True)
    service.chat_template = RERANKER_TEMPLATE
    return service


async def post(path: str, body: dict[str, Any], service: FakeService) -> httpx.Response:
    async with app_client(service) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("path", PATHS)
async def test_a_cross_encoder_reads_pairs(path: str) -> None:
    service = serving(CROSS_ENCODER)
    reply = (await post(path, BODY, service)).json()
    assert reply["id"].startswith("rerank-") and reply["model"] == "/models/tiny"
    assert reply["usage"] == {"prompt_tokens": 4 + 6 + 5, "total_tokens": 15}
    assert [result["index"] for result in reply["results"]] == [1, 2, 0]
    assert [result["document"] for result in reply["results"]] == [{"text": "abc"}, {"text": "ab"}, {"text": "a"}]
    values = [result["relevance_score"] for result in reply["results"]]
    assert values == pytest.approx([sigmoid(2), sigmoid(1), 0.5], rel=1e-6)
    assert service.requests[0].pairs == [("q", "a"), ("q", "abc"), ("q", "ab")] and len(service.requests) == 1


async def test_what_is_replied() -> None:
    service = serving(CROSS_ENCODER)
    asked = {**BODY, "top_n": 2, "return_documents": False, "use_activation": False, "priority": 4}
    reply = (await post("/v1/rerank", asked, service)).json()
    assert reply["results"] == [{"index": 1, "relevance_score": 2.0}, {"index": 2, "relevance_score": 1.0}]
    assert {options.priority for options in service.requests[0].options} == {4}
    everything = (await post("/v1/rerank", {**BODY, "top_n": 0}, service)).json()
    assert len(everything["results"]) == 3


async def test_equal_documents_stay_in_their_order() -> None:
    reply = (await post("/rerank", {"query": "q", "documents": ["b", "a", "c"]}, serving(CROSS_ENCODER))).json()
    assert [result["index"] for result in reply["results"]] == [0, 1, 2]


async def test_the_form_of_text_embeddings_inference() -> None:
    service = serving(CROSS_ENCODER)
    body: dict[str, Any] = {"query": "q", "texts": ["a", "abc"], "truncate": True, "truncation_direction": "Right"}
    reply = (await post("/rerank", body, service)).json()
    assert reply == [{"index": 1, "score": pytest.approx(sigmoid(2))}, {"index": 0, "score": 0.5}]
    assert service.requests[0].truncate_prompt_tokens == -1
    reply = (await post("/rerank", {**body, "raw_scores": True, "return_text": True}, service)).json()
    assert reply == [{"index": 1, "score": 2.0, "text": "abc"}, {"index": 0, "score": 0.0, "text": "a"}]


async def test_an_embedding_model_compares_vectors() -> None:
    service = embedding()
    results = (await post("/v1/rerank", BODY, service)).json()["results"]
    assert [result["index"] for result in results] == [0, 2, 1]
    assert [result["relevance_score"] for result in results] == pytest.approx([1.0, math.cos(0.1), math.cos(0.2)], rel=1e-6)
    assert service.requests[0].prompts == ["q", "a", "abc", "ab"]


async def test_a_model_that_generates_is_asked_in_words() -> None:
    """The fake finds all tokens equally likely."""
    service = asked_in_words()
    service.tokenizer.encode = lambda text, add_special_tokens=True: [ord(text[0])]  # type: ignore[method-assign]
    reply = await post("/v1/rerank", {**BODY, "instruct": "Judge."}, service)
    assert [result["relevance_score"] for result in reply.json()["results"]] == [0.5] * 3
    assert [one["messages"] for one in service.templated] == [
        [
            {"role": "query", "content": "q"},
            {"role": "document", "content": document},
            {"role": "system", "content": "Judge."},
        ]
        for document in ("a", "abc", "ab")
    ]
    assert {one["instruct"] for one in service.templated} == {"Judge."}
    (req,) = service.requests
    assert req.options[0].token_ids_logprob == (ord("y"), ord("n")) and not req.pools


async def test_a_cross_encoder_with_a_rerankers_template() -> None:
    service = serving(CROSS_ENCODER)
    service.chat_template = RERANKER_TEMPLATE
    assert (await post("/v1/rerank", BODY, service)).status_code == 200
    (req,) = service.requests
    assert req.pools and req.pairs is None and len(req.input_ids or ()) == 3 == len(service.templated)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"query": "q"}, "documents", "Exactly one of documents and texts must be given."),
        ({"query": "q", "documents": ["a"], "texts": ["a"]}, "documents", "Exactly one of documents and texts"),
        ({"query": "q", "documents": []}, "documents", "documents must be a list of at least one text, got []."),
        ({"query": "", "documents": ["a"]}, "query", "query must be a text of at least one character"),
        ({"query": "q", "documents": ["a", ""]}, "documents", "documents must be texts of at least one character each"),
        ({"query": "q", "documents": [{"image": "x"}]}, "documents", "objects with a text and nothing else"),
        ({"query": "q", "documents": ["a"], "top_n": -1}, "top_n", "top_n must be at least 0 (all), got -1."),
        ({"query": "q", "documents": ["a"], "instruct": "x"}, "instruct", "asked in words"),
        ({"query": "q", "documents": ["a"], "model": "other"}, "model", "does not exist"),
        ({"query": "q", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields", "not supported"),
        ({"documents": ["a"]}, "query", "query is required"),
        ({"query": "q", "texts": ["a"], "truncation_direction": "Left"}, "truncation_direction", "not supported"),
    ],
)
async def test_bad_requests(body: dict[str, Any], param: str, words: str) -> None:
    reply = await post("/v1/rerank", body, serving(CROSS_ENCODER))
    error = reply.json()["error"]
    assert reply.status_code in (400, 404) and error["param"] == param and words in error["message"], reply.text


async def test_models_that_cannot_rerank() -> None:
    reply = await post("/v1/rerank", BODY, serving(None, generates=True))
    assert "its chat template is not a reranker's" in error_message(reply)
    reply = await post("/v1/rerank", BODY, serving(CLASSIFIER))
    assert "it gives scores of 3 labels (POST /v1/classify), not one" in error_message(reply)
    reply = await post("/v1/rerank", BODY, serving(dataclasses.replace(EMBEDDING, of_tokens=True)))
    assert "makes a vector of each token" in error_message(reply)
    reply = await post("/v1/rerank", BODY, asked_in_words())
    assert "no single tokens for yes and no" in error_message(reply)
    reply = await post("/v1/rerank", {**BODY, "truncate_prompt_tokens": 9}, asked_in_words())
    assert "truncate_prompt_tokens is not available" in error_message(reply)


# --- the clients


async def test_coheres_client() -> None:
    async with live_server(serving(CROSS_ENCODER)) as url:
        client = cohere.ClientV2("k", base_url=url)
        reply = await asyncio.to_thread(client.rerank, model="default", query="q", documents=["a", "abc"], top_n=1)
        assert [(result.index, result.relevance_score) for result in reply.results] == [(1, pytest.approx(sigmoid(2)))]


async def test_langchains_client() -> None:
    async with live_server(serving(CROSS_ENCODER)) as url:
        client = CohereRerank(base_url=url, cohere_api_key=SecretStr("k"), model="default", top_n=2)
        documents = [Document(page_content=text) for text in ("a", "abc", "ab")]
        best = await asyncio.to_thread(client.compress_documents, documents, "q")
        assert [document.page_content for document in best] == ["abc", "ab"]


async def test_llama_indexs_client() -> None:
    async with live_server(embedding()) as url:
        client = JinaRerank(top_n=2, model="default", base_url=f"{url}/v1", api_key="k")
        nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("abc", "a", "ab")]
        best = await asyncio.to_thread(client.postprocess_nodes, nodes, QueryBundle("q"))
        assert [node.node.get_content() for node in best] == ["a", "ab"]


# --- /v1/score


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_of_pairs(path: str) -> None:
    service = serving(CROSS_ENCODER)
    reply = (await post(path, {"text_1": "q", "text_2": ["a", "abc"]}, service)).json()
    assert reply["object"] == "list" and reply["id"].startswith("score-")
    assert reply["data"] == [
        {"index": 0, "object": "score", "score": 0.5},
        {"index": 1, "object": "score", "score": pytest.approx(sigmoid(2))},
    ]
    assert reply["usage"] == {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10}
    each = {"text_1": ["q", "qq"], "text_2": ["a", "b"], "use_activation": False}
    assert [one["score"] for one in (await post(path, each, service)).json()["data"]] == [0.0, 1.0]
    assert service.requests[-1].pairs == [("q", "a"), ("qq", "b")]
    similar = (await post(path, {"text_1": ["a", "abc"], "text_2": ["q", "q"]}, embedding())).json()["data"]
    assert [one["score"] for one in similar] == pytest.approx([1.0, math.cos(0.2)], rel=1e-6)


async def test_scores_of_labels() -> None:
    service = serving(CLASSIFIER)
    service.vectors_of = lambda ids: [0.0, 1.0, len(ids)]
    body: dict[str, Any] = {"query": "q", "items": ["x", "yz"]}
    assert (await post("/v1/score", body, service)).json()["scores"] == [[0.0, 1.0, 3.0], [0.0, 1.0, 4.0]]
    assert service.requests[-1].prompts == ["qx", "qyz"] and service.requests[-1].pools
    (row,) = (await post("/v1/score", {"query": [1], "items": [[2]], "apply_softmax": True}, service)).json()["scores"]
    assert row == pytest.approx([math.exp(x) / sum(map(math.exp, (0, 1, 2))) for x in (0, 1, 2)], rel=1e-6)
    cooler = {"query": [1], "items": [[2]], "apply_softmax": True, "temperature": 0.5}
    (row,) = (await post("/v1/score", cooler, service)).json()["scores"]
    assert row == pytest.approx([math.exp(x) / sum(map(math.exp, (0, 2, 4))) for x in (0, 2, 4)], rel=1e-6)
    assert (await post("/v1/score", {**cooler, "temperature": 1e-310}, service)).json()["scores"] == [[0, 0, 1]]
    service.tokenizer.separates_pairs = True
    await post("/v1/score", {**body, "item_first": True}, service)
    assert service.requests[-1].pairs == [TextPair("x", "q"), TextPair("yz", "q")]
    assert (await post("/v1/score", {"query": "q", "items": []}, service)).json()["scores"] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text_1": "a"}, "text_2 must be a text, or a list of texts"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 must be one text, or as many as text_2 has (3), got 2."),
        ({"text_1": "a", "text_2": ""}, "text_2 must be a text"),
        ({"text_1": "a", "text_2": "b", "items": ["c"]}, "items does not go with text_1 and text_2."),
        ({"query": "a", "items": "b", "use_activation": True}, "use_activation does not go with query and items."),
        ({"query": "a", "items": "b", "label_token_ids": [1]}, "does not generate text: it scores texts"),
        ({"text_1": "a", "text_2": "b", "temperature": 0.5}, "temperature does not go with text_1 and text_2."),
        ({"query": "a", "items": "b", "return_token_logprobs": True}, "return_token_logprobs needs a model that generates"),
        ({"query": "a", "items": "b", "temperature": 2}, "temperature needs apply_softmax: true."),
        ({"query": "a"}, "items must be given."),
        ({}, "query must be given."),
    ],
)
async def test_bad_scores(body: dict[str, Any], words: str) -> None:
    reply = await post("/v1/score", body, serving(CROSS_ENCODER))
    assert reply.status_code == 400 and words in error_message(reply), reply.text


# --- /v1/classify


async def test_classify() -> None:
    service = serving(CLASSIFIER)
    service.vectors_of = lambda ids: [1.0, 0.0, len(ids) - 2.5]
    reply = (await post("/v1/classify", {"input": ["a", "abc"], "model": "default"}, service)).json()
    assert reply["id"].startswith("classify-") and reply["object"] == "list" and reply["usage"]["total_tokens"] == 6
    assert [(one["index"], one["label"], one["num_classes"]) for one in reply["data"]] == [(0, "sad", 3), (1, "glad", 3)]
    logits = np.array([1.0, 0.0, -0.5])
    assert reply["data"][0]["probs"] == pytest.approx((np.exp(logits) / np.exp(logits).sum()).tolist(), rel=1e-6)
    reply = (await post("/v1/classify", {"input": "a", "use_activation": False}, service)).json()
    assert reply["data"][0]["probs"] == [1.0, 0.0, -0.5]


async def test_classify_with_a_sigmoid_and_without_names() -> None:
    service = serving(Vectors(size=2, gives="scores", activation="sigmoid"))
    service.vectors_of = lambda ids: [-1000.0, 2.0]
    (one,) = (await post("/v1/classify", {"input": [5, 6]}, service)).json()["data"]
    assert one == {"index": 0, "label": "LABEL_1", "probs": [0.0, pytest.approx(sigmoid(2))], "num_classes": 2}


async def test_what_classify_refuses() -> None:
    reply = await post("/v1/classify", {"input": "a"}, embedding())
    assert error_message(reply).startswith("This server's model gives no scores: it makes embeddings of texts")
    reply = await post("/v1/classify", {"input": "a"}, serving(Vectors(size=2, gives="token_scores", of_tokens=True)))
    assert "makes a vector of each token, not of a text: POST /encode or /classify." in error_message(reply)
    reply = await post("/v1/classify", {"input": []}, serving(CLASSIFIER))
    assert reply.json()["error"]["param"] == "input"
