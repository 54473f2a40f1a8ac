"""input_embeds: what is taken, as what, and the sentences for what is not; on its way to the scheduler."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from fake_service import LIMITS, FakeService
from http_harness import app_client

from jaxserve.namespaces import cache_namespace
from jaxserve.server.native.input_embeds import GivenEmbeds, embeds_of, with_embeds
from jaxserve.server.native.request import build_generate_request
from jaxserve.server.request_checks import check_shape
from jaxserve.server.requests import PromptEmbeds, RequestError

JSON = {"Content-Type": "application/json"}
ROWS = [[0.5, 1], [-2, 3e-5], [7, 8]]


def values_of(given: GivenEmbeds) -> list[Any]:
    return [prompt.values.tolist() for prompt in given.prompts if prompt.values is not None]


def as_float32(rows: Any) -> Any:
    return np.array(rows, np.float32).tolist()


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, indent=1).encode())


@pytest.mark.parametrize(
    "one",
    [
        ROWS,
        tuple(map(tuple, ROWS)),
        np.array(ROWS),
        np.array(ROWS, np.float32).T.copy().T,  # not in one piece
        [np.array(row) for row in ROWS],
        raw(ROWS),
    ],
    ids=["lists", "tuples", "array", "transposed", "rows", "JSON"],
)
def test_one_prompt(one: Any) -> None:
    given = embeds_of(one, LIMITS)
    assert values_of(given) == [as_float32(ROWS)] and not given.is_list
    (prompt,) = given.prompts
    assert prompt.values is not None and prompt.values.dtype == np.float32 and (prompt.length, prompt.width) == (3, 2)
    assert prompt.key == embeds_of(ROWS, LIMITS).prompts[0].key


@pytest.mark.parametrize(
    "many",
    [
        [ROWS, ROWS[:1]],
        [np.array(ROWS), ROWS[:1]],
        [ROWS, np.array(ROWS[:1])],
        raw([ROWS, ROWS[:1]]),
    ],
    ids=["lists", "array first", "array last", "JSON"],
)
def test_several_prompts(many: Any) -> None:
    given = embeds_of(many, LIMITS)
    assert values_of(given) == [as_float32(ROWS), as_float32(ROWS[:1])] and given.is_list
    assert given.prompts[0].key != given.prompts[1].key


def test_arrays_of_other_types() -> None:
    assert values_of(embeds_of(np.ones((2, 3, 2)), LIMITS)) == [[[1.0, 1.0]] * 3] * 2
    assert values_of(embeds_of(np.array([[1, 2]]), LIMITS)) == [[[1.0, 2.0]]]
    assert values_of(embeds_of(np.array([[1, 2]], ml_dtypes.bfloat16), LIMITS)) == [[[1.0, 2.0]]]
    assert values_of(embeds_of(np.array([[1, 2]], np.float16), LIMITS)) == [[[1.0, 2.0]]]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (5, "input_embeds must be a list of rows of numbers, one row for each token, or a list of such lists, got 5."),
        ("abc", "or a list of such lists, got 'abc'."),
        ([], "or a list of such lists, got []."),
        ([1.0, 2.0], "or a list of such lists, got [1.0, 2.0]."),
        (np.zeros(3), "or a list of such lists, got an array of shape (3,)."),
        (raw([1, 2]), "or a list of such lists, got ["),
        (raw(None), "or a list of such lists, got null."),
        ([[1.0, 2.0], [1.0]], "input_embeds[1] must have 2 numbers for each token, the model's hidden size, got 1."),
        (
            raw([[1.0, 2.0], [1.0, 2.0, 3.0]]),
            "input_embeds[1] must have 2 numbers for each token, the model's hidden size, got 3.",
        ),
        (np.zeros((4, 3)), "input_embeds must have 2 numbers for each token, the model's hidden size, got 3."),
        ([[]], "input_embeds[0] must have 2 numbers for each token, the model's hidden size, got 0."),
        ([[[1, 2]], []], "input_embeds[1] is empty: a prompt must hold at least one embedding."),
        (raw([[[1, 2]], []]), "input_embeds[1] is empty: a prompt must hold at least one embedding."),
        (np.zeros((0, 2)), "input_embeds is empty: a prompt must hold at least one embedding."),
        ([[[1, 2]], [[1, 2, 3]]], "input_embeds[1][0] must have 2 numbers"),
        ([[1, 2], 3], "input_embeds[1] must be a list, got an integer."),
        (raw([[1, 2], 3]), "input_embeds[1] must be a list, got an integer."),
        ([[1, "2"]], "input_embeds[0][1] must be a number, got a string."),
        (raw([[1, "2"]]), "input_embeds[0][1] must be a number, got a string."),
        (raw([[1, None]]), "input_embeds[0][1] must be a number, got null."),
        (raw([[1, True]]), "input_embeds[0][1] must be a number, got a boolean."),
        ([[1, float("nan")]], "input_embeds[0][1] must be a finite number of float32, got nan."),
        ([[[1, 2]], [[1, 2], [float("-inf"), 0]]], "input_embeds[1][1][0] must be a finite number of float32, got -inf."),
        (np.array([[1, np.inf]]), "input_embeds[0][1] must be a finite number of float32, got inf."),
        (raw([[1, 1e39]]), "input_embeds[0][1] must be a finite number of float32, got inf."),
        (np.array([[1e39, 0]]), "input_embeds[0][0] must be a finite number of float32, got inf."),
        (np.array([["a", "b"]]), "input_embeds must hold numbers, got an array of <U1."),
        (np.zeros((1, 1, 1, 2)), "input_embeds[0]"),
        (
            np.ones((100, 2)),
            "The input (100 tokens) is longer than the model's context length (100 tokens) less one new token.",
        ),
        (
            raw([[1]] * 2000),
            "The input (2000 tokens) is longer than the model's context length (100 tokens) less one new token.",
        ),
    ],
)
def test_what_is_not_taken(value: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        embeds_of(value, LIMITS)
    assert sentence in caught.value.message
    assert caught.value.status_code == 400 and caught.value.param == (None if "longer" in sentence else "input_embeds")


def test_too_many_are_cut_if_that_is_allowed() -> None:
    cutting = dataclasses.replace(LIMITS, context_len=3, allow_auto_truncate=True)
    for given in (ROWS, np.array(ROWS), raw(ROWS)):
        assert values_of(embeds_of(given, cutting)) == [as_float32(ROWS[:2])]


def build(**body: Any) -> Any:
    return build_generate_request(with_embeds(body, lambda: LIMITS))


def test_a_request_of_embeddings() -> None:
    one = build(input_embeds=ROWS, sampling_params={"max_new_tokens": 3})
    assert (one.req.num_prompts, one.is_list) == (1, False)
    assert build(input_embeds=ROWS, sampling_params={"n": 2}).is_list
    many = build(
        input_embeds=[ROWS, ROWS], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}], extra_key=["a", "b"]
    )
    assert (many.req.num_prompts, many.is_list) == (2, True)
    assert [options.extra_key for options in many.req.options] == ["a", "b"]
    assert build(text="a", input_embeds=None).req.input_embeds is None


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        ({"text": "a"}, "Exactly one of text, input_ids and input_embeds must be given.", "text"),
        ({"input_ids": [1]}, "Exactly one of text, input_ids and input_embeds must be given.", "text"),
        ({"return_prompt_token_ids": True}, "return_prompt_token_ids needs a prompt of tokens.", "return_prompt_token_ids"),
        (
            {"return_logprob": True, "logprob_start_len": 0},
            "logprob_start_len must be -1 or the prompt's end, 3, with input_embeds, got 0.",
            "logprob_start_len",
        ),
        (
            {"session_params": {"id": "s"}},
            "A turn of a session needs a prompt of tokens, not input_embeds.",
            "session_params",
        ),
    ],
)
def test_what_needs_token_ids_is_refused(fields: dict[str, Any], sentence: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_shape(build(input_embeds=ROWS, **fields).req, LIMITS)
    assert (caught.value.message, caught.value.param, caught.value.status_code) == (sentence, param, 400)


def test_what_needs_none_is_not() -> None:
    for fields in (
        {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [3]},
        {"return_logprob": True, "logprob_start_len": 3},
        {"logprob_start_len": 0},
        {"return_hidden_states": True},
        {"sampling_params": {"regex": "a+", "stop": ["x"], "presence_penalty": 1}},
    ):
        check_shape(build(input_embeds=ROWS, **fields).req, LIMITS)


def test_each_prompt_is_a_namespace_of_the_cache() -> None:
    first, second = (PromptEmbeds(np.full((1, 2), value, np.float32), f"key {value}") for value in (1, 2))
    found = [
        cache_namespace(extra_key, salt, embeds and embeds.key)
        for embeds in (None, first, second)
        for extra_key in (None, "", "key 1", '["key 1"]')
        for salt in (None, "", "key 1")
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("spelled", ['"input_embeds"', '"input\\u005fembeds"'])
async def test_over_http(spelled: str) -> None:
    service = FakeService()
    async with app_client(service) as client:
        for rows, count in ((ROWS, 1), ([ROWS, ROWS[:2]], 2), ([[1 / 3, i] for i in range(90)], 1)):
            body = f'{{"sampling_params": {{"max_new_tokens": 2}}, {spelled} : {json.dumps(rows)}, "text": null}}'
            reply = await client.post("/generate", content=body, headers=JSON)
            assert reply.status_code == 200, reply.text
            found = service.requests[-1].input_embeds
            assert found is not None and len(found) == count
            expected = rows if count == 1 else rows[0]
            assert found[0].values is not None and found[0].values.tolist() == as_float32(expected)
        reply = await client.post("/generate", json={"text": "input_embeds", "input_embeds": None})
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ('{"input_embeds": [[1, 2], [3]]}', "input_embeds[1] must have 2 numbers for each token"),
        ('{"input_embeds": [[1, NaN]]}', "JSON"),
        ('{"input_embeds": [[1, 2]', "JSON"),
        ('{"input_embeds": [[1, 1.2.3]]}', "JSON"),
        ('{"input_embeds": [[1, 2]], "text": tru}', "JSON"),
        ('["input_embeds"]', "The request body must be a JSON object"),
        ('{"input_embeds": [[1, 2]], "text": "a"}', "Exactly one of text, input_ids and input_embeds"),
        ('{"input_embeds": [[1, 2]], "foo": 1}', "foo is not a field this server knows."),
        ('{"input_embeds": {}}', "input_embeds must be a list of rows of numbers"),
        ('{"input_embeds": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
    ],
)
async def test_bad_bodies(body: str, sentence: str) -> None:
    async with app_client(FakeService()) as client:
        reply = await client.post("/generate", content=body, headers=JSON)
    assert reply.status_code == 400 and sentence in reply.json()["error"]["message"], reply.text
