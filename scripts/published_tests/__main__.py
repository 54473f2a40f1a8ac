"""Runs SGLang's and sglang-jax's published endpoint tests, unedited, against our server, and says why some do not pass.

    python -m scripts.published_tests --sglang PATH --sglang-jax PATH [--only WORD] [--out FOLDER]

PATH is a checkout that you have; nothing is fetched. Needs `requests`, `tabulate`, `openai` and `aiohttp`. Each file runs in a
process of its own (`child`), in which `sglang` and `sgl_jax` are made up but for the checkout's test helpers (`modules`), and
where a test starts a server it gets ours with the demo model (`launch`, `checkpoint`). `files` has the files and the known
reasons; what fails for none of those is listed as ours to look at, and makes the exit status 1. A run that was interrupted goes
on with the same `--out`: a file whose results lie there is not run again. For a second run beside one set CUDA_VISIBLE_DEVICES
to another digit: the tests choose their port by it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from typing import Any

from scripts.published_tests.checkpoint import make_large, make_other
from scripts.published_tests.files import BUG, FILES, RULES

Record = dict[str, Any]


_ROOT = pathlib.Path(__file__).resolve().parents[2]
_NOT_DONE = "not done within"
_NO_RESULT = "no result"
_NOT_TRIED = "is not supported yet|is not a field this server knows|multipart/form-data"


def records_of(package: str, checkout: pathlib.Path, name: str, folder: pathlib.Path, timeout_s: float) -> list[Record]:
    """A record per test of the file. A file whose records lie in `folder` is not run again."""
    kept = folder / f"{package}-{name.replace('/', '-')}.json"
    if not kept.exists():
        kept.write_text(json.dumps(run_file(package, checkout, name, folder, timeout_s)))
    records: list[Record] = json.loads(kept.read_text())
    return records


def run_file(package: str, checkout: pathlib.Path, name: str, folder: pathlib.Path, timeout_s: float) -> list[Record]:
    """Tests that did not come to a result have the reason of their class or file. After one that hangs the others go on."""
    lines: list[Record] = []
    while True:
        planned, more, ending = _run_child(package, checkout, name, folder, timeout_s, [line["test"] for line in lines])
        lines += more
        left = [record["test"] for record in complete(planned, lines, _NO_RESULT) if record["reason"] == _NO_RESULT]
        if not (left and ending.startswith(_NOT_DONE)):
            return complete(planned, lines, ending)
        lines += complete(left[:1], [], ending)


def _run_child(
    package: str, checkout: pathlib.Path, name: str, folder: pathlib.Path, timeout_s: float, skip: list[str]
) -> tuple[list[str], list[Record], str]:
    """All tests of the file, the records of those it ran, and how it ended."""
    stem = f"{package}-{name.replace('/', '-')}"
    results = folder / f"{stem}.jsonl"
    results.unlink(missing_ok=True)
    make_other(folder)
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PUBLISHED_TESTS_FILE": name,
        "PUBLISHED_TESTS_LOG": str(folder / f"{stem}.server.log"),
        "PUBLISHED_TESTS_MODEL": make_large(folder),
        "PUBLISHED_TESTS_SKIP": json.dumps(skip),
        "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    module = "scripts.published_tests.child"
    command = [sys.executable, "-m", module, package, str(checkout), str(checkout / name), str(results)]
    with (folder / f"{stem}.log").open("ab") as output:
        # In the folder: the other model is there, and some tests leave files where they run.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True
        )  # fmt: skip
        try:
            process.wait(timeout_s)
            ending = f"the file ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"{_NOT_DONE} {timeout_s:g} s"
        finally:
            _kill_group(process)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    planned = lines.pop(0)["planned"] if lines else ["(whole file)"]
    return planned, lines, ending


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def complete(planned: list[str], lines: list[Record], ending: str) -> list[Record]:
    seen = {line["test"]: line for line in reversed(lines)}
    records = []
    for test in planned:
        whole_class = seen.get(test.partition(".")[0] + ".*")
        missing = {"outcome": "failed", "reason": ending, "where": "", "refused": []}
        records.append({**(seen.get(test) or whole_class or missing), "test": test})
    return records


def column_of(record: Record, name: str) -> str:
    """A few tests look at no reply: what passes although it was refused something did not try it."""
    is_told = record["outcome"] == "skipped" or not re.search(_NOT_TRIED, " ".join(record["refused"]))
    return record["outcome"] if record["outcome"] in ("passed", "skipped") and is_told else group_of(record, name)


def group_of(record: Record, name: str) -> str:
    text = f"{name} {record['test']}: {record['reason']} | {record['where']} | {' | '.join(record['refused'])}"
    return next((group for pattern, group in RULES if re.search(pattern, text, re.DOTALL)), BUG)


def as_table(groups: dict[tuple[str, str], collections.Counter[str]]) -> str:
    columns = ["passed", "skipped", *sorted({group for counts in groups.values() for group in counts} - {"passed", "skipped"})]
    lines = ["| file | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for (package, name), counts in groups.items():
        lines.append(f"| {package}: {name.removeprefix('test/')} | " + " | ".join(str(counts[c] or "") for c in columns) + " |")
    total = sum(groups.values(), collections.Counter())
    lines.append("| together | " + " | ".join(str(total[column]) for column in columns) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.published_tests", description=__doc__)
    parser.add_argument("--sglang", type=pathlib.Path, help="a checkout of sgl-project/sglang")
    parser.add_argument("--sglang-jax", type=pathlib.Path, help="a checkout of sgl-project/sglang-jax")
    parser.add_argument("--only", default="", help="run only files whose path holds this")
    parser.add_argument(
        "--timeout-s", type=float, default=290, help="for a file, and again for what is left after a test that hangs"
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for results and logs; default: a fresh one")
    options = parser.parse_args()
    folder = (options.out or pathlib.Path(tempfile.mkdtemp(prefix="published-tests-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[tuple[str, str], collections.Counter[str]] = {}
    for package, checkout in (("sglang", options.sglang), ("sgl_jax", options.sglang_jax)):
        for name in FILES[package] if checkout else ():
            if options.only in name and (checkout / name).is_file():
                counts = groups.setdefault((package, name), collections.Counter())
                for record in records_of(package, checkout.resolve(), name, folder, options.timeout_s):
                    group = column_of(record, name)
                    counts[group] += 1
                    if group not in ("passed", "skipped"):
                        print(
                            f"{group}: {name} {record['test']}: {record['reason'][:300]}", *record["refused"][-1:], flush=True
                        )
                print(f"{name}: {dict(counts)}", flush=True)
    print("\n" + as_table(groups) + f"\n\nresults and logs: {folder}")
    return 1 if any(counts[BUG] for counts in groups.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
