"""What is left out of a run: nothing that a change can have touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.accelerator import passed
from tests.accelerator.passed import ROOT, LeavesOutKnown, PassedTests, sources_of

pytestmark = pytest.mark.every_run  # they read what stands in the repository
HERE = Path(__file__).parent
TEST = "tests/accelerator/test_gpu_decode.py::test_the_interpreted_kernel_is_right[sinks]"
VERSIONS = {"jax": "0.11.2"}
IMPORTED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]))
"""


def named(module: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in sources_of(HERE / module)}


@pytest.mark.parametrize("module", ["test_gpu_backend", "test_model_interpreted"])
def test_whatever_a_test_imports_is_among_its_sources(module: str) -> None:
    command = [sys.executable, "-c", IMPORTED, f"tests.accelerator.{module}"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'kernels'}", "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=path)
    imported = {Path(file) for file in json.loads(done.stdout)}
    venvs = {path for path in imported if "site-packages" in path.parts}
    ours = {path for path in imported - venvs if path.is_relative_to(ROOT)}
    by_package = {ROOT / "jaxserve" / "cuda_toolkit.py"}  # by jaxserve/__init__.py; no kernel sees what it does
    assert ours - by_package <= sources_of(HERE / f"{module}.py") and len(ours) > 10


def test_a_kernels_sources_are_the_kernels_and_what_tests_them() -> None:
    found = named("test_gpu_decode.py")
    assert {"jaxserve/kernels/pallas/gpu/softmax.py", "jaxserve/aot/h200.txtpb", "tests/conftest.py"} <= found
    assert not [path for path in found if path.startswith(("jaxserve/server", "jaxserve/scheduler", "jaxserve/executor"))]


def test_sources_that_only_another_process_imports_count() -> None:
    assert {"benchmarks/device/worker.py", "benchmarks/device/server.py"} <= named("test_device_benchmark.py")
    assert {"jaxserve/models/decoder.py", "jaxserve/aot/h200.txtpb"} <= named("test_whole_step.py")


@pytest.fixture
def digest(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the sources are, {"now": digest}."""
    state = {"now": "before"}
    monkeypatch.setattr(passed, "digest_of", lambda module: state["now"])
    return state


def recorded(path: Path, *nodeids: str) -> PassedTests:
    tests = PassedTests(path, VERSIONS)
    for nodeid in nodeids:
        tests.add(nodeid)
    tests.write()
    return PassedTests(path, VERSIONS)


def test_a_test_is_known_until_its_sources_change(tmp_path: Path, digest: dict[str, str]) -> None:
    tests = recorded(tmp_path / "passed.json", TEST)
    assert tests.knows(TEST) and not tests.knows(TEST + "2") and not tests.knows("tests/accelerator/test_other.py::test")
    digest["now"] = "after"
    assert not tests.knows(TEST)
    other = TEST.replace("sinks", "window")
    tests = recorded(tmp_path / "passed.json", other)
    assert tests.knows(other) and not tests.knows(TEST), "passed with other sources"


def test_processes_add_to_one_record(tmp_path: Path, digest: dict[str, str]) -> None:
    path, other = tmp_path / "passed.json", TEST.replace("sinks", "window")
    first, second = PassedTests(path, VERSIONS), PassedTests(path, VERSIONS)
    first.add(TEST)
    second.add(other)
    first.write()
    second.write()
    tests = PassedTests(path, VERSIONS)
    assert tests.knows(TEST) and tests.knows(other)


def test_a_record_of_other_compilers_is_not_believed(tmp_path: Path, digest: dict[str, str]) -> None:
    recorded(tmp_path / "passed.json", TEST)
    assert not PassedTests(tmp_path / "passed.json", {"jax": "0.12.0"}).knows(TEST)


def report(when: str, outcome: str) -> Any:
    return SimpleNamespace(nodeid=TEST, when=when, passed=outcome == "passed", failed=outcome == "failed")


@pytest.mark.parametrize(
    ("call", "teardown", "is_known"),
    [("passed", "passed", True), ("failed", "passed", False), ("skipped", "passed", False), ("passed", "failed", False)],
)
def test_only_what_passed_to_its_end_is_known(
    tmp_path: Path, digest: dict[str, str], call: str, teardown: str, is_known: bool
) -> None:
    tests = PassedTests(tmp_path / "passed.json", VERSIONS)
    plugin = LeavesOutKnown(tests, only_changed=True)
    for phase in (report("setup", "passed"), report("call", call), report("teardown", teardown)):
        plugin.pytest_runtest_logreport(phase)
    tests.write()
    assert PassedTests(tmp_path / "passed.json", VERSIONS).knows(TEST) == is_known


@pytest.mark.parametrize(("only_changed", "left"), [(True, ["anew", "always"]), (False, ["known", "anew", "always"])])
def test_what_is_left_out(tmp_path: Path, digest: dict[str, str], only_changed: bool, left: list[str]) -> None:
    module = TEST.split("::", 1)[0]
    tests = recorded(tmp_path / "passed.json", f"{module}::known", f"{module}::always")
    marks = {"always": "every_run"}
    items: list[Any] = [
        SimpleNamespace(nodeid=f"{module}::{name}", get_closest_marker=lambda mark, name=name: marks.get(name) == mark or None)
        for name in ("known", "anew", "always")
    ]
    deselected: list[Any] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)))
    LeavesOutKnown(tests, only_changed=only_changed).pytest_collection_modifyitems(config, items)
    assert [item.nodeid.split("::")[1] for item in items] == left
    assert len(deselected) == 3 - len(left)
