"""The pipeline that tests of a file share."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pipeline_harness import running

from jaxserve.server.pipeline import Pipeline


@pytest.fixture(scope="module")
async def pipeline() -> AsyncIterator[Pipeline]:
    """Its steps take 2 ms, so that a request of 480 tokens can be aborted before its end on a busy machine too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP_S", "0.002")
        async with running() as ready:
            yield ready


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for names of sockets, as pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="launch-") as path:
        yield Path(path)
