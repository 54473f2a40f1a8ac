"""The JSON Schema Test Suite: what comes out is valid, but for what docs/json_schema.md records."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts.document_json_schema import Case, cases, page

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "json_schema.md"


@pytest.fixture(scope="module")
def all_cases() -> list[Case]:
    return list(cases())


def test_nothing_is_wrong_that_is_not_recorded(all_cases: list[Case]) -> None:
    recorded = set(re.findall(r"^\* .*$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {line for case in all_cases for line in case.lines} <= recorded


def test_only_formats_let_out_what_is_not_valid(all_cases: list[Case]) -> None:
    assert all(case.file.startswith("optional/format/") for case in all_cases if case.too_lax)


def test_the_page_is_what_the_script_writes(all_cases: list[Case]) -> None:
    """For the version of the library that it names; another one may serve more."""
    written = _PAGE.read_text(encoding="utf-8")
    if f"llguidance {version('llguidance')}." in written:
        assert page(all_cases) == written, "run: python scripts/document_json_schema.py > docs/json_schema.md"
    else:
        served = re.search(r"(\d+) are served", written)
        assert served and sum(not case.refusal for case in all_cases) >= int(served[1])
