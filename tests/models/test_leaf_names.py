"""Trees of other programs, by names, and their names as those of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models.leaf_names import hugging_face_names, named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any = None


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.head = nnx.Linear(4, 6, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


NAMES = ["head.bias", "head.kernel", "layers.0.kernel", "layers.1.kernel"]


def test_names_of_leaves() -> None:
    tree = {"layers": [Layer(jnp.ones(2)), Layer(jnp.ones(2), np.ones(3))], "model.norm": jnp.ones(1), "": (jnp.ones(1),)}
    assert sorted(named_leaves(tree)) == ["0", "layers.0.w", "layers.1.b", "layers.1.w", "model.norm"]
    assert named_leaves({}) == {}


@pytest.mark.parametrize("kind", ["module", "state", "pure"])
def test_names_in_flax(kind: str) -> None:
    model = Model()
    state = nnx.state(model, nnx.Param)
    tree = {"module": model, "state": state, "pure": nnx.to_pure_dict(state)}[kind]
    assert sorted(named_leaves(tree)) == NAMES
    assert sorted(named_leaves({"actor": tree})) == [f"actor.{name}" for name in NAMES]
    assert all(isinstance(leaf, jax.Array) for leaf in named_leaves(tree).values())


def test_what_is_no_array_is_named() -> None:
    with pytest.raises(ValueError, match=r"Weights must be a tree of arrays: a\.b is a float, c is a str\."):
        named_leaves({"a": {"b": 1.0}, "c": "x", "d": jnp.ones(1)})
    with pytest.raises(ValueError, match=r"the tree is a int"):
        named_leaves(3)
    with pytest.raises(ValueError, match=r"two leaves are called a\.b"):
        named_leaves({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def tensors(leaves: dict[str, Any], mapping: Any) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Tensor -> the first element of its array, and its place in it."""
    given = hugging_face_names(leaves, mapping)
    return {name: (float(tensor.array.ravel()[0]), tensor.index) for name, tensor in given.items()}


def test_names_are_mapped_by_numbers() -> None:
    leaves = {f"layers.{layer}.attn.q.w": np.full((2, 3), layer) for layer in (0, 11)} | {"embed.w": np.zeros((5, 2))}
    mapping: Any = {
        "layers.*.attn.q.w": ("model.layers.*.self_attn.q_proj.weight", jnp.transpose),
        "embed.w": "model.embed_tokens.weight",
    }
    assert tensors(leaves, mapping) == {
        "model.layers.0.self_attn.q_proj.weight": (0, ()),
        "model.layers.11.self_attn.q_proj.weight": (11, ()),
        "model.embed_tokens.weight": (0, ()),
    }
    given = hugging_face_names(leaves, mapping)
    assert given["model.layers.11.self_attn.q_proj.weight"].compute is jnp.transpose
    assert given["model.embed_tokens.weight"].compute is None
    assert tensors(leaves, None) == {name: (array.ravel()[0], ()) for name, array in leaves.items()}


def test_layers_and_experts_in_one_array() -> None:
    leaves = {"scan.q": np.ones((3, 2)), "experts.7.w": np.ones((2, 4, 4)), "all.w": np.ones((2, 1, 4))}
    mapping = {"scan.q": "l.*.q", "experts.*.w": ("l.*.e.*.w", jnp.transpose), "all.w": "l.*.f.*.w"}
    assert tensors(leaves, mapping) == {
        **{f"l.{layer}.q": (1, (layer,)) for layer in range(3)},
        **{f"l.7.e.{expert}.w": (1, (expert,)) for expert in range(2)},
        **{f"l.{layer}.f.0.w": (1, (layer, 0)) for layer in range(2)},
    }


def test_several_tensors_of_one_array_and_arrays_that_are_passed_over() -> None:
    mapping = {"kv": [("k", lambda kv: kv[0]), ("v", lambda kv: kv[1])], "lora.*": None}
    assert tensors({"kv": np.ones((2, 4)), "lora.0": np.ones(1)}, mapping) == {"k": (1, ()), "v": (1, ())}


def test_a_function_as_mapping() -> None:
    def mapped(name: str) -> Any:
        return None if name == "step" else ("model." + name, jnp.transpose)

    assert tensors({"step": np.ones(1), "norm": np.ones(2)}, mapped) == {"model.norm": (1, ())}


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"b": "x"}, "The mapping does not know: a. The mapping has entries that no array is called like: b."),
        ({"a": "x", "layers.*.w": "y.*"}, "no array is called like: layers.*.w."),
        ({"a": ["x", "x"]}, "Several arrays are mapped to one tensor: x."),
        ({"a": ("x", ("fsdp", None))}, "The mapping of a must be a name, or a name and a function"),
        ({"a": 3}, "The mapping of a must be a name, or a name and a function; got 3."),
        ({"a": "x.*.*.*"}, "a must have 3 axes to stack tensors along; got the shape [2, 1]."),
    ],
)
def test_what_is_wrong_with_a_mapping_is_said(mapping: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        hugging_face_names({"a": np.ones((2, 1))}, mapping)
    assert says in str(error.value)


def test_more_numbers_than_the_tensor_takes() -> None:
    with pytest.raises(ValueError, match=r"The mapping of a\.1\.2 must have a place for each of its 2 numbers; got b\.\*\."):
        hugging_face_names({"a.1.2": np.ones(1)}, {"a.*.*": "b.*"})
