"""Documents that are made from the code are up to date, and links between documents lead somewhere."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_options_page_is_what_the_script_writes() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "document_options.py")]
    written = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert written == (ROOT / "docs" / "options.md").read_text(), "run: python scripts/document_options.py > docs/options.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_route_is_in_the_api_page() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for file in (ROOT / "jaxserve" / "server").rglob("*.py"):
        for path in re.findall(r"router\.(?:get|post|put|api_route)\(\"([^\"]+)\"", file.read_text()):
            assert f"`{path}`" in text or path.startswith("/get_"), f"docs/api.md does not name {path}"
