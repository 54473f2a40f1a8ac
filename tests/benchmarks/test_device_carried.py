"""Programs carried to a device: how the case of `parity` counts what was taken, and what it says of what was not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.device import parity
from benchmarks.device.carry import fill
from benchmarks.device.case import NotHereError, Setting
from jaxserve.aot import carry

sys.path.insert(0, str(Path(__file__).parents[1] / "aot"))
from shapes import cpu_target

SMOKE = Setting(smoke=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this CPU."""
    found = tmp_path_factory.mktemp("carried")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carry, "without_devices", lambda: None)
        fill(found, cpu_target(1, 1 << 30), [parity.carried_plan(SMOKE)])
    return found


def test_all_are_taken(folder: Path) -> None:
    numbers = parity.carried_against_compiled_here(SMOKE, folder)()
    assert numbers["taken"] == numbers["programs"] > 5 and "status" not in numbers
    assert numbers["tokens_agreed"] == 1.0


def test_what_was_not_taken_is_named_with_what_differs(folder: Path) -> None:
    parity.driver_for.cache_clear()
    for path in folder.glob("*/executables/decode-*.program"):  # a file, two names
        path.unlink()
    (environment,) = folder.glob("*/environment.txt")
    environment.write_text(environment.read_text().replace("jax: ", "jax: 1."))
    numbers = parity.carried_against_compiled_here(SMOKE, folder)()
    assert numbers["taken"] == numbers["programs"] - 1 and numbers["status"] == "failed"
    assert "compiled here: decode-R=4;" in numbers["reason"] and "(there: jax: 1." in numbers["reason"]


def test_without_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotHereError, match="make device-programs"):
        parity.carried_against_compiled_here(SMOKE, tmp_path / "nothing")
