"""scripts/surface.py: SGLang's names against what is here, and what docs/sglang.md says of them."""

from __future__ import annotations

import collections
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def surface() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "surface.py"
    spec = importlib.util.spec_from_file_location("surface", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["surface"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_of_sglangs_has_a_row(surface: ModuleType) -> None:
    names = surface.sglangs()
    counts = collections.Counter(row.kind for row in surface.rows())
    assert counts == {kind: len(names[kind]) for kind in surface.TITLES}
    by_name = {(row.kind, row.name): row for row in surface.rows()}
    assert by_name["endpoints", "/health_generate"].status == surface.SAME
    assert by_name["endpoints", "/health"].status == surface.DIFFERS
    assert by_name["endpoints", "/health"].words.startswith("generates a token when idle / ")
    assert by_name["generate", "no_logs"].status == surface.NO_EFFECT
    depth = by_name["options", "--pp-async-batch-depth"]
    assert depth.status == surface.MISSING
    assert depth.words.startswith("parallelism: as many steps ")
    assert "| `--page-size` | differs | 1 to 128;" in surface.surface_page()


def test_the_comparison_says_why_something_is_missing(surface: ModuleType) -> None:
    """But for options, of which it names those that users of servers set."""
    said = tuple(surface.comparison("endpoints"))  # /v1/responses speaks for what is below it
    missing = [row for row in surface.rows() if row.status == surface.MISSING and row.kind != "options"]
    silent = [row.name for row in missing if not row.words and not (row.kind == "endpoints" and row.name.startswith(said))]
    assert not silent, f"docs/sglang.md does not say why these are missing: {silent}"
    here = [row for row in surface.rows() if row.status == surface.SAME and row.kind != "endpoints"]
    wrong = [row.name for row in here if row.words]
    assert not wrong, f"docs/sglang.md says of these, which are here, why they are missing: {wrong}"
