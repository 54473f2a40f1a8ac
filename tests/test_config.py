"""Options under the names that people know."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from jaxserve.config import ALIASES, ServerArgs
from jaxserve.config.kv_events import read_kv_events_config
from jaxserve.config.lora import split_lora_path


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
        (
            {"kv_events_config": '{"publisher": "zmq"}', "disable_radix_cache": True},
            r"^--kv-events-config needs the prefix cache, which --disable-radix-cache turns off\.$",
        ),
    ],
)
def test_options_that_make_no_sense_are_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerArgs(**options)


@pytest.mark.parametrize("address", ["node-0:5000", "10.0.0.1:5000", "[fd00::1]:5000", "a.b.svc.cluster.local:1"])
def test_hosts_that_fit_together(address: str) -> None:
    args = ServerArgs(model_path="m", nnodes=2, node_rank=1, tp_size=16, dist_init_addr=address)
    assert args.num_local_devices == 8


HOSTS: dict[str, Any] = {"nnodes": 2, "tp_size": 4, "dist_init_addr": "node-0:5000"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"node_rank": 2}, r"--node-rank must be in \[0, 1\] with --nnodes 2; got 2\."),
        ({"nnodes": 1, "node_rank": 1}, r"--node-rank must be in \[0, 0\] with --nnodes 1; got 1\."),
        ({"nnodes": 0}, r"--nnodes must be at least 1; got 0\."),
        ({"dist_init_addr": None}, r"--nnodes 2 needs --dist-init-addr"),
        ({"tp_size": 3}, r"--tp-size 3 cannot be divided among 2 hosts"),
        ({"pp_size": 3, "tp_size": 1}, r"--pp-size 3 times --tp-size 1 cannot be divided among 2 hosts \(--nnodes\)\."),
        (
            {"pp_size": 3, "tp_size": 2},
            r"--pp-size 3 with --nnodes 2 and --tp-size 2: a stage must have whole hosts, or a host whole stages; "
            r"each host has 3 devices\.",
        ),
        (
            {"pp_size": 2, "expert_distribution_recorder_mode": "stat"},
            r"--expert-distribution-recorder-mode with --pp-size 2 with --nnodes 2: no host sees the experts of all stages",
        ),
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


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("zmq", "must be a JSON object; got 'zmq'."),
        ('{"port": 1}', "there is no field port; there are publisher, endpoint, replay_endpoint, buffer_steps, hwm,"),
        ('{"publisher": "nats"}', "publisher must be zmq or null; got 'nats'."),
        ('{"endpoint": "5557"}', "endpoint must be tcp://host:port or ipc://path; got '5557'."),
        ('{"endpoint": "inproc://kv"}', "endpoint must be tcp://host:port or ipc://path; got 'inproc://kv'."),
        ('{"endpoint": "tcp://*:0"}', "the port of endpoint must be in [1, 65535]; got 0."),
        ('{"replay_endpoint": 5558}', "replay_endpoint must be tcp://host:port or ipc://path; got 5558."),
        ('{"replay_endpoint": "tcp://*:5557"}', "must differ; got 'tcp://*:5557' and 'tcp://*:5557'."),
        ('{"buffer_steps": 0}', "buffer_steps must be a whole number in [1, 2147483647]; got 0."),
        ('{"hwm": "many"}', "hwm must be a whole number in [1, 2147483647]; got 'many'."),
        ('{"max_queue_size": 1.5}', "max_queue_size must be a whole number in [1, 2147483647]; got 1.5."),
        ('{"topic": 7}', "topic must be a text; got 7."),
        ('{"encoding": "json"}', "encoding must be map, array or vllm; got 'json'."),
        ('{"bind": 1}', "bind must be true or false; got 1."),
        ('{"format": "vllm"}', "format must be default or dynamo; got 'vllm'."),
        ('{"enable_kv_cache_events": null, "hwm": -1}', "hwm must be a whole number in [1, 2147483647]; got -1."),
    ],
)
def test_a_bad_config_of_kv_events_is_a_sentence(config: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^--kv-events-config.*{re.escape(says)}") as caught:
        ServerArgs(kv_events_config=config)
    assert "\n" not in str(caught.value)


def test_dp_attention_in_either_spelling() -> None:
    args = ServerArgs(tp_size=8, dp_size=4, enable_dp_attention=True)
    assert (args.attn_dp_size, args.dp_size, args.attn_tp_size) == (4, 1, 2)
    again = args.replace(port=1)
    assert (again.attn_dp_size, again.dp_size) == (4, 1)
    both = ServerArgs(tp_size=8, dp_size=2, attn_dp_size=4)
    assert (both.attn_dp_size, both.dp_size) == (4, 2), "replicas, of which each has four shards"
    with pytest.raises(ValueError, match="--attn-dp-size 3 must divide --tp-size 8, which counts all devices"):
        ServerArgs(tp_size=8, attn_dp_size=3)
    with pytest.raises(ValueError, match="--dp-size is --attn-dp-size"):
        ServerArgs(tp_size=4, dp_size=8, enable_dp_attention=True)
    with pytest.raises(ValueError, match="--attn-dp-size must be at least 1"):
        ServerArgs(attn_dp_size=0)


def test_sizes_of_context_parallelism() -> None:
    args = ServerArgs(tp_size=8, attn_dp_size=2, dcp_size=4, page_size=64)
    assert (args.attn_tp_size, args.dcp_size, args.page_tokens) == (4, 4, 256)
    assert ServerArgs.of({"tp": 2, "decode_context_parallel_size": 2}).dcp_size == 2
    wrong: list[tuple[dict[str, int], str]] = [
        ({"tp_size": 8, "dcp_size": 3}, "--dcp-size 3 must divide the 8 devices that share attention (--tp-size 8)."),
        (
            {"tp_size": 8, "attn_dp_size": 4, "dcp_size": 4},
            "--dcp-size 4 must divide the 2 devices that share attention (--tp-size 8 over --attn-dp-size 4).",
        ),
        ({"dcp_size": 0}, "--dcp-size must be at least 1"),
    ]
    for options, says in wrong:
        with pytest.raises(ValueError, match=re.escape(says)):
            ServerArgs(**options)


@pytest.mark.parametrize(
    "given",
    [
        ("sql=/a/sql", "/a/fr"),
        ["sql=/a/sql", "/a/fr"],
        {"sql": "/a/sql", "/a/fr": "/a/fr"},
        [{"lora_name": "sql", "lora_path": "/a/sql", "pinned": False}, {"lora_name": "/a/fr", "lora_path": "/a/fr"}],
    ],
)
def test_adapters_may_be_named_as_sglangs_programs_do(given: Any) -> None:
    args = ServerArgs(lora_paths=given)
    assert [split_lora_path(text) for text in args.lora_paths or ()] == [("sql", "/a/sql"), ("/a/fr", "/a/fr")]
    assert args.serves_lora and ServerArgs(enable_lora=True).serves_lora and not ServerArgs().serves_lora
    assert args.replace(port=1).lora_paths == args.lora_paths


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora_paths": "sql=/a"}, "--lora-paths must be a list of NAME=PATH, or a dict of name to path; got 'sql=/a'."),
        ({"lora_paths": [7]}, "--lora-paths must hold NAME=PATH or PATH; got 7."),
        ({"lora_paths": [{"lora_name": "sql"}]}, "--lora-paths must hold NAME=PATH or PATH; got {'lora_name': 'sql'}."),
        ({"lora_paths": ["=/a"]}, "--lora-paths must hold NAME=PATH or PATH; got '=/a'."),
        ({"lora_paths": [{"lora_name": "a", "lora_path": "/a", "pinned": True}]}, "--lora-paths cannot pin 'a': load it with"),
        ({"lora_paths": ["a=/1", "a=/2"]}, "--lora-paths must name different adapters; 'a' comes twice."),
        ({"enable_lora": True, "max_loras_per_batch": 0}, "--max-loras-per-batch must be at least 1; got 0."),
        ({"enable_lora": True, "max_lora_rank": 0}, "--max-lora-rank must be at least 1; got 0."),
        (
            {"enable_lora": True, "max_loaded_loras": 4},
            "--max-loaded-loras must be at least --max-loras-per-batch, which is 8; got 4.",
        ),
        ({"max_lora_rank": 8}, "--max-lora-rank needs --enable-lora or --lora-paths."),
        ({"lora_target_modules": ("q_proj",)}, "--lora-target-modules needs --enable-lora or --lora-paths."),
        ({"max_loaded_loras": 8}, "--max-loaded-loras needs --enable-lora or --lora-paths."),
    ],
)
def test_options_of_adapters_that_make_no_sense_are_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ServerArgs(**options)


def test_replicas_need_ports_of_their_own_for_kv_events() -> None:
    near = '{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    with pytest.raises(ValueError, match=r"must differ by 2 or more, as each of the --dp-size 2 replicas takes a port; got "):
        ServerArgs(kv_events_config=near, dp_size=2)
    ServerArgs(kv_events_config=near)
    ServerArgs(kv_events_config='{"endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:5558"}', dp_size=2)
    with pytest.raises(ValueError, match=r"in \[1, 65532\] \(replica r takes port \+ r, and --dp-size is 4\); got 65533"):
        ServerArgs(kv_events_config='{"endpoint": "tcp://*:65533"}', dp_size=4)


@pytest.mark.parametrize(
    ("config", "is_on", "binds"),
    [
        ("{}", False, True),
        ('{"publisher": "null"}', False, True),
        ('{"publisher": "zmq"}', True, True),
        ('{"publisher": "zmq", "endpoint": "tcp://0.0.0.0:1"}', True, True),
        ('{"publisher": "zmq", "endpoint": "tcp://[::1]:1"}', True, True),
        ('{"publisher": "zmq", "endpoint": "ipc:///run/kv"}', True, True),
        ('{"publisher": "zmq", "endpoint": "tcp://router:1"}', True, False),
        ('{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:1", "bind": true}', True, True),
        ('{"enable_kv_cache_events": true}', True, True),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', False, True),
    ],
)
def test_when_kv_events_are_told_and_who_listens(config: str, is_on: bool, binds: bool) -> None:
    read = read_kv_events_config(config)
    assert (read.is_on, read.binds) == (is_on, binds)
    assert (ServerArgs(kv_events_config=config).kv_events is not None) == is_on


def test_routers_are_told_where_kv_events_are() -> None:
    args = ServerArgs(kv_events_config='{"publisher": "zmq", "endpoint": "ipc:///run/kv", "topic": "t"}', dp_size=3)
    assert args.describe_kv_events(16) == {
        "publisher": "zmq", "endpoint_host": "", "endpoint_port_base": 0, "topic": "t", "block_size": 16, "dp_size": 3
    }  # fmt: skip
    assert ServerArgs().describe_kv_events(16) is None
