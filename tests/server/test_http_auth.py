"""Keys: who may call what, and where the server has them from."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_service import FakeService
from http_harness import app_client

from jaxserve.config import ServerArgs
from jaxserve.server.http.keys import with_keys

NORMAL = [("GET", "/model_info"), ("GET", "/v1/models"), ("POST", "/generate"), ("GET", "/nothing")]
ADMIN = [
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/pause_generation"),
    ("POST", "/block_input"),
    ("POST", "/unblock_input"),
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


@pytest.mark.parametrize("key", ["schlüssel", "voilà", "two words", "ключ", "鍵"])
async def test_keys_may_hold_any_characters(key: str) -> None:
    """Clients send them as UTF-8; those that cannot, as latin-1."""
    options = {"api_key": key}
    assert await allowed(options, key, "GET", "/model_info")
    assert await allowed(options, f" {key}\t", "GET", "/model_info")
    assert not await allowed(options, key[:-1], "GET", "/model_info")
    async with app_client(FakeService(), **options) as client:
        latin = await client.get("/model_info", headers={"authorization": f"Bearer {key}".encode("latin-1", "replace")})
    assert (latin.status_code == 200) == (max(key) < "\u0100")


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    async with app_client(FakeService(), api_key="k", admin_api_key="a") as client:

        async def status(path: str, **headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await client.post(path, headers=named)).status_code

        assert await status("/v1/messages", x_api_key="k") != 401
        assert await status("/v1/messages", x_api_key="other", authorization="Bearer k") != 401
        assert await status("/v1/messages", x_api_key="k", authorization="Bearer other") != 401
        assert await status("/v1/messages", x_api_key="other", authorization="Bearer other") == 401
        assert await status("/v1/messages", x_api_key="") == 401
        assert await status("/flush_cache", x_api_key="k") == 401
        assert await status("/flush_cache", x_api_key="a") == 200


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
            headers={"origin": "http://localhost:3000", "access-control-request-method": "POST"},
        )
    assert (basic.status_code, lower.status_code, preflight.status_code) == (401, 200, 200)
    assert basic.headers["www-authenticate"] == "Bearer"
    assert basic.json()["error"]["code"] == "invalid_api_key"
    assert preflight.headers["access-control-allow-origin"] == "*"


BAD_KEYS = [
    ("", "is empty"),
    (" ", "is empty"),
    (" k", "never match"),
    ("k ", "never match"),
    ("k\n", "never match"),
    ("a\x00b", "header"),
]


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize(("key", "words"), BAD_KEYS)
def test_keys_that_protect_nothing_or_everything_are_refused(name: str, key: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        ServerArgs(model_path="m", **{name: key})
    assert str(refused.value).startswith("--" + name.replace("_", "-"))
    with pytest.raises(ValueError, match=words) as refused:
        with_keys(ServerArgs(model_path="m"), {f"JAXSERVE_{name.upper()}": key})
    assert f"JAXSERVE_{name.upper()}" in str(refused.value)


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_keys_from_files_and_the_environment(name: str, tmp_path: Path) -> None:
    path, args, variable = tmp_path / "key", ServerArgs(model_path="m"), f"JAXSERVE_{name.upper()}"
    path.write_text("schlüssel\n")
    from_file = with_keys(args.replace(**{f"{name}_file": str(path)}), {})
    assert (getattr(from_file, name), from_file.public_dict()[name]) == ("schlüssel", "***")
    assert getattr(with_keys(args, {variable: "k"}), name) == "k"
    assert getattr(with_keys(args.replace(**{name: "k"}), {}), name) == "k"
    assert with_keys(args, {"HOME": "/"}) == args
    two = [
        ({name: "k"}, {variable: "k"}),
        ({name: "k", f"{name}_file": str(path)}, {}),
        ({f"{name}_file": str(path)}, {variable: "k"}),
    ]
    for options, environment in two:
        with pytest.raises(ValueError, match="only one of them may"):
            with_keys(args.replace(**options), environment)


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b" \n", "is empty"), (b"a\nb\n", "header"), (b"\xff", "UTF-8")]
)
def test_files_without_a_key_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        with_keys(ServerArgs(model_path="m", api_key_file=str(path)), {})
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        with_keys(ServerArgs(model_path="m", api_key_file=str(path) + ".no"), {})
