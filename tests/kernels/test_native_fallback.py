"""Where the C++ attention cannot serve, the reference does; and XLA multiplies where there is no library."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from cpp_compiler import needs_compiler

from jaxserve.kernels.api import choose_backend
from jaxserve.kernels.native import few_rows, library
from jaxserve.kernels.spec import AttentionSpec, Chip

SPEC = AttentionSpec(Chip("cpu"), 4, 2, 16, "float32", "float32", 4)


@pytest.mark.parametrize(("field", "message"), [("dtype", "queries must be"), ("kv_dtype", "keys and values must be")])
def test_other_types_go_to_the_reference(field: str, message: str) -> None:
    spec = dataclasses.replace(SPEC, **{field: "bfloat16"})
    assert choose_backend("auto", spec).name == "reference"
    with pytest.raises(NotImplementedError, match=f"'native': {message} float32, not bfloat16"):
        choose_backend("native", spec)


@pytest.fixture
def no_library_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """As on a machine where it was never built; the compiler is what CXX says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_registered", library._registered.__wrapped__)
    return tmp_path


def test_without_a_compiler_the_reference_serves(no_library_yet: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert choose_backend("auto", SPEC).name == "reference"
    with pytest.raises(NotImplementedError, match=r"'native': no C\+\+ compiler is installed \(no-such-compiler\)"):
        choose_backend("native", SPEC)
    assert not few_rows.are_available()


@needs_compiler
def test_a_library_that_cannot_be_kept_serves_all_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = library._library(library._compiler(), library.user_cache() / "native")
    copying = tmp_path / "copying-c++"  # a compiler that is quick
    copying.write_text(f'#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then cp {built} "$2"; fi; shift; done\n')
    copying.chmod(0o755)
    monkeypatch.setenv("CXX", str(copying))
    monkeypatch.setenv("XDG_CACHE_HOME", str(copying))  # a file
    symbol = getattr(library._load(library._compiler()), library.FEW_ROWS)
    assert symbol is not None
    assert "The C++ part is compiled at every start" in caplog.text and "XDG_CACHE_HOME" in caplog.text


def test_a_compiler_that_fails_is_quoted(no_library_yet: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = no_library_yet / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NotImplementedError, match=r"cannot compile its C\+\+ part: fatal error: no such header\."):
        choose_backend("native", SPEC)
    assert not list((no_library_yet / "jaxserve" / "native").iterdir())
