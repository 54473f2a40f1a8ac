"""Runs one foreign test file in this process and writes a line of JSON for each of its tests.

    python -m scripts.published_tests.child PACKAGE CHECKOUT FILE RESULTS

Beside a failure stands what our server refused meanwhile: replies of status 400 and more, as the test's own client saw them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback
import unittest
from collections.abc import Iterator
from typing import Any, TextIO

import httpx

from scripts.published_tests import engines, launch, modules

_REFUSED_CHARS = 300
# Imported by their helpers, needed by few of the tests here.
_OF_THEIR_HELPERS = ("aiohttp", "anthropic", "datasets", "pandas", "PIL", "torch")


class _Refusals:
    """Watches the two clients that foreign tests use."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        with contextlib.suppress(ImportError):  # the tests' own import will say so
            self._watch(importlib.import_module("requests").Session, "send", lambda reply: reply.text)
        self._watch(httpx.Client, "send", lambda reply: reply.read().decode(errors="replace"))

    def _watch(self, owner: type, name: str, text_of: Any) -> None:
        original = getattr(owner, name)

        def send(client: Any, request: Any, **kwargs: Any) -> Any:
            reply = original(client, request, **kwargs)
            if reply.status_code >= 400:
                self.seen.append(f"{reply.status_code} {text_of(reply)[:_REFUSED_CHARS]}")
            return reply

        setattr(owner, name, send)


class _Recorder(unittest.TestResult):
    def __init__(self, file: TextIO, refusals: _Refusals) -> None:
        super().__init__()
        self._file = file
        self._refusals = refusals
        self._started_s = 0.0

    def write(self, test: Any, outcome: str, reason: str = "", where: str = "") -> None:
        record = {
            "test": _name(test),
            "outcome": outcome,
            "reason": reason,
            "where": where,
            "refused": self._refusals.seen[-3:],
        }
        self._file.write(json.dumps({**record, "seconds": round(time.monotonic() - self._started_s, 1)}) + "\n")
        self._file.flush()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._started_s = time.monotonic()
        self._refusals.seen.clear()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.write(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.write(test, "skipped", reason)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:  # noqa: N802
        if error is not None:
            self.addError(test, error)

    def addError(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        frames = [frame for frame in traceback.extract_tb(error[2]) if "unittest" not in frame.filename]
        where = f"{pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}" if frames else ""
        outcome = "not ours" if issubclass(error[0], modules.NotOursError) else "failed"
        self.write(test, outcome, f"{error[0].__name__}: {error[1]}"[:600], where)

    addFailure = addError  # noqa: N815 (unittest's name)


def _name(test: Any) -> str:
    """Class.test, also of what stands for a whole class whose start failed ("setUpClass (module.Class)")."""
    full = test.id()
    if "(" in full:
        return full.partition("(")[2].rstrip(")").rpartition(".")[2] + ".*"
    return ".".join(full.partition(" ")[0].split(".")[-2:])


def _all_tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _all_tests(test)
        else:
            yield test


def main() -> None:
    package, checkout, file, results = sys.argv[1:5]
    modules.install(package, pathlib.Path(checkout) / "python", _OF_THEIR_HELPERS)
    modules.complete_transformers()
    engines.load_local_models()
    for name in (package, f"{package}.srt.entrypoints.engine"):
        setattr(importlib.import_module(name), "Engine", engines.TheirEngine)  # noqa: B010 (a made-up module)
    helpers = importlib.import_module(f"{package}.test.test_utils")
    helpers.popen_launch_server = launch.popen_launch_server
    helpers.STDOUT_FILENAME = str(pathlib.Path(results).with_suffix(".stdout"))  # /tmp's would be another run's too
    helpers.STDERR_FILENAME = str(pathlib.Path(results).with_suffix(".stderr"))
    if hasattr(helpers, "read_output"):
        helpers.read_output.__defaults__ = (helpers.STDERR_FILENAME,)
    helpers.kill_process_tree = sys.modules[f"{package}.srt.utils"].kill_process_tree
    sys.path.insert(0, str(pathlib.Path(file).parent))
    refusals = _Refusals()
    with open(results, "w") as out:
        spec = importlib.util.spec_from_file_location("published", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["published"] = module
        spec.loader.exec_module(module)
        # As when the file is run by itself: what its tests pickle goes with its code, not by a name that no server can import.
        module.__name__ = "__main__"
        sys.modules["__main__"] = module
        suite = unittest.defaultTestLoader.loadTestsFromModule(module)
        out.write(json.dumps({"planned": [_name(test) for test in _all_tests(suite)]}) + "\n")
        out.flush()
        modules.loading_is_over()
        skip = json.loads(os.environ.get("PUBLISHED_TESTS_SKIP", "[]"))
        left = [test for test in _all_tests(suite) if not {_name(test), _name(test).partition(".")[0] + ".*"} & set(skip)]
        unittest.TestSuite(left).run(_Recorder(out, refusals))


if __name__ == "__main__":
    main()
