"""The seam between blocks and whatever they attend with: what a block gives for the tokens of a step, and what comes back.

T tokens, H local query heads, K local key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax

from jaxserve.kernels.latent import Projections
from jaxserve.kernels.rotary import Rotary
from jaxserve.kernels.state_rows import StateRows
from jaxserve.models.specs import AttentionMixer, StateMixer


class HeadInputs(NamedTuple):
    """Of attention with keys and values per head."""

    qkv: jax.Array  # [T, K, H / K + 2, D] as it was projected: of each key/value head its queries, its key and its value
    rotary: Rotary  # what norms and rotates it
    sinks: jax.Array | None  # [H] scores of a key per head that has no value


class LatentInputs(NamedTuple):
    """Of latent attention."""

    q: jax.Array  # [T, H, nope_dim + rope_dim], rotated
    rows: jax.Array  # [T, row]: what is kept of the tokens, a latent and the rotated end of all heads' keys
    projections: Projections  # from latents to keys and values


class StateInputs(NamedTuple):
    """Of a mixer that keeps states: (arrays of states, whose they are) -> (out [T, ...], the arrays behind the step)."""

    num_tokens: int
    update: Callable[[dict[str, Any], StateRows], tuple[jax.Array, dict[str, Any]]]


Inputs: TypeAlias = HeadInputs | LatentInputs | StateInputs
Mixer: TypeAlias = AttentionMixer | StateMixer


class Attend(Protocol):
    """What the decoder is given to attend with."""

    def __call__(self, inputs: Inputs, kv: Any, layer: Mixer, index: jax.Array) -> tuple[jax.Array, Any]:
        """-> (out [T, H, D], or [T, H, value_dim] of latent attention; kv).

        `layer` says window, scale and soft cap; `index` is a traced int32, the layer's number among those of its window, or
        among those that keep states. kv is any pytree; it is threaded through to be updated in place.
        """
        ...


# The same, bound to a layer and its cache.
BoundAttend: TypeAlias = Callable[[Inputs], tuple[jax.Array, Any]]
