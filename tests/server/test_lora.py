"""LoRA adapters as clients name them: the fields, the model's name, the cards; and how prompts go on with them."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_service import LIMITS, FakeService
from http_harness import MODEL, app_client, error_message, events_of

from jaxserve.config import ServerArgs
from jaxserve.data_parallel import Prompt
from jaxserve.messages import TOKENIZER, WorkerAddress
from jaxserve.namespaces import adapter_namespace, cache_namespace
from jaxserve.scheduler.control.load_lora_adapter import LoadLoRAAdapterReqInput, LoRAUpdateOutput
from jaxserve.scheduler.control.load_lora_adapter_from_tensors import LoadLoRAAdapterFromTensorsReqInput
from jaxserve.scheduler.control.unload_lora_adapter import UnloadLoRAAdapterReqInput
from jaxserve.server.native.positions import POSITIONS, generate_body
from jaxserve.server.native.request import build_generate_request
from jaxserve.server.openai.params import ServedModel, served_model
from jaxserve.server.request_checks import check_shape
from jaxserve.server.requests import RequestError
from jaxserve.server.tokenizer_manager import TokenizerManager

ADAPTERS = {"sql": "/adapters/sql", "fr:v2": "/adapters/fr"}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}


def with_adapters() -> FakeService:
    service = FakeService()
    service.lora_adapters = dict(ADAPTERS)
    return service


async def post(path: str, service: FakeService | None = None, **fields: Any) -> httpx.Response:
    async with app_client(service or with_adapters()) as client:
        return await client.post(path, json={**BODIES.get(path, {}), **fields})


def asked_for(service: FakeService) -> list[str | None]:
    """Of the prompts of the newest request."""
    return [options.lora_path for options in service.requests[-1].options]


# --- /generate and the Engine


@pytest.mark.parametrize(
    ("given", "expected"),
    [("sql", ["sql", "sql"]), (["sql", None], ["sql", None]), ([None, "fr:v2"], [None, "fr:v2"]), (None, [None, None])],
)
async def test_each_prompt_has_its_adapter(given: Any, expected: list[str | None]) -> None:
    service = with_adapters()
    reply = await post("/generate", service, text=["a", "b"], lora_path=given)
    assert reply.status_code == 200, reply.text
    assert asked_for(service) == expected


async def test_a_list_needs_an_entry_for_each_prompt() -> None:
    reply = await post("/generate", text=["a", "b"], lora_path=["sql"])
    assert error_message(reply) == "lora_path must have one entry per prompt: got 1 for 2 prompts."


def test_an_engine_takes_it_by_its_name_and_at_its_place() -> None:
    place = POSITIONS.index("lora_path")
    for others, fields in (((), {"lora_path": "sql"}), ((*[None] * place, "sql"), {})):
        native = build_generate_request(generate_body("a", None, None, others, fields))
        assert native.req.options[0].lora_path == "sql"


def test_a_server_without_adapters_refuses_the_field() -> None:
    native = build_generate_request({"text": "a", "lora_path": "sql"})
    with pytest.raises(RequestError, match="without --enable-lora") as caught:
        check_shape(native.req, LIMITS)
    assert (caught.value.status_code, caught.value.param) == (400, "lora_path")


# --- the model's name


@pytest.mark.parametrize(
    ("served", "name", "expected"),
    [
        (None, None, ServedModel(MODEL)),
        (None, "default", ServedModel(MODEL)),
        (None, f"{MODEL}:sql", ServedModel(f"{MODEL}:sql", "sql")),
        (None, "default:sql", ServedModel("default:sql", "sql")),
        (None, ":sql", ServedModel(":sql", "sql")),
        (None, "sql", ServedModel("sql", "sql")),
        (None, "fr:v2", ServedModel("fr:v2", "fr:v2")),
        ("m:7b", "m:7b", ServedModel("m:7b")),
        ("m:7b", "m:7b:sql", ServedModel("m:7b:sql", "sql")),
        ("m:7b", f"{MODEL}:fr:v2", ServedModel(f"{MODEL}:fr:v2", "fr:v2")),
        ("sql", "sql", ServedModel("sql")),  # the model goes before an adapter of the same name
        ("sql", "sql:sql", ServedModel("sql:sql", "sql")),
    ],
)
def test_a_name_is_the_models_or_an_adapters(served: str | None, name: str | None, expected: ServedModel) -> None:
    args = ServerArgs(model_path=MODEL, served_model_name=served)
    assert served_model(name, args, ADAPTERS) == expected


@pytest.mark.parametrize("name", [f"{MODEL}:none", f"{MODEL}:", "other:sql", "none", "m"])
@pytest.mark.parametrize("path", BODIES)
async def test_other_names_are_not_found(path: str, name: str) -> None:
    reply = await post(path, model=name)
    assert reply.status_code == 404
    words = f'model "{name}" does not exist; this server serves "{MODEL}", and adapters: "sql, fr:v2".'
    assert error_message(reply) == words


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["sql", f"{MODEL}:sql"])
async def test_every_protocol_takes_an_adapter_as_model(path: str, name: str) -> None:
    service = with_adapters()
    reply = await post(path, service, model=name)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == name
    assert asked_for(service) == ["sql"]


@pytest.mark.parametrize("name", ["sql", "sql:latest", f"{MODEL}:sql:latest"])
async def test_ollamas_clients_may_add_a_tag(name: str) -> None:
    service = with_adapters()
    for raw in (False, True):
        assert (await post("/api/generate", service, model=name, raw=raw)).status_code == 200
        assert asked_for(service) == ["sql"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_the_field_does_the_same(path: str) -> None:
    service = with_adapters()
    reply = await post(path, service, lora_path="sql")
    assert reply.json()["model"] == MODEL
    assert asked_for(service) == ["sql"]
    both = await post(path, service, lora_path="sql", model="sql")
    assert (both.status_code, both.json()["model"]) == (200, "sql")
    reply = await post(path, service, lora_path="fr:v2", model="sql")
    assert reply.status_code == 400
    assert error_message(reply) == 'lora_path is "fr:v2", but model names the adapter "sql"; give one of them.'


async def test_prompts_of_a_completion_may_differ() -> None:
    service = with_adapters()
    reply = await post("/v1/completions", service, prompt=["a", "b", "c"], lora_path=["sql", None, "fr:v2"], n=2)
    assert len(reply.json()["choices"]) == 6
    assert asked_for(service) == ["sql", None, "fr:v2"]
    await post("/v1/completions", service, prompt=["a", "b"], lora_path=[None, "sql"], model="sql")
    assert asked_for(service) == ["sql", "sql"], "null leaves it to the model's name"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streams_and_rendered_prompts_bear_the_name(path: str) -> None:
    reply = await post(path, model="sql", stream=True)
    assert {event["model"] for event in events_of(reply.text)} == {"sql"}
    rendered = (await post(f"{path}/render", **BODIES[path], model="sql")).json()
    assert (rendered[0] if isinstance(rendered, list) else rendered)["model"] == "sql"


async def test_scores_are_the_adapters() -> None:
    service = with_adapters()
    reply = await post("/v1/score", service, query="a", items=["b"], label_token_ids=[7], model="sql")
    assert (reply.json()["model"], asked_for(service)) == ("sql", ["sql"])


# --- what is told of them


async def test_cards_are_those_that_are_loaded() -> None:
    service = with_adapters()
    async with app_client(service, served_model_name="tiny") as http:
        client = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=http)
        cards = (await client.models.list()).data
        assert [card.id for card in cards] == ["tiny", "sql", "fr:v2"]
        assert [card.to_dict()["root"] for card in cards] == [MODEL, "/adapters/sql", "/adapters/fr"]
        assert [card.to_dict()["parent"] for card in cards] == [None, "tiny", "tiny"]
        assert len({card.to_dict()["max_model_len"] for card in cards}) == 1
        for name in ("sql", "tiny:sql"):
            assert await client.models.retrieve(name) == cards[1]
        service.lora_adapters = {"new": "/adapters/new"}
        assert [card.id for card in (await client.models.list()).data] == ["tiny", "new"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("sql")
        reply = await client.chat.completions.create(model="new", messages=[{"role": "user", "content": "hi"}])
        assert (reply.model, asked_for(service)) == ("new", ["new"])


async def test_ollamas_lists_have_them() -> None:
    async with app_client(with_adapters()) as client:
        for path in ("/api/tags", "/api/ps"):
            models = (await client.get(path)).json()["models"]
            assert [model["name"] for model in models] == [MODEL, *ADAPTERS]
            assert [model["details"]["parent_model"] for model in models] == ["", MODEL, MODEL]
            assert len({model["digest"] for model in models}) == 3
        assert (await client.post("/api/show", json={"model": "sql"})).json()["details"]["parent_model"] == MODEL


def test_a_manager_begins_with_those_of_the_options() -> None:
    args = ServerArgs(model_path=MODEL, lora_paths=("sql=/adapters/sql", "/adapters/fr"))
    manager = TokenizerManager(args, [WorkerAddress(TOKENIZER)], lambda event: None)
    assert manager.lora_adapters == {"sql": "/adapters/sql", "/adapters/fr": "/adapters/fr"}
    assert manager.model_info["lora_adapters"] == manager.lora_adapters
    manager.close()


# --- while the server runs


async def test_adapters_are_loaded_and_unloaded_by_routes() -> None:
    service = with_adapters()
    loaded = await post("/load_lora_adapter", service, lora_name="sql", lora_path="/adapters/sql", pinned=True)
    assert loaded.json() == {"success": True, "error_message": "", "loaded_adapters": {"sql": "/adapters/sql"}}
    assert (await post("/unload_lora_adapter", service, lora_name="sql")).json()["success"]
    assert service.controls == [
        LoadLoRAAdapterReqInput(lora_name="sql", lora_path="/adapters/sql", pinned=True),
        UnloadLoRAAdapterReqInput(lora_name="sql"),
    ]
    assert (await post("/load_lora_adapter", service, lora_name="sql")).status_code == 400, "without a folder"


async def test_an_adapter_may_be_in_the_request() -> None:
    service = with_adapters()
    body = {"lora_name": "policy-7", "config_dict": {"r": 8}, "serialized_tensors": base64.b64encode(b"{}").decode()}
    loaded = await post("/load_lora_adapter_from_tensors", service, **body)
    assert (loaded.status_code, list(loaded.json()["loaded_adapters"])) == (200, ["policy-7"])
    assert service.controls == [
        LoadLoRAAdapterFromTensorsReqInput(lora_name="policy-7", config_dict={"r": 8}, serialized_tensors=b"{}")
    ]
    for wrong in ({"serialized_tensors": "%"}, {"config_dict": []}, {"upsert": True}):
        reply = await post("/load_lora_adapter_from_tensors", service, **body | wrong)
        assert reply.status_code == 400 and next(iter(wrong)) in error_message(reply)


async def test_what_the_scheduler_says_of_a_load_is_answered() -> None:
    service = with_adapters()
    service.control_replies["load_lora_adapter"] = [LoRAUpdateOutput(False, "It is for another model.", {})]
    reply = await post("/load_lora_adapter", service, lora_name="sql", lora_path="/adapters/sql")
    assert (reply.status_code, reply.json()["error_message"]) == (400, "It is for another model.")


# --- on the way to the scheduler


def test_prompts_of_different_adapters_share_nothing() -> None:
    keys = [cache_namespace(*pair) for pair in ((None, None), ("a", None), ("{}", None))]
    namespaces = [adapter_namespace(key, name) for key in keys for name in (None, "sql", "fr")]
    assert len(set(namespaces)) == len(namespaces)
    assert namespaces[0] is None
    ids = np.arange(64, dtype=np.int32)
    assert len({tuple(Prompt(ids, namespace).hashes) for namespace in namespaces}) == len(namespaces)
    assert json.loads(str(adapter_namespace(None, "sql"))) == {"namespace": None, "lora_name": "sql"}
