"""JAX is told of CUDA's compiler where it would take the text "None" for its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRINT = "import os, jaxserve; from jax._src import lib; print(lib.cuda_path, os.environ.get('CUDA_ROOT'))"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """CUDA's libraries as wheels bring them, without the compiler."""
    (tmp_path / "site" / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    return tmp_path / "site"


def toolkit(folder: Path, *, is_whole: bool = True) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "ptxas").write_text("#!/bin/sh\n")
    (folder / "bin" / "ptxas").chmod(0o755)
    if is_whole:
        (folder / "nvvm" / "libdevice").mkdir(parents=True)
        (folder / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    return folder


def found(site: Path, code: str = PRINT, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    environment |= {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.split()


def test_jax_alone_would_look_in_a_folder_named_none(site: Path) -> None:
    """What this is about. If JAX mends it, `jaxserve.cuda_toolkit` can go."""
    assert found(site, "from jax._src import lib; print(lib.cuda_path)") == ["None"]


def test_the_toolkit_on_the_path_is_named(site: Path, tmp_path: Path) -> None:
    root = toolkit(tmp_path / "toolkit")
    assert found(site, PATH=f"{root / 'bin'}:/usr/bin:/bin") == [str(root), str(root)]


def test_the_one_that_the_environment_names_goes_first(site: Path, tmp_path: Path) -> None:
    on_path, named = toolkit(tmp_path / "toolkit"), toolkit(tmp_path / "named")
    assert found(site, PATH=f"{on_path / 'bin'}:/usr/bin:/bin", CUDA_HOME=str(named)) == [str(named), str(named)]
    chosen = toolkit(tmp_path / "chosen")
    assert found(site, CUDA_HOME=str(named), CUDA_ROOT=str(chosen)) == [str(chosen), str(chosen)]


def test_a_ptxas_without_its_library_goes_last(site: Path, tmp_path: Path) -> None:
    alone, whole = toolkit(tmp_path / "alone", is_whole=False), toolkit(tmp_path / "whole")
    assert found(site, PATH=f"{whole / 'bin'}:/usr/bin:/bin", CUDA_HOME=str(alone)) == [str(whole), str(whole)]


def test_nothing_is_set_where_jax_finds_its_own(site: Path, tmp_path: Path) -> None:
    own = toolkit(site / "nvidia" / "cu13")
    root = toolkit(tmp_path / "toolkit")
    assert found(site, PATH=f"{root / 'bin'}:/usr/bin:/bin") == [str(own), "None"]
