"""Every operation of /openapi.json, with bodies and parameters made from its schema, right and wrong ones, and with bodies that
are no JSON: the answer is what it should be or a 4xx with a sentence.

Few examples, the same every time; `make fuzz-api` puts many to a real server (benchmarks/abuse/api.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fake_service import FakeService
from http_harness import app_client, error_message
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode

from jaxserve.config import ServerArgs
from jaxserve.server.http.app import create_app
from jaxserve.types import FinishReason

STATUSES = {200, 400, 404, 405, 413}
JSON = {"content-type": "application/json"}

CHAT = "/v1/chat/completions"
NO_JSON = (
    b"{", b"[1", b"1 2", b"{}{}", b"nul", b"\x00", b"-", b'"', b'{"a":"', b"\xff\xfe{}", b'{"model": 5, garbage', b"{'a': 1}",
    b'{"prompt": NaN}', b'{"a": 1e999}', b'{"max_tokens": ' + b"9" * 5000 + b"}", b"9" * 5000, b"[" * 100_000,
    b'{"a":' * 100_000, b'{"text": {"a": ' + b"[" * 990 + b"]" * 990 + b"}}",
)  # fmt: skip


def service() -> FakeService:
    fake = FakeService()
    fake.fail_after = (4, FinishReason.length_limit(4))  # however many tokens are asked for
    return fake


def operations() -> Iterator[APIOperation[Any, Any, Any, Any]]:
    app = create_app(service(), ServerArgs(model_path="m", host="0.0.0.0"))  # nothing listens: it lets any Host pass
    for operation in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():
        yield operation.ok()


OPERATIONS = {operation.label: operation for operation in operations()}
PATHS_WITH_BODY = [operation.path for operation in OPERATIONS.values() if operation.body]


def takes_input(operation: APIOperation[Any, Any, Any, Any]) -> bool:
    return bool(operation.body) or len(operation.query) > 0


def assert_is_a_sentence(reply: Any) -> None:
    """Whatever the client sent: it reads what is wrong, and not all that it sent."""
    message = error_message(reply)
    assert message.endswith((".", "...")), message
    assert 10 < len(message) <= 2003


@pytest.mark.parametrize("label", OPERATIONS)
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_input_is_a_server_error(label: str, mode: GenerationMode) -> None:
    operation = OPERATIONS[label]
    if mode is GenerationMode.NEGATIVE and not takes_input(operation):
        return  # nothing can be wrong

    @settings(
        max_examples=10,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def call(case: Case) -> None:
        reply = case.call()
        assert reply.status_code in STATUSES, (case.as_curl_command()[:2000], reply.text[:2000])
        if reply.status_code != 200:
            assert_is_a_sentence(reply)

    call()


@pytest.mark.parametrize("path", PATHS_WITH_BODY)
async def test_what_is_no_json_is_400(path: str) -> None:
    async with app_client(service()) as client:
        for raw in NO_JSON:
            reply = await client.post(path, content=raw, headers=JSON)
            assert reply.status_code == 400, (raw[:50], reply.text)
            assert_is_a_sentence(reply)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, '"logit_bias": {"5": 1e999}'),
        (CHAT, '"chat_template_kwargs": {"self": 1}'),
        (CHAT, '"chat_template_kwargs": {"messages": []}'),
        (CHAT, '"chat_template_kwargs": {"tokenize": true}'),
        (CHAT, '"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}'),
        ("/tokenize", '"chat_template_kwargs": {"add_generation_prompt": true}'),
        ("/generate", '"text": "x", "sampling_params": {"max_new_tokens": DIGITS}'),
        ("/generate", '"text": "x", "sampling_params": {"stop_token_ids": [DIGITS]}'),
        ("/generate", '"text": "x", "sampling_params": {"logit_bias": {"5": 1e999}}'),
        ("/detokenize", '"tokens": [DIGITS]'),
    ],
)
async def test_hostile_values_are_400(path: str, fields: str) -> None:
    messages = '"messages": [{"role": "user", "content": "x"}], ' if "chat_template" in fields or path == CHAT else ""
    body = "{" + messages + fields.replace("DIGITS", "9" * 4300) + "}"  # as many as Python converts
    async with app_client(service()) as client:
        reply = await client.post(path, content=body, headers=JSON)
    assert reply.status_code == 400, reply.text
    assert_is_a_sentence(reply)


async def test_hostile_parameters_are_400() -> None:
    async with app_client(service()) as client:
        for query in ({"dp_rank": "9" * 5000}, {"dp_rank": "x" * 5000}, {"dp_rank": "1e999"}, {"include": "x" * 5000}):
            reply = await client.get("/v1/loads", params=query)
            assert reply.status_code == 400, reply.text
            assert_is_a_sentence(reply)
        reply = await client.get("/v1/" + "x" * 5000)
        assert reply.status_code == 404
        assert_is_a_sentence(reply)
