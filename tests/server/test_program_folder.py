"""Where a server without a usable folder for compiled programs keeps them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxserve.config import ServerArgs
from jaxserve.server.building import with_usable_cache


def usable(folder: Path, private: Path) -> str | None:
    args = ServerArgs(model_path="m", compilation_cache_dir=str(folder))
    return with_usable_cache(args, private).compilation_cache_dir


def test_a_folder_that_can_be_made_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert usable(tmp_path / "a" / "b", tmp_path) == str(tmp_path / "a" / "b")
    assert not caplog.records


def test_in_place_of_one_that_cannot_be_made_the_private_one_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert usable(tmp_path / "file" / "programs", tmp_path) == str(tmp_path / "compiled")
    (record,) = caplog.records
    for words in ("file/programs' cannot be made: Not a directory.", "--compilation-cache-dir"):
        assert words in record.getMessage()


@pytest.mark.parametrize(
    ("mode", "is_taken", "words"), [(os.W_OK, True, "cannot be written to"), (os.R_OK, False, "cannot be read")]
)
def test_one_that_can_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int, is_taken: bool, words: str
) -> None:
    """Such as programs that came with an image."""
    monkeypatch.setattr(os, "access", lambda path, asked: not asked & mode)
    taken = usable(tmp_path / "programs", tmp_path)
    assert (taken == str(tmp_path / "programs")) == is_taken
    (record,) = caplog.records
    assert words in record.getMessage() and "--compilation-cache-dir" in record.getMessage()
