"""Keys: who may call what."""

from __future__ import annotations

import pytest
from fake_service import FakeService
from http_harness import app_client

NORMAL = [("GET", "/model_info"), ("GET", "/v1/models"), ("POST", "/generate"), ("GET", "/nothing")]
ADMIN = [
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/pause_generation"),
    ("PUT", "/set_internal_state"),
]
OPEN = [
    ("GET", "/health"),
    ("GET", "/health_generate"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
]


async def allowed(options: dict[str, str], key: str | None, method: str, path: str) -> bool:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    async with app_client(FakeService(), **options) as client:
        reply = await client.request(method, path, headers=headers)
    return reply.status_code != 401


@pytest.mark.parametrize(("method", "path"), NORMAL + ADMIN)
async def test_without_keys_everything_is_open(method: str, path: str) -> None:
    assert await allowed({}, None, method, path)


@pytest.mark.parametrize(("method", "path"), NORMAL + ADMIN)
async def test_an_api_key_protects_everything(method: str, path: str) -> None:
    options = {"api_key": "k"}
    assert await allowed(options, "k", method, path)
    for wrong in (None, "", "K", "kk", "ü"):
        assert not await allowed(options, wrong, method, path)


async def test_keys_may_hold_any_characters() -> None:
    assert await allowed({"api_key": "schlüssel"}, "schlüssel", "GET", "/model_info")


@pytest.mark.parametrize(("method", "path"), OPEN)
async def test_health_and_metrics_need_no_key(method: str, path: str) -> None:
    assert await allowed({"api_key": "k", "admin_api_key": "a"}, None, method, path)


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_the_admin_key_is_the_only_one_for_control_endpoints(method: str, path: str) -> None:
    for options in ({"api_key": "k", "admin_api_key": "a"}, {"admin_api_key": "a"}):
        assert await allowed(options, "a", method, path)
        assert not await allowed(options, "k", method, path)
        assert not await allowed(options, None, method, path)


async def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    assert await allowed({"admin_api_key": "a"}, None, "GET", "/v1/models")
    assert not await allowed({"api_key": "k", "admin_api_key": "a"}, "a", "GET", "/v1/models")


async def test_other_schemes_are_refused_and_preflights_pass() -> None:
    async with app_client(FakeService(), api_key="k") as client:
        basic = await client.get("/v1/models", headers={"authorization": "Basic k"})
        lower = await client.get("/v1/models", headers={"authorization": "bearer k"})
        preflight = await client.options(
            "/v1/chat/completions",
            headers={"origin": "http://page", "access-control-request-method": "POST"},
        )
    assert (basic.status_code, lower.status_code, preflight.status_code) == (401, 200, 200)
    assert basic.headers["www-authenticate"] == "Bearer"
    assert basic.json()["error"]["code"] == "invalid_api_key"
    assert preflight.headers["access-control-allow-origin"] == "*"
