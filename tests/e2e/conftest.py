"""Servers and caches the end-to-end tests share."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from live_server import LiveServer, environment, running

from jaxserve.demo import demo_model_path


@pytest.fixture(scope="session")
def compilation_cache() -> str:
    """One persistent compilation cache for all servers of all test runs: the second run starts them in seconds."""
    folder = pathlib.Path(__file__).resolve().parents[2] / ".jax_cache"
    folder.mkdir(exist_ok=True)
    return str(folder)


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[LiveServer]:
    """The demo model with default options as a user runs it, for all tests that do not need a server of their own."""
    log = tmp_path_factory.mktemp("demo_server") / "server.log"
    options = ["--model-path", demo_model_path(), "--compilation-cache-dir", compilation_cache]
    with running(log, *options, env=environment()) as server:
        yield server
