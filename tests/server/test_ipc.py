"""Sockets between processes: delivery in order, bad frames, paths, dispatch."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from jaxserve.config import ServerArgs
from jaxserve.dispatcher import Dispatcher
from jaxserve.ipc import MOST_BYTES_TOGETHER, IpcPaths, Receiver, Sender, send_once
from jaxserve.messages import (
    DETOKENIZER,
    SCHEDULER,
    AbortReq,
    BatchTokenIDOut,
    DetokenizerInput,
    ProfileBegan,
    Route,
    SchedulerInput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    TokenizerInput,
    WorkerAddress,
    WorkerFailed,
)
from jaxserve.server.scheduler_process import ChannelTransport
from jaxserve.server.worker_process import read_args, write_args
from jaxserve.types import SamplingParams


@pytest.fixture
def paths() -> Iterator[IpcPaths]:
    paths = IpcPaths.create()
    yield paths
    paths.remove()
    assert not paths.folder.exists()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_the_folder_is_private_and_carries_the_options_without_keys(paths: IpcPaths) -> None:
    assert stat.S_IMODE(paths.folder.stat().st_mode) == 0o700
    args = ServerArgs(model_path="m", api_key="hidden-key", decode_row_buckets=(1, 2), mem_fraction_static=0.5)
    write_args(paths.folder, args)
    file = paths.folder / "server_args.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "hidden-key" not in file.read_text()
    assert read_args(paths.folder) == args.replace(api_key=None)


def test_a_long_temporary_folder_is_refused_with_its_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ValueError, match="Set TMPDIR to a shorter path"):
        IpcPaths.create()
    assert not list(deep.iterdir())


OWNER = """
import sys, tempfile
from jaxserve.ipc import IpcPaths
paths = IpcPaths.create()
(paths.folder / "compiled").mkdir()
(paths.folder / "compiled" / "program").touch()
print(paths.folder, flush=True)
sys.stdin.read()
"""


def own_folder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a private folder, and the folder."""
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1, text=True, env=environment)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Socket paths have at most 103 bytes, and pytest's folders have long names."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_the_folders_of_dead_processes_are_removed_and_no_others(short_folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        first, of_first = own_folder(short_folder)
        stack.callback(first.kill)
        second, of_second = own_folder(short_folder)
        stack.callback(second.kill)
        assert of_first.is_dir() and of_second.is_dir(), "both live"
        os.kill(first.pid, signal.SIGSTOP)  # it lives all the same
        third, of_third = own_folder(short_folder)
        stack.callback(third.kill)
        assert sorted(short_folder.iterdir()) == sorted((of_first, of_second, of_third))
        for process in (first, second):
            process.kill()
            process.wait()
        fourth, of_fourth = own_folder(short_folder)
        stack.callback(fourth.kill)
        assert sorted(short_folder.iterdir()) == sorted((of_third, of_fourth))


def test_folders_that_are_not_ours_to_remove_stay(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    elsewhere = short_folder / "elsewhere"
    for folder in (short_folder / "jaxserve-young", elsewhere):
        folder.mkdir()
    (elsewhere / "lock").touch()
    (short_folder / "jaxserve-link").symlink_to(elsewhere)
    (short_folder / "jaxserve-file").touch()
    of_another_user = short_folder / "jaxserve-theirs"
    of_another_user.mkdir()
    (of_another_user / "lock").touch()
    names = sorted(path.name for path in short_folder.iterdir())
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    IpcPaths.create().remove()
    assert sorted(path.name for path in short_folder.iterdir()) == names
    monkeypatch.setattr(os, "getuid", lambda: user)
    IpcPaths.create().remove()
    names.remove("jaxserve-theirs")  # which is ours again, and nobody holds its lock
    assert sorted(path.name for path in short_folder.iterdir()) == names


def test_messages_arrive_in_order_whoever_starts_first(paths: IpcPaths, context: zmq.Context[Any]) -> None:
    sender = Sender(context, paths.of(WorkerAddress(SCHEDULER)))
    for i in range(3000):
        sender.send(AbortReq(rids=[str(i)]))
    receiver = Receiver(context, paths.of(WorkerAddress(SCHEDULER)), SchedulerInput)
    got: list[Any] = []
    while len(got) < 3000:
        assert receiver.wait(5)
        got += receiver.receive(most=1000)
    assert [m.rids for m in got] == [[str(i)] for i in range(3000)]
    assert receiver.receive() == []
    assert not receiver.wait(0)


def test_what_is_read_together_is_bounded_in_bytes(paths: IpcPaths, context: zmq.Context[Any]) -> None:
    sender = Sender(context, paths.of(WorkerAddress(SCHEDULER)))
    receiver = Receiver(context, paths.of(WorkerAddress(SCHEDULER)), SchedulerInput)
    rid = "r" * (MOST_BYTES_TOGETHER // 3)
    for _ in range(5):
        sender.send(AbortReq(rids=[rid]))
    got: list[int] = []
    while sum(got) < 5:
        assert receiver.wait(5)
        time.sleep(0.05)
        got.append(len(receiver.receive()))
        assert got[-1] <= 3 and receiver.left_some == (sum(got) < 5), got


def test_arrays_survive(paths: IpcPaths, context: zmq.Context[Any]) -> None:
    receiver = Receiver(context, paths.of(WorkerAddress(SCHEDULER)), SchedulerInput)
    ids = np.arange(70_000, dtype=np.int32)
    Sender(context, paths.of(WorkerAddress(SCHEDULER))).send(
        TokenizedGenerateReqInput(rid="r", input_ids=ids, sampling_params=SamplingParams(stop=["é"]))
    )
    assert receiver.wait(5)
    (message,) = receiver.receive()
    assert message.input_ids.dtype == np.int32
    assert (message.input_ids == ids).all()
    assert message.sampling_params.stop == ["é"]


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Nope", b"\x82\xa4type\xa8AbortReq\xa4rids\x05"])
def test_a_malformed_frame_is_logged_and_dropped(
    paths: IpcPaths, context: zmq.Context[Any], frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver(context, paths.of(WorkerAddress(SCHEDULER)), SchedulerInput)
    raw = context.socket(zmq.PUSH)
    raw.connect(paths.of(WorkerAddress(SCHEDULER)))
    raw.send(frame)
    sender = Sender(context, paths.of(WorkerAddress(SCHEDULER)))
    assert receiver.wait(5)
    assert receiver.receive() == []
    assert "malformed frame" in caplog.text
    sender.send(ShutdownReq())
    assert receiver.wait(5)
    assert receiver.receive() == [ShutdownReq()]


def test_an_object_array_is_not_accepted(paths: IpcPaths, context: zmq.Context[Any]) -> None:
    import msgspec

    receiver = Receiver(context, paths.of(WorkerAddress(SCHEDULER)), SchedulerInput)
    raw = context.socket(zmq.PUSH)
    raw.connect(paths.of(WorkerAddress(SCHEDULER)))
    body = {"type": "TokenizedGenerateReqInput", "rid": "r", "sampling_params": {}, "input_ids": ("|O", (1,), b"\0" * 8)}
    raw.send(msgspec.msgpack.encode(body))
    assert receiver.wait(5)
    assert receiver.receive() == []


def test_last_words_can_be_sent_from_any_thread(paths: IpcPaths, context: zmq.Context[Any]) -> None:
    receiver = Receiver(context, paths.tokenizer, TokenizerInput)
    words = WorkerFailed(worker=WorkerAddress("scheduler", 1), error="out of memory")
    threading.Thread(target=send_once, args=(paths.tokenizer, words)).start()
    assert receiver.wait(5)
    assert receiver.receive() == [words]


def test_dispatch_is_by_type_and_unknown_types_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    dispatch = Dispatcher({AbortReq: seen.append})
    dispatch(AbortReq(rids=["a"]))
    dispatch(ShutdownReq())
    assert seen == [AbortReq(rids=["a"])]
    assert "ShutdownReq" in caplog.text


def test_the_schedulers_transport(paths: IpcPaths, context: zmq.Context[Any]) -> None:
    transport = ChannelTransport(
        Receiver(context, paths.of(WorkerAddress(SCHEDULER)), SchedulerInput),
        [Sender(context, paths.of(WorkerAddress(DETOKENIZER, rank))) for rank in range(3)],
        Sender(context, paths.tokenizer),
    )
    assert transport.recv_messages(0.0) == []
    assert transport.recv_messages(0.01) == []
    sender = Sender(context, paths.of(WorkerAddress(SCHEDULER)))
    threading.Timer(0.05, sender.send, [ShutdownReq()]).start()
    assert transport.recv_messages(None) == [ShutdownReq()]
    none = np.zeros(0, np.int32)
    for rank in (2, 0, 2):
        transport.send_output(
            BatchTokenIDOut(
                rids=[], token_ids=none, token_counts=none, decode_flags=none, prompt_tokens=none, completion_tokens=none,
                cached_tokens=none, route=Route(rank, 1),
            )
        )  # fmt: skip
    transport.send_output(ProfileBegan())
    transport.send_output(ShutdownReq())
    received: list[list[Any]] = []
    for rank in range(3):
        receiver = Receiver(context, paths.of(WorkerAddress(DETOKENIZER, rank)), DetokenizerInput)
        received.append([])
        while not received[rank] or not isinstance(received[rank][-1], ShutdownReq):
            assert receiver.wait(5)
            received[rank] += receiver.receive()
    kinds = [[type(message).__name__ for message in messages] for messages in received]
    assert kinds == [
        ["BatchTokenIDOut", "ProfileBegan", "ShutdownReq"],
        ["ShutdownReq"],
        ["BatchTokenIDOut", "BatchTokenIDOut", "ShutdownReq"],
    ]
    assert received[2][0].route == Route(2, 1)
