"""Options under the names that people know."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.config import ALIASES, ServerArgs


def test_every_alias_is_of_a_field_and_is_none_itself() -> None:
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    assert set(ALIASES.values()) <= fields
    assert not fields & set(ALIASES)


@pytest.mark.parametrize("name", ["tp_size", "tp", "tensor_parallel_size"])
def test_an_option_may_be_given_under_any_of_its_names(name: str) -> None:
    assert ServerArgs.of({"model": "m", name: 2}) == ServerArgs(model_path="m", tp_size=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_paralel_size": 2}, r"^There is no option tensor_paralel_size\. Did you mean tensor_parallel_size\?$"),
        ({"max_runing_requests": 2}, r"Did you mean max_running_requests\?$"),
        ({"zzzzzz": 2}, r"^There is no option zzzzzz\.$"),
        ({"tp_size": 2, "tp": 2}, r"^tp_size is given twice, also as tp\.$"),
        ({"tp": 0}, r"--tp-size must be at least 1; got 0"),
    ],
)
def test_what_is_no_option_is_a_sentence(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerArgs.of(options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"constrained_json_whitespace_pattern": "("},
            r"^--constrained-json-whitespace-pattern must be a regular expression: ",
        ),
        (
            {"constrained_json_whitespace_pattern": " ?", "constrained_json_disable_any_whitespace": True},
            r"^--constrained-json-whitespace-pattern has no effect with --constrained-json-disable-any-whitespace\.$",
        ),
    ],
)
def test_options_that_make_no_sense_are_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerArgs(**options)


@pytest.mark.parametrize("address", ["node-0:5000", "10.0.0.1:5000", "[fd00::1]:5000", "a.b.svc.cluster.local:1"])
def test_hosts_that_fit_together(address: str) -> None:
    args = ServerArgs(model_path="m", nnodes=2, node_rank=1, tp_size=16, dist_init_addr=address)
    assert args.local_tp_size == 8


HOSTS: dict[str, Any] = {"nnodes": 2, "tp_size": 4, "dist_init_addr": "node-0:5000"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"node_rank": 2}, r"--node-rank must be in \[0, 1\] with --nnodes 2; got 2\."),
        ({"nnodes": 1, "node_rank": 1}, r"--node-rank must be in \[0, 0\] with --nnodes 1; got 1\."),
        ({"nnodes": 0}, r"--nnodes must be at least 1; got 0\."),
        ({"dist_init_addr": None}, r"--nnodes 2 needs --dist-init-addr"),
        ({"tp_size": 3}, r"--tp-size 3 cannot be divided among 2 hosts"),
        ({"dp_size": 2}, r"--nnodes 2 with --dp-size 2: run a server for each replica"),
        ({"restart_workers": True}, r"--restart-workers with --nnodes 2: a lost host ends all"),
        ({"warmup": "early"}, r"--warmup early with --nnodes 2"),
        ({"dist_timeout": 0}, r"--dist-timeout must be above 0; got 0\."),
        ({"dist_init_addr": "node-0"}, r"--dist-init-addr must be host:port, with a port in \[1, 65533\]; got 'node-0'\."),
        ({"dist_init_addr": "node-0:65534"}, r"--dist-init-addr must be host:port"),
        ({"dist_init_addr": "fd00::1:5000"}, r"--dist-init-addr must be host:port"),
        ({"dist_init_addr": "tcp://node-0:5000"}, r"--dist-init-addr must be host:port"),
    ],
)
def test_hosts_that_do_not(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        ServerArgs(model_path="m", **(HOSTS | options))
