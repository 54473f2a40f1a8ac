"""What host 0's runner is asked to do, the others' runners do alike: steps, in all their forms, and commands."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, fake_spec
from host_harness import Hosts
from scheduler_harness import Harness

from jaxserve.commands import (
    CheckWeights,
    Command,
    CommandError,
    ForgetAdapter,
    ReadAdapter,
    ReleaseMemory,
    ReplaceWeights,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from jaxserve.hosts import BroadcastRunner, HostsError, Replay
from jaxserve.hosts.fingerprint import adapter_fingerprint, fingerprint
from jaxserve.hosts.protocol import Forward, numbered, read_numbered
from jaxserve.runner import EmbeddedTokens, LogitLines, PageUpdates, RowState, ScoreQuery, StepInput, StepOutput, launch
from jaxserve.types import ForwardMode, SamplingParams


class Recorder(FakeRunner):
    """Remembers what its steps gave, and commands; `refuses` those that fail here."""

    def __init__(self, refuses: tuple[type[Any], ...] = (), **spec: Any) -> None:
        super().__init__(fake_spec(**spec))
        self.most_in_flight += 1  # where a host replays, one is for the way
        self.outputs: list[StepOutput] = []
        self.carried_out: list[Command] = []
        self.read: list[np.ndarray] = []
        self.refuses = refuses

    def fetch(self, handle: Any) -> StepOutput:
        self.outputs.append(super().fetch(handle))
        return self.outputs[-1]

    def read_logits(self, handle: Any, lines: np.ndarray) -> np.ndarray:
        self.read.append(super().read_logits(handle, lines))
        return self.read[-1]

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, self.refuses):
            raise CommandError("the disk is full.")
        if isinstance(command, StartProfile):
            Path(command.folder).mkdir(exist_ok=True)
        super()._carry_out(command)
        self.carried_out.append(command)


class Together:
    """Host 0's runner and the others', which replay in threads."""

    def __init__(self, hosts: Hosts, *others: Recorder, **spec: Any) -> None:
        self.first, self.others = Recorder(**spec), others
        self.leader, followers = hosts.all_join(1 + len(others))
        self.runner = BroadcastRunner(self.first, self.leader, model_path="first", load_format="auto")
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self.followers = followers
        for rank, (follower, runner) in enumerate(zip(followers, others, strict=True), start=1):
            replay = Replay(runner, follower, rank, model_path="first", load_format="auto")
            self.threads.append(threading.Thread(target=self._run, args=(replay,), daemon=True))
            self.threads[-1].start()

    def _run(self, replay: Replay) -> None:
        try:
            replay.run()
        except Exception as error:
            self.errors.append(error)

    def close(self) -> None:
        for follower in self.followers:
            follower._closing.set()
        for thread in self.threads:
            thread.join()
        for runner in (self.first, *self.others):
            runner.close()


def same(left: Any, right: Any) -> bool:
    """Of dataclasses with arrays in them."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_steps_of_a_crowd_are_the_same_everywhere(hosts: Hosts) -> None:
    spec: dict[str, Any] = {"num_draft_tokens": 3, "page_size": 4}
    together = Together(hosts, Recorder(**spec), Recorder(**spec), **spec)
    harness = Harness({"chunked_prefill_size": 16, "enable_mixed_chunk": True}, runner=together.runner)
    rng = np.random.default_rng(0)
    for index in range(24):
        prompt = rng.integers(1, 50, rng.integers(1, 60)).tolist()
        harness.submit(prompt, 12, rid=str(index), return_logprob=index % 3 == 0, logprob_start_len=0 if index % 3 == 0 else -1)
    harness.run()
    assert len(together.first.outputs) > 20
    for other in together.others:
        _wait_until(lambda other=other: len(other.outputs) == len(together.first.outputs))
        assert same(together.first.outputs, other.outputs)
    assert not together.errors
    together.close()


def _wait_until(holds: Any) -> None:
    deadline = threading.Event()
    for _ in range(200):
        if holds():
            return
        deadline.wait(0.05)
    raise AssertionError("it did not come")


def step(**changes: Any) -> StepInput:
    """With everything that one can have."""
    ints = np.arange(3, dtype=np.int32)
    params = SamplingParams(temperature=0.5, stop=["x"])
    whole = StepInput(
        mode=ForwardMode.EXTEND,
        rows=ints[:2],
        seq_lens=np.array([3, 1], np.int32),
        extend_lens=np.array([3, 1], np.int32),
        num_decode_rows=0,
        input_ids=np.array([5, -1, 7, 9], np.int32),
        sample=np.array([True, False]),
        page_updates=PageUpdates.of(ints[:2], np.zeros(2, np.int32), np.array([4, 5], np.int32)),
        new_rows=[RowState(row, params, 7, len(ids), ints, ids[:0], ids) for row, ids in enumerate((ints + 5, ints[:1] + 9))],
        needs_sampling=True,
        needs_adjusting=False,
        needs_logprobs=True,
        needs_top_logprobs=False,
        needs_masks=True,
        score_query=ScoreQuery(ints, ints + 1, ints[:, None], needs_top=True),
        hidden_slots=ints,
        expert_slots=ints,
        embeds=[EmbeddedTokens(1, np.ones((1, 4), np.float32))],
    )
    return dataclasses.replace(whole, **changes)


def test_a_step_arrives_as_it_was_sent() -> None:
    for sent in (
        step(),
        step(score_query=None, hidden_slots=None, expert_slots=None, embeds=(), new_rows=[], rows=np.zeros(0, np.int32)),
    ):
        message = read_numbered(numbered(7, Forward(step=sent)), 7)
        assert isinstance(message, Forward)
        assert same(dataclasses.replace(sent, embeds=list(sent.embeds)), message.step)


def test_what_was_lost_on_the_way_is_noticed() -> None:
    with pytest.raises(HostsError, match="Message 8 of host 0 came where 7 was to come: some were lost"):
        read_numbered(numbered(8, Forward(step=step())), 7)


def test_logits_that_the_host_changes(hosts: Hosts) -> None:
    together = Together(hosts, Recorder(moves_logits=True, page_size=4), moves_logits=True, page_size=4)
    runner = together.runner
    ids, both = np.array([5, 6, 7, 9], np.int32), np.array([True, True])
    given = step(score_query=None, hidden_slots=None, expert_slots=None, embeds=(), input_ids=ids, sample=both)
    handle = runner.forward(given)
    lines = np.array([0], np.int32)
    logits = np.array(runner.read_logits(handle, lines))
    logits[:] = -9
    logits[0, 33] = 9
    runner.sample(handle, None, LogitLines(lines, logits))
    assert runner.fetch(handle).token_ids[0, 0] == 33
    (other,) = together.others
    _wait_until(lambda: other.outputs)
    assert same(other.outputs, together.first.outputs) and same(other.read, together.first.read)
    together.close()


def test_commands_are_carried_out_everywhere(hosts: Hosts, tmp_path: Path) -> None:
    together = Together(hosts, Recorder(), Recorder())
    commands = [
        CheckWeights("second", "auto"),
        ReplaceWeights("second", "auto"),
        ReleaseMemory(("kv_cache", "weights")),
        ResumeMemory(("kv_cache", "weights")),
        StartProfile(str(tmp_path)),
        StopProfile(str(tmp_path / "memory")),
    ]
    for command in commands:
        assert together.runner.execute(command).result(10) is None
    assert together.first.carried_out == commands
    for rank, other in enumerate(together.others, start=1):
        assert other.carried_out[:4] == commands[:4]
        assert other.carried_out[4] == StartProfile(str(tmp_path / f"host-{rank}"))
        assert other.carried_out[5] == StopProfile(str(tmp_path / f"host-{rank}-memory"))
    assert together.runner.internal_state()["hosts"] == ["machine-0", "machine-1", "machine-2"]
    together.close()


def test_what_all_refuse_is_said_once(hosts: Hosts) -> None:
    together = Together(hosts, Recorder())
    with pytest.raises(CommandError) as refusal:
        together.runner.execute(ReplaceWeights("bad", "auto")).result(10)
    assert not str(refusal.value).startswith("Host")
    together.close()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_one_host_cannot_do_is_taken_back_on_the_others(hosts: Hosts, broken: int) -> None:
    together = Together(hosts, Recorder(), Recorder())
    runners = (together.first, *together.others)
    runners[broken].refuses = (ReplaceWeights,)
    with pytest.raises(CommandError) as refusal:
        together.runner.execute(ReplaceWeights("second", "auto")).result(10)
    assert str(refusal.value) == ("" if broken == 0 else f"Host {broken}: ") + "the disk is full."
    for index, runner in enumerate(runners):
        expected = [ReplaceWeights("second", "auto"), ReplaceWeights("first", "auto")]
        assert runner.carried_out == ([] if index == broken else expected)
    runners[broken].refuses = ()
    assert together.runner.execute(ReplaceWeights("third", "auto")).result(10) is None
    assert not hosts.lost
    together.close()


def test_a_crowd_with_adapters_is_the_same_everywhere(hosts: Hosts) -> None:
    spec: dict[str, Any] = {"num_adapter_slots": 2}
    together = Together(hosts, Recorder(**spec), **spec)
    (other,) = together.others
    harness = Harness({"enable_lora": True, "max_loras_per_batch": 2, "max_loaded_loras": 2}, runner=together.runner)
    harness.scheduler.adapters.load_initial(["a=/a", "b=/b", "c=/c"])
    for index in range(12):
        harness.submit([5, 6, 7, index], 6, rid=str(index), lora=(None, "a", "b", "c")[index % 4])
    _wait_until(lambda: harness.turn(50) or harness.scheduler.is_idle)
    _wait_until(lambda: len(other.outputs) == len(together.first.outputs))
    assert same(together.first.outputs, other.outputs) and not together.errors
    assert together.first.adapters.num_loads == other.adapters.num_loads > 2
    _wait_until(lambda: together.first.adapters.in_memory == other.adapters.in_memory)
    together.close()


def test_an_adapter_that_one_host_cannot_read_is_forgotten_by_the_others(hosts: Hosts, tmp_path: Path) -> None:
    """Whatever else was done meanwhile."""
    together = Together(hosts, Recorder(), Recorder())
    runners = (together.first, *together.others)
    runners[2].adapters.broken.add("/a")
    for runner in runners:
        runner.adapters.may_read.clear()
    reading = together.runner.execute(ReadAdapter(0, "/a"))
    profile = together.runner.execute(StartProfile(str(tmp_path)))
    for runner in runners:
        runner.adapters.may_read.set()
    with pytest.raises(CommandError, match=r"Host 2: /a holds no adapter\."):
        reading.result(10)
    assert profile.result(10) is None and together.first.carried_out == [StartProfile(str(tmp_path))], "that one stands"
    assert not any(runner.adapters.in_memory for runner in runners)
    assert together.runner.execute(ReadAdapter(1, "/b")).result(10) is None
    assert together.runner.execute(ForgetAdapter(1)).result(10) is None
    assert not any(runner.adapters.in_memory for runner in runners) and not hosts.lost
    together.close()


def test_adapters_that_host_0_sees_otherwise_are_refused(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Together(hosts, Recorder())
    monkeypatch.setattr("jaxserve.hosts.protocol.weights_of", lambda command: "what host 0 sees")
    with pytest.raises(CommandError, match=r"Host 1: its files there are not those of host 0\."):
        together.runner.execute(ReadAdapter(0, "/a")).result(10)
    assert not together.first.adapters.in_memory and not together.others[0].adapters.in_memory
    together.close()


def test_fingerprints_of_adapters(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    seen = {adapter_fingerprint(str(tmp_path))}
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_text("changed")
        seen.add(adapter_fingerprint(str(tmp_path)))
    (tmp_path / "README.md").write_text("of no account")
    assert len(seen) == 3 and adapter_fingerprint(str(tmp_path)) in seen


def test_weights_that_host_0_sees_otherwise_are_refused(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as through the cache of a network file system."""
    together = Together(hosts, Recorder())
    assert together.runner.execute(ReleaseMemory(("kv_cache",))).result(10) is None
    monkeypatch.setattr("jaxserve.hosts.protocol.weights_of", lambda command: "what host 0 sees")
    with pytest.raises(CommandError, match=r"Host 1: its files there are not those of host 0\."):
        together.runner.execute(ReplaceWeights(str(tmp_path), "auto")).result(10)
    assert together.others[0].carried_out == [ReleaseMemory(("kv_cache",))], "and what was before is not taken back"
    together.close()


def test_fingerprints_of_folders(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder, copy = tmp_path / "a", tmp_path / "b"
    (folder / "orbax" / "d").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "orbax/d/x", "README.md"):
        (folder / name).write_bytes(rng.bytes(200_000))
    shutil.copytree(folder, copy)
    (copy / "README.md").unlink()
    assert fingerprint(str(folder), "auto") == fingerprint(str(copy), "auto") != fingerprint("/nowhere", "auto")
    for name in ("model.safetensors", "orbax/d/x"):
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(rng.bytes(200_000))
        assert fingerprint(str(folder), "auto") != fingerprint(str(copy), "auto")
        assert fingerprint(str(folder), "dummy") == fingerprint(str(copy), "dummy")
        (copy / name).write_bytes(before)
    (copy / "config.json").write_bytes(b"{}")
    assert fingerprint(str(folder), "dummy") != fingerprint(str(copy), "dummy")


def test_weights_that_were_released_are_so_again(hosts: Hosts) -> None:
    together = Together(hosts, Recorder())
    assert together.runner.execute(ReleaseMemory(("weights",))).result(10) is None
    together.others[0].refuses = (ReplaceWeights,)
    with pytest.raises(CommandError, match=r"Host 1: the disk is full\."):
        together.runner.execute(ReplaceWeights("second", "auto")).result(10)
    assert together.first.carried_out[1:] == [
        ReplaceWeights("second", "auto"),
        ReplaceWeights("first", "auto"),
        ReleaseMemory(("weights",)),
    ]
    together.others[0].refuses = ()
    assert together.runner.execute(ResumeMemory(("weights",))).result(10) is None
    together.close()


def test_hosts_that_cannot_go_back_end(hosts: Hosts) -> None:
    together = Together(hosts, Recorder(), Recorder())
    together.others[0].refuses = (ReleaseMemory,)
    together.others[1].refuses = (ResumeMemory,)
    with pytest.raises(CommandError, match=r"Host 1: the disk is full\."):
        together.runner.execute(ReleaseMemory(("weights",))).result(10)
    hosts.wait_for(lambda: hosts.lost and len(hosts.ended) == 2)
    assert hosts.lost[0] == "Hosts are not in the same state any more, and one cannot go back. Host 2: the disk is full."
    together.close()


def test_a_step_that_fails_here_ends_the_replay(hosts: Hosts) -> None:
    together = Together(hosts, Recorder())
    launch(
        together.runner,
        step(rows=np.array([0, 0], np.int32), score_query=None, hidden_slots=None, expert_slots=None, embeds=()),
    )
    _wait_until(lambda: together.errors)
    together.close()
