"""Which devices a process gets; each case in a process of its own, since JAX chooses once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.executor import mesh

_MAKE_MESH = """
import sys
from types import SimpleNamespace
from jaxserve.executor.mesh import make_mesh, select_devices
select_devices(sys.argv[1], int(sys.argv[2]))
try:
    print(make_mesh(int(sys.argv[2]), dp_size=int(sys.argv[3])).devices.shape)
except ValueError as error:
    print("ValueError:", error)
"""
_WITHOUT = {"XLA_FLAGS", "JAX_PLATFORMS"}


def make_mesh(device: str, tp_size: int = 1, dp_size: int = 1, **environment: str) -> str:
    command = [sys.executable, "-c", _MAKE_MESH, device, str(tp_size), str(dp_size)]
    env = {name: value for name, value in os.environ.items() if name not in _WITHOUT} | environment
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_cpu_devices_are_as_many_as_asked_for() -> None:
    assert make_mesh("cpu", 2) == "(1, 2)"
    assert make_mesh("cpu", 2, dp_size=3, CUDA_VISIBLE_DEVICES="5") == "(1, 2)"


@pytest.mark.parametrize(
    ("device", "environment"), [("cuda", {"CUDA_VISIBLE_DEVICES": ""}), ("auto", {"JAX_PLATFORMS": "nowhere"})]
)
def test_a_device_that_is_not_there_is_a_sentence(device: str, environment: dict[str, str]) -> None:
    said = make_mesh(device, **environment)
    wanted = environment.get("JAX_PLATFORMS", device)
    assert said.startswith(f"ValueError: --device {wanted} (or JAX_PLATFORMS): JAX finds no such device, but ")
    assert ("pip install 'jaxserve[" in said) == (wanted == "cuda") and said.endswith("shows what is installed.")
    assert " (set JAX_PLATFORMS" not in said and ".." not in said


def test_a_part_with_too_few_devices_is_a_sentence_of_both_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ValueError, match=r"^--tp-size 2 needs as many devices; cpu has 1\.$"):
        mesh.make_mesh(2, jax.devices()[:1])
    expected = (
        "--dp-size 2 with --tp-size 2 needs 4 devices, 2 for each replica; of this one's (CUDA_VISIBLE_DEVICES=2,3): cpu has 1."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        mesh.make_mesh(2, jax.devices()[:1], dp_size=2)


@pytest.fixture
def nothing_selected() -> Iterator[None]:
    """In this process, whose devices are there already."""
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("nothing_selected")
def test_a_part_that_names_gpus_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX says that it cannot start CUDA and goes on with the CPU, or raises; a replica must not serve there."""
    said = make_mesh("cuda", dp_size=2, CUDA_VISIBLE_DEVICES="7")
    assert said.startswith("ValueError: --device cuda") and "--dp-size 2 with --tp-size 1 needs 2 devices" in said, said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(mesh, "_CUDA_PLUGINS", ("jaxserve",))
    assert mesh.make_mesh(1, dp_size=2).devices.size == 1, "a machine without GPUs"
    monkeypatch.setattr(mesh.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    with pytest.raises(ValueError, match=r"\(CUDA_VISIBLE_DEVICES=7\): none of them is there\.$"):
        mesh.make_mesh(1, dp_size=2)
    assert mesh.make_mesh(1).devices.size == 1


@pytest.mark.usefixtures("nothing_selected")
def test_a_gpu_that_fails_to_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> list[Any]:
        if asked := jax.config.values["jax_platforms"]:
            return [SimpleNamespace(device_kind=asked)]
        raise RuntimeError("Unable to initialize backend 'cuda': no device (you may need to uninstall the failing plugin)")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(
        ValueError, match=r"--device auto .* but 1 x cpu\. Unable to initialize backend 'cuda': no device\. `jax"
    ):
        mesh.make_mesh(1)


def devices_of(*processes: int) -> list[Any]:
    return [SimpleNamespace(process_index=process, id=index) for index, process in enumerate(processes)]


def test_each_process_brings_as_many_devices() -> None:
    found = devices_of(0, 0, 0, 1, 1, 1, 2, 2)
    assert [device.id for device in mesh._of_each_process(found, mesh.Sizes(1, 6, 1))] == [0, 1, 3, 4, 6, 7]
    assert mesh._of_each_process(found[:3], mesh.Sizes(1, 2, 1)) == found[:3], "of one process all: too many are no fault"
    with pytest.raises(ValueError, match=r"^--tp-size 9 over 3 hosts needs 3 devices of each; one has 2\.$"):
        mesh._of_each_process(found, mesh.Sizes(1, 9, 1))
    with pytest.raises(ValueError, match=r"^--pp-size 3 and --tp-size 3 over 3 hosts needs 3 devices of each; one has 2\.$"):
        mesh._of_each_process(found, mesh.Sizes(3, 3, 1))
