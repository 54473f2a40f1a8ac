"""Who is let in, what the others hear, and who is missed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from host_harness import SECRET, Hosts, hello, run_host

from jaxserve.hosts import Follower, HostsError, Leader
from jaxserve.hosts.protocol import Sample
from jaxserve.hosts.sockets import LARGEST_FROM_FOLLOWER, HostAddress


def heard(follower: Follower, timeout_s: float = 20.0) -> list[str]:
    """By a follower that joins in a thread of its own: waits for its end with the list."""
    said: list[str] = []

    def join() -> None:
        try:
            follower.join(timeout_s)
        except HostsError as error:
            said.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    thread.join(timeout_s + 5)
    return said


def joining(leader: Leader, timeout_s: float = 20.0) -> str:
    with pytest.raises(HostsError) as refusal:
        leader.gather(timeout_s, lambda reason: None)
    leader.end(str(refusal.value))
    return str(refusal.value)


def test_all_come_and_hear_when_all_is_done(hosts: Hosts) -> None:
    leader, _ = hosts.all_join(4)
    assert leader.names == ["machine-0", "machine-1", "machine-2", "machine-3"]
    leader.end("")
    hosts.leader = None
    hosts.wait_for(lambda: len(hosts.ended) == 3)
    assert set(hosts.ended.values()) == {""} and not hosts.lost


def test_host_0_may_come_last(hosts: Hosts) -> None:
    follower = hosts.follower(1)
    thread = threading.Thread(target=follower.join, args=(20.0,))
    thread.start()
    time.sleep(0.3)
    hosts.lead(2).gather(20.0, lambda reason: None)
    thread.join(5)
    assert not thread.is_alive()


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"software": "jaxserve 1 with JAX 3"}, "Host 1 (machine-1) runs jaxserve 1 with JAX 3, host 0 jaxserve 1 with JAX 2."),
    ({"options": {"tp_size": 8}}, "Host 1 (machine-1) was given --tp-size 8, host 0 4: all hosts need the same."),
    ({"options": {"tp_size": 4, "x": 1}}, "Host 1 (machine-1) was given --x 1, host 0 None: all hosts need the same."),
    ({"weights": "b"}, "Host 1 (machine-1) has another config.json or other weights in its --model-path than host 0."),
    ({"rank": 3}, "Host 3 (machine-1) has --node-rank 3; with --nnodes 3 the others have 1 to 2."),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_one_that_does_not_fit_ends_the_start_everywhere(hosts: Hosts, changes: dict[str, Any], sentence: str) -> None:
    leader, follower = hosts.lead(3), hosts.follower(1)
    follower._hello = hello(**({"rank": 1, "name": "machine-1"} | changes))
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.extend(heard(follower)))
    thread.start()
    assert joining(leader) == sentence
    thread.join()
    assert said == [sentence]
    hosts.leader = None


def test_a_rank_that_comes_twice(hosts: Hosts) -> None:
    leader = hosts.lead(3)
    said: dict[str, list[str]] = {}

    def join(name: str) -> None:
        said[name] = heard(hosts.follower(1, name=name))

    threads = [threading.Thread(target=join, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    sentence = joining(leader)
    for thread in threads:
        thread.join()
    assert sentence == "Two hosts have --node-rank 1: a and b."
    assert said == {"a": [sentence], "b": [sentence]}
    hosts.leader = None


def test_who_comes_to_hosts_that_run_is_sent_away_and_they_run_on(hosts: Hosts) -> None:
    hosts.all_join(2)
    assert heard(hosts.follower(1, name="late")) == ["Two hosts have --node-rank 1: machine-1 and late."]
    time.sleep(1.0)
    assert not hosts.lost and not hosts.ended


@pytest.mark.parametrize("secret", [b"", b"another secret, of as many bytes"])
def test_who_has_another_secret(hosts: Hosts, secret: bytes) -> None:
    leader = hosts.lead(2)
    sentence = f"Host 0 at {hosts.address} does not take this host: it has another secret."
    assert heard(hosts.follower(1, secret)) == [sentence]
    said = joining(leader, 0.5)
    assert said.startswith(f"Host 1 did not come to {hosts.address} within 0.5 s. ")
    assert said.endswith("connections came with another secret.")
    hosts.leader = None


def test_who_knows_nothing_of_secrets_gets_nothing(hosts: Hosts) -> None:
    hosts.all_join(2)
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(hosts.address.control)
        plain.send(b"hello")
        assert not plain.poll(500)
    assert not hosts.lost


def test_hosts_that_do_not_come(hosts: Hosts) -> None:
    leader = hosts.lead(4)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.extend(heard(hosts.follower(2))))
    thread.start()
    sentence = joining(leader, 1.5)
    thread.join()
    assert sentence == f"Hosts 1, 3 did not come to {hosts.address} within 1.5 s."
    assert said == [sentence]
    hosts.leader = None


def test_host_0_that_does_not_come(hosts: Hosts) -> None:
    assert heard(hosts.follower(1), 0.4) == [f"There was no answer from host 0 at {hosts.address} within 0.4 s."]


def test_last_words_are_heard_that_come_together_with_the_end_of_the_connection(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a poll has found may be older than what is there."""

    class Late(zmq.Poller):
        def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
            time.sleep(0.5)
            return []

    monkeypatch.setattr("jaxserve.hosts.follower.zmq.Poller", Late)
    leader, _ = hosts.all_join(2)
    leader.end("")
    hosts.leader = None
    hosts.wait_for(lambda: hosts.ended)
    assert hosts.ended == {1: ""}


@pytest.mark.parametrize("how", ["follower", "leader"])
def test_a_loss_is_known_everywhere_within_seconds(hosts: Hosts, how: str) -> None:
    leader, followers = hosts.all_join(3)
    started_s = time.monotonic()
    if how == "follower":
        followers[0].close()
        hosts.wait_for(lambda: hosts.lost and 2 in hosts.ended)
        sentence = "Host 1 (machine-1) was lost: its connection is gone."
        assert hosts.lost == [sentence] and hosts.ended[2] == sentence
    else:
        leader.close()
        hosts.leader = None
        hosts.wait_for(lambda: len(hosts.ended) == 2)
        assert set(hosts.ended.values()) == {f"Host 0 at {hosts.address} was lost: its connection is gone."}
    assert time.monotonic() - started_s < 5


@contextlib.contextmanager
def elsewhere(hosts: Hosts, rank: int, num_hosts: int) -> Iterator[int]:
    """The process id of a host that is not in this process."""
    process = multiprocessing.get_context("spawn").Process(target=run_host, args=(hosts.address, rank, num_hosts))
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()  # one that is stopped, too
        process.join(10)
        process.close()


def test_a_host_that_falls_silent_is_lost_as_well(hosts: Hosts) -> None:
    """As if it were switched off: nobody closes its connections."""
    with elsewhere(hosts, 1, 3) as pid:
        hosts.run(hosts.lead(3), hosts.follower(2))
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        time.sleep(1)
        assert not hosts.lost, "its connection is there"
        hosts.wait_for(lambda: hosts.lost and 2 in hosts.ended)
        assert time.monotonic() - stopped_s < 10
    assert hosts.lost == [hosts.ended[2]] == ["Host 1 (machine-1) was lost: its connection is gone."]


def test_a_host_0_that_falls_silent_is_lost_as_well(hosts: Hosts) -> None:
    with elsewhere(hosts, 0, 2) as pid:
        hosts.run(None, hosts.follower(1))
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        time.sleep(1)
        assert not hosts.ended, "its connection is there"
        hosts.wait_for(lambda: hosts.ended)
        assert time.monotonic() - stopped_s < 10
    assert hosts.ended == {1: f"Host 0 at {hosts.address} was lost: its connection is gone."}


def test_who_sends_more_than_a_frame_may_have_is_lost(hosts: Hosts) -> None:
    _, followers = hosts.all_join(3)
    followers[0].report(0, "x" * LARGEST_FROM_FOLLOWER)  # and the message around it
    hosts.wait_for(lambda: hosts.lost and len(hosts.ended) == 2)
    assert hosts.lost == [hosts.ended[2]] == ["Host 1 (machine-1) was lost: its connection is gone."]
    assert hosts.ended[1] == f"Host 0 at {hosts.address} was lost: its connection is gone."


def test_a_step_that_is_too_large_for_a_frame_ends_all(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.hosts.sockets.LARGEST_FROM_LEADER", 1 << 16)  # of 2 GiB
    leader, followers = hosts.all_join(2)
    leader.send(Sample())
    assert followers[0].receive(5.0) is not None
    leader.send(Sample(masks=np.zeros(1 << 16, np.uint8)))
    assert followers[0].receive(1.0) is None
    leader.send(Sample())
    hosts.wait_for(lambda: hosts.lost and hosts.ended)
    assert hosts.lost == [hosts.ended[1]] == ["Host 1 was lost: its connection for steps is gone."]


def test_last_words_are_passed_on_and_a_loss_explains_them(hosts: Hosts) -> None:
    """When a host is gone, the others' steps fail: theirs is not the fault."""
    _, followers = hosts.all_join(3)
    threading.Thread(target=followers[0].fail, args=("a collective failed",), daemon=True).start()
    time.sleep(0.3)
    followers[1].close()
    hosts.wait_for(lambda: hosts.lost)
    assert hosts.lost == ["Host 2 (machine-2) was lost: its connection is gone."]


def test_last_words(hosts: Hosts) -> None:
    _, followers = hosts.all_join(3)
    threading.Thread(target=followers[0].fail, args=("the disk is full.",), daemon=True).start()
    hosts.wait_for(lambda: len(hosts.ended) == 2 and hosts.lost)
    assert set(hosts.ended.values()) == {"Host 1 (machine-1) failed: the disk is full."} == set(hosts.lost)


def test_ports_that_are_in_use(hosts: Hosts) -> None:
    hosts.lead(2)
    with pytest.raises(HostsError, match=rf"Host 0 cannot listen on {hosts.address}: Address already in use\."):
        Leader(hosts.address, hello(0), 2, SECRET)
    with pytest.raises(HostsError, match=r"--dist-init-addr: the host 'no\.such\.host\.invalid' is not known"):
        Leader(HostAddress("no.such.host.invalid", 7000), hello(0), 2, SECRET)
