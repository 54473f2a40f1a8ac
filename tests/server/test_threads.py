"""Workers that are threads: the same engine, and the process that it is in stays as it was."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
from typing import Any

import pytest
from pipeline_harness import collect, internal_state, refused, request, running_on_threads, until

from jaxserve.mailboxes import Mailbox, MailboxClosedError, Mailboxes
from jaxserve.messages import SCHEDULER, AbortReq, ShutdownReq, WorkerAddress
from jaxserve.server.worker import WorkerDiedError


async def test_requests_go_through_threads_as_through_processes() -> None:
    async with running_on_threads() as pipeline:
        texts = await asyncio.gather(*(collect(pipeline, request(f"Say {i}", n=2, max_new_tokens=20)) for i in range(20)))
        assert all(set(one) == {0, 1} for one in texts)
        assert (await internal_state(pipeline))["num_running_reqs"] == 0
        streamed = await collect(pipeline, request(stream=True, max_new_tokens=20, ignore_eos=True))
        assert sum(len(chunk.text) for chunk in streamed[0]) > 0
        assert await pipeline.drain(5.0)


async def test_the_process_is_left_as_it_was() -> None:
    before = _process_state()
    async with running_on_threads(log_level="debug") as pipeline:
        await collect(pipeline, request())
        assert _process_state() == before
    assert _process_state() == before


def _process_state() -> tuple[Any, ...]:
    root = logging.getLogger()
    handlers = tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT))
    return (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled(), root.level, tuple(root.handlers), handlers,
            logging.getLogRecordFactory(), threading.excepthook)  # fmt: skip


async def test_replicas_and_several_detokenizers_are_threads_too() -> None:
    async with running_on_threads(dp_size=2, detokenizer_worker_num=2) as pipeline:
        await asyncio.gather(*(collect(pipeline, request(f"Say {i}")) for i in range(10)))
        assert len(pipeline.workers.alive) == 4


async def test_engines_of_one_process_do_not_meet() -> None:
    async with running_on_threads() as one, running_on_threads() as other:
        mine, theirs = await asyncio.gather(
            collect(one, request("Hello", temperature=0.0)), collect(other, request("Hello", temperature=0.0))
        )
        assert mine[0][-1].text == theirs[0][-1].text
        await one.close()
        assert (await collect(other, request("Hello", temperature=0.0)))[0][-1].text == theirs[0][-1].text


async def test_close_ends_threads_whose_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.01")
    async with running_on_threads() as pipeline:
        task = asyncio.create_task(refused(pipeline, request(max_new_tokens=400, ignore_eos=True)))
        await until(lambda: pipeline.manager.num_live)
        await asyncio.wait_for(pipeline.close(), 5)
        assert (await task).message == "The server was shut down. The request could not be finished."


@pytest.mark.parametrize(
    ("kind", "reason", "is_user_error"),
    [("user_error", "--model-path 'nowhere' does not exist.", True),
     ("crash", "The scheduler thread failed: RuntimeError: the device is on fire", False)],
)  # fmt: skip
async def test_a_failed_start_says_why(kind: str, reason: str, is_user_error: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SCHEDULER", kind)
    with pytest.raises(WorkerDiedError) as caught:
        async with running_on_threads():
            pass
    assert (str(caught.value), caught.value.is_user_error) == (reason, is_user_error)


async def test_a_tokenizer_that_cannot_be_loaded_ends_threads_that_wait_for_it(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        async with running_on_threads(tokenizer_path=str(tmp_path)):
            pass


async def test_a_step_that_hangs_ends_every_request_and_not_the_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_SCHEDULER", "hang_in_step")
    async with running_on_threads(watchdog_timeout=1.0, skip_server_warmup=True) as pipeline:
        watch = asyncio.create_task(pipeline.watch())
        error = await asyncio.wait_for(refused(pipeline, request(max_new_tokens=50, ignore_eos=True)), 30)
        assert error.message == "The server's scheduler thread ended. The request could not be finished."
        assert "took longer than 1 s" in str(await watch)
        assert (await refused(pipeline, request())).status_code == 503


def test_a_mailbox_keeps_the_order_and_wakes_its_reader() -> None:
    box = Mailbox()
    assert box.receive() == []
    assert not box.wait(0.01)
    threading.Timer(0.05, box.send, [ShutdownReq()]).start()
    assert box.wait(5)
    for i in range(5):
        box.send(AbortReq(rids=[str(i)]))
    assert box.receive(3) == [ShutdownReq(), AbortReq(rids=["0"]), AbortReq(rids=["1"])]
    assert box.left_some
    assert [message.rids for message in box.receive()] == [["2"], ["3"], ["4"]]


def test_a_reader_is_woken_without_a_message() -> None:
    box = Mailbox()
    threading.Timer(0.05, box.wake).start()
    began_s = time.monotonic()
    assert not box.wait(30)
    box.wake()  # before it waits
    assert not box.wait(30)
    assert time.monotonic() - began_s < 10
    assert not box.wait(0.01)


def test_nobody_misses_a_message() -> None:
    """Whatever the threads' order: a reader that waits is woken by every message that it has not seen."""
    box, seen = Mailbox(), []

    def read() -> None:
        while len(seen) < 4000:
            assert box.wait(10)
            seen.extend(box.receive())

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=lambda: [box.send(ShutdownReq()) for _ in range(1000)]) for _ in range(4)]
    for writer in writers:
        writer.start()
    reader.join(30)
    assert len(seen) == 4000


def test_a_closed_mailbox_ends_its_reader() -> None:
    box = Mailboxes(folder=None).of(WorkerAddress(SCHEDULER))  # type: ignore[arg-type]
    threading.Timer(0.05, box.end).start()
    began_s = time.monotonic()
    with pytest.raises(MailboxClosedError):
        box.wait(30)
    assert time.monotonic() - began_s < 10
    with pytest.raises(MailboxClosedError):
        box.receive()
    box.send(ShutdownReq())
