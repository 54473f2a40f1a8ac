"""The Engine's methods for weights that a training program hands over: arrays on the devices of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from jaxserve.handover import Handover
from jaxserve.scheduler.control.declaration import first_failure
from jaxserve.scheduler.control.update_weights_from_arrays import UpdateWeightsFromArraysReq
from jaxserve.server.engine_base import EngineBase

if TYPE_CHECKING:
    from jaxserve.models.leaf_names import NameMapping


class WeightOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.update_weights`."""

    partial: bool  # tensors that are not given stay
    weight_version: str | None  # a label; None: how many updates there were
    # Requests that run end first, new ones wait; those that a pause has retracted are computed again. False: all go on at once,
    # with what the old weights computed. True by default.
    flush_cache: bool
    abort_all_requests: bool  # instead of being finished with the old weights


class WeightMethods(EngineBase):
    _handover: Handover | None  # with the scheduler's thread; None: it is in another process
    _num_updates = 0

    def update_weights(self, weights: Any, mapping: NameMapping | None = None, **options: Unpack[WeightOptions]) -> str:
        """Replaces the weights by those in a tree of jax.Array (dictionaries, dataclasses, flax.nnx states and modules), on
        whatever devices of this process, in whatever sharding: from device to device, into copies of the engine's own. Without
        compiling anything from the second time on. Returns the version that replies bear from now on.

        mapping: from names in the tree to those of a Hugging Face checkpoint, see `leaf_names.hugging_face_names`; None: they
        are the same. Keep it, and its functions, from one update to the next: programs are compiled for them.

        Raises ValueError with the names of all that is wrong, and has changed nothing then. If the weights are lost midway, as
        for lack of memory, it says so: requests are refused until there are others.
        """
        return self._call(self._update_weights(weights, mapping, **options))

    async def async_update_weights(
        self, weights: Any, mapping: NameMapping | None = None, **options: Unpack[WeightOptions]
    ) -> str:
        """As `update_weights`, from any event loop."""
        return await self._wait(self._update_weights(weights, mapping, **options))

    async def _update_weights(
        self,
        weights: Any,
        mapping: NameMapping | None,
        *,
        partial: bool = False,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> str:
        if self._handover is None:
            raise ValueError(
                "update_weights needs an Engine with in_process=True, which shares devices with this program; for others there "
                "are update_weights_from_tensor and update_weights_from_disk."
            )
        # Here and not above: it imports JAX, which other Engines leave to their workers.
        from jaxserve.models.leaf_names import hugging_face_names, named_leaves

        given = hugging_face_names(named_leaves(weights), mapping)
        version = str(self._num_updates + 1) if weight_version is None else weight_version
        number = self._handover.leave(given)
        request = UpdateWeightsFromArraysReq(
            handover=number,
            partial=partial,
            weight_version=version,
            abort_all_requests=abort_all_requests,
            flush_cache=flush_cache,
        )
        try:
            reply = first_failure(await self._pipeline.manager.control(request))
        finally:
            self._handover.drop(number)
        if not reply.success:
            raise ValueError(reply.message)
        self._num_updates += 1
        return version
