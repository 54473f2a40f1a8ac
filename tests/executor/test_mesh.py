"""Which devices a process gets; each case in a process of its own, since JAX chooses once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_MAKE_MESH = """
import sys
from jaxserve.executor.mesh import make_mesh, select_devices
select_devices(sys.argv[1], int(sys.argv[2]))
try:
    print(make_mesh(int(sys.argv[2])).devices.shape)
except ValueError as error:
    print("ValueError:", error)
"""
_WITHOUT = {"XLA_FLAGS", "JAX_PLATFORMS"}


def make_mesh(device: str, tp_size: int = 1, **environment: str) -> str:
    command = [sys.executable, "-c", _MAKE_MESH, device, str(tp_size)]
    env = {name: value for name, value in os.environ.items() if name not in _WITHOUT} | environment
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_cpu_devices_are_as_many_as_asked_for() -> None:
    assert make_mesh("cpu", 2) == "(1, 2)"


@pytest.mark.parametrize(
    ("device", "environment"), [("cuda", {"CUDA_VISIBLE_DEVICES": ""}), ("auto", {"JAX_PLATFORMS": "nowhere"})]
)
def test_a_device_that_is_not_there_is_a_sentence(device: str, environment: dict[str, str]) -> None:
    said = make_mesh(device, **environment)
    wanted = environment.get("JAX_PLATFORMS", device)
    assert said.startswith(f"ValueError: --device {wanted} (or JAX_PLATFORMS): JAX finds no such device, but ")
    assert ("pip install 'jaxserve[" in said) == (wanted == "cuda") and said.endswith("shows what is installed.")
    assert " (set JAX_PLATFORMS" not in said and ".." not in said
