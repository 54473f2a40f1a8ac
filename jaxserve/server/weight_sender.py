"""`jaxserve.WeightSender`: a training program's arrays for servers in other processes or on other machines.

    sender = jaxserve.WeightSender("10.0.0.7")  # an address of this machine that the server's processes reach
    sender.send(engine, params, mapping, weight_version="7")

The server's schedulers fetch the arrays from this process (jax.experimental.transfer); only their names, shapes and types go
through requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import transfer

from jaxserve.executor.distributed import NUM_TRANSPORTS, cpu_device
from jaxserve.models.given_tensors import GivenTensor, unreachable
from jaxserve.models.leaf_names import NameMapping, hugging_face_names, named_leaves
from jaxserve.server.requests import RequestError

if TYPE_CHECKING:
    from jaxserve.server.engine import Engine
    from jaxserve.server.remote import RemoteEngine

_UUID_BITS = 62  # an offer is for who knows its number


class WeightSender:
    """For one thread at a time."""

    def __init__(self, host: str = "127.0.0.1", *, bucket_bytes: int = 1 << 30) -> None:
        """`host`: the address of this machine where the server's processes reach it; `bucket_bytes`: of what is offered at a
        time, and lies in this host's memory until it is fetched. ValueError if JAX has no CPU device here, from which arrays
        are offered: JAX_PLATFORMS must name cpu as well, if it is set."""
        self._device = cpu_device()
        self._here = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._bucket_bytes = bucket_bytes
        self._server: Any = None

    def send(
        self,
        engine: Engine | RemoteEngine,
        weights: Any,
        mapping: NameMapping | None = None,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """Replaces the engine's weights by those of a tree of jax.Array, all at once, or a part of them: as
        `Engine.update_weights` takes it, with the same `mapping`. The arrays may be deleted afterwards.

        Raises ValueError for arrays that cannot be sent, RequestError with what the server says; the weights are the old ones
        then. `timeout_s`: so long a part of `bucket_bytes` may take.
        """
        given = hugging_face_names(named_leaves(weights), mapping)
        if problems := unreachable(given):
            raise ValueError(" ".join(problems))
        num_replicas: int = engine.get_server_info()["dp_size"]
        options = {"flush_cache": flush_cache, "abort_all_requests": abort_all_requests, "weight_version": weight_version}
        try:
            _check(engine.begin_weight_update())
            for bucket in self._buckets(given):
                uuid = self._offer([*bucket.values()], num_replicas)
                reply = engine.update_weights_from_distributed(
                    names=[*bucket],
                    dtypes=[str(array.dtype) for array in bucket.values()],
                    shapes=[[*array.shape] for array in bucket.values()],
                    address=self._server.address(),
                    uuid=uuid,
                    timeout_s=timeout_s,
                    **options,
                )
                _check(reply)
            _check(engine.end_weight_update())
        except BaseException:
            self._server = None  # and with it what nobody has fetched
            raise

    def _offer(self, arrays: list[jax.Array], num_replicas: int) -> int:
        """The first replica's number; the others' are behind it."""
        if self._server is None:
            transports = [self._here] * NUM_TRANSPORTS
            self._server = transfer.start_transfer_server(self._device.client, self._here, transports)
        uuid = secrets.randbits(_UUID_BITS)
        for rank in range(num_replicas):
            self._server.await_pull(uuid + rank, arrays)
        return uuid

    def _buckets(self, given: Mapping[str, GivenTensor]) -> Iterator[dict[str, jax.Array]]:
        """By name, in this host's memory; each but the last just large enough."""
        bucket: dict[str, jax.Array] = {}
        num_bytes = 0
        for name, tensor in given.items():
            element = tensor.element()
            made = element if tensor.compute is None else jax.jit(tensor.compute)(element)
            bucket[name] = jax.device_put(made, self._device)
            num_bytes += bucket[name].nbytes
            if num_bytes >= self._bucket_bytes:
                yield bucket
                bucket, num_bytes = {}, 0
        if bucket:
            yield bucket


def _check(reply: tuple[bool, str]) -> None:
    success, message = reply
    if not success:
        raise RequestError(message)
