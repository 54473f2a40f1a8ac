"""The web pages' files: headers, caching, keys, and what is no page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_service import FakeService
from http_harness import app_client, error_message

from jaxserve.server import web

STATIC = Path(web.__file__).parent / "static"
PAGES = ("/playground", "/dashboard")


@pytest.mark.parametrize("path", [*PAGES, *(f"/web/{file.name}" for file in STATIC.iterdir())])
async def test_files_go_out_with_a_strict_policy_and_are_kept(path: str) -> None:
    async with app_client(FakeService(), api_key="k") as client:
        reply = await client.get(path)
        assert reply.status_code == 200
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "data:" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-cache"
        again = await client.get(path, headers={"if-none-match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await client.head(path)
        assert (head.status_code, head.headers["etag"]) == (200, reply.headers["etag"])


async def test_what_is_no_file_is_404() -> None:
    async with app_client(FakeService()) as client:
        for name in ("nothing.js", "..%2froutes.py", "%2e%2e/routes.py", ".", "routes.py"):
            assert (await client.get(f"/web/{name}")).status_code == 404
        assert error_message(await client.get("/web/nothing.js")) == "There is no such file."


async def test_pages_work_below_any_path() -> None:
    """All addresses in them are relative, and count from the path without a slash."""
    async with app_client(FakeService(), fastapi_root_path="/llm") as client:
        for path in PAGES:
            reply = await client.get(f"/llm{path}/")
            assert reply.headers["location"] == f"..{path}"
    for file in STATIC.iterdir():
        absolute = re.findall(r"""(?:src|href|from|import\(|fetch\() ?=? ?["'](/|https?:)""", file.read_text())
        assert not absolute, file.name


def test_nothing_is_written_into_the_pages() -> None:
    """No script or style within a page, and no text that becomes HTML."""
    for file in STATIC.iterdir():
        text = file.read_text()
        if file.suffix == ".html":
            assert not re.search(r"<style|<script(?![^>]*src=)| style=| on[a-z]+=", text), file.name
        if file.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), file.name


async def test_the_first_page_links_to_them_for_browsers_only() -> None:
    async with app_client(FakeService()) as client:
        page = await client.get("/", headers={"accept": "text/html,application/xhtml+xml"})
        assert 'href="playground"' in page.text and "Accept" in page.headers["vary"]
        assert (await client.get("/")).text == "jaxserve is running\n"


async def test_disable_web() -> None:
    async with app_client(FakeService(), disable_web=True) as client:
        for path in (*PAGES, "/web/common.css"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/", headers={"accept": "text/html"})).text == "jaxserve is running\n"
