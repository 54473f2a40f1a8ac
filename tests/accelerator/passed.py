"""Which tests have passed with the very sources that stand here, so that `make aot` runs only what a change can have touched.

    a test's module -> every file of the repository that it can import -> a digest -> in the record? the test is known to pass

The record says so per module, for one set of compilers. `--only-changed` leaves known tests out (tests/conftest.py), `make
aot-all` forgets them all. Tests marked `every_run` are never left out: one or two of each kernel, interpreted and compiled.

Imports are read from the sources: also those inside functions, and strings that name a module. So it does not matter when
and by whom something is imported, or in which process; only that its name stands somewhere.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (ROOT, ROOT / "tests", ROOT / "tests" / "kernels")  # where modules are looked for (pyproject.toml: pythonpath)
_MODULE = re.compile(r"(jaxserve|benchmarks|tests)(\.\w+)+")
# Count for every test, but are not followed: no one test sees all that fixtures import.
_FOR_ALL = [
    ROOT / name
    for name in ("tests/conftest.py", "tests/accelerator/conftest.py", "jaxserve/aot/targets.py", "jaxserve/aot/chips.py")
]
# Nor are these: how facts are read is a version of the record, and the package imports what it offers only when asked.
_NOT_FOLLOWED = {*_FOR_ALL, ROOT / "tests" / "accelerator" / "proofs.py", ROOT / "jaxserve" / "__init__.py"}


def sources_of(module: Path) -> set[Path]:
    """The module, what it can import in turn, and the data beside that; files of this repository only."""
    found: set[Path] = set()
    pending = {module, *_FOR_ALL}
    while pending:
        path = pending.pop()
        found.add(path)
        if path not in _NOT_FOLLOWED:
            pending |= _imported(path) - found
    return found | {data for folder in {path.parent for path in found} for data in _data(folder)}


def _data(folder: Path) -> Iterator[Path]:
    if folder.is_relative_to(ROOT / "jaxserve"):
        yield from (path for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc"))


@functools.cache
def _imported(path: Path) -> frozenset[Path]:
    return frozenset(file for name in _names(ast.parse(path.read_text())) for file in _files(name))


def _names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported, perhaps with that of something inside a module behind; and strings that name a
    module, or a package that `python -m` may run."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if _MODULE.fullmatch(text):
                yield from (text, f"{text}.__main__")


@functools.cache
def _files(name: str) -> tuple[Path, ...]:
    """Of the module and of the packages that it is in."""
    parts = name.split(".")
    starts = (folder.joinpath(*parts[:count]) for folder in _FOLDERS for count in range(1, len(parts) + 1))
    candidates = (file for start in starts for file in (start.with_suffix(".py"), start / "__init__.py"))
    return tuple(file for file in candidates if file.exists())


@functools.cache
def digest_of(module: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources_of(module)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


class PassedTests:
    """The record of one set of compilers: module -> digest of its sources, and the tests that passed with them."""

    def __init__(self, path: Path, versions: dict[str, str]) -> None:
        self._path, self._versions = path, versions
        self._known = self._read()
        self._new: dict[str, set[str]] = {}

    def __str__(self) -> str:
        return self._path.name

    def knows(self, nodeid: str) -> bool:
        module, name = nodeid.split("::", 1)
        known = self._known.get(module)
        return known is not None and name in known["passed"] and known["sources"] == digest_of(ROOT / module)

    def add(self, nodeid: str) -> None:
        module, name = nodeid.split("::", 1)
        self._new.setdefault(module, set()).add(name)

    def drop(self, nodeid: str) -> None:
        """For what failed when its test had passed: an interpreted kernel's races are found at the end."""
        module, name = nodeid.split("::", 1)
        self._new.get(module, set()).discard(name)

    def write(self) -> None:
        """Adds what is new; several processes may."""
        if not self._new:
            return
        self._path.parent.mkdir(exist_ok=True)
        with (self._path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            modules = self._read()
            for module, passed in self._new.items():
                digest, known = digest_of(ROOT / module), modules.get(module)
                before = known["passed"] if known is not None and known["sources"] == digest else []
                modules[module] = {"sources": digest, "passed": sorted({*before, *passed})}
            content = {"versions": self._versions, "modules": dict(sorted(modules.items()))}
            self._path.write_text(json.dumps(content, indent=0) + "\n")

    def _read(self) -> dict[str, dict[str, list[str] | str]]:
        if not self._path.exists():
            return {}
        content = json.loads(self._path.read_text())
        return dict(content["modules"]) if content["versions"] == self._versions else {}


class LeavesOutKnown:
    """The pytest plugin: leaves out what the record knows, adds what passed. Each process of a run has one."""

    def __init__(self, passed: PassedTests, *, only_changed: bool) -> None:
        self._passed, self._only_changed = passed, only_changed
        self._left_out = 0

    @pytest.hookimpl(trylast=True)  # of what -k and -m have left
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            digest_of(ROOT / item.nodeid.split("::", 1)[0])  # now, as the sources are imported; it is kept
        if not self._only_changed:
            return
        known, rest = [], []
        for item in items:
            is_known = item.get_closest_marker("every_run") is None and self._passed.knows(item.nodeid)
            (known if is_known else rest).append(item)
        items[:], self._left_out = rest, len(known)
        config.hook.pytest_deselected(items=known)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._passed.drop(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Processes that pytest-xdist started write, and tell the one that started them."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = self._left_out
        if not session.config.getoption("numprocesses", None):
            self._passed.write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out = getattr(node, "workeroutput", {}).get("left_out", 0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._left_out:
            terminalreporter.write_line(
                f"{self._left_out} tests left out: they passed with the sources as they are ({self._passed})"
            )
