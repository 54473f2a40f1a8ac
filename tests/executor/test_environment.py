"""What is the same program, of devices described as JAX describes real ones and those of a topology."""

from __future__ import annotations

import importlib.metadata
import types
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.executor.environment import environment

LIBTPU = "PJRT C API\nTFRT TPU v6 lite\nBuilt on Oct 15 2026 06:08:03 (1792069683) cl/1000038190"


def mesh_of(platform: str, version: str, kind: str, count: int = 1, **more: Any) -> Any:
    client = types.SimpleNamespace(platform=platform, platform_version=version, device_count=lambda: count)
    devices = [
        types.SimpleNamespace(id=i, device_kind=kind, process_index=0, platform=platform, client=client, **more)
        for i in range(count)
    ]
    return types.SimpleNamespace(devices=np.asarray(devices).reshape(1, count), axis_names=("data", "tensor"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    packages = {"jax-cuda13-pjrt": "0.11.2"}

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return packages


def test_a_gpu_and_its_topology(installed: dict[str, str]) -> None:
    real, topology = (
        mesh_of("gpu", version, "NVIDIA H200") for version in ("PJRT C API\ncuda 13000", "PJRT C API\nNVIDIA H200")
    )
    before = environment(real)
    assert before == environment(topology)
    assert before != environment(mesh_of("gpu", "PJRT C API\ncuda 13000", "NVIDIA H100 80GB HBM3"))
    assert before != environment(mesh_of("gpu", "PJRT C API\ncuda 13000", "NVIDIA H200", 8))
    installed["jax-cuda13-pjrt"] = "0.12.0"
    assert before != environment(real)
    del installed["jax-cuda13-pjrt"]  # built by oneself: the client's word is all there is
    assert environment(real) != environment(topology)


def test_a_tpu_and_its_topology() -> None:
    real = environment(mesh_of("tpu", LIBTPU, "TPU v6 lite", 4, coords=(0, 1, 0), core_on_chip=0))
    assert real == environment(mesh_of("tpu", LIBTPU, "TPU v6 lite", 4, coords=[0, 1, 0], core_on_chip=0))
    assert real != environment(mesh_of("tpu", LIBTPU, "TPU v6 lite", 4, coords=[1, 0, 0], core_on_chip=0)), "another place"
    assert real != environment(mesh_of("tpu", f"{LIBTPU}1", "TPU v6 lite", 4, coords=[0, 1, 0], core_on_chip=0))
    assert real != environment(mesh_of("tpu", LIBTPU, "TPU v5 lite", 4, coords=[0, 1, 0], core_on_chip=0))


@pytest.mark.parametrize(
    ("option", "values", "matters"),
    [
        ("jax_cross_host_transfer_socket_address", ("127.0.0.1:1234", "127.0.0.1:4321"), False),
        ("jax_compilation_cache_dir", ("here", "there"), False),
        ("jax_default_matmul_precision", ("float32", "bfloat16"), True),
    ],
)
def test_options_of_jax_that_matter(option: str, values: tuple[str, str], matters: bool) -> None:
    """A start takes another free port than the last one did."""
    before, found = jax.config.values[option], []
    try:
        for value in values:
            jax.config.update(option, value)
            found.append(environment(mesh_of("tpu", LIBTPU, "TPU v6 lite", coords=(0, 0, 0), core_on_chip=0)))
    finally:
        jax.config.update(option, before)
    assert (found[0] != found[1]) == matters
