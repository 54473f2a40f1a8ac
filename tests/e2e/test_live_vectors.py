"""Embeddings, rerankers and classifiers before real clients: the openai package, LangChain's and LlamaIndex's, the Engine.

What they get equals what sentence-transformers and Transformers make of the same texts, alone and in crowds of clients.
"""

from __future__ import annotations

import concurrent.futures
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from checkpoints import make_tokenizer
from crowd import check_crowd
from live_server import LiveServer, running
from parity import Oracle
from peft_adapters import load_adapted, make_adapter
from transformers import AutoTokenizer
from vector_checkpoints import CASES, MAX_LEN, VectorOracle, check, make_vectors, texts

from jaxserve import Engine
from jaxserve.server.requests import RequestError

OPTIONS = """
    --max-running-requests 32 --max-total-tokens 16384 --page-size 16 --prefill-token-buckets 512
""".split()  # noqa: SIM905
CLIENTS = 48
torch_lock = threading.Lock()  # of what the clients expect one is computed at a time


class Served:
    """A live server of a model, and its oracle."""

    def __init__(self, server: LiveServer, oracle: VectorOracle) -> None:
        self.server, self.oracle = server, oracle
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def embed(self, text: str | list[str], **fields: Any) -> np.ndarray:
        reply = self.client.embeddings.create(model="m", input=text, **fields)
        assert [one.index for one in reply.data] == list(range(len(reply.data)))
        return np.array([one.embedding for one in reply.data], np.float32)

    def expected(self, *pair: str) -> np.ndarray:
        with torch_lock:
            return self.oracle.vectors(*pair)


def serve(
    name: str, vector_checkpoint: Callable[[str], Path], log: Path, compilation_cache: str, *options: str
) -> Iterator[Served]:
    folder = vector_checkpoint(name)
    own = ("--model-path", str(folder), "--served-model-name", "m", "--compilation-cache-dir", compilation_cache)
    with running(log, *own, *OPTIONS, *options) as server:
        yield Served(server, VectorOracle(name, folder))


@pytest.fixture(scope="module")
def embedder(
    vector_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, compilation_cache: str
) -> Iterator[Served]:
    yield from serve("bert-mean", vector_checkpoint, tmp_path_factory.mktemp("log") / "log", compilation_cache)


@pytest.fixture(scope="module")
def cross_encoder(
    vector_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, compilation_cache: str
) -> Iterator[Served]:
    yield from serve("bert-cross", vector_checkpoint, tmp_path_factory.mktemp("log") / "log", compilation_cache)


def without_ties(cosines: np.ndarray) -> list[int]:
    """Some of the passages of [queries, passages], of which no two are so near to each other, for any query, that rounding
    decides about their order: float32 moves a cosine by up to 5e-7."""
    chosen: list[int] = []
    for passage in range(cosines.shape[1]):
        if np.all(np.abs(cosines[:, chosen] - cosines[:, [passage]]) > 5e-6):
            chosen.append(passage)
    return chosen


class TestEmbedder:
    def test_openai_s_client_gets_the_reference_s_embeddings(self, embedder: Served) -> None:
        some = texts(12)
        expected = np.concatenate([embedder.expected(text) for text in some])
        case = CASES["bert-mean"]
        check(embedder.embed(some), expected, case)  # base64, which the client asks for by default
        check(embedder.embed(some, encoding_format="float"), expected, case)
        check(embedder.embed(some[0]), expected[:1], case)
        ids = [embedder.oracle.ids(text) for text in some]
        check(embedder.embed(ids), expected, case)  # type: ignore[arg-type]
        check(embedder.embed(ids[3]), expected[3:4], case)  # type: ignore[arg-type]
        cut = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
        check(embedder.embed(some, dimensions=16), cut, case)
        reply = embedder.client.embeddings.create(model="m", input=some)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))

    def test_a_crowd_is_answered_as_each_alone(self, embedder: Served) -> None:
        crowd = texts(CLIENTS, seed=3)

        def ask(i: int) -> np.ndarray:
            if i % 3 == 0:
                reply = embedder.server.post("/encode", {"text": crowd[i]}).json()
                return np.array([reply["embedding"]], np.float32)
            return embedder.embed(crowd[i])

        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(ask, range(CLIENTS)))
        for text, vectors in zip(crowd, found, strict=True):
            check(vectors, embedder.expected(text), CASES["bert-mean"])

    def test_thousands_in_one_request(self, embedder: Served) -> None:
        some = texts(40, longest=20)
        many = [some[i % len(some)] for i in range(4000)]
        found = embedder.embed(many)
        expected = np.concatenate([embedder.expected(text) for text in some])
        np.testing.assert_allclose(found, expected[np.arange(4000) % len(some)], atol=1e-4)

    def test_nearest_neighbours_are_those_of_sentence_transformers(self, embedder: Served) -> None:
        """A small task of retrieval: of each query all passages in the same order."""
        passages, queries = texts(200, longest=60, seed=5), texts(20, longest=12, seed=6)
        of_passages = np.concatenate([embedder.expected(text) for text in passages])
        expected = np.concatenate([embedder.expected(text) for text in queries]) @ of_passages.T
        chosen = without_ties(expected)[:120]
        assert len(chosen) == 120
        found = embedder.embed(queries) @ embedder.embed([passages[i] for i in chosen]).T
        np.testing.assert_array_equal(np.argsort(-found, axis=1), np.argsort(-expected[:, chosen], axis=1))

    def test_langchain_and_llama_index(self, embedder: Served) -> None:
        from langchain_openai import OpenAIEmbeddings
        from llama_index.embeddings.openai import OpenAIEmbedding

        some, url = texts(5, longest=40, seed=7), f"{embedder.server.url}/v1"
        expected = np.concatenate([embedder.expected(text) for text in some])
        chain = OpenAIEmbeddings(model="m", base_url=url, api_key="none", check_embedding_ctx_length=False)  # type: ignore[arg-type]
        np.testing.assert_allclose(chain.embed_documents(some), expected, atol=1e-4)
        np.testing.assert_allclose(chain.embed_query(some[0]), expected[0], atol=1e-4)
        index = OpenAIEmbedding(model_name="m", api_base=url, api_key="none")
        np.testing.assert_allclose(index.get_text_embedding_batch(some), expected, atol=1e-4)

    def test_rerank_and_score_by_similarity(self, embedder: Served) -> None:
        query, *documents = texts(6, longest=30, seed=8)
        vectors = [embedder.expected(text)[0] for text in (query, *documents)]
        similar = [float(vectors[0] @ vector) for vector in vectors[1:]]
        reply = embedder.server.post("/v1/rerank", {"model": "m", "query": query, "documents": documents}).json()
        order = np.argsort(similar)[::-1].tolist()
        assert [one["index"] for one in reply["results"]] == order
        np.testing.assert_allclose([one["relevance_score"] for one in reply["results"]], sorted(similar)[::-1], atol=1e-4)
        scored = embedder.server.post("/score", {"model": "m", "text_1": query, "text_2": documents}).json()
        np.testing.assert_allclose([one["score"] for one in scored["data"]], similar, atol=1e-4)

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({"input": ""}, "empty"),
            ({"input": ["a", ""]}, "empty"),
            ({"input": []}, "input"),
            ({"input": [[]]}, "empty"),
            ({"input": [[5, 99999]]}, r"input_ids|input must"),
            ({"input": "fox", "dimensions": 65}, r"dimensions must be in \[1, 64\]"),
            ({"input": "fox", "dimensions": 0}, r"dimensions must be in \[1, 64\]"),
            ({"input": "fox " * 400}, rf"{MAX_LEN}"),
            ({"input": "fox", "encoding_format": "hex"}, "encoding_format"),
            ({"input": "fox", "model": "other"}, "other"),
            ({"input": 5}, "input"),
        ],
    )
    def test_what_is_wrong_is_said(self, embedder: Served, body: dict[str, Any], said: str) -> None:
        reply = embedder.server.post("/v1/embeddings", {"model": "m", **body})
        assert reply.status_code in (400, 404), reply.text
        message = reply.json()["error"]["message"]
        assert re.search(said, message), message
        check(embedder.embed("quick fox"), embedder.expected("quick fox"), CASES["bert-mean"])

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox"}]}),
            ("/v1/completions", {"prompt": "fox"}),
            ("/v1/responses", {"input": "fox"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 5}),
            ("/api/generate", {"prompt": "fox"}),
            ("/generate", {"text": "fox"}),
            ("/v1/classify", {"input": "fox"}),
            ("/classify", {"text": "fox"}),
        ],
    )
    def test_what_an_embedder_cannot_do_is_said(self, embedder: Served, path: str, body: dict[str, Any]) -> None:
        reply = embedder.server.post(path, {"model": "m", **body})
        assert reply.status_code == 400, reply.text
        assert "embeddings" in reply.text, reply.text

    def test_texts_are_cut_where_that_is_wanted(self, embedder: Served) -> None:
        long = " ".join(texts(3, longest=900, seed=9))
        reply = embedder.server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}).json()
        assert reply["usage"]["prompt_tokens"] == MAX_LEN
        check(np.array([reply["data"][0]["embedding"]]), embedder.expected(long), CASES["bert-mean"])  # which cuts, too

    def test_it_says_what_it_is_for(self, embedder: Served) -> None:
        assert embedder.server.get("/model_info").json()["is_generation"] is False
        assert embedder.server.get("/health_generate").status_code == 200
        assert [model.id for model in embedder.client.models.list()] == ["m"]


class TestCrossEncoder:
    def _pairs(self) -> tuple[str, list[str]]:
        query, *documents = texts(9, longest=40, seed=11)
        return query, documents

    def _expected(self, served: Served) -> np.ndarray:
        """Probabilities, as sentence-transformers' CrossEncoder gives them."""
        query, documents = self._pairs()
        scores = np.concatenate([served.expected(query, document)[0] for document in documents])
        return 1 / (1 + np.exp(-scores))

    def test_rerank(self, cross_encoder: Served) -> None:
        query, documents = self._pairs()
        expected = self._expected(cross_encoder)
        order = np.argsort(-expected).tolist()
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            body = {"model": "m", "query": query, "documents": documents, "top_n": 4}
            results = cross_encoder.server.post(path, body).json()["results"]
            assert [one["index"] for one in results] == order[:4]
            np.testing.assert_allclose([one["relevance_score"] for one in results], expected[order[:4]], atol=1e-4)
            assert [one["document"]["text"] for one in results] == [documents[i] for i in order[:4]]
        listed = cross_encoder.server.post("/rerank", {"query": query, "texts": documents, "return_text": True}).json()
        assert [one["index"] for one in listed] == order and listed[0]["text"] == documents[order[0]]
        raw = cross_encoder.server.post("/rerank", {"query": query, "texts": documents, "raw_scores": True}).json()
        np.testing.assert_allclose([one["score"] for one in raw], np.log(expected / (1 - expected))[order], atol=1e-3)

    def test_langchain_and_llama_index_rerank(self, cross_encoder: Served) -> None:
        from langchain_cohere import CohereRerank
        from langchain_core.documents import Document
        from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
        from llama_index.postprocessor.jinaai_rerank import JinaRerank

        query, documents = self._pairs()
        expected = self._expected(cross_encoder)
        order = np.argsort(-expected).tolist()[:3]
        chain = CohereRerank(model="m", cohere_api_key="none", base_url=cross_encoder.server.url, top_n=3)  # type: ignore[arg-type]
        ranked = chain.compress_documents([Document(page_content=text) for text in documents], query)
        assert [one.page_content for one in ranked] == [documents[i] for i in order]
        np.testing.assert_allclose([one.metadata["relevance_score"] for one in ranked], expected[order], atol=1e-4)
        jina = JinaRerank(model="m", api_key="none", base_url=f"{cross_encoder.server.url}/v1", top_n=3)
        nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in documents]
        found = jina.postprocess_nodes(nodes, query_bundle=QueryBundle(query))
        assert [node.node.get_content() for node in found] == [documents[i] for i in order]
        np.testing.assert_allclose([node.score for node in found], expected[order], atol=1e-4)

    def test_scores_of_pairs(self, cross_encoder: Served) -> None:
        query, documents = self._pairs()
        reply = cross_encoder.server.post("/v1/score", {"model": "m", "text_1": query, "text_2": documents}).json()
        np.testing.assert_allclose([one["score"] for one in reply["data"]], self._expected(cross_encoder), atol=1e-4)

    def test_a_crowd_and_thousands(self, cross_encoder: Served) -> None:
        query, documents = self._pairs()
        expected = self._expected(cross_encoder)

        def ask(i: int) -> float:
            body = {"model": "m", "query": query, "documents": [documents[i % len(documents)]]}
            return float(cross_encoder.server.post("/v1/rerank", body).json()["results"][0]["relevance_score"])

        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(ask, range(CLIENTS)))
        np.testing.assert_allclose(found, expected[np.arange(CLIENTS) % len(documents)], atol=1e-4)
        many = [documents[i % len(documents)] for i in range(3000)]
        results = cross_encoder.server.post("/v1/rerank", {"model": "m", "query": query, "documents": many}).json()["results"]
        by_place = sorted((one["index"], one["relevance_score"]) for one in results)
        np.testing.assert_allclose([score for _, score in by_place], expected[np.arange(3000) % len(documents)], atol=1e-4)

    def test_other_weights_with_their_head(self, cross_encoder: Served, tmp_path: Path) -> None:
        query, documents = self._pairs()
        shutil.copytree(cross_encoder.oracle.folder, tmp_path, dirs_exist_ok=True)
        other = VectorOracle("bert-cross", make_vectors("bert-cross", tmp_path, seed=1))
        other.tokenizer = cross_encoder.oracle.tokenizer
        body = {"model": "m", "text_1": query, "text_2": documents[0]}
        for oracle in (other, cross_encoder.oracle):
            asked = {"model_path": str(oracle.folder)}
            assert cross_encoder.server.post("/update_weights_from_disk", asked).json()["success"]
            score = cross_encoder.server.post("/v1/score", body).json()["data"][0]["score"]
            expected = 1 / (1 + np.exp(-oracle.vectors(query, documents[0])[0, 0]))
            np.testing.assert_allclose(score, expected, atol=1e-4)

    @pytest.mark.parametrize(
        ("path", "body", "said"),
        [
            ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
            ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
            ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
            ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
            ("/v1/rerank", {"query": "a", "documents": ["fox " * 400]}, str(MAX_LEN)),
            ("/v1/embeddings", {"input": "fox"}, "scores"),
            ("/v1/completions", {"prompt": "fox"}, "scores"),
        ],
    )
    def test_what_is_wrong_is_said(self, cross_encoder: Served, path: str, body: dict[str, Any], said: str) -> None:
        reply = cross_encoder.server.post(path, {"model": "m", **body})
        assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "options", "num_hosts"),
    [
        ("bert-joined", "--tp-size 2", 2),
        ("bert-joined", "--tp-size 2 --pp-size 2", 1),
        ("modern-bert-mean", "--dp-size 2 --tokenizer-worker-num 2 --detokenizer-worker-num 2", 1),
        ("qwen3-last", "--tp-size 2 --attn-dp-size 2 --chunked-prefill-size 64", 2),
        ("qwen2-mean", "--pp-size 2 --chunked-prefill-size 64", 2),
    ],
)
def test_a_crowd_before_servers_of_every_layout(
    name: str,
    options: str,
    num_hosts: int,
    vector_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    compilation_cache: str,
) -> None:
    folder = vector_checkpoint(name)
    oracle, longest = VectorOracle(name, folder), 40 if CASES[name].is_decoder else 180
    crowd = texts(CLIENTS, seed=3, longest=longest)
    own = ("--model-path", str(folder), "--compilation-cache-dir", compilation_cache)
    with running(tmp_path / "log", *own, *OPTIONS, *options.split(), num_hosts=num_hosts) as server:

        def ask(text: str) -> np.ndarray:
            return np.array([server.post("/encode", {"text": text}).json()["embedding"]], np.float32)

        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(ask, crowd * 2))
    for text, vectors in zip(crowd * 2, found, strict=True):
        check(vectors, oracle.vectors(text), CASES[name])


RERANKER_TEMPLATE = (
    '<|turn|>The answer can only be "yes" or "no".<|end|><Instruct>: {{ instruct }}\n<Query>: {{ messages[0].content }}\n'
    "<Document>: {{ messages[1].content }}<|end|><|turn|>"
)


@pytest.fixture(scope="module")
def reranker(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generating model whose tokenizer has words for yes and no, and a template that asks for them, as Qwen3-Reranker's."""
    folder = tmp_path_factory.mktemp("reranker") / "model"
    shutil.copytree(checkpoint("qwen3"), folder)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.chat_template = RERANKER_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_one_server_generates_embeds_and_reranks_with_and_without_an_adapter(
    reranker: Path, tmp_path: Path, compilation_cache: str
) -> None:
    """Embeddings are the hidden state behind the last token, of length 1: in steps with tokens of others, chunk by chunk, and
    from where the cache ends."""
    oracle = Oracle(reranker)
    adapter = make_adapter(reranker, tmp_path / "adapter", seed=3, r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = Oracle(reranker)
    adapted.model = load_adapted(reranker, adapter)
    options = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--decode-row-buckets", "32", "--context-length", "256")
    own = ("--model-path", str(reranker), "--compilation-cache-dir", compilation_cache, "--lora-paths", f"a={adapter}")
    with running(tmp_path / "log", *own, *OPTIONS, *options) as server:
        rng = np.random.default_rng(1)
        prompts = [rng.integers(3, 300, int(rng.integers(1, 200))).tolist() for _ in range(CLIENTS)]

        def embed(i: int) -> np.ndarray:
            body = {"input": prompts[i % CLIENTS], "lora_path": "a" if i % 2 else None}
            reply = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120).json()
            return np.array(reply["data"][0]["embedding"], np.float32)

        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            found = pool.map(embed, range(2 * CLIENTS))
            check_crowd(server, oracle, seed=4)
            vectors = list(found)
        for i, vector in enumerate(vectors):
            expected = np.asarray((adapted if i % 2 else oracle).hidden_states(prompts[i % CLIENTS])[-1], np.float32)
            expected /= np.linalg.norm(expected)
            np.testing.assert_allclose(vector, expected, atol=1e-3)
            assert vector @ expected > 1 - 1e-4
        _check_answers_in_words(server, oracle, reranker)


def _check_answers_in_words(server: LiveServer, oracle: Oracle, folder: Path) -> None:
    """How likely yes is, of yes and no."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    query, *documents = (text[:60] for text in texts(6, longest=8, seed=12))
    expected = []
    for document in documents:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, instruct="Judge", return_dict=False)
        logprobs = oracle.logprobs(ids)[-1]
        expected.append(float(1 / (1 + np.exp(float(logprobs[no] - logprobs[yes])))))
    body = {"query": query, "documents": documents, "instruct": "Judge"}
    results = server.post("/v1/rerank", body).json()["results"]
    assert [one["index"] for one in results] == np.argsort([-value for value in expected]).tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in results], sorted(expected, reverse=True), atol=1e-3)


@pytest.mark.parametrize("name", ["bert-labels", "llama-reward", "qwen3-tokens"])
def test_an_engine_scores(name: str, vector_checkpoint: Callable[[str], Path], compilation_cache: str) -> None:
    folder, case = vector_checkpoint(name), CASES[name]
    oracle = VectorOracle(name, folder)
    options: dict[str, Any] = {"max_running_requests": 16, "prefill_token_buckets": (512,), "max_total_tokens": 8192}
    with Engine(model_path=str(folder), compilation_cache_dir=compilation_cache, log_level="error", **options) as engine:
        some = [text for text, _ in oracle.prompts(8)]
        for text, reply in zip(some, engine.encode(some), strict=True):
            found = np.array(reply["embedding"], np.float32)
            check(found if case.of_tokens else found[None], oracle.vectors(text), case)
        if not case.of_tokens:
            (classified,) = [engine.classify(some[0])]
            assert classified
        with pytest.raises(RequestError, match="scores"):
            engine.generate("a fox")


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3-last", ["q_proj", "down_proj"]), ("bert-mean", ["query", "output.dense"])]
)
def test_an_adapter_of_a_model_without_a_head(
    name: str, targets: list[str], vector_checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    """Its names are those of its base, which sentence-transformers keeps inside."""
    folder = vector_checkpoint(name)
    oracle, adapted = VectorOracle(name, folder), VectorOracle(name, folder)
    base = adapted.transformer
    adapter = make_adapter(folder, tmp_path, seed=3, base=base, task="FEATURE_EXTRACTION", r=8, target_modules=targets)
    options: dict[str, Any] = {"max_running_requests": 16, "prefill_token_buckets": (512,), "max_total_tokens": 8192}
    options |= {"compilation_cache_dir": compilation_cache, "log_level": "error"}
    with Engine(model_path=str(folder), lora_paths={"a": str(adapter)}, **options) as engine:
        some = [text for text, _ in oracle.prompts(8)]
        replies = engine.encode(some, lora_path=["a", None] * 4)
        for i, (text, reply) in enumerate(zip(some, replies, strict=True)):
            expected = (oracle if i % 2 else adapted).vectors(text)
            check(np.array([reply["embedding"]], np.float32), expected, CASES[name])
            assert abs(adapted.vectors(text) - oracle.vectors(text)).max() > 0.01, "the test is void"
