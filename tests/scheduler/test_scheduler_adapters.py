"""LoRA adapters, with the fake runner: every request gets its own adapter's tokens, and everybody's turn comes."""

from __future__ import annotations

import random
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.commands import ForgetAdapter, ReadAdapter
from jaxserve.namespaces import adapter_of
from jaxserve.scheduler.adapters import Adapters
from jaxserve.scheduler.control.declaration import ControlError
from jaxserve.scheduler.control.load_lora_adapter import LoadLoRAAdapterReqInput, LoRAUpdateOutput, check
from jaxserve.scheduler.control.unload_lora_adapter import UnloadLoRAAdapterReqInput
from jaxserve.scheduler.control.unload_lora_adapter import check as check_unload

both_loops = pytest.mark.parametrize("overlap", [True, False])


@pytest.fixture
def make(make_harness: Callable[..., Harness]) -> Callable[..., Harness]:
    def make(names: str = "", args: dict[str, Any] | None = None, **spec: Any) -> Harness:
        """With an adapter for each letter of `names`, loaded from a folder of that name."""
        harness = make_harness({"enable_lora": True, **(args or {})}, **({"num_adapter_slots": 2} | spec))
        harness.scheduler.adapters.load_initial([f"{name}=/{name}" for name in names])
        return harness

    return make


def until(harness: Harness, holds: Callable[[], Any]) -> None:
    """Readings take real time, in a thread."""
    give_up_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < give_up_s, harness.scheduler.internal_state()["lora"]
        harness.turn()
        time.sleep(0.0005)


def until_idle(harness: Harness) -> None:
    until(harness, lambda: harness.scheduler.is_idle and not harness.transport.inbox)
    harness.run()


def until_replied(harness: Harness, count: int = 1) -> Any:
    until(harness, lambda: len(harness.control_replies()) >= count)
    return harness.control_replies()[-1]


def load(harness: Harness, name: str, path: str | None = None, pinned: bool = False) -> Any:
    harness.control(LoadLoRAAdapterReqInput(lora_name=name, lora_path=path or f"/{name}", pinned=pinned))
    return until_replied(harness, len(harness.control_replies()) + 1)


def has_ended(harness: Harness, rid: str) -> bool:
    answer = harness.transport.answers.get(rid)
    return answer is not None and answer.finish is not None


def lora(harness: Harness) -> dict[str, int]:
    numbers: dict[str, int] = harness.scheduler.internal_state()["lora"]
    return numbers


@both_loops
def test_rows_of_one_step_run_with_different_adapters(make: Callable[..., Harness], overlap: bool) -> None:
    harness = make("ab", overlap=overlap)
    for name in ("a", "b", None, "a"):
        harness.submit(prompt_of(9), 6, lora=name, ignore_eos=True)
    harness.run()
    harness.assert_as_expected()
    assert len({tuple(harness.answer(rid).token_ids) for rid in ("r0", "r1", "r2")}) == 3
    assert harness.steps[0].num_rows == 4 and len(harness.steps[0].adapter_loads) == 2
    assert not any(step.adapter_loads for step in harness.steps[1:])
    assert lora(harness) == {
        "num_loaded": 2, "num_pinned": 0, "num_draining": 0, "num_in_memory": 2, "num_on_device": 2, "num_held_reqs": 0,
        "num_reads": 2, "num_evictions": 0,
    }  # fmt: skip


def test_adapters_come_and_go_while_steps_run(make: Callable[..., Harness]) -> None:
    harness = make("a")
    harness.runner.adapters.may_read.clear()
    first = harness.submit(prompt_of(5), 200, lora="a", ignore_eos=True)
    harness.control(LoadLoRAAdapterReqInput(lora_name="b", lora_path="/b"))
    harness.turn(20)
    assert len(harness.steps) > 15 and not harness.control_replies()
    harness.runner.adapters.may_read.set()
    assert until_replied(harness) == LoRAUpdateOutput(True, "", {"a": "/a", "b": "/b"})
    second = harness.submit(prompt_of(5), 30, lora="b", ignore_eos=True)
    harness.turn(3)
    harness.control(UnloadLoRAAdapterReqInput(lora_name="b"))
    harness.turn()
    late = harness.submit(prompt_of(5), 3, lora="b")
    harness.turn(3)
    assert harness.answer(late).finish.message == "The LoRA adapter 'b' is not loaded; loaded are: 'a'."
    assert len(harness.control_replies()) == 1, "who runs with it goes on"
    assert until_replied(harness, 2) == LoRAUpdateOutput(True, "", {"a": "/a"})
    assert has_ended(harness, second) and not has_ended(harness, first)
    assert lora(harness)["num_on_device"] == lora(harness)["num_in_memory"] == 1
    assert isinstance(harness.runner.commands[-1], ForgetAdapter)
    harness.run()
    harness.assert_as_expected(first, second)


def test_a_waiting_request_drains_too(make: Callable[..., Harness]) -> None:
    harness = make("ab", max_rows=1)
    first = harness.submit(prompt_of(5), 20, lora="a", ignore_eos=True)
    second = harness.submit(prompt_of(6), 5, lora="b", ignore_eos=True)
    harness.turn(2)
    harness.control(UnloadLoRAAdapterReqInput(lora_name="b"))
    until_replied(harness)
    assert has_ended(harness, second)
    harness.assert_as_expected(first, second)


def test_what_cannot_be_loaded_or_unloaded_is_said(make: Callable[..., Harness]) -> None:
    harness = make("a")
    assert load(harness, "c", "bad") == "bad holds no adapter."
    assert load(harness, "a", "/other") == "The LoRA adapter 'a' is loaded already, from /a; unload it first."
    assert load(harness, "p", pinned=True).success
    assert load(harness, "q", pinned=True) == (
        "1 LoRA adapters are pinned; at most 1 may be, so that others find one of the 2 slots (--max-loras-per-batch)."
    )
    for name, sentence in {
        "p": "The LoRA adapter 'p' is pinned, and stays loaded as long as the server runs.",
        "x": "The LoRA adapter 'x' is not loaded.",
    }.items():
        harness.control(UnloadLoRAAdapterReqInput(lora_name=name))
        assert until_replied(harness, len(harness.control_replies()) + 1) == sentence
    assert harness.scheduler.adapters.loaded == {"a": "/a", "p": "/p"}
    rid = harness.submit(prompt_of(3), lora="c")
    harness.run()
    finish = harness.answer(rid).finish
    assert (finish.status_code, finish.message) == (400, "The LoRA adapter 'c' is not loaded; loaded are: 'a', 'p'.")
    with pytest.raises(ValueError, match=r"The LoRA adapter 'bad' of --lora-paths cannot be loaded: bad holds no adapter\."):
        harness.scheduler.adapters.load_initial(["bad"])


def test_the_only_slot_cannot_be_pinned(make: Callable[..., Harness]) -> None:
    assert "at most 0 may be" in load(make(num_adapter_slots=1), "a", pinned=True)


def test_one_name_is_loaded_once_at_a_time(make: Callable[..., Harness]) -> None:
    adapters: Adapters = make().scheduler.adapters
    loading = adapters.load("a", "/a")
    next(loading)
    with pytest.raises(ControlError, match=r"The LoRA adapter 'a' is being loaded\."):
        next(adapters.load("a", "/a"))


def test_without_slots_there_are_no_adapters(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    assert load(harness, "a") == "LoRA adapters need a server that runs with --enable-lora."
    rid = harness.submit(prompt_of(3), lora="a")
    harness.run()
    assert harness.answer(rid).finish.message == "LoRA adapters need a server that runs with --enable-lora."
    assert "lora" not in harness.scheduler.internal_state()


def test_the_main_process_refuses_what_it_can() -> None:
    manager = types.SimpleNamespace(lora_adapters={"a": "/a"})
    for name in ("", " a", "a ", "a\nb", "a\tb"):
        with pytest.raises(ControlError, match="lora_name must be printable"):
            check(manager, LoadLoRAAdapterReqInput(lora_name=name, lora_path="/x"))
    with pytest.raises(ControlError, match=r"'a' is loaded already, from /a; unload it first\."):
        check(manager, LoadLoRAAdapterReqInput(lora_name="a", lora_path="/a"))
    with pytest.raises(ControlError, match=r"The LoRA adapter 'b' is not loaded\."):
        check_unload(manager, UnloadLoRAAdapterReqInput(lora_name="b"))
    for name in ("b/c d", "fr:v2", "a,b"):
        assert check(manager, LoadLoRAAdapterReqInput(lora_name=name, lora_path="/x")).success


def one_after_the_other(harness: Harness, names: str) -> list[tuple[str, int]]:
    """The adapters that went into slots, and which."""
    known = {}
    for name in names:
        harness.submit(prompt_of(4, len(harness.sent)), 2, lora=name, ignore_eos=True)
        harness.run()
    known = {command.adapter_id: command.path[1:] for command in harness.runner.commands if isinstance(command, ReadAdapter)}
    return [(known[one.adapter_id], one.slot) for step in harness.steps for one in step.adapter_loads]


@pytest.mark.parametrize(("policy", "last"), [("lru", [("c", 1), ("b", 0)]), ("fifo", [("c", 0), ("a", 1)])])
def test_which_adapter_leaves(make: Callable[..., Harness], policy: str, last: list[tuple[str, int]]) -> None:
    harness = make("abc", {"lora_eviction_policy": policy})
    order = one_after_the_other(harness, "abac" + ("b" if policy == "lru" else "a"))
    assert order == [("a", 0), ("b", 1), *last]
    harness.assert_as_expected()


def test_a_pinned_adapter_stays(make: Callable[..., Harness]) -> None:
    harness = make("ab", {"max_loaded_loras": 2, "max_loras_per_batch": 2})
    assert load(harness, "p", pinned=True).success
    assert one_after_the_other(harness, "pababp")[:1] == [("p", 0)]
    assert {load.slot for step in harness.steps[1:] for load in step.adapter_loads} == {1}
    assert sum(isinstance(one, ReadAdapter) and one.path == "/p" for one in harness.runner.commands) == 1
    harness.assert_as_expected()


@both_loops
def test_who_waits_for_an_adapter_does_not_keep_others(make: Callable[..., Harness], overlap: bool) -> None:
    """One waits for a reading, one for a slot."""
    harness = make("abc", {"max_loaded_loras": 2, "max_loras_per_batch": 2}, overlap=overlap, num_adapter_slots=1)
    harness.runner.adapters.may_read.clear()
    running = harness.submit(prompt_of(5), 40, lora="b", ignore_eos=True)
    harness.turn(2)
    slotless = harness.submit(prompt_of(6), 5, lora="c", ignore_eos=True)
    unread = harness.submit(prompt_of(5), 5, lora="a", ignore_eos=True)  # it was forgotten for c
    plain = harness.submit(prompt_of(7), 5, ignore_eos=True)
    until(harness, lambda: has_ended(harness, plain))
    assert not {unread, running, slotless} & {rid for rid in harness.sent if has_ended(harness, rid)}
    harness.runner.adapters.may_read.set()
    until_idle(harness)
    harness.assert_as_expected()


def test_the_loop_wakes_when_an_adapter_is_read(make: Callable[..., Harness]) -> None:
    harness = make("ab", {"max_loaded_loras": 1, "max_loras_per_batch": 1}, num_adapter_slots=1)
    harness.runner.adapters.may_read.clear()
    rid = harness.submit(prompt_of(5), 5, lora="a")
    harness.turn(5)
    wait_s = harness.scheduler.wait_s
    assert wait_s is not None and 0 < wait_s < 0.05
    assert not has_ended(harness, rid), "it is not taken for one that can never run"
    harness.runner.adapters.may_read.set()
    until_idle(harness)
    harness.assert_as_expected()


@pytest.mark.parametrize("limit", ["slots", "memory"])
@both_loops
def test_nobody_starves(make: Callable[..., Harness], limit: str, overlap: bool) -> None:
    """Others with the adapters that are there come all the time."""
    args = {"max_loaded_loras": 2, "max_loras_per_batch": 2} if limit == "memory" else {}
    harness = make("cab", args, overlap=overlap, num_adapter_slots=2)
    crowd: list[str] = []

    def come() -> None:
        for name in "ab":
            crowd.append(harness.submit(prompt_of(4, len(harness.sent)), 12, lora=name, ignore_eos=True))

    come()
    harness.turn(3)
    late = harness.submit(prompt_of(5), 4, lora="c", ignore_eos=True)
    for _ in range(100):
        come()
        harness.turn(3)
        time.sleep(0.0005)
        if has_ended(harness, late):
            break
    assert has_ended(harness, late) and not has_ended(harness, crowd[-1])
    until_idle(harness)
    harness.assert_as_expected()


def test_a_claim_ends_with_its_request(make: Callable[..., Harness]) -> None:
    harness = make("ab", num_adapter_slots=1)
    running = harness.submit(prompt_of(5), 30, lora="a", ignore_eos=True)
    harness.turn(2)
    claimant = harness.submit(prompt_of(5), 5, lora="b")
    harness.turn(2)
    held = harness.submit(prompt_of(6), 5, lora="a", ignore_eos=True)
    harness.turn(4)
    assert held not in harness.transport.answers
    harness.abort(claimant, exact=True)
    until(harness, lambda: has_ended(harness, held))
    assert not has_ended(harness, running)
    harness.run()
    harness.assert_as_expected(running, held)


def test_the_hosts_memory_holds_so_many(make: Callable[..., Harness]) -> None:
    harness = make("abcd", {"max_loaded_loras": 2, "max_loras_per_batch": 2})
    assert len(harness.runner.adapters.in_memory) == 2
    for name in "abcdabcdda":
        harness.submit(prompt_of(6, len(harness.sent)), 4, lora=name, ignore_eos=True)
        harness.turn()
    until_idle(harness)
    harness.assert_as_expected()
    assert harness.runner.adapters.most_in_memory == 2
    assert harness.scheduler.adapters.loaded == {name: f"/{name}" for name in "abcd"}


def test_an_adapter_that_cannot_be_read_again(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make("ab", {"max_loaded_loras": 1, "max_loras_per_batch": 1}, num_adapter_slots=1)
    harness.runner.adapters.broken.add("/a")
    lost = [harness.submit(prompt_of(5), 5, lora="a") for _ in range(2)]
    fine = harness.submit(prompt_of(5), 5, lora="b", ignore_eos=True)
    until_idle(harness)
    for rid in lost:
        finish = harness.answer(rid).finish
        assert (finish.type, finish.status_code) == ("abort", 400)
        assert finish.message == "The LoRA adapter 'a' cannot be read again: /a holds no adapter."
    harness.runner.adapters.broken.clear()
    again = harness.submit(prompt_of(5), 5, lora="a", ignore_eos=True)
    until_idle(harness)
    harness.assert_as_expected(fine, again)
    (tmp_path / "x").write_text("old")
    harness.scheduler.adapters.load_initial([f"x={tmp_path}", "y=/y"])
    (tmp_path / "x").write_text("changed")
    rid = harness.submit(prompt_of(5), 5, lora="x")
    until_idle(harness)
    assert f"the files in {tmp_path} are not those that were loaded; load it again." in harness.answer(rid).finish.message


def test_what_one_adapter_computed_no_other_reads(make: Callable[..., Harness]) -> None:
    harness = make("ab")

    def cached(name: str | None, **fields: Any) -> int:
        rid = harness.submit(prompt_of(20), 3, lora=name, ignore_eos=True, **fields)
        until_idle(harness)
        harness.assert_as_expected(rid)
        return harness.answer(rid).cached_tokens

    assert [cached(name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [cached(name) for name in (None, "a", "b")] == [19, 19, 19]
    assert cached("a", extra_key="tenant") == 0
    assert load(harness, "a").success  # from the same folder: a new version
    assert [cached("a"), cached("a"), cached("b")] == [0, 19, 19]
    assert lora(harness) == lora(harness) | {"num_loaded": 2, "num_draining": 0, "num_in_memory": 2}


def test_events_name_the_adapter(make: Callable[..., Harness]) -> None:
    assert adapter_of('["a", null]') is None
    harness = make("ab", {"kv_events_config": '{"publisher": "zmq"}'}, page_size=4)
    for name in (None, "a", "b"):
        harness.submit(prompt_of(8), 2, lora=name)
    harness.run()
    ids = {event.lora_id for events in harness.events for event in events if hasattr(event, "lora_id")}
    assert ids == {None, 0, 1}


def test_retracted_requests_come_back_with_their_adapters(make: Callable[..., Harness]) -> None:
    harness = make("abc", {"schedule_conservativeness": 0.0, "disable_radix_cache": True}, num_pages=70)
    for index in range(9):
        harness.submit(prompt_of(8, index), 30, lora="abc"[index % 3])
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_retractions"] > 0


def settle(harness: Harness, names: list[str]) -> None:
    """All is answered; then unloads everything, and nothing is left."""
    until_idle(harness)
    for name in names:
        harness.control(UnloadLoRAAdapterReqInput(lora_name=name))
        until_replied(harness, len(harness.control_replies()) + 1)
    until_idle(harness)
    numbers = lora(harness)
    assert not any(numbers[key] for key in numbers if key not in ("num_reads", "num_evictions")), numbers
    assert not harness.runner.adapters.in_memory


@pytest.mark.parametrize("seed", range(12))
def test_random_loads(make: Callable[..., Harness], seed: int) -> None:
    """Adapters come and go under requests that need them, in every mode."""
    rng = random.Random(seed)
    num_slots, page_size = rng.choice([1, 2, 3]), rng.choice([1, 4])
    most = rng.choice([None, num_slots, num_slots + 1])
    args = {
        "max_loras_per_batch": num_slots,
        "max_loaded_loras": most,
        "lora_eviction_policy": rng.choice(["lru", "fifo"]),
        "schedule_policy": rng.choice(["fcfs", "lpm", "random", "priority"]),
        "chunked_prefill_size": rng.choice([16, 64]),
        "enable_mixed_chunk": rng.random() < 0.5,
        "schedule_conservativeness": rng.choice([0.0, 1.0]),
    }
    harness = make(
        "abc", args, overlap=rng.random() < 0.7, num_adapter_slots=num_slots, page_size=page_size,
        num_pages=rng.choice([96, 400]) // page_size, max_rows=rng.choice([2, 8]), num_draft_tokens=rng.choice([1, 3]),
    )  # fmt: skip
    harness.runner.adapters.delay_s = rng.choice([0.0, 0.002])
    loaded = set("abc")
    aborted = set()
    bases = [prompt_of(30, n) for n in range(2)]
    for _ in range(60):
        for _ in range(rng.choice([0, 1, 3])):
            name = rng.choice([None, *sorted(loaded), *sorted(loaded)])
            prompt = [*rng.choice(bases)[: rng.randint(1, 30)], rng.randint(1, 100)]
            priority, ignore_eos = rng.choice([None, 0, 5]), rng.random() < 0.5
            harness.submit(prompt, rng.choice([1, 5, 30]), lora=name, priority=priority, ignore_eos=ignore_eos)
        harness.turn(rng.randint(0, 3))
        if rng.random() < 0.1:
            name = rng.choice("abcde")
            if name in loaded:
                loaded.remove(name)
                harness.control(UnloadLoRAAdapterReqInput(lora_name=name))
                harness.turn()
            else:
                harness.control(LoadLoRAAdapterReqInput(lora_name=name, lora_path=f"/{name}"))
                until(harness, lambda name=name: name in harness.scheduler.adapters.loaded)
                loaded.add(name)
        if harness.sent and rng.random() < 0.1:
            aborted.add(rid := rng.choice(list(harness.sent)))
            harness.abort(rid, exact=True)
    settle(harness, sorted(loaded))
    harness.assert_as_expected(*(rid for rid in harness.sent if rid not in aborted))
    assert set(harness.transport.answers) == set(harness.sent)
    if most is not None:
        assert harness.runner.adapters.most_in_memory <= most


def test_commands_that_fail_for_other_reasons(make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make()

    def fail(self: Any, command: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("fake_adapters.FakeAdapters._carry_out", fail)
    with pytest.raises(ValueError, match="the disk is gone"):
        harness.scheduler.adapters.load_initial(["a=/a"])
