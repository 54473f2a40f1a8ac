"""Debian's chromium, and the servers it is pointed at: the demo model, and one that takes its time and wants a key."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, environment, running
from pages import KEY, OpenPage
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server_process import Server, serving

WAIT_MS = 20_000  # the machine may be busy
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file: playwright's loop would be in the way of asynchronous tests of others."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("The browser tests need chromium: run `make debian-tools`, or install it.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(url, **context)`: a page in a context of its own. Whatever the console of one says, such as that its policy
    was violated, is a fault; but for the replies 4xx that a test asks for, which are named `allowed`."""
    contexts, said = [], []

    def open_one(url: str, allowed: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: said.append(message.text) if not allowed or allowed not in message.text else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert said == [], said


@pytest.fixture(scope="session")
def compilation_cache() -> str:
    """That of the end-to-end tests."""
    folder = Path(__file__).resolve().parents[2] / ".jax_cache"
    folder.mkdir(exist_ok=True)
    return str(folder)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[LiveServer]:
    options = ["--model-path", "demo", "--compilation-cache-dir", compilation_cache]
    with running(tmp_path_factory.mktemp("web") / "server.log", *options, env=environment()) as server:
        yield server


@pytest.fixture(scope="session")
def slow() -> Iterator[Server]:
    """A step takes 20 ms, and every request lasts as long as it may. Under a path, behind a key, without metrics."""
    with (
        tempfile.TemporaryDirectory(prefix="web-") as folder,
        serving(Path(folder), step_s=0.02, api_key=KEY, fastapi_root_path="/llm", enable_metrics=False) as server,
    ):
        server.wait_for("/ready", 200)
        yield server
        server.stop()
