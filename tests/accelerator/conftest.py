"""Tests of the accelerator lane: they need JAX 0.11.2 or newer with jax[cuda13] and libtpu, but no accelerator.

`make aot` runs them; where JAX is older they are not collected, since its GPU interpreter and compiler lack what they test.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.conftest import QUICK_COMPILATION

NEEDED = (0, 11, 2)
# From JAX 0.12 on the wheel's libnvjitlink compiles GPU kernels; before it is ptxas: PTXAS=path/to/ptxas, or the wheel's.
ASKS_PTXAS = jax.__version_info__ < (0, 12)


def wheel_ptxas() -> str:
    (folder,) = importlib.util.find_spec("nvidia.cu13").submodule_search_locations  # type: ignore[union-attr]
    return str(Path(folder) / "bin" / "ptxas")


if jax.__version_info__ < NEEDED:
    collect_ignore_glob = ["*"]
else:  # code as it runs, but for autotuning, which needs a real device; JAX has not read this yet
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(QUICK_COMPILATION, "--xla_gpu_autotune_level=0")
    if ASKS_PTXAS:  # the first on PATH, then /usr/local/cuda's, then the wheel's, whatever CUDA_ROOT says
        os.environ.setdefault("PTXAS", wheel_ptxas())
        os.environ["PATH"] = os.pathsep.join([str(Path(os.environ["PTXAS"]).resolve().parent), os.environ["PATH"]])


def pytest_configure(config: pytest.Config) -> None:
    if jax.__version_info__ < NEEDED:
        return
    from tests.accelerator.passed import LeavesOutKnown, PassedTests
    from tests.accelerator.proofs import RECORDS, compilers, versions

    passed = PassedTests(RECORDS / f"passed-{compilers()}.json", versions())
    config.pluginmanager.register(LeavesOutKnown(passed, only_changed=config.getoption("--only-changed")))


@pytest.fixture(scope="session")
def chosen_ptxas() -> str | None:
    """The version of PTXAS, as 13.0.88; None where no ptxas is asked."""
    from tests.accelerator.proofs import chosen_ptxas

    return chosen_ptxas()


@pytest.fixture(scope="session")
def h200() -> Mesh:
    """A mesh of one H200 that is not there: what is lowered for it is compiled down to ptxas for sm_90a."""
    from jaxserve.aot.targets import gpu_devices

    return Mesh(np.array(gpu_devices("h200", 1)).reshape(1, 1), ("data", "tensor"))


@pytest.fixture(scope="session")
def record() -> Iterator[Any]:
    from tests.accelerator.proofs import Record

    record = Record()
    yield record
    record.write()
    print(f"\n{record.compiled} programs compiled, {record.recalled} known from {record.path.name}")


@pytest.fixture(scope="session")
def prover(record: Any) -> Any:
    from tests.accelerator.proofs import Prover

    return Prover(record)


@pytest.fixture
def prove(prover: Any, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`prove(lowered)` -> Facts of the compiled program, from the record if it holds this very program."""
    anew = request.node.get_closest_marker("every_run") is not None
    return functools.partial(prover, request.node.nodeid, anew=anew)


@pytest.fixture
def compile_for_h200(h200: Mesh, prove: Callable[..., Any]) -> Callable[..., Any]:
    """`compile_for_h200(function, *arguments)` -> Facts; arguments are arrays or shapes and dtypes."""

    def compile_(function: Callable[..., Any], *arguments: Any) -> Any:
        replicated = NamedSharding(h200, PartitionSpec())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), arguments)
        with jax.sharding.use_abstract_mesh(h200.abstract_mesh):
            return prove(jax.jit(function).trace(*shapes).lower())

    return compile_


@pytest.fixture
def interpret(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Parameters of the GPU interpreter: uninitialised memory is NaN, and a data race in any kernel fails the test."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    states: list[Any] = []

    class Kept(gpu_callbacks.GPURaceDetectionState):  # one per kernel; the interpreter itself keeps only the last
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            states.append(self)

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", Kept)
    yield plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    gpu_callbacks.reset_gpu_interpret_mode_state()
    assert not any(state.races_found for state in states), "a kernel has a data race"


def some_always(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of a test of which the `chosen` are not left out of any run."""
    return [pytest.param(value, marks=pytest.mark.every_run) if value in chosen else value for value in values]


def relative_error(got: Any, expected: Any) -> float:
    """||got - expected|| / ||expected|| in float64; NaN anywhere gives NaN."""
    got, expected = np.asarray(jnp.asarray(got, jnp.float32), np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
