"""Where CUDA's compiler tools lie: told to JAX before it is imported, where it would look at a wrong place.

JAX takes the folder of `nvidia.cu13` for the toolkit, and where that package is there without `bin/ptxas` (the CUDA libraries
are installed as wheels, its compiler is not) its path becomes the text "None". Setting CUDA_ROOT comes before all that.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

_VARIABLE = "CUDA_ROOT"
_PTXAS = Path("bin") / "ptxas"
_LIBDEVICE = Path("nvvm") / "libdevice" / "libdevice.10.bc"


def point_jax_to_toolkit() -> None:
    """Sets CUDA_ROOT if JAX would find no ptxas by itself and another toolkit is installed. Too late once JAX is imported."""
    if "jax" in sys.modules or _VARIABLE in os.environ:
        return
    folders = _package_folders()
    if not folders or any((folder / _PTXAS).exists() for folder in folders):
        return
    root = next(iter(toolkit_candidates()), None)
    if root is not None:
        os.environ[_VARIABLE] = str(root)


def toolkit_candidates() -> list[Path]:
    """Folders with a `bin/ptxas`: what the environment names, what the wheels brought, what is on the PATH, the usual places.

    Those with CUDA's device library go first, which XLA needs too: a ptxas alone may lie beside other programs.
    """
    named = [Path(os.environ[name]) for name in (_VARIABLE, "CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = shutil.which("ptxas")
    on_path = [Path(found).resolve().parents[1]] if found else []
    usual = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    roots = dict.fromkeys([*named, *_package_folders(), *on_path, *usual])
    return sorted((root for root in roots if (root / _PTXAS).exists()), key=lambda root: not (root / _LIBDEVICE).exists())


def _package_folders() -> list[Path]:
    """Of nvidia.cu13, a package in several places."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
