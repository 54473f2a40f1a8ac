"""Processes that start together with one empty cache: each program is compiled once."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServerArgs
from jaxserve.executor import warmup
from jaxserve.executor.background import BackgroundCompiler, Order
from jaxserve.executor.build import draw_blueprints
from jaxserve.executor.compilation import ProgramCompiler
from jaxserve.executor.compile_counter import CompileCounter
from jaxserve.executor.compile_process import compile_order
from jaxserve.executor.programs import ProgramKey, program_name
from jaxserve.executor.warmup import Work, compile_all, do_all

_FILL = """
import sys
from jaxserve.config import ServerArgs
from jaxserve.executor.build import fill_cache
args = ServerArgs(
    model_path=sys.argv[1], max_total_tokens=128, max_running_requests=2, context_length=64, chunked_prefill_size=16,
    prefill_token_buckets=(16,), decode_row_buckets=(1, 2), grammar_backend="none", device="cpu",
)
print("ready", flush=True)
sys.stdin.readline()
filled = fill_cache(args, sys.argv[2])
print(filled.programs, filled.compiled)
"""


def fill(model: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FILL, str(model), str(cache)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_two_processes_compile_each_program_once(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    processes = [fill(model, tmp_path) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    said = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        said.append(tuple(map(int, out.split())))
    (programs, first), (same, second) = said
    assert programs == same == first + second, said
    assert min(first, second) > 0, "they share the work"
    folder = tmp_path / "executables"
    assert len({path.stat().st_ino for path in folder.glob("*.program")}) == programs
    assert not list(folder.glob(".*")), "no lock is left"


def test_behind_servers_that_serve_already_too(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A process on CPU and the thread of an accelerator, at once."""
    args = ServerArgs(
        model_path=str(checkpoint("qwen3")),
        max_running_requests=2,
        context_length=64,
        chunked_prefill_size=16,
        prefill_token_buckets=(16,),
        decode_row_buckets=(1, 2),
        grammar_backend="none",
        device="cpu",
        compilation_cache_dir=str(tmp_path),
    )
    (blueprint,) = draw_blueprints(args)
    num_pages, keys = blueprint.pages_each(4), blueprint.program_set.later
    counter, out = CompileCounter(), io.StringIO()
    thread = BackgroundCompiler(ProgramCompiler.of(blueprint, num_pages, tmp_path), keys, None)
    thread.start()
    compile_order(Order(args=args, num_pages=num_pages, names=[program_name(key) for key in keys]), out)
    taken: dict[ProgramKey, Any] = {}
    deadline_s = time.monotonic() + 60
    while len(taken) < len(keys):
        assert time.monotonic() < deadline_s
        if program := thread.take():
            taken[program[0]] = program[1]
        time.sleep(0.01)
    assert set(taken) == set(keys) and sorted(out.getvalue().splitlines()) == sorted(map(program_name, keys))
    assert counter.count == len(keys)


def test_what_another_does_comes_last_and_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[str] = []
    answers: dict[str, list[Any]] = {"a": [None, None, None, 1], "b": [2], "c": [None, 3]}

    def task(key: str) -> Any:
        tried.append(key)
        return answers[key].pop(0)

    work = Work({key: lambda key=key: task(key) for key in answers})
    with caplog.at_level(logging.INFO):
        assert list(work.results()) == [("b", 2), ("c", 3), ("a", 1)]
    assert tried == ["a", "b", "c", "a", "c", "a", "a"]
    assert caplog.text.count("Waiting for other processes") == 1


def test_the_bar_counts_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    class Bar:
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, n: int = 1) -> None:
            counted.append(n)

    monkeypatch.setattr(warmup, "progress_bar", lambda *args, **options: Bar())
    answers = {key: [None] * (key % 3) + [10 * key] for key in range(1, 9)}
    tasks: dict[int, Callable[[], int | None]] = {key: lambda key=key: answers[key].pop(0) for key in answers}
    assert do_all(tasks, show_progress=True) == {key: 10 * key for key in range(1, 9)}
    assert sum(counted) == 8


def test_after_an_error_nothing_more_is_begun() -> None:
    begun: list[int] = []

    class Lowered:
        def compile(self) -> int:
            time.sleep(0.01)
            raise RuntimeError("too large")

    def lower(key: int) -> Lowered:
        begun.append(key)
        return Lowered()

    with pytest.raises(RuntimeError, match="too large"):
        compile_all({key: lambda key=key: lower(key) for key in range(1000)}, show_progress=False)
    assert len(begun) < 100


def test_one_traces_at_a_time() -> None:
    tracing = threading.Lock()

    class Lowered:
        def compile(self) -> bool:
            return True

    def lower() -> Lowered:
        assert tracing.acquire(blocking=False), "another one traces"
        time.sleep(0.001)
        tracing.release()
        return Lowered()

    assert compile_all(dict.fromkeys(range(50), lower), show_progress=False) == dict.fromkeys(range(50), True)
