"""KVEventsConfig: what --kv-events-config holds. Names, defaults and meanings are SGLang's; `encoding` and `bind` are ours."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

_LARGEST_PORT = 65535
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_COUNT = "a whole number in [1, 2147483647]"
_ENDPOINT = "tcp://host:port or ipc://path"
_RULES = {
    "publisher": "zmq or null",
    "endpoint": _ENDPOINT,
    "replay_endpoint": _ENDPOINT,
    "buffer_steps": _COUNT,
    "hwm": _COUNT,
    "max_queue_size": _COUNT,
    "topic": "a text",
    "encoding": "map, array or vllm",
    "bind": "true or false",
    "format": "default or dynamo",
    "enable_kv_cache_events": "true or false",
}
_TCP = re.compile(r"tcp://(?P<host>[^/\s]+):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc://\S+")


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    publisher: Literal["zmq", "null"] | None = None  # None: zmq if enable_kv_cache_events, else null
    endpoint: str = "tcp://*:5557"  # events go out here
    replay_endpoint: str | None = None  # here one may ask for events again
    buffer_steps: _Count = 10_000  # batches that are kept for that
    hwm: _Count = 100_000  # batches that wait for one slow subscriber; it misses what comes then
    max_queue_size: _Count = 100_000  # batches that wait for the publisher; those that come then are dropped
    topic: str = ""
    # Of each event. array: as SGLang and vLLM wrote them first; vllm: maps as vLLM's are now
    encoding: Literal["map", "array", "vllm"] = "map"
    bind: bool | None = None  # listen at `endpoint` or connect to it; None: listen if it is a wildcard or ipc
    # SGLang's dynamo names LoRA adapters besides, of which there are none here.
    format: Literal["default", "dynamo"] = "default"
    enable_kv_cache_events: bool | None = None  # vLLM's; false: no events

    @property
    def is_on(self) -> bool:
        default = "zmq" if self.enable_kv_cache_events else "null"
        return (self.publisher or default) == "zmq" and self.enable_kv_cache_events is not False

    @property
    def binds(self) -> bool:
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or any(mark in self.endpoint for mark in ("*", "::", "0.0.0.0"))

    def describe(self, block_size: int, dp_size: int) -> dict[str, Any]:
        """How routers find the events, in /server_info. Replica r's ports are the bases plus r."""
        host, port = host_and_port(self.endpoint)
        described = {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": dp_size,
        }
        if self.replay_endpoint is not None:
            described["replay_endpoint_host"], described["replay_endpoint_port_base"] = host_and_port(self.replay_endpoint)
        return described


def read_kv_events_config(text: str, dp_size: int = 1) -> KVEventsConfig:
    """ValueError with a sentence that names the field."""
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"--kv-events-config: {_sentence(str(error), msgspec.json.decode(text))}") from None
    for name in ("endpoint", "replay_endpoint"):
        if (endpoint := getattr(config, name)) is not None:
            _check_endpoint(name, endpoint, dp_size)
    if config.replay_endpoint is not None and config.binds:
        _check_apart(config.endpoint, config.replay_endpoint, dp_size)
    return config


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Of an endpoint that is no tcp, as SGLang tells it: '' and 0."""
    match = _TCP.fullmatch(endpoint)
    return (match["host"], int(match["port"])) if match else ("", 0)


def endpoint_of(endpoint: str, rank: int) -> str:
    """Each replica has its own: the port is the first one's plus its rank."""
    if not rank:
        return endpoint
    host, port = host_and_port(endpoint)
    return f"tcp://{host}:{port + rank}" if port else f"{endpoint}_dp{rank}"


def _sentence(error: str, given: Any) -> str:
    """Of what msgspec says about a field."""
    if not isinstance(given, dict):
        return f"it must be a JSON object; got {given!r}."
    if unknown := [name for name in given if name not in _RULES]:
        return f"there is no field {unknown[0]}; there are {', '.join(_RULES)}."
    found = re.search(r"\$\.(\w+)", error)
    assert found is not None, error
    return f"{found[1]} must be {_RULES[found[1]]}; got {given[found[1]]!r}."


def _check_endpoint(name: str, endpoint: str, dp_size: int) -> None:
    _, port = host_and_port(endpoint)
    if not (_TCP.fullmatch(endpoint) or _IPC.fullmatch(endpoint)):
        raise ValueError(f"--kv-events-config: {name} must be {_ENDPOINT}; got {endpoint!r}.")
    most = _LARGEST_PORT - dp_size + 1
    if endpoint.startswith("tcp") and not 1 <= port <= most:
        replicas = f" (replica r takes port + r, and --dp-size is {dp_size})" if dp_size > 1 else ""
        raise ValueError(f"--kv-events-config: the port of {name} must be in [1, {most}]{replicas}; got {port}.")


def _check_apart(endpoint: str, replay_endpoint: str, dp_size: int) -> None:
    (_, first), (_, second) = host_and_port(endpoint), host_and_port(replay_endpoint)
    if endpoint == replay_endpoint or (first and second and abs(first - second) < dp_size):
        replicas = f" by {dp_size} or more, as each of the --dp-size {dp_size} replicas takes a port" if dp_size > 1 else ""
        raise ValueError(
            f"--kv-events-config: endpoint and replay_endpoint must differ{replicas}; got {endpoint!r} and {replay_endpoint!r}."
        )
