"""/dashboard in a browser: whoever runs and waits is seen, and nobody is shut out."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest
from live_server import LiveServer, environment, running
from pages import KEY, SIZES, OpenPage, serious_faults
from playwright.sync_api import expect
from server_process import Server


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[LiveServer]:
    options = ["--model-path", "demo", "--compilation-cache-dir", compilation_cache]
    with running(tmp_path_factory.mktemp("measured") / "server.log", *options, env=environment()) as server:
        work(server, 6)
        server.wait_idle()
        yield server


def work(server: LiveServer, num: int, tokens: int = 40) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        bodies = [{"text": "What is a radix cache? " * 9 + str(i % 3), "sampling_params": sampling(tokens)} for i in range(num)]
        assert all(pool.map(lambda body: server.generate(**body), bodies))


def sampling(tokens: int) -> dict[str, object]:
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}


def test_it_shows_who_runs_and_how_requests_went(open_page: OpenPage, measured: LiveServer) -> None:
    page = open_page(f"{measured.url}/dashboard", allowed="404")
    rows = page.locator("#requests tbody tr")
    expect(rows.nth(5)).to_be_visible()
    expect(rows.first).to_contain_text("length")
    assert rows.first.locator(".part.prefill").count() >= 1 and rows.first.locator(".part.decode").count() == 1
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        busy = pool.submit(work, measured, 8, 400)
        expect(rows.filter(has_text="runs").first).to_be_visible()
        busy.result()
    page.get_by_label("Bars").select_option("own")


def test_without_metrics_it_says_how_to_have_them(open_page: OpenPage, slow: Server) -> None:
    page = open_page(f"{slow.url}/llm/dashboard", allowed="Failed to load resource")
    expect(page.locator("#state")).to_have_text("needs an API key")
    page.get_by_label("This server asks for an API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_text("--enable-metrics")).to_be_visible()
    expect(page.locator("#numbers")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("live")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(open_page: OpenPage, measured: LiveServer, scheme: str, size: str) -> None:
    page = open_page(f"{measured.url}/dashboard", allowed="404", color_scheme=scheme, viewport=SIZES[size], bypass_csp=True)
    expect(page.locator("#requests tbody tr").first).to_be_visible()
    assert serious_faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
