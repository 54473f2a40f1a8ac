"""The sockets between hosts: who knows the secret can connect, and what they say is encrypted (CurveZMQ).

Both key pairs follow from the secret. A client that has another does not know host 0's public key, which is never sent, and
its handshake fails; likewise a server that is not host 0's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from typing import Any

import zmq
from zmq.utils import z85

from jaxserve.hosts.protocol import HostsError

# ZMQ's own threads send and answer these, whatever Python does meanwhile. A host that is switched off is gone after the latter.
_HEARTBEAT_MS = 1500
_HEARTBEAT_TIMEOUT_MS = 5000
# Of what followers say. What host 0 sends may be large: embeddings, masks.
LARGEST_FROM_FOLLOWER = 1 << 20
LARGEST_FROM_LEADER = 1 << 31
# How long a closing socket waits for its last messages to leave.
_LINGER_MS = 1000


@dataclasses.dataclass(frozen=True)
class HostAddress:
    """Of host 0: three ports, one behind the other."""

    host: str
    port: int  # of the threads' connection

    @property
    def coordinator(self) -> str:
        """Of jax.distributed."""
        return f"{self._host}:{self.port + 1}"

    @property
    def control(self) -> str:
        return f"tcp://{self._host}:{self.port}"

    @property
    def steps(self) -> str:
        return f"tcp://{self._host}:{self.port + 2}"

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def resolved(self) -> HostAddress:
        """With a number in place of a name, which sockets are bound to. HostsError if there is no such name."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0]
        except socket.gaierror as error:
            raise HostsError(f"--dist-init-addr: the host {self.host!r} is not known: {error.strerror}.") from error
        return HostAddress(str(found), self.port)

    def __str__(self) -> str:
        return f"{self._host}:{self.port}"


def server(context: zmq.Context[Any], address: str, secret: bytes) -> zmq.Socket[Any]:
    """A ROUTER that is bound there. HostsError with a sentence if it cannot be."""
    made = context.socket(zmq.ROUTER)
    _configure(made, LARGEST_FROM_FOLLOWER)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what is sent to somebody who is gone is an error
    made.curve_server = True
    made.curve_publickey, made.curve_secretkey = _key_pair(secret, b"host 0")
    try:
        made.bind(address)
    except zmq.ZMQError as error:
        made.close()
        reason = zmq.strerror(error.errno or 0)
        raise HostsError(
            f"Host 0 cannot listen on {address.removeprefix('tcp://')}: {reason}. --dist-init-addr is an address of "
            "its own, with three free ports from the one named on."
        ) from error
    return made


def client(context: zmq.Context[Any], secret: bytes) -> zmq.Socket[Any]:
    """A DEALER, to be connected."""
    made = context.socket(zmq.DEALER)
    _configure(made, LARGEST_FROM_LEADER)
    made.curve_serverkey, _ = _key_pair(secret, b"host 0")
    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    return made


def _configure(made: zmq.Socket[Any], largest_bytes: int) -> None:
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.LINGER, _LINGER_MS)
    made.setsockopt(zmq.MAXMSGSIZE, largest_bytes)
    made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    made.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)


def _key_pair(secret: bytes, whose: bytes) -> tuple[bytes, bytes]:
    """Public and private, in ZMQ's spelling."""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=whose).digest())
    return zmq.curve_public(private), private
