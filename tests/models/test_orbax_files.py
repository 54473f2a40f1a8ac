"""What is said when a checkpoint cannot be written: once, by our error."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
from orbax.checkpoint import StandardCheckpointer

from jaxserve.models import CheckpointError
from jaxserve.models.orbax_files import save_params


def _fail_many_times(self: StandardCheckpointer, folder: Path, tree: Any) -> None:
    """As Orbax does on a full disk: the first tensor's error is raised, those of the others are not looked at."""

    async def write(name: str) -> None:
        raise ValueError(f"Error writing {name!r} at {folder}.orbax-checkpoint-tmp/x: Failed [os_error_code='27']")

    async def write_all() -> None:
        groups = [asyncio.gather(write(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        await groups[0]

    asyncio.run(write_all())


def test_only_the_first_of_many_errors_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StandardCheckpointer, "save", _fail_many_times)
    with pytest.raises(CheckpointError, match="orbax cannot be written: File too large"):
        save_params(tmp_path, {})
    gc.collect()
    assert not caplog.messages


def test_other_errors_that_nobody_looked_at_are_still_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StandardCheckpointer, "save", _fail_many_times)
    with pytest.raises(CheckpointError):
        save_params(tmp_path, {})
    logging.getLogger("asyncio").error("exception was never retrieved", exc_info=ValueError("of something else"))
    assert caplog.messages == ["exception was never retrieved"]
