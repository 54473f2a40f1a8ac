"""How foreign tests are run against our server: what stands in for their packages, their options, and how they are counted."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.published_tests import __main__ as runner
from scripts.published_tests.__main__ import complete, group_of, records_of
from scripts.published_tests.files import BUG, FEATURE, OPTION
from scripts.published_tests.launch import popen_launch_server, translate
from scripts.published_tests.modules import NotOursError

_ROOT = Path(__file__).resolve().parents[2]

_HELPERS = """
from madeup.srt.utils import kill_process_tree, retry
from madeup.deep.within import something
import unittest
IS_IN_CI = something()  # calls are fine while modules are loaded
class CustomTestCase(unittest.TestCase):
    pass
def popen_launch_server(*args, **kwargs):
    raise AssertionError("theirs must not be called")
"""
_TEST_FILE = """
from madeup.srt.sampling import Processor
from madeup.test.test_utils import IS_IN_CI, CustomTestCase, popen_launch_server
class Mine(Processor):
    pass
class TestA(CustomTestCase):
    def test_passes(self):
        self.assertFalse(IS_IN_CI)
        self.assertIn("scripts", popen_launch_server.__module__)
    def test_fails(self):
        for i in range(2):
            with self.subTest(i=i):
                self.assertEqual(i, 0)
    def test_uses_theirs(self):
        Processor.to_str()
class TestB(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        popen_launch_server("model", "http://127.0.0.1:1", 1, other_args=["--uno-lora-path", "x"])
    def test_never_begins(self):
        pass
"""


def test_options_that_we_have_go_through_and_others_are_named() -> None:
    theirs = (
        "--max-total-tokens",
        1000,
        "--context-len",
        "500",
        "--cuda-graph-max-bs",
        "8",
        "--disable-radix-cache",
        "--tp",
        "2",
    )
    assert translate(theirs) == ["--max-total-tokens", "1000", "--context-length", "500", "--disable-radix-cache"]
    assert translate(["--page-size=16", "--device", "tpu"]) == ["--page-size", "16"]
    assert translate(["--lora-paths", "a=/a", "b=/b", "--tp", "2"]) == ["--lora-paths", "a=/a,b=/b"]
    with pytest.raises(NotOursError, match="needs the option --uno-lora-path"):
        translate(["--uno-lora-path", "x"])


def test_a_file_is_run_with_their_helpers_and_our_server(tmp_path: Path) -> None:
    package = tmp_path / "python" / "madeup" / "test"
    package.mkdir(parents=True)
    (package / "test_utils.py").write_text(_HELPERS)
    (tmp_path / "test_file.py").write_text(_TEST_FILE)
    results = tmp_path / "results.jsonl"
    command = [
        sys.executable,
        "-m",
        "scripts.published_tests.child",
        "madeup",
        str(tmp_path),
        str(tmp_path / "test_file.py"),
        str(results),
    ]
    subprocess.run(command, cwd=_ROOT, check=True, timeout=60)
    planned, *lines = map(json.loads, results.read_text().splitlines())
    records = {record["test"]: record for record in complete(planned["planned"], lines, "the end")}
    assert {test: record["outcome"] for test, record in records.items()} == {
        "TestA.test_passes": "passed",
        "TestA.test_fails": "failed",
        "TestA.test_uses_theirs": "not ours",
        "TestB.test_never_begins": "not ours",
    }
    assert group_of(records["TestB.test_never_begins"], "test_file.py") == OPTION
    assert group_of(records["TestA.test_fails"], "test_file.py") == BUG


def test_what_the_server_refused_explains_a_failure() -> None:
    record = {
        "test": "A.b",
        "outcome": "failed",
        "reason": "KeyError: 'text'",
        "where": "",
        "refused": ["400 echo is not supported yet"],
    }
    assert group_of(record, "x.py") == FEATURE
    assert group_of({**record, "refused": []}, "x.py") == BUG


def test_tests_without_a_result_have_the_end_of_their_file_as_reason() -> None:
    [record] = complete(["A.b"], [], "not done within 5 s")
    assert record["outcome"] == "failed"
    assert record["reason"] == "not done within 5 s"


def test_a_server_is_not_started_where_another_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port} is in use"):
            popen_launch_server("model", f"http://127.0.0.1:{port}", 1)


def test_a_file_with_results_is_not_run_again(tmp_path: Path) -> None:
    record = {"test": "A.b", "outcome": "passed", "reason": "", "where": "", "refused": []}
    (tmp_path / "madeup-test-x.py.json").write_text(json.dumps([record]))
    assert records_of("madeup", tmp_path / "missing", "test/x.py", tmp_path, 1) == [record]


def test_after_one_that_hangs_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = ["A.a", "B.hangs", "B.b", "C.c"]
    rounds = iter([(["A.a"], "not done within 5 s"), (["B.b", "C.*"], "the file ended with status 0")])
    skipped = []

    def run_child(*args: object) -> tuple[list[str], list[runner.Record], str]:
        skipped.append(args[-1])
        tests, ending = next(rounds)
        return planned, [{"test": test, "outcome": "passed", "reason": ""} for test in tests], ending

    monkeypatch.setattr(runner, "_run_child", run_child)
    records = runner.run_file("madeup", tmp_path, "test/x.py", tmp_path, 5)
    assert [record["test"] for record in records] == planned
    assert [record["reason"] for record in records] == ["", "not done within 5 s", "", ""]
    assert skipped == [[], ["A.a", "B.hangs"]]
