"""How this process joins the other hosts of a server: as the one that schedules, or as one that follows.

Everything that does not fit is found here, before JAX is started; afterwards hosts end together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec

import jaxserve
from jaxserve.config import ServerArgs, split_address
from jaxserve.executor import distributed, source_digest
from jaxserve.hosts import Follower, Hello, HostsError, Leader
from jaxserve.hosts.fingerprint import fingerprint
from jaxserve.hosts.sockets import HostAddress
from jaxserve.server.worker_process import UserError

_SECRET_VARIABLE = "JAXSERVE_DIST_SECRET"
_LEAST_SECRET = 16
# What is a host's own: where files are, and what only host 0's front doors and scheduler know of.
_OWN_OPTIONS = frozenset(
    ("model_path", "tokenizer_path", "served_model_name", "download_dir", "compilation_cache_dir", "device", "node_rank",
     "host", "port", "api_key", "api_key_file", "admin_api_key", "admin_api_key_file", "ssl_keyfile", "ssl_certfile",
     "ssl_ca_certs", "ssl_keyfile_password", "log_level", "log_level_http", "dist_secret_file", "dist_init_addr",
     "dist_timeout", "tokenizer_worker_num", "detokenizer_worker_num", "max_queued_requests", "max_reply_numbers",
     "crash_dump_folder", "profile_dir")
)  # fmt: skip


@contextlib.contextmanager
def leading(args: ServerArgs, environment: Mapping[str, str], on_loss: Callable[[str], None]) -> Iterator[Leader | None]:
    """While it lasts the other hosts follow, if there are any. They end with it, and hear why."""
    if args.nnodes == 1:
        yield None
        return
    leader = lead(args, environment, on_loss)
    try:
        _start_jax(args, leader.coordinator)
        yield leader
    except UserError as error:
        leader.end(f"Host 0: {error}")
        raise
    except Exception as error:
        leader.let_loss_show()
        leader.end(f"Host 0 failed: {type(error).__name__}: {error}")
        raise
    leader.end("")


def lead(args: ServerArgs, environment: Mapping[str, str], on_loss: Callable[[str], None]) -> Leader:
    """Waits for the other hosts. UserError with a sentence; those that are there hear it, too. `on_loss` is called, in a
    thread, when one is lost later."""
    address, hello = _address(args), _hello(args)
    try:
        leader = Leader(address, hello, args.nnodes, _secret(args, environment))
    except HostsError as error:
        raise UserError(str(error)) from error
    try:
        leader.gather(args.dist_timeout, on_loss)
    except HostsError as error:
        leader.end(str(error))
        raise UserError(str(error)) from error
    return leader


@contextlib.contextmanager
def following(args: ServerArgs, environment: Mapping[str, str], on_end: Callable[[str], None]) -> Iterator[Follower]:
    """Joined to host 0. What goes wrong while it lasts, host 0 hears; it has the last word."""
    follower = follow(args, environment, on_end)
    try:
        _start_jax(args, follower.coordinator)
        yield follower
    except Exception as error:
        follower.fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        raise


def follow(args: ServerArgs, environment: Mapping[str, str], on_end: Callable[[str], None]) -> Follower:
    """Joins host 0. UserError with a sentence. `on_end` is called, in a thread, when host 0 ends (with "") or says why all
    must."""
    follower = Follower(_address(args), _hello(args), _secret(args, environment))
    try:
        follower.join(args.dist_timeout)
    except HostsError as error:
        raise UserError(str(error)) from error
    follower.watch(on_end)
    return follower


def _start_jax(args: ServerArgs, coordinator: str) -> None:
    distributed.start(
        coordinator,
        num_processes=args.nnodes,
        rank=args.node_rank,
        num_devices=args.num_local_devices,
        timeout_s=args.dist_timeout,
        hands_on=args.pp_size > 1,
    )


def _address(args: ServerArgs) -> HostAddress:
    assert args.dist_init_addr is not None, "checked with the options"
    return HostAddress(*split_address("--dist-init-addr", args.dist_init_addr))


def _hello(args: ServerArgs) -> Hello:
    source = source_digest("hosts", "messages.py")[:12]
    software = f"jaxserve {jaxserve.__version__} (source {source}) with JAX {jax.__version__}"
    options = {name: value for name, value in dataclasses.asdict(args).items() if name not in _OWN_OPTIONS}
    as_json: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(options))
    weights = fingerprint(args.model_path, args.load_format)
    return Hello(rank=args.node_rank, name=socket.gethostname(), software=software, options=as_json, weights=weights)


def _secret(args: ServerArgs, environment: Mapping[str, str]) -> bytes:
    """UserError if there is none where it takes one."""
    path, variable = args.dist_secret_file, environment.get(_SECRET_VARIABLE)
    if path is not None and variable is not None:
        raise UserError(
            f"--dist-secret-file and the environment's {_SECRET_VARIABLE} each give a secret; only one of them may."
        )
    if path is None and variable is None and _is_loopback(_address(args).host):
        return b""
    secret = (variable or "").strip().encode() if path is None else _read_secret(path)
    if len(secret) < _LEAST_SECRET:
        raise UserError(
            f"The secret that hosts share has {len(secret)} characters; it takes {_LEAST_SECRET} or more, in "
            f"--dist-secret-file or the environment's {_SECRET_VARIABLE}: others may reach {args.dist_init_addr}."
        )
    return secret


def _read_secret(path: str) -> bytes:
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"--dist-secret-file {path!r} cannot be read: {error.strerror}.") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, of whatever
        return False
