"""What making weights of a trainer's arrays takes, next to `jax.device_put` of the same bytes to the same shardings.

    python -m benchmarks.hand_over [--rounds 9] [--tp-size 4]

A Qwen3 of 130M parameters in float32 on virtual CPU devices. The trainer holds kernels [in, out], divided as
tensor parallel training does, on the same devices as the engine or on as many others; what is given is transposed twice, which
costs nothing. `device_put` copies (may_alias=False) and knows nothing of fused matrices. Rounds of both take turns; the ratio
is that of the medians. Aim: below 1.2.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # with JAX, which counts its devices when it is imported
    import jax

    from jaxserve.models import ModelConfig
    from jaxserve.models.given_tensors import GivenTensor

NUM_DEVICES = 8
# Of [in, out] kernels, which axis tensor parallel training divides; the rest is on every device.
DIVIDED = {
    "q_proj": 1,
    "k_proj": 1,
    "v_proj": 1,
    "gate_proj": 1,
    "up_proj": 1,
    "o_proj": 0,
    "down_proj": 0,
    "embed_tokens": 0,  # [vocabulary, hidden], as files have it
}


def model_config() -> ModelConfig:
    """Of `medium_model`, with heads that four devices can divide."""
    from benchmarks.medium_model import CONFIG
    from jaxserve.models import ModelConfig

    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_attention_heads": 16, "num_key_value_heads": 4}
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        return ModelConfig.from_pretrained(folder)


def trained(mesh: jax.sharding.Mesh) -> dict[str, GivenTensor]:
    """Weights as a trainer has them on its mesh."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxserve.models.decoder import abstract_params
    from jaxserve.models.given_tensors import GivenTensor, variants
    from jaxserve.models.names import stored_arrays

    rng = np.random.default_rng(0)
    stored = stored_arrays(abstract_params(model_config(), jnp.float32, 1))
    given = {}
    for name, shape in (tensor for info in stored.values() for option in variants(info) for tensor in option.items()):
        is_kernel = len(shape) == 2 and "embed" not in name
        axis = next((axis for part, axis in DIVIDED.items() if part in name), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, mesh.axis_names[0])
        held = rng.standard_normal(shape[::-1] if is_kernel else shape, np.float32)
        given[name] = GivenTensor(jax.device_put(held, NamedSharding(mesh, spec)), jnp.transpose if is_kernel else None)
    return given


def put(given: Mapping[str, GivenTensor], mesh: jax.sharding.Mesh) -> list[jax.Array]:
    import jax
    from jax.sharding import NamedSharding

    copies = []
    for tensor in given.values():
        sharding = tensor.array.sharding  # type: ignore[union-attr]
        assert isinstance(sharding, NamedSharding)
        copies.append(jax.device_put(tensor.array, NamedSharding(mesh, sharding.spec), may_alias=False))
    return copies


def seconds(run: Callable[[], Any]) -> float:
    import jax

    started_s = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started_s


def compare(label: str, of_trainer: Any, of_engine: Any, rounds: int) -> None:
    """`of_trainer`, `of_engine`: their devices."""
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from jaxserve.models.tensor_update import TensorUpdate, check

    given, target = trained(Mesh(np.array(of_trainer), ("model",))), Mesh(np.array(of_engine), ("model",))
    update = TensorUpdate(model_config(), Mesh(np.array([of_engine]), ("data", "tensor")), jnp.float32)
    check([update], given, partial=False)
    params = update.apply(update.apply(None, given), given)
    taken: dict[str, list[float]] = {"apply": [], "device_put": []}
    for _ in range(rounds):
        taken["device_put"].append(seconds(functools.partial(put, given, target)))
        started_s = time.perf_counter()
        params = update.apply(params, given)  # finished when it returns
        taken["apply"].append(time.perf_counter() - started_s)
    apply_s, put_s = (statistics.median(taken[name]) for name in ("apply", "device_put"))
    total_mb = sum(tensor.array.nbytes for tensor in given.values()) / 1e6
    print(
        f"{label:22}  {total_mb:.0f} MB  apply {apply_s * 1e3:6.1f} ms  device_put {put_s * 1e3:6.1f} ms  "
        f"ratio {apply_s / put_s:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tp-size", type=int, default=4, choices=(1, 2, 4))
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    devices, size = jax.devices(), options.tp_size
    compare("the same devices", devices[:size], devices[:size], options.rounds)
    compare("as many other devices", devices[:size], devices[4 : 4 + size], options.rounds)


if __name__ == "__main__":
    main()
