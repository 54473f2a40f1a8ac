"""What tests of the C++ parts need: a compiler, the one that `jaxserve.kernels.native.library` would take."""

from __future__ import annotations

import os
import shutil

import pytest

from jaxserve.kernels.native import library

# CXX alone if it is set, as the library does.
COMPILERS = [name] if (name := os.environ.get("CXX")) else list(library.COMPILERS)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler is installed")
