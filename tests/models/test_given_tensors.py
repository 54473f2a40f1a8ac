"""Weights made of a trainer's arrays: bit for bit those that loading its checkpoint gives, whatever devices hold what."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax._src.array
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from given_arrays import divided, trainer_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jaxserve.models import ModelConfig, array_batch, array_programs, divide_layers, load_params
from jaxserve.models.arrays import ALL_AXES, Stacked
from jaxserve.models.decoder import abstract_params
from jaxserve.models.expert_placement import place_experts
from jaxserve.models.given_tensors import GivenTensor
from jaxserve.models.names import stored_arrays
from jaxserve.models.redistribute import redistribute
from jaxserve.models.tensor_update import TensorUpdate, check

CheckpointOf: TypeAlias = Callable[[str], Path]
Tensors: TypeAlias = dict[str, np.ndarray]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"


def mesh_of(data: int, tensor: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ALL_AXES)


BACKWARDS = Mesh(np.array(jax.devices()[1::-1]), ("fsdp",))


def of_trainer(tensors: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, GivenTensor]:
    """Matrices as [in, out] kernels, everything else as files have it."""
    given = {}
    for name, array in tensors.items():
        is_kernel = array.ndim == 2 and "embed" not in name
        given[name] = GivenTensor(divided(array.T if is_kernel else array, mesh), jnp.transpose if is_kernel else None)
    return given


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "inv_freq" not in name}


def make(update: TensorUpdate, params: Any, given: Mapping[str, GivenTensor], *, partial: bool = False) -> Any:
    check([update], given, partial=partial)
    return update.apply(params, given)


def check_equal(params: Any, expected: Any) -> None:
    """Also shardings, which compiled steps insist on."""

    def check(array: jax.Array, other: jax.Array) -> None:
        assert (array.sharding, array.dtype) == (other.sharding, other.dtype)
        got, wanted = (np.ascontiguousarray(part).view(np.uint8) for part in (array, other))
        np.testing.assert_array_equal(got, wanted)

    jax.tree.map(check, params, expected)


@contextlib.contextmanager
def compiling(most: int) -> Iterator[None]:
    count = 0

    def listener(event: str, duration_secs: float, **_: Any) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert count <= most, f"{count} programs were compiled"


def refuse_host_copy(array: Any) -> None:
    """In place of what JAX reads arrays by, also where it must only divide one in another way."""
    raise AssertionError(f"{array.shape} goes through the host")


CASES = [
    ("llama", (1, 1), trainer_mesh(0, 1)),
    ("llama", (1, 4), trainer_mesh(4, 2, 2)),
    ("llama", (1, 2), BACKWARDS),
    ("llama-biases", (2, 2), trainer_mesh(0, 2, 2)),
    ("gemma2", (1, 2), trainer_mesh(1, 4)),  # tied; some devices are ours as well
    ("qwen2", (1, 4), trainer_mesh(0, 8)),
    ("phi3", (2, 2), trainer_mesh(5, 2)),  # fused
    ("mistral", (1, 4), trainer_mesh(0, 4)),  # a vocabulary that is filled up
    ("deepseek-v3", (1, 2), trainer_mesh(0, 2)),  # latent attention
    ("mixtral", (1, 4), trainer_mesh(4, 4)),
    ("qwen3-moe", (2, 2), trainer_mesh(0, 2, 2)),
    ("gpt-oss", (1, 2), trainer_mesh(6, 1)),  # [experts, in, out], gates and ups in turns
    ("bamba", (1, 2), trainer_mesh(2, 2)),  # convolutions
]


@pytest.mark.parametrize(("name", "shape", "of"), CASES, ids=[f"{name}-{a}x{b}-{of.size}" for name, (a, b), of in CASES])
def test_as_loaded_from_a_checkpoint(
    name: str, shape: tuple[int, int], of: Mesh, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing goes through the host."""
    folder, mesh = checkpoint(name), mesh_of(*shape)
    config = ModelConfig.from_pretrained(folder).replace(attn_dp_size=shape[0])
    dtype = ml_dtypes.bfloat16 if shape == (1, 4) else np.float32
    expected = load_params(folder, config, mesh, dtype, progress=False)
    update, given = TensorUpdate(config, mesh, dtype), of_trainer(tensors_of(folder), of)
    monkeypatch.setattr(jax._src.array.ArrayImpl, "_value", property(refuse_host_copy))
    params = make(update, without_numbers(expected), given)
    with compiling(0):
        params = make(update, params, given)
    delete(given)
    monkeypatch.undo()
    check_equal(params, expected)


def delete(given: Mapping[str, GivenTensor]) -> None:
    for tensor in given.values():
        assert isinstance(tensor.array, jax.Array)
        tensor.array.delete()


def without_numbers(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), params)


@pytest.mark.parametrize("of", [trainer_mesh(0, 1, 2), trainer_mesh(4, 2)])
def test_quantized_weights(of: Mesh, checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder).replace(quantization="int8wo")
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    update, given = TensorUpdate(config, mesh, jnp.float32), of_trainer(tensors_of(folder), of)
    params = make(update, make(update, None, given), given)
    with compiling(0):
        params = make(update, params, given)
    check_equal(params, expected)


@pytest.mark.parametrize(("ep_size", "redundant", "layout"), [(4, 4, "given"), (2, 2, "restacked"), (2, 0, "given")])
def test_placed_experts(ep_size: int, redundant: int, layout: str, checkpoint: CheckpointOf) -> None:
    """Several times, and in slices; experts one by one, and in one tensor."""
    folder, mesh = checkpoint("mixtral"), mesh_of(1, 4)
    config = ModelConfig.from_pretrained(folder)
    placement = place_experts(
        layers=config.mixtures, architecture="Some", tp_size=4, ep_size=ep_size, num_redundant=redundant, location="trivial"
    )
    config = config.replace(expert_placement=placement)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    tensors = tensors_of(folder)
    if layout == "restacked":
        tensors = restacked(config, tensors)
    update, given = TensorUpdate(config, mesh, jnp.float32), of_trainer(tensors, trainer_mesh(0, 2, 2))
    params = make(update, make(update, None, given), given)
    with compiling(0):
        params = make(update, params, given)
    check_equal(params, expected)


def restacked(config: ModelConfig, tensors: Tensors) -> Tensors:
    """Experts one by one if they are in one tensor, else in one."""
    stored = stored_arrays(abstract_params(config, np.float32, 1)).values()
    changed = dict(tensors)
    for source in (info.source for info in stored):
        if not isinstance(source, Stacked):
            continue
        (fused,) = source.fused[0].names
        if fused in tensors:
            stack = changed.pop(fused)
            for expert, part in zip(stack, source.parts, strict=True):
                starts = np.cumsum([shape[0] for shape in part.shapes])[:-1]
                changed |= dict(zip(part.names, np.split(expert, starts), strict=True))
        else:
            changed[fused] = np.stack([np.concatenate([changed.pop(name) for name in part.names]) for part in source.parts])
    assert changed.keys() != tensors.keys()
    return changed


@pytest.mark.parametrize("num_devices", [1, 4])
def test_experts_one_by_one_and_in_one_tensor(num_devices: int, checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint("qwen3-moe"), mesh_of(1, num_devices)
    config = ModelConfig.from_pretrained(folder)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    update = TensorUpdate(config, mesh, jnp.float32)
    check_equal(make(update, None, of_trainer(restacked(config, tensors_of(folder)), trainer_mesh(2, 2, 2))), expected)


@pytest.mark.parametrize("of", [trainer_mesh(0, 2, 2), trainer_mesh(4, 2)])
def test_experts_in_one_array_for_each_part(of: Mesh, checkpoint: CheckpointOf) -> None:
    """Gates of all experts, [experts, in, out], and so on: no program for each, and not one by one."""
    folder, mesh = checkpoint("qwen3-moe"), mesh_of(1, 4)
    config = ModelConfig.from_pretrained(folder)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    tensors = one_by_one(config, tensors_of(folder))
    given = of_trainer({name: array for name, array in tensors.items() if ".experts." not in name}, of)
    for name in {re.sub(r"experts\.\d+", "experts.*", name) for name in tensors if ".experts." in name}:
        stack = divided(np.stack([tensors[name.replace("*", str(expert))].T for expert in range(config.num_experts)]), of)
        for expert in range(config.num_experts):
            given[name.replace("*", str(expert))] = GivenTensor(stack, jnp.transpose, (expert,))
    update = TensorUpdate(config, mesh, jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorUpdate, "_make_slots", None)
        check_equal(make(update, None, given), expected)


def test_large_matrices_are_on_no_device_whole(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though XLA knows only that way from [experts, in / 2, out / 2] to [experts / 4, in, out]."""
    folder, mesh, of = checkpoint("qwen3-moe"), mesh_of(1, 4), trainer_mesh(0, 2, 2)
    config = ModelConfig.from_pretrained(folder)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    tensors = tensors_of(folder)
    tensors = tensors if any(name.endswith("experts.down_proj") for name in tensors) else restacked(config, tensors)
    given = {}
    for name, tensor in tensors.items():
        spec = PartitionSpec(None, "fsdp", "tp") if tensor.ndim == 3 else PartitionSpec("fsdp")
        given[name] = GivenTensor(jax.device_put(tensor, NamedSharding(of, spec)))
    brought: list[tuple[int, ...]] = []

    def noted(arrays: Sequence[jax.Array], *args: Any, **options: Any) -> list[jax.Array]:
        moved = redistribute(arrays, *args, **options)
        brought.extend(array.shape for array, other in zip(arrays, moved, strict=True) if other is not array)
        return moved

    monkeypatch.setattr(array_batch, "redistribute", noted)
    check_equal(make(TensorUpdate(config, mesh, jnp.float32), None, given), expected)
    assert not brought
    monkeypatch.setattr(array_programs, "_LARGE_BYTES", 0)
    check_equal(make(TensorUpdate(config, mesh, jnp.float32), None, given), expected)
    assert {shape for shape in brought if len(shape) == 3} >= {tensors[name].shape for name in tensors if "down_proj" in name}


class Move(NamedTuple):
    """Of an array to our devices."""

    num_axes: int
    is_whole: bool  # on each of them
    live_bytes: int  # when those that come with it have come


def noted_moves(monkeypatch: pytest.MonkeyPatch) -> list[Move]:
    found: list[Move] = []

    def noted(*args: Any, **options: Any) -> list[jax.Array]:
        moved = redistribute(*args, **options)
        found.extend(Move(array.ndim, array.is_fully_replicated, live_bytes()) for array in moved)
        return moved

    monkeypatch.setattr(array_batch, "redistribute", noted)
    return found


def test_what_trainers_have_whole_does_not_come_whole(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 4)
    config = ModelConfig.from_pretrained(folder)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    whole = NamedSharding(trainer_mesh(4, 4), PartitionSpec())
    given = {name: GivenTensor(jax.device_put(array, whole)) for name, array in tensors_of(folder).items()}
    moves = noted_moves(monkeypatch)
    for large_bytes, are_whole in ((1 << 20, {True}), (0, {False})):
        monkeypatch.setattr(array_programs, "_LARGE_BYTES", large_bytes)
        check_equal(make(TensorUpdate(config, mesh, jnp.float32), None, given), expected)
        assert {move.is_whole for move in moves if move.num_axes == 2} == are_whole
        moves.clear()


def test_no_more_comes_at_once_than_the_largest_array_has(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 2)
    update = TensorUpdate(ModelConfig.from_pretrained(folder), mesh, jnp.float32)
    given = of_trainer(tensors_of(folder), trainer_mesh(4, 2))
    params = make(update, None, given)
    before, moves = live_bytes(), noted_moves(monkeypatch)
    params = make(update, params, given)
    assert live_bytes() == before and len(moves) == len(given)
    most = max(array.nbytes for array in jax.tree.leaves(params))
    assert most / 2 < max(move.live_bytes for move in moves) - before <= most


def one_by_one(config: ModelConfig, tensors: Tensors) -> Tensors:
    return tensors if any(".experts.0." in name for name in tensors) else restacked(config, tensors)


def test_stages_take_their_parts(checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint("gemma2"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder)
    given = of_trainer(tensors_of(folder), trainer_mesh(0, 2))
    for stage in divide_layers(config.num_layers, 2):
        part = config.replace(stage=stage)
        expected = load_params(folder, part, mesh, jnp.float32, progress=False)
        check_equal(make(TensorUpdate(part, mesh, jnp.float32), None, given), expected)


def test_arrays_of_numpy_and_prefixes_of_other_models(checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    tensors = tensors_of(folder)
    given = {name.replace("model.", "model.language_model.", 1): GivenTensor(array) for name, array in tensors.items()}
    given["model.layers.0.self_attn.rotary_emb.inv_freq"] = GivenTensor(np.zeros(8, np.float32))
    params = make(TensorUpdate(config, mesh, jnp.float32), None, given)
    for array in tensors.values():
        array.fill(0)
    check_equal(params, expected)


@pytest.mark.parametrize("kind", ["explicit", "on_host"])
@pytest.mark.parametrize("first", [0, 4])
def test_meshes_of_explicit_types_and_memory_of_the_host(first: int, kind: str, checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 4)
    config = ModelConfig.from_pretrained(folder)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    of = trainer_mesh(first, 2, 2)
    given = of_trainer(tensors_of(folder), of)
    explicit = Mesh(of.devices, of.axis_names, axis_types=(AxisType.Explicit,) * 2)
    for name, tensor in given.items():
        sharding: Any = tensor.array.sharding  # type: ignore[union-attr]
        if kind == "explicit":
            other = NamedSharding(explicit, sharding.spec)
        else:
            other = sharding.with_memory_kind("pinned_host")
        given[name] = GivenTensor(jax.device_put(tensor.array, other), tensor.compute)
    check_equal(make(TensorUpdate(config, mesh, jnp.float32), None, given), expected)


def test_layers_in_one_array(checkpoint: CheckpointOf) -> None:
    """As a scan over layers has them."""
    folder, mesh = checkpoint("llama"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder)
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    tensors = tensors_of(folder)
    given = {name: GivenTensor(array) for name, array in tensors.items() if ".layers." not in name}
    for name in [name.removeprefix("model.layers.0.") for name in tensors if name.startswith("model.layers.0.")]:
        layers = [f"model.layers.{layer}.{name}" for layer in range(config.num_layers)]
        stack = divided(np.stack([tensors[layer] for layer in layers]), trainer_mesh(0, 2))
        given |= {layer: GivenTensor(stack, index=(number,)) for number, layer in enumerate(layers)}
    check_equal(make(TensorUpdate(config, mesh, jnp.float32), None, given), expected)


def test_some_tensors(checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder)
    update, tensors = TensorUpdate(config, mesh, jnp.float32), tensors_of(folder)
    params = make(update, None, of_trainer(tensors, trainer_mesh(0, 2)))
    kept = params["layers"][1]["mlp"]["down"].matrix
    changed = tensors[DOWN_PROJ] + 1
    params = make(update, params, of_trainer({DOWN_PROJ: changed}, trainer_mesh(4, 2)), partial=True)
    np.testing.assert_array_equal(params["layers"][0]["mlp"]["down"].matrix, changed.T)
    assert params["layers"][1]["mlp"]["down"].matrix is kept
    with pytest.raises(ValueError, match=r"Missing tensors: .* and \d+ more"):
        check([update], of_trainer({DOWN_PROJ: changed}, trainer_mesh(4, 2)), partial=False)


@pytest.mark.parametrize("of", [trainer_mesh(0, 2), trainer_mesh(0, 1), trainer_mesh(4, 2), BACKWARDS])
def test_what_is_kept_is_not_the_trainers(of: Mesh, checkpoint: CheckpointOf) -> None:
    """Even where nothing has to be done to an array, in float32 and divided as it should be."""
    folder, mesh = checkpoint("llama"), mesh_of(1, of.size)
    config = ModelConfig.from_pretrained(folder)
    update, given = TensorUpdate(config, mesh, jnp.float32), of_trainer(tensors_of(folder), of)
    given[DOWN_PROJ] = GivenTensor(
        jax.device_put(given[DOWN_PROJ].array, NamedSharding(of, PartitionSpec(of.axis_names[0]))), jnp.transpose
    )
    params = make(update, None, given)
    for _ in range(2):
        theirs = {buffer for tensor in given.values() for buffer in buffers(tensor.array)}
        ours = [buffer for leaf in jax.tree.leaves(params) for buffer in buffers(leaf)]
        assert not theirs.intersection(ours) and len(set(ours)) == len(ours)
        params = make(update, params, given)


def buffers(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_layers_share_programs_and_old_arrays_go_as_new_ones_come(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder)
    update, given = TensorUpdate(config, mesh, jnp.float32), of_trainer(tensors_of(folder), trainer_mesh(0, 2))
    with compiling(8):  # embedding, norm, qkv, o, gate_up, down, head, and one to spare
        params = make(update, None, given)
    params = make(update, params, given)
    before, most, make_some = live_bytes(), 0, array_batch.make_all

    def noted(makings: Sequence[array_batch.Making]) -> list[jax.Array]:
        nonlocal most
        made = make_some(makings)
        most = max(most, live_bytes())
        return made

    monkeypatch.setattr(array_batch, "make_all", noted)
    params = make(update, params, given)
    assert most == live_bytes() == before


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_failure_on_the_way_leaves_nothing(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mesh = checkpoint("llama"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder)
    update, given = TensorUpdate(config, mesh, jnp.float32), of_trainer(tensors_of(folder), trainer_mesh(0, 2))
    params = make(update, None, given)
    delete({Q_PROJ: given[Q_PROJ]})
    with pytest.raises(RuntimeError, match="deleted"):
        update.apply(params, given)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_all_that_is_wrong_is_said_at_once(checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    update = TensorUpdate(ModelConfig.from_pretrained(folder), mesh_of(1, 2), jnp.float32)
    given = {name: GivenTensor(array) for name, array in tensors_of(folder).items()}
    gone = jnp.ones(64)
    gone.delete()
    given["model.norm.weight"] = GivenTensor(gone)
    given |= {f"model.layers.{layer}.vision.weight": GivenTensor(np.zeros(2, np.float32)) for layer in range(5)}
    given[DOWN_PROJ] = GivenTensor(given[DOWN_PROJ].array, jnp.transpose)
    given[Q_PROJ] = GivenTensor(given[Q_PROJ].array, lambda kernel: kernel.reshape(7, -1))
    given["layers.0.self_attn.o_proj.weight"] = given["model.layers.0.self_attn.o_proj.weight"]
    given["model.layers.1.input_layernorm.weight"] = GivenTensor(np.zeros(64, np.int32))
    del given["lm_head.weight"]
    with pytest.raises(ValueError, match="The model has no tensors") as error:
        check([update], given, partial=False)
    for part in (
        "The model has no tensors of these names: model.layers.0.vision.weight, model.layers.1.vision.weight, "
        "model.layers.2.vision.weight and 2 more.",
        "Given twice, under several names: model.layers.0.self_attn.o_proj.weight.",
        "Deleted arrays, as donated ones are: model.norm.weight.",
        "Types that are none of float64, float32, float16, bfloat16: model.layers.1.input_layernorm.weight is int32.",
        f"{DOWN_PROJ} is [96, 64], but config.json asks for [64, 96]",
        f"{Q_PROJ} cannot be computed from [64, 64] (",
        "Missing tensors: lm_head.weight.",
    ):
        assert part in str(error.value)


def test_parts_of_what_is_stored_as_one(checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    update = TensorUpdate(ModelConfig.from_pretrained(folder), mesh_of(1, 1), jnp.float32)
    given = {Q_PROJ: GivenTensor(tensors_of(folder)[Q_PROJ])}
    prefix = Q_PROJ.removesuffix("q_proj.weight")
    says = f"Stored as one and given in part: {Q_PROJ} is given without {prefix}k_proj.weight, {prefix}v_proj.weight."
    with pytest.raises(ValueError, match=re.escape(says)):
        check([update], given, partial=True)
    with pytest.raises(ValueError, match="No tensors are given"):
        check([update], {}, partial=True)


def test_experts_given_both_ways(checkpoint: CheckpointOf) -> None:
    folder = checkpoint("mixtral")
    config = ModelConfig.from_pretrained(folder)
    tensors = tensors_of(folder)
    given = {name: GivenTensor(array) for name, array in (tensors | restacked(config, tensors)).items()}
    with pytest.raises(ValueError, match="Experts that are given one by one as well: "):
        check([TensorUpdate(config, mesh_of(1, 1), jnp.float32)], given, partial=False)
    one = next(name for name in given if ".experts.1." in name)
    with pytest.raises(ValueError, match=r"experts.* is given without .* and \d+ more"):
        check([TensorUpdate(config, mesh_of(1, 1), jnp.float32)], {one: given[one]}, partial=True)


def test_a_head_that_is_tied_is_passed_over(checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint("gemma2"), mesh_of(1, 2)
    config = ModelConfig.from_pretrained(folder)
    assert config.tie_word_embeddings
    given = {name: GivenTensor(array) for name, array in tensors_of(folder).items()}
    given["lm_head.weight"] = given["model.embed_tokens.weight"]
    expected = load_params(folder, config, mesh, jnp.float32, progress=False)
    check_equal(make(TensorUpdate(config, mesh, jnp.float32), None, given), expected)
