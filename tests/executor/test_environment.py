"""What is the same program, of devices described as JAX describes real ones and those of a topology."""

from __future__ import annotations

import importlib.metadata
import types
from typing import Any

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
