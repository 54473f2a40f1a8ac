"""Before any test imports JAX: run on the CPU, and pretend that it is eight devices. And the checkpoints tests share."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_DEVICES_FLAG = "--xla_force_host_platform_device_count"
# LLVM optimizes little: most of a test's time is the compilation of what runs a few times. XLA's own passes are as always.
QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jax").startswith("0.10."):  # which can still do without MLIR's emitters, the slower ones
    QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES_FLAG}=8 {QUICK_COMPILATION}".strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only-changed", action="store_true",
        help="of tests/accelerator, leave out what has passed with the very sources that stand here (accelerator/passed.py)",
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """What a file of tests compiled is of no use to the next: in thousands of tests it would grow to most of the memory."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(name)`: the folder of a case of tests/checkpoints.py, written on first use."""
    from checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def vector_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same for those of tests/vector_checkpoints.py, which make vectors of texts."""
    from vector_checkpoints import make_vectors

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_vectors(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get
