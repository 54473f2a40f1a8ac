"""Limits that need no engine: lengths, seeds, namespaces."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import pytest

from jaxserve.namespaces import cache_namespace, salt_of
from jaxserve.server.request_checks import (
    ModelLimits,
    check_patterns,
    check_prompt,
    check_shape,
    fit_new_tokens,
    pattern_sets,
    sample_params,
)
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError
from jaxserve.types import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES, SamplingParams


def limits(**changes: int) -> ModelLimits:
    values = {
        "context_len": 10,
        "vocab_size": 100,
        "hidden_size": 2,
        "max_total_tokens": 50,
        "max_top_logprobs": 5,
        "allow_auto_truncate": False,
    }
    return ModelLimits(**(values | changes))  # type: ignore[arg-type]


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert len(check_prompt([1] * 9, limits())) == 9
    with pytest.raises(RequestError, match=r"The input \(10 tokens\) is longer than the model's context length \(10 tokens\)"):
        check_prompt([1] * 10, limits())
    with pytest.raises(RequestError, match="the maximum input length is 5 tokens") as caught:
        check_prompt([1] * 6, limits(max_total_tokens=6))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=r"KV cache \(6 tokens in each of 2 shards\) .*: the maximum input length is 5"):
        check_prompt([1] * 6, limits(max_total_tokens=13, num_shards=2))
    assert check_prompt([1, 2, 3], limits(context_len=3, allow_auto_truncate=True)).tolist() == [1, 2]


def test_new_tokens_fit_the_context() -> None:
    assert fit_new_tokens(SamplingParams(max_new_tokens=3), 7, limits()) == 3
    assert fit_new_tokens(SamplingParams(max_new_tokens=None), 7, limits()) == 3
    assert fit_new_tokens(SamplingParams(max_new_tokens=4), 7, limits(allow_auto_truncate=True)) == 3
    assert fit_new_tokens(SamplingParams(max_new_tokens=4), 7, limits(), cut=True) == 3
    with pytest.raises(RequestError, match="together 11; this model's maximum context length is 10") as caught:
        fit_new_tokens(SamplingParams(max_new_tokens=4), 7, limits())
    assert caught.value.code == "context_length_exceeded"
    assert str(caught.value).startswith("Requested token count exceeds the model's maximum context length of 10 tokens")


def test_the_options_of_every_prompt_are_checked() -> None:
    fine = PromptOptions(return_logprob=True, top_logprobs_num=5)
    cases: dict[str, dict[str, Any]] = {
        "top_logprobs_num must be in [0, 5], got 6.": {"top_logprobs_num": 6},
        "logprob_start_len must be -1 (none) or a place in the prompt, got -2.": {"logprob_start_len": -2},
        "token_ids_logprob holds an out-of-vocabulary token id: ": {"token_ids_logprob": (0, 1 << 30)},
        "token_ids_logprob may hold at most 1024 tokens, got 1025.": {"token_ids_logprob": (1,) * 1025},
        "priority must lie within": {"priority": 2**31},
        "extra_key holds a lone surrogate, U+D800 at 1.": {"extra_key": "a\ud800"},
        "cache_salt holds a lone surrogate": {"cache_salt": "\ud800"},
        "lora_path is not available: this server runs without --enable-lora.": {"lora_path": "sql"},
    }
    for words, wrong in cases.items():
        req = GenerateReqInput(
            prompts=["a", "b"], sampling_params=[SamplingParams()] * 2, options=[fine, PromptOptions(**wrong)]
        )
        with pytest.raises(RequestError, match=re.escape(words)):
            check_shape(req, limits())


def test_adapters_may_be_named_where_there_are_some() -> None:
    for name, words in (("sql", ""), ("a" * 4097, "at most 4096 characters, got 4097"), ("\ud800", "a lone surrogate")):
        req = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams()], options=[PromptOptions(lora_path=name)])
        with pytest.raises(RequestError, match=words) if words else contextlib.nullcontext():
            check_shape(req, limits(serves_lora=True))
    nothing = [PromptOptions(lora_path=""), PromptOptions()]
    check_shape(GenerateReqInput(prompts=["a", "b"], sampling_params=[SamplingParams()] * 2, options=nothing), limits())


def test_rids_are_short() -> None:
    params = [SamplingParams()]
    check_shape(GenerateReqInput(prompts=["a"], sampling_params=params, rids=["x" * 512]), limits())
    with pytest.raises(RequestError, match="rid may have at most 512 characters, got 513"):
        check_shape(GenerateReqInput(prompts=["a"], sampling_params=params, rids=["x" * 513]), limits())


def test_sampling_errors_have_sglangs_words() -> None:
    cases: dict[str, dict[str, Any]] = {
        "temperature must be non-negative": {"temperature": -0.5},
        "top_p must be in (0, 1], got 0.0.": {"top_p": 0.0},
        "min_p must be in [0, 1], got 2.0.": {"min_p": 2.0},
        "top_k must be -1 (disable) or at least 1, got 0.": {"top_k": 0},
        "frequency_penalty must be in [-2, 2], got 3.0.": {"frequency_penalty": 3.0},
        "presence_penalty must be in [-2, 2], got -3.0.": {"presence_penalty": -3.0},
        "repetition_penalty must be in (0, 2]": {"repetition_penalty": 0.0},
        "min_new_tokens must be in [0, max_new_tokens": {"min_new_tokens": 9, "max_new_tokens": 8},
        "max_new_tokens must be at least 0, got -1.": {"max_new_tokens": -1},
    }
    for words, fields in cases.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            SamplingParams(**fields).verify(100)


def test_seeds_of_samples_stay_64_bit() -> None:
    top = SamplingParams(sampling_seed=2**63 - 1, n=2)
    assert [sample_params(top, j, 1).sampling_seed for j in (0, 1)] == [2**63 - 1, -(2**63)]
    assert sample_params(SamplingParams(n=2), 1, 1).sampling_seed is None
    assert sample_params(SamplingParams(n=2), 1, 1, default_seed=42).sampling_seed == 43
    short = sample_params(SamplingParams(min_new_tokens=5, max_new_tokens=9), 0, 2)
    assert (short.n, short.min_new_tokens, short.max_new_tokens) == (1, 2, 2)


def test_namespaces_do_not_collide() -> None:
    keys = [None, "", "a", "b", "ab", "a\x1fb", "\x1f", '"', 'a", "b', "null", "é"]
    made = [cache_namespace(*pair) for pair in itertools.product(keys, keys)]
    assert cache_namespace(None, None) is None
    assert len(set(made)) == len(made)
    salts = [salt_of(namespace) for namespace in made if namespace is not None]
    assert len(set(salts)) == len(salts)


def test_a_namespace_is_called_by_its_salt_if_it_has_nothing_else() -> None:
    for salt in ("", "tenant é", "null", "[null, 1]"):
        assert salt_of(cache_namespace(None, salt) or "") == salt
    for others in (
        ("key", None),
        ("key", "salt"),
        (None, "half a pair \ud800"),
        (None, "salt", "embeds"),
        (None, None, "embeds"),
    ):
        namespace = cache_namespace(*others)
        assert namespace is not None and salt_of(namespace) == namespace
    assert salt_of("of no request") == "of no request"


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["ok", "é" * 129], "stop_regex patterns may have at most 256 bytes, got 'éééé"),
        (["ok", "(a)\\1"], "stop_regex '(a)\\\\1' holds a back reference, which is not supported."),
        (["ok", "a{2000}"], "stop_regex and stop are too large together"),
        (["(" * 250], "is not a regular expression"),
    ],
)
def test_patterns_are_checked_before_anything_is_tokenized(patterns: list[str], sentence: str) -> None:
    req = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams(stop_regex=patterns)])
    with pytest.raises(RequestError) as caught:
        _ = check_shape(req, limits()), check_patterns(pattern_sets(req))
    assert sentence in caught.value.message and caught.value.param == "stop_regex"


def test_a_pattern_of_256_bytes_is_served() -> None:
    req = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams(stop_regex=["é" * 128])])
    check_shape(req, limits())
    check_patterns(pattern_sets(req))


def test_the_patterns_of_a_batch_are_compiled_once_and_few() -> None:
    params = [SamplingParams(stop_regex=[f"a{i % 32}"]) for i in range(100)]
    assert len(pattern_sets(GenerateReqInput(prompts=["a"] * 100, sampling_params=params))) == 32
    params.append(SamplingParams(stop_regex=["b"]))
    with pytest.raises(RequestError, match="at most 32 different sets of stop_regex and stop, got 33"):
        pattern_sets(GenerateReqInput(prompts=["a"] * 101, sampling_params=params))


def test_long_parameters_are_not_repeated_for_each_of_many_prompts() -> None:
    params = SamplingParams(regex="a" * MAX_GRAMMAR_BYTES)
    check_shape(GenerateReqInput(prompts=["a"] * 256, sampling_params=[params] * 256), limits())
    with pytest.raises(RequestError, match="sampling_params hold 67371008 characters"):
        check_shape(GenerateReqInput(prompts=["a"] * 257, sampling_params=[params] * 257), limits())


def test_a_request_cannot_ask_for_endless_sequences() -> None:
    params = SamplingParams(n=4096)
    req = GenerateReqInput(prompts=["a"] * 100, sampling_params=[params] * 100)
    with pytest.raises(RequestError, match=r"409600 sequences \(100 prompts, n=4096\); at most 262144"):
        check_shape(req, limits())


def test_a_batch_that_could_never_fit_the_queue_is_refused_whole() -> None:
    queue = limits(max_running=4, max_queued=10)
    check_shape(GenerateReqInput(prompts=["a"] * 7, sampling_params=[SamplingParams(n=2)] * 7), queue)
    sentence = (
        r"asks for 16 sequences \(8 prompts, n=2\); this server runs 4 at once and lets 10 wait \(--max-queued-requests\)"
    )
    with pytest.raises(RequestError, match=sentence):
        check_shape(GenerateReqInput(prompts=["a"] * 8, sampling_params=[SamplingParams(n=2)] * 8), queue)
    check_shape(GenerateReqInput(prompts=["a"] * 50_000, sampling_params=[SamplingParams()] * 50_000), limits())


def test_the_parameters_of_a_batch_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[SamplingParams] = []
    monkeypatch.setattr(SamplingParams, "verify", lambda params, vocab_size: checked.append(params))
    check_shape(GenerateReqInput(prompts=["a"] * 5000, sampling_params=[SamplingParams()] * 5000), limits())
    assert len(checked) == 1


@pytest.mark.parametrize(
    ("params", "sentence", "param"),
    [
        (SamplingParams(regex="a", ebnf="b"), "regex and ebnf cannot be combined: a request may have one grammar.", "regex"),
        (SamplingParams(json_schema="{}", regex="a"), "json_schema and regex cannot be combined", "json_schema"),
        (SamplingParams(structural_tag="{}", ebnf="b"), "ebnf and structural_tag cannot be combined", "ebnf"),
        (SamplingParams(ebnf=" \n"), "ebnf must not be empty.", "ebnf"),
        (
            SamplingParams(regex="é" * (MAX_GRAMMAR_BYTES // 2) + "a"),
            f"regex may have at most {MAX_GRAMMAR_BYTES} bytes, got {MAX_GRAMMAR_BYTES + 1}.",
            "regex",
        ),
        (SamplingParams(regex="\ud800"), "regex holds a lone surrogate, U+D800 at 0.", "regex"),
    ],
)
def test_a_request_has_one_grammar_of_a_sensible_size(params: SamplingParams, sentence: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_shape(GenerateReqInput(prompts=["a"], sampling_params=[params]), limits())
    assert sentence in caught.value.message and caught.value.param == param


def test_a_server_may_follow_no_grammars() -> None:
    for kind in GRAMMAR_KINDS:
        req = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams(**{kind: "{}"})])
        check_shape(req, limits())
        with pytest.raises(RequestError, match=f"{kind} is not available: this server runs with --grammar-backend none"):
            check_shape(req, limits(follows_grammars=False))
