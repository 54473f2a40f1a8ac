"""Names of models become folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.demo import demo_model_path
from jaxserve.models import model_folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == str(tmp_path)


def test_demo_is_the_model_that_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_folder("demo") == demo_model_path()
    (tmp_path / "demo").mkdir()
    assert model_folder("demo") == "demo", "a folder of that name comes first"
