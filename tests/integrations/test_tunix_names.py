"""tunix' arrays in Hugging Face's names: every tensor of each family, made as a checkpoint holds it. Without tunix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.integrations.tunix_names import Part, is_lora, mapping_of, out_of_heads, with_lora
from jaxserve.models.leaf_names import hugging_face_names

D, N, K, H, F, V, E = 8, 4, 2, 6, 10, 12, 3  # hidden size, heads, key/value heads, size of one, MLP, vocabulary, experts


def made_of(leaves: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The tensors by name."""
    given = hugging_face_names(leaves, mapping_of(leaves))
    made = {name: jnp.asarray(of.element()) for name, of in given.items()}
    return {name: np.asarray(of.compute(made[name]) if of.compute else made[name]) for name, of in given.items()}


def array(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def llama_layer(prefix: str = "layers.1.") -> dict[str, jax.Array]:
    return {
        f"{prefix}attn.q_proj.w": array(D, N, H),
        f"{prefix}attn.k_proj.w": array(D, K, H),
        f"{prefix}attn.v_proj.w": array(D, K, H),
        f"{prefix}attn.o_proj.w": array(N, H, D),
        f"{prefix}mlp.gate_proj.kernel": array(D, F),
        f"{prefix}mlp.up_proj.kernel": array(D, F),
        f"{prefix}mlp.down_proj.kernel": array(F, D),
        f"{prefix}input_layernorm.w": array(D),
        f"{prefix}post_attention_layernorm.w": array(D),
    }


def test_llama() -> None:
    whole = {"embedder.input_embedding": array(V, D), "final_norm.w": array(D), "lm_head.w": array(D, V)}
    leaves = {**llama_layer(), **whole}
    made = made_of(leaves)
    attn, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert {name: of.shape for name, of in made.items()} == {
        "model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D),
        f"{attn}q_proj.weight": (N * H, D), f"{attn}k_proj.weight": (K * H, D), f"{attn}v_proj.weight": (K * H, D),
        f"{attn}o_proj.weight": (D, N * H), f"{mlp}gate_proj.weight": (F, D), f"{mlp}up_proj.weight": (F, D),
        f"{mlp}down_proj.weight": (D, F), "model.layers.1.input_layernorm.weight": (D,),
        "model.layers.1.post_attention_layernorm.weight": (D,),
    }  # fmt: skip
    x, heads = array(5, D), array(5, N, H)
    q = jnp.einsum("td,dnh->tnh", x, leaves["layers.1.attn.q_proj.w"]).reshape(5, -1)
    o = jnp.einsum("tnh,nhd->td", heads, leaves["layers.1.attn.o_proj.w"])
    np.testing.assert_allclose(x @ made[f"{attn}q_proj.weight"].T, q, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(heads.reshape(5, -1) @ made[f"{attn}o_proj.weight"].T, o, rtol=1e-5, atol=1e-5)


def test_qwen() -> None:
    names = {f"{x}_bias": (N * H,) for x in "qkv"} | {f"{x}_norm.w": (H,) for x in "qk"}
    made = made_of({f"layers.0.attn.{name}": array(*shape) for name, shape in names.items()})
    assert {name.removeprefix("model.layers.0.self_attn.") for name in made} == {
        "q_proj.bias", "k_proj.bias", "v_proj.bias", "q_norm.weight", "k_norm.weight",
    }  # fmt: skip


def test_experts() -> None:
    stacks = {name: array(E, *((F, D) if name == "down" else (D, F))) for name in ("gate", "up", "down")}
    leaves = {f"layers.0.mlp.{name}_proj": stack for name, stack in stacks.items()}
    made = made_of({**leaves, "layers.0.mlp.router.kernel": array(D, E)})
    assert made.pop("model.layers.0.mlp.gate.weight").shape == (E, D)
    assert len(made) == 3 * E
    for name, stack in stacks.items():
        for expert in range(E):
            np.testing.assert_array_equal(made[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"], stack[expert].T)


@pytest.mark.parametrize(("name", "heads"), [("kv_einsum", "kv"), ("qkv_einsum", "qkv")])
def test_gemma_stacks_its_heads(name: str, heads: str) -> None:
    stack = array(len(heads), K, D, H)
    made = made_of({f"layers.0.attn.{name}.w": stack})
    x = array(5, D)
    for head, weight in zip(heads, stack, strict=True):
        told = x @ made[f"model.layers.0.self_attn.{head}_proj.weight"].T
        np.testing.assert_allclose(told, jnp.einsum("td,ndh->tnh", x, weight).reshape(5, -1), rtol=1e-5, atol=1e-5)


def norms(*names: str) -> set[str]:
    made = made_of({f"layers.0.{name}.scale": array(D) for name in names})
    return {name.removeprefix("model.layers.0.").removesuffix(".weight") for name in made}


def test_norms_of_each_gemma() -> None:
    four = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
    assert norms("pre_attention_norm", "post_attn_norm", "pre_ffw_norm", "post_ffw_norm") == four
    assert norms("pre_attention_norm", "post_attention_norm", "pre_ffw_norm", "post_ffw_norm") == four


def test_what_is_not_known_is_named() -> None:
    leaves = {"embedder.input_embedding": array(V, D), "layers.0.vision.w": array(D)}
    with pytest.raises(ValueError, match=r"does not know: layers\.0\.vision\.w\."):
        made_of(leaves)


def test_layers_share_programs() -> None:
    assert Part(1, out_of_heads) == Part(1, out_of_heads) != Part(0, out_of_heads)
    assert len({Part(1, out_of_heads), Part(1, out_of_heads)}) == 1


@pytest.mark.parametrize("shape", [(D, N, H), (D, F)])
def test_lora_is_added(shape: tuple[int, ...]) -> None:
    weight, a, b = array(*shape), array(D, 2), array(2, *shape[1:])
    lora = {"layers.0.x.w_lora_a": a, "layers.0.x.w_lora_b": b}
    assert all(map(is_lora, lora)) and not is_lora("layers.0.x.w")
    merged = with_lora({"layers.0.x.w": weight, "other": b}, lora, 0.5)
    x = array(5, D)
    told = jnp.tensordot(x, merged["layers.0.x.w"], 1)
    np.testing.assert_allclose(told, jnp.tensordot(x, weight, 1) + 0.5 * jnp.tensordot(x @ a, b, 1), rtol=1e-4, atol=1e-5)
    assert merged["other"] is b


def test_lora_that_does_not_fit() -> None:
    lora = {"x.w_lora_a": array(D, 2), "x.w_lora_b": array(2, N, H)}
    with pytest.raises(
        ValueError, match=r"LoRA of x\.w \(4, 8, 6\) must keep the order of its axes; got \(8, 2\) and \(2, 4, 6\)"
    ):
        with_lora({"x.w": array(N, D, H)}, lora, 1.0)
    with pytest.raises(ValueError, match=r"x\.w_lora_a needs x\.w, which the model does not have"):
        with_lora({}, lora, 1.0)
