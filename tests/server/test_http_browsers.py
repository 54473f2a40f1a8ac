"""Web pages: which may use the server, and that a refused request has not run."""

from __future__ import annotations

import httpx
import pytest
from fake_service import FakeService
from http_harness import app_client, live_server

from jaxserve.config import ServerArgs
from jaxserve.server.http.app import create_app
from jaxserve.server.http.browsers import BrowserPolicy

CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
HERE = ("http://localhost", "http://localhost:3000", "https://127.0.0.1:8443", "http://[::1]:5", "http://app.localhost:1",
        "app://obsidian.md", "file://", "tauri://localhost", "vscode-webview://abc", "HTTP://LocalHost:1")  # fmt: skip
FOREIGN = ("https://evil.example", "http://localhost.evil.example", "http://user@evil.example",
           "http://127.0.0.1.evil.example:80", "null", "", "evil",
           "http://", "http://192.168.0.7:30000", "http://evil@[::1", "chrome-extension://abc")  # fmt: skip


@pytest.mark.parametrize("origin", HERE)
async def test_pages_of_this_machine_may(origin: str) -> None:
    async with app_client(FakeService()) as client:
        preflight = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        }
        asked = await client.options(CHAT, headers=preflight)
        reply = await client.post(CHAT, json=MESSAGES, headers={"origin": origin})
    assert (asked.status_code, reply.status_code) == (200, 200)
    assert asked.headers["access-control-allow-origin"] == reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", FOREIGN)
async def test_foreign_pages_may_not_and_nothing_runs(origin: str) -> None:
    service = FakeService()
    async with app_client(service) as client:
        asked = await client.options(CHAT, headers={"origin": origin, "access-control-request-method": "POST"})
        calls = [
            await client.post(CHAT, json=MESSAGES, headers={"origin": origin}),
            await client.post("/generate", json={"text": "x"}, headers={"origin": origin}),
            await client.post("/flush_cache", headers={"origin": origin}),
            await client.get("/flush_cache", headers={"origin": origin}),
            await client.get("/v1/models", headers={"origin": origin}),
        ]
    for reply in (asked, *calls):
        assert reply.status_code == 403
        assert "--allowed-origins names those that may" in reply.json()["error"]["message"]
        assert "access-control-allow-origin" not in reply.headers
    assert (service.requests, service.controls) == ([], [])


async def test_origins_that_are_named_may() -> None:
    options = {"allowed_origins": "https://chat.example.com, http://10.0.0.1:8080"}
    async with app_client(FakeService(), **options) as client:
        for origin, status in (
            ("https://chat.example.com", 200),
            ("https://Chat.Example.com", 200),
            ("http://10.0.0.1:8080", 200),
            ("http://localhost:3000", 200),
            ("http://chat.example.com", 403),
            ("https://chat.example.com:444", 403),
            ("https://evil.example", 403),
        ):
            assert (await client.get("/v1/models", headers={"origin": origin})).status_code == status, origin
        host = {"host": "chat.example.com"}  # a proxy may pass on the name it is known by
        assert (await client.get("/v1/models", headers=host)).status_code == 200


async def test_a_star_allows_all() -> None:
    headers = {"origin": "https://evil.example", "host": "evil.example", "sec-fetch-site": "cross-site"}
    async with app_client(FakeService(), allowed_origins="*") as client:
        assert (await client.get("/flush_cache", headers=headers)).status_code == 200
        del headers["origin"]
        assert (await client.get("/flush_cache", headers=headers)).status_code == 200


@pytest.mark.parametrize("origins", ["", "evil.example", "https://a/b", "https://a,", "https://", "https://a b", "**"])
def test_origins_are_checked_at_the_start(origins: str) -> None:
    with pytest.raises(ValueError, match="--allowed-origins holds"):
        ServerArgs(model_path="m", allowed_origins=origins)


@pytest.mark.parametrize(
    ("method", "path", "mode", "site", "status"),
    [
        ("GET", "/flush_cache", "no-cors", "cross-site", 403),  # <img src>
        ("GET", "/flush_cache", "navigate", "cross-site", 403),  # a link, or a window that is opened
        ("GET", "/flush_cache/", "navigate", "cross-site", 403),
        ("POST", "/flush_cache", "navigate", "cross-site", 403),  # a form; browsers send its Origin, too
        ("GET", "/slow_down", "no-cors", "cross-site", 403),
        ("GET", "/freeze_gc", "no-cors", "cross-site", 403),
        ("GET", "/health_generate", "no-cors", "cross-site", 403),
        ("GET", "/docs", "navigate", "cross-site", 200),
        ("GET", "/flush_cache", "navigate", "none", 200),  # typed by the user
        ("GET", "/flush_cache", "no-cors", "same-origin", 200),
        ("GET", "/flush_cache", "no-cors", "same-site", 200),  # another port of this machine
    ],
)
async def test_requests_without_an_origin(method: str, path: str, mode: str, site: str, status: int) -> None:
    service = FakeService()
    async with app_client(service) as client:
        reply = await client.request(method, path, headers={"sec-fetch-site": site, "sec-fetch-mode": mode})
    assert reply.status_code == status
    assert status == 200 or service.controls == []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:30000", 200), ("localhost", 200), ("LOCALHOST:1", 200), ("localhost.", 200),
        ("[::1]:30000", 200), ("10.0.0.1", 200), ("host.docker.internal:30000", 200), ("app.localhost", 200), ("", 200),
        ("evil.example", 403), ("evil.example:30000", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
        ("evil.example:x", 403), ("[::1", 403), ("@localhost:1@evil.example", 403),
    ],
)  # fmt: skip
async def test_names_that_a_server_on_loopback_answers_to(host: str, status: int) -> None:
    async with app_client(FakeService()) as client:
        reply = await client.get("/v1/models", headers={"host": host})
        assert reply.status_code == status
        if status == 403:
            assert "does not answer to the name" in reply.json()["message"]
            page = {"host": host, "origin": f"http://{host}"}
            assert (await client.get("/v1/models", headers=page)).status_code == 403, "rebound pages have this origin"


async def test_names_do_not_matter_with_a_key_or_on_other_addresses() -> None:
    for options in ({"api_key": "k"}, {"host": "0.0.0.0"}, {"host": "::"}, {"host": "10.1.1.1"}):
        async with app_client(FakeService(), **options) as client:
            headers = {"host": "llm.example.com", "authorization": "Bearer k"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
            own_page = headers | {"origin": "https://llm.example.com"}
            assert (await client.get("/v1/models", headers=own_page)).status_code == 200, "/docs"
            foreign = headers | {"origin": "https://evil.example"}
            assert (await client.get("/v1/models", headers=foreign)).status_code == 403


def test_the_name_that_is_listened_on() -> None:
    policy = BrowserPolicy("localhost", None, has_key=False)
    assert policy.allows_host("localhost:1")
    assert not policy.allows_host("mybox:1")


async def test_a_second_host_header_hides_nothing() -> None:
    app = create_app(FakeService(), ServerArgs(model_path="m"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        reply = await client.get("/v1/models", headers=[("host", "localhost"), ("host", "evil.example")])
    assert reply.status_code == 403


async def test_a_browser_s_websocket_is_refused_by_its_origin() -> None:
    headers = {"origin": "https://evil.example", "connection": "upgrade", "upgrade": "websocket"}
    async with live_server(FakeService()) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/realtime", headers=headers)).status_code == 403
