"""SGLang's request object: what is accepted, what it means, and the sentences for what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.server.native.request import NativeRequest, build_generate_request
from jaxserve.server.requests import PromptOptions, RequestError
from jaxserve.types import Grammar, SamplingParams, Thinking


def build(**body: Any) -> NativeRequest:
    return build_generate_request(body)


def test_single_and_list_prompts() -> None:
    one = build(text="a")
    assert (one.req.prompts, one.req.input_ids, one.is_list) == (["a"], None, False)
    many = build(text=["a", "b"])
    assert (many.req.prompts, many.is_list, len(many.req.sampling_params)) == (["a", "b"], True, 2)
    assert build(input_ids=[1, 2]).req.input_ids == [[1, 2]]
    assert build(input_ids=np.array([1, 2], np.int32)).req.input_ids == [[1, 2]]
    rows = build(input_ids=[np.array([1]), [2, 3]])
    assert (rows.req.input_ids, rows.is_list) == ([[1], [2, 3]], True)
    assert build(text="a", sampling_params={"n": 2}).is_list


def test_null_means_default_except_where_null_is_a_value() -> None:
    params = build(text="a", stream=None, sampling_params={"temperature": None, "max_new_tokens": None, "regex": None})
    assert params.req.sampling_params == [SamplingParams(max_new_tokens=None)]
    assert build(text="a", sampling_params=None).req.sampling_params == [SamplingParams()]


def test_short_forms() -> None:
    params = build(text="a", sampling_params={"stop": "x", "stop_regex": "y", "logit_bias": {"5": 1, 6: -1}})
    assert params.req.sampling_params == [SamplingParams(stop=["x"], stop_regex=["y"], logit_bias={5: 1.0, 6: -1.0})]
    assert build(text=["a", "b"], rid="r").req.rids == ["r_0", "r_1"]
    assert build(text=["a", "b"], rid=["r", "s"]).req.rids == ["r", "s"]
    assert build(text="a", rid="r").req.rids == ["r"]


def test_options_are_one_for_all_prompts_or_one_for_each() -> None:
    shared = build(text=["a", "b"], return_logprob=True, priority=3).req.options
    assert shared == [PromptOptions(return_logprob=True, priority=3)] * 2
    first, second, third = build(
        text=["a", "b", "c"],
        return_logprob=[True, None, True],
        top_logprobs_num=[2, 0, 2],
        extra_key=["x", "y", "x"],
        cache_salt="s",
    ).req.options
    assert first == PromptOptions(return_logprob=True, top_logprobs_num=2, extra_key="x", cache_salt="s")
    assert second == PromptOptions(extra_key="y", cache_salt="s")
    assert third is first
    assert build(text="a").req.options == [PromptOptions()]
    assert build(text="a", return_logprob=[True]).req.options == [PromptOptions(return_logprob=True)]


def test_a_schema_may_be_an_object() -> None:
    params = build(text="a", sampling_params={"json_schema": {"enum": ["é", 1]}}).req.sampling_params[0]
    assert params.grammar == Grammar("json_schema", '{"enum": ["é", 1]}')
    assert build(text="a", sampling_params={"ebnf": 'root ::= "a"'}).req.sampling_params[0].grammar == Grammar(
        "ebnf", 'root ::= "a"'
    )
    params = build(text="a", sampling_params={"structural_tag": {"type": "structural_tag"}}).req.sampling_params[0]
    assert params.grammar == Grammar("structural_tag", '{"type": "structural_tag"}')
    assert build(text="a").req.sampling_params[0].grammar is None


def test_thinking_ends_as_the_server_knows() -> None:
    assert build_generate_request({"text": "a", "require_reasoning": True}, None, "</t>").req.thinking == Thinking(None, "</t>")
    assert build_generate_request({"text": "a"}, None, "</t>").req.thinking is None
    assert build(text="a", require_reasoning=False).req.thinking is None


def test_the_servers_defaults_stand_below_the_requests() -> None:
    defaults = '{"temperature": 0.5, "top_k": 7}'
    req = build_generate_request({"text": "a", "sampling_params": {"top_k": 3}}, defaults).req
    assert (req.sampling_params[0].temperature, req.sampling_params[0].top_k) == (0.5, 3)


def test_fields_without_effect_and_switched_off_features_are_accepted() -> None:
    build(text="a", model="some", log_metrics=True, lora_path=None, return_hidden_states=False, logprob_start_len=-1)
    build(text="a", return_logprob=False, logprob_start_len=0)
    build(text=["a", "b"], logprob_start_len=[0, 0])


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        ({}, "Exactly one of text, input_ids and input_embeds must be given.", "text"),
        ({"text": "a", "input_ids": [1]}, "Exactly one of text, input_ids and input_embeds must be given.", "text"),
        ({"text": 5}, "text must be a string or a list, got an integer.", "text"),
        ({"text": ["a", 5]}, "text[1] must be a string, got an integer.", "text"),
        ({"input_ids": "abc"}, "input_ids must be a list, got a string.", "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids[1] must be an integer, got a string.", "input_ids"),
        ({"input_ids": [[1], [2.5]]}, "input_ids[1][0] must be an integer, got a number.", "input_ids"),
        ({"text": "a", "stream": "yes"}, "stream must be true or false, got a string.", "stream"),
        ({"text": "a", "rid": 7}, "rid must be a string or a list, got an integer.", "rid"),
        ({"text": "a", "lora_path": 1}, "lora_path must be a string or null, got an integer.", "lora_path"),
        ({"text": ["a", "b"], "lora_path": ["x"]}, "one entry per prompt: got 1 for 2 prompts.", "lora_path"),
        ({"text": "a", "input_embeds": np.zeros((2, 2))}, "Exactly one of text, input_ids and input_embeds", "text"),
        ({"text": "a", "steram": False}, "steram is not a field this server knows.", "steram"),
        ({"text": "a", "logprob_start_len": "x"}, "logprob_start_len must be an integer", "logprob_start_len"),
        ({"text": "a", "sampling_params": 5}, "sampling_params must be an object or a list of objects.", "sampling_params"),
        ({"text": "a", "sampling_params": [{}, {}]}, "one entry per prompt: got 2 for 1 prompts.", "sampling_params"),
        ({"text": "a", "sampling_params": {"foo": 1}}, "sampling_params has no field 'foo'.", "foo"),
        ({"text": "a", "sampling_params": {"regex": 1}}, "sampling_params.regex must be a string or null, got", "regex"),
        (
            {"text": "a", "sampling_params": {"json_schema": [1]}},
            "json_schema must be a string or null",
            "json_schema",
        ),
        (
            {"text": "a", "sampling_params": {"json_schema": {"a": {1}}}},
            "json_schema must be JSON: Object",
            "json_schema",
        ),
        ({"text": "a", "require_reasoning": True}, "require_reasoning is not available: this server", "require_reasoning"),
        ({"text": "a", "require_reasoning": 1}, "require_reasoning must be true or false", "require_reasoning"),
        ({"text": "a", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p must be a number, got a string.", "top_p"),
        ({"text": "a", "sampling_params": {"n": True}}, "sampling_params.n must be an integer, got a boolean.", "n"),
        ({"text": "a", "sampling_params": {"stop": [1]}}, "sampling_params.stop[0] must be a string", "stop"),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias keys must be an integer", "logit_bias"),
        ({"text": "a", "sampling_params": {"logit_bias": {"1": "x"}}}, "logit_bias values must be a number", "logit_bias"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "one entry per prompt: got 1 for 2 prompts.", "top_logprobs_num"),
        ({"text": ["a", "b"], "extra_key": ["x", 2]}, "extra_key must be a string or null, got an integer.", "extra_key"),
        ({"text": ["a", "b"], "return_logprob": []}, "one entry per prompt: got 0 for 2 prompts.", "return_logprob"),
    ],
)
def test_wrong_requests_get_a_sentence(body: dict[str, Any], sentence: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_generate_request(body)
    assert sentence in caught.value.message
    assert caught.value.param == param
    assert caught.value.status_code == 400


def test_what_asks_for_nothing_is_accepted() -> None:
    build(
        text="a", image_data=[], lora_path=None, return_hidden_states=False, session_params={}, routed_dp_rank=0,
        custom_labels={"a": "b"}, no_such_field=None,
    )  # fmt: skip
