"""The documentation as a site: built strictly, complete without a network, and searchable from a folder."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium")


class Loads(HTMLParser):
    """What a page brings the browser to load: not what its links lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("href") if tag == "link" else None if tag == "a" else given.get("src")
        self.addresses += [address] if address else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Any warning is an error: what the navigation names, and what a link leads to, must be there. --quiet would hide them."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: pathlib.Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.addresses, page
        assert not [address for address in loads.addresses if re.match(r"(https?:)?//", address)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_the_quickstart_is_the_readmes(site: pathlib.Path) -> None:
    page = (site / "quickstart.html").read_text()
    assert "A small model of our own comes with the package" in page
    assert 'href="repository/examples/engine.py.html"' in page  # a file of the repository is a page


def test_the_whole_reference_can_be_searched(site: pathlib.Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    text = {entry["location"]: entry["text"] for entry in index}
    assert "--chunked-prefill-size" in text["options.html#scheduling"]
    assert "No memory is left for the KV cache" in text["troubleshooting.html#the-server-does-not-start"]
    assert not [location for location in text if location.startswith("repository/deploy")]  # shown, but not in the way


@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_site_works_from_a_folder(site: pathlib.Path, width: int) -> None:
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]) as browser,
    ):
        page = browser.new_page(viewport={"width": width, "height": 800})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
        page.goto(f"{site.as_uri()}/options.html")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.keyboard.press("/")
        page.keyboard.type("chunked-prefill-size")
        page.locator(".md-search-result__link[href*='options.html']").first.wait_for()
        assert not faults
