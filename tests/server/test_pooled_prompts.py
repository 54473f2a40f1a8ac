"""Texts and pairs of which vectors are wanted: their ids and types, and how they are cut, side by side with transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from bert_tokenizers import CLS, SEP, WORDS, bert_folder, roberta_folder, word_id
from text_tokenizers import byte_level, write_folder
from transformers import AutoTokenizer

from jaxserve.runner import Vectors
from jaxserve.server.pooled_prompts import cut_length, encode_pooled
from jaxserve.server.prompt_encoding import lengths_within
from jaxserve.server.request_checks import ModelLimits, check_prompt, check_shape
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError, SessionParams, TextPair
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.server.vectors import pooling_request
from jaxserve.types import SamplingParams

STRIDE = 100
TEXTS = ["the quick brown fox", "", "jumps over a lazy dog", " ".join(WORDS * 3)]


def limits(**changes: Any) -> ModelLimits:
    values: dict[str, Any] = {
        "context_len": 16,
        "vocab_size": STRIDE,
        "hidden_size": 2,
        "max_total_tokens": 50,
        "max_top_logprobs": 5,
        "allow_auto_truncate": False,
        "num_token_ids": 2 * STRIDE,
        "generates": False,
        "vectors": Vectors(size=2, gives="embedding"),
    }
    return ModelLimits(**(values | changes))


@pytest.fixture(scope="module", params=["bert", "bert left", "roberta", "byte level"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "roberta":
        return roberta_folder(path)
    if request.param == "byte level":
        return write_folder(byte_level(), path)
    return bert_folder(path, truncation_side="left" if request.param == "bert left" else "right")


@pytest.mark.parametrize("cut_to", [None, 4, 7, 8, 9, 12])
def test_ids_and_types_are_those_of_transformers(folder: Path, cut_to: int | None) -> None:
    tokenizer, oracle = Tokenizer.load(str(folder)), AutoTokenizer.from_pretrained(folder)
    cut = {"truncation": True, "max_length": cut_to} if cut_to else {}
    pairs = [TextPair(*pair) for pair in itertools.product(TEXTS, TEXTS)]
    for texts in (TEXTS, pairs):
        expected = []
        for text in texts:
            made = oracle(*([part] for part in ([text] if isinstance(text, str) else text)), **cut)
            (ids,) = made["input_ids"]
            (types,) = made.get("token_type_ids", [[0] * len(ids)])
            expected.append([i + t * STRIDE for i, t in zip(ids, types, strict=True)])
        assert tokenizer.encode_texts(texts, type_stride=STRIDE, cut_to=cut_to) == expected
        if cut_to:
            assert encode_pooled(tokenizer, texts, limits().of_pooling, cut_to) == expected


def test_a_tokenizer_written_in_python_is_asked_itself(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(bert_folder(tmp_path)))
    pair, texts = TextPair("the quick brown fox", "a lazy dog"), ["the quick brown fox jumps over"]
    expected = [tokenizer.encode_texts(given, type_stride=STRIDE, cut_to=5) for given in ([pair], texts)]
    tokenizer._backend = None
    assert [tokenizer.encode_texts(given, type_stride=STRIDE, cut_to=5) for given in ([pair], texts)] == expected


def test_the_longer_of_a_pair_is_cut_first() -> None:
    cases = {
        (5, 5, 10): [5, 5],
        (3, 9, 10): [3, 7],
        (9, 3, 10): [7, 3],
        (9, 8, 10): [5, 5],
        (9, 8, 11): [6, 5],
        (8, 9, 11): [5, 6],
    }
    for (first, second, most), kept in cases.items():
        assert lengths_within([first, second], most) == kept
    assert lengths_within([9], 4) == [4] and lengths_within([3], 4) == [3] and lengths_within([3, 3], 0) == [0, 0]


def test_a_model_without_types_gets_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(bert_folder(tmp_path)))
    pair = [TextPair("the fox", "a dog")]
    the, fox, a, dog = map(word_id, ("the", "fox", "a", "dog"))
    one_type = limits(num_token_ids=0).of_pooling
    assert encode_pooled(tokenizer, pair, one_type, None) == [[CLS, the, fox, SEP, a, dog, SEP]]
    two_types = limits().of_pooling
    made = encode_pooled(tokenizer, pair, two_types, None)
    assert made == [[CLS, the, fox, SEP, a + STRIDE, dog + STRIDE, SEP + STRIDE]]
    assert len(check_prompt(made[0], two_types)) == 7
    with pytest.raises(RequestError, match=r"input_ids must lie in \[0, 200\), got 200"):
        check_prompt([200], two_types)
    with pytest.raises(RequestError, match=r"input_ids must lie in \[0, 100\), got 113"):
        check_prompt(made[0], limits())


def test_how_long_a_text_may_be(tmp_path: Path) -> None:
    """No token follows it: it may fill the context."""
    tokenizer, pooling = Tokenizer.load(str(bert_folder(tmp_path))), limits().of_pooling
    assert len(check_prompt([1] * 16, pooling)) == 16
    with pytest.raises(
        RequestError, match=r"The input \(17 tokens\) is longer than the model's context length \(16 tokens\)\.$"
    ):
        check_prompt([1] * 17, pooling)
    with pytest.raises(RequestError, match=r"this server's KV cache \(9 tokens\): the maximum input length is 9 tokens"):
        check_prompt([1] * 10, limits(max_total_tokens=9).of_pooling)
    far_too_long = "a " * 5000
    for text in (far_too_long, TextPair("a", far_too_long)):
        with pytest.raises(RequestError, match=r"at least \d+ tokens\) is longer than the model's context") as caught:
            encode_pooled(tokenizer, [text], pooling, None)
        assert caught.value.code == "context_length_exceeded"
        (cut,) = encode_pooled(tokenizer, [text], pooling, 16)
        assert len(cut) == 16 and cut[0] == CLS and cut[-1] % STRIDE == SEP
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be at least 3, the special tokens of a text, got 1"):
        encode_pooled(tokenizer, [TextPair("a", "the")], pooling, 1)


def test_who_says_where_texts_are_cut() -> None:
    def cut(wanted: int | None, **changes: Any) -> int | None:
        return cut_length(pooling_request(texts=["a"], truncate_prompt_tokens=wanted), limits(**changes).of_pooling)

    assert (cut(None), cut(5), cut(-1)) == (None, 5, 16)
    assert (cut(None, allow_auto_truncate=True), cut(5, allow_auto_truncate=True)) == (16, 5)


def pooling(**changes: Any) -> GenerateReqInput:
    return GenerateReqInput(
        **({"prompts": ["a"], "sampling_params": [SamplingParams(max_new_tokens=0)], "pools": True} | changes)
    )


def test_what_a_request_for_vectors_may_ask_for() -> None:
    check_shape(pooling(), limits())
    check_shape(pooling(prompts=None, pairs=[TextPair("", "")]), limits())
    wrong: list[tuple[GenerateReqInput, str, str]] = [
        (pooling(prompts=["a", ""], sampling_params=[SamplingParams(max_new_tokens=0)] * 2), "text", "an empty string"),
        (pooling(stream=True), "stream", "has no new tokens"),
        (pooling(sampling_params=[SamplingParams(max_new_tokens=1)]), "stream", "has no new tokens"),
        (pooling(sampling_params=[SamplingParams(max_new_tokens=0, n=2)]), "stream", "has no new tokens"),
        (pooling(options=[PromptOptions(return_logprob=True)]), "return_logprob", "has no logprobs"),
        (pooling(options=[PromptOptions(session_params=SessionParams(id="s"))]), "return_logprob", "has no logprobs"),
        (pooling(truncate_prompt_tokens=0), "truncate_prompt_tokens", r"must be -1 or in \[1, 16\], got 0"),
        (pooling(truncate_prompt_tokens=17), "truncate_prompt_tokens", r"must be -1 or in \[1, 16\], got 17"),
        (pooling(prompts=["\ud800"]), "text", "lone surrogate"),
        (pooling(prompts=None, pairs=[TextPair("a", "\ud800")]), "text", "lone surrogate"),
    ]
    for req, param, words in wrong:
        with pytest.raises(RequestError, match=words) as caught:
            check_shape(req, limits())
        assert caught.value.param == param
    with pytest.raises(RequestError, match="makes no vectors of texts: its model generates"):
        check_shape(pooling(), limits(vectors=None, generates=True))


def test_what_a_model_of_vectors_is_not_asked_for() -> None:
    plain = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams()])
    with pytest.raises(RequestError, match=r"does not generate text: it makes embeddings of texts \(POST /v1/embeddings\)"):
        check_shape(plain, limits())
    with pytest.raises(RequestError, match=r"does not generate text: it scores texts \(POST /classify, /rerank\)"):
        check_shape(plain, limits(vectors=Vectors(size=2, gives="scores")))
    check_shape(plain, limits(generates=True))
    pairs = GenerateReqInput(pairs=[TextPair("a", "b")], sampling_params=[SamplingParams()])
    with pytest.raises(RequestError, match="Pairs of texts are for vectors"):
        check_shape(pairs, limits(generates=True))


def test_what_a_scheduler_says_of_its_model() -> None:
    from jaxserve.config import ServerArgs
    from jaxserve.server.reply_limits import NO_REPLY_LIMITS

    info = {"context_len": 8, "vocab_size": 9, "hidden_size": 2, "max_total_tokens": 8, "max_rows": 1, "num_shards": 1}
    args = ServerArgs(model_path="m")
    old = ModelLimits.of(info, args, NO_REPLY_LIMITS, None)
    assert old.generates and old.vectors is None and old.type_stride == 0
    vectors = {"size": 2, "gives": "scores", "labels": ["yes", "no"], "activation": "softmax"}
    new = ModelLimits.of({**info, "generates": False, "vectors": vectors, "num_token_ids": 18}, args, NO_REPLY_LIMITS, None)
    assert new.vectors == Vectors(size=2, gives="scores", labels=("yes", "no"), activation="softmax")
    assert not new.generates and new.type_stride == 9
