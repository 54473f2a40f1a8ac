"""Rollouts for tunix, where it is installed: its models compute the logprobs that the engine drew with, and its GRPO learns."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

pytest.importorskip("tunix")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import optax
    import qwix
    from flax import nnx
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common, rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from jaxserve.integrations.tunix import JaxserveRollout, _sizes

pytestmark = pytest.mark.filterwarnings("ignore")  # tunix' own

AXES = ("fsdp", "tp")
ROLLOUT = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32, temperature=0.7, return_logprobs=True)
PROMPTS = ["1234", "98", "5", "1234"]
COMMON: dict[str, Any] = {"num_layers": 2, "embed_dim": 64, "hidden_dim": 96, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
LLAMA: dict[str, Any] = {**COMMON, "vocab_size": 16, "rope_theta": 1_000_000, "norm_eps": 1e-6}  # they know no other theta
CONFIG: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
GLOBAL = (gemma.AttentionType.GLOBAL, gemma.AttentionType.GLOBAL)  # tunix' window of Gemma 2 begins elsewhere behind padding
GEMMA_2 = {
    "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "layer_types": ["full_attention", "full_attention"],
    "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e4,
}  # fmt: skip
GEMMA_3 = {
    "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 4, "rope_local_base_freq": 10000.0,
    "layer_types": ["sliding_attention", "sliding_attention"], "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


# Few programs: what a test needs.
SHAPES: dict[str, Any] = {"max_running_requests": 64, "decode_row_buckets": (64,), "prefill_token_buckets": (512,)}


class Digits:
    """A tokenizer: 0 pads, 1 begins, 2 ends, 3 to 12 are digits."""

    def encode(self, text: str) -> list[int]:
        return [3 + int(digit) for digit in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(str(token - 3) if 3 <= token < 13 else "?" for token in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def drawn_anew(model: nnx.Module, mesh: Mesh) -> nnx.Module:
    """On a mesh, with every array random: tunix begins with MLPs of zeros."""
    graph, state = nnx.split(model)
    arrays, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(arrays))
    new = [
        0.2 * jax.random.normal(key, array.shape, array.dtype) + (array.ndim == 1)
        for key, array in zip(keys, arrays, strict=True)
    ]
    specs = nnx.get_partition_spec(state)
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    return nnx.merge(graph, jax.device_put(jax.tree.unflatten(tree, new), shardings))


CASES = {
    "llama": (llama3.Llama3, llama3.ModelConfig(**LLAMA), {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
    "qwen2": (qwen2.Qwen2, qwen2.ModelConfig(**LLAMA), {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
    "qwen3": (
        qwen3.Qwen3, qwen3.ModelConfig(**LLAMA, use_tied_embedding=True),
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    ),
    "qwen3-moe": (
        qwen3.Qwen3, qwen3.ModelConfig(**LLAMA, num_experts=4, num_experts_per_tok=2),
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **MOE},
    ),
    "gemma2": (
        gemma.Gemma, gemma.ModelConfig(
            **COMMON, num_embed=16, final_logit_softcap=3.0, attn_logits_soft_cap=5.0, attention_types=GLOBAL,
            use_post_attn_norm=True, use_post_ffw_norm=True,
        ),
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **GEMMA_2},
    ),
    "gemma3": (
        gemma3.Gemma3, gemma3.ModelConfig(**COMMON, num_embed=16, sliding_window_size=4, param_dtype=jnp.float32),
        {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **GEMMA_3},
    ),
}  # fmt: skip


def meshes() -> tuple[Mesh, Mesh]:
    """The trainer's, and the engine's, of another shape."""
    devices = np.array(jax.devices())
    return Mesh(devices[:4].reshape(2, 2), AXES), Mesh(devices[4:].reshape(1, 4), AXES)


def folder_of(config: dict[str, Any], folder: pathlib.Path) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


@pytest.fixture(params=CASES)
def actor_and_rollout(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[tuple[nnx.Module, JaxserveRollout]]:
    module, config, theirs = CASES[request.param]
    trainers, engines = meshes()
    actor = drawn_anew(module(config, rngs=nnx.Rngs(0)), trainers)
    rollout = JaxserveRollout(
        rollout_actor=actor,
        tokenizer=Digits(),
        mesh=engines,
        rollout_config=ROLLOUT,
        model_path=folder_of(theirs, tmp_path),
        **SHAPES,
    )
    yield actor, rollout
    rollout.shutdown()


def padded(rows: list[np.ndarray]) -> np.ndarray:
    return np.array([np.pad(row, (0, ROLLOUT.max_tokens_to_generate - len(row))) for row in rows])


def assert_alike(actor: nnx.Module, rollout: JaxserveRollout) -> None:
    """To the actor, what the engine draws is as likely as it says."""
    drawn = rollout.generate(PROMPTS, ROLLOUT)
    prompts, samples, logprobs = drawn.left_padded_prompt_tokens, padded(drawn.tokens), padded(drawn.logprobs)
    np.testing.assert_array_equal(rollout.get_per_token_logps(jnp.array(prompts), jnp.array(samples)), logprobs)
    told = common.compute_per_token_logps(
        *nnx.split(actor), jnp.array(prompts), jnp.array(samples), rollout.pad_id(), rollout.eos_id(),
        temperature=ROLLOUT.temperature,
    )  # fmt: skip
    mask = np.cumsum(samples == rollout.pad_id(), axis=1) == 0  # tunix does not attend to pad_id, were it drawn
    np.testing.assert_allclose(np.where(mask, logprobs, 0), np.where(mask, told, 0), atol=2e-4)


def test_the_engine_draws_from_the_actor(actor_and_rollout: tuple[nnx.Module, JaxserveRollout]) -> None:
    actor, rollout = actor_and_rollout
    assert_alike(actor, rollout)
    state = jax.tree.map(lambda array: 1.3 * array, nnx.state(actor, nnx.Param))
    nnx.update(actor, state)
    with jax.transfer_guard("disallow_explicit"):  # as tunix does
        rollout.update_params(nnx.state(actor, nnx.Param), (nnx.Param,))
    assert_alike(actor, rollout)


@pytest.mark.parametrize("actor_and_rollout", ["llama"], indirect=True)
def test_what_is_asked_for(actor_and_rollout: tuple[nnx.Module, JaxserveRollout]) -> None:
    _, rollout = actor_and_rollout
    drawn = rollout.sampler(["12", "3"], 8, temperature=1.0, multi_sampling=3, seed=jax.random.key(7))
    again = rollout.sampler(["12", "3"], 8, temperature=1.0, multi_sampling=3, seed=jax.random.key(7))
    assert [row.tolist() for row in drawn.tokens] == [row.tolist() for row in again.tokens]
    assert drawn.padded_prompt_tokens.tolist() == [[1, 4, 5], [0, 1, 6]]
    same = rollout.generate(["12"] * 16, dataclasses.replace(ROLLOUT, seed=7, return_logprobs=False))
    assert len(set(same.text)) > 1 and same.logprobs is None  # each has a seed of its own
    assert rollout.sampler("12", 8, max_prompt_length=2).padded_prompt_tokens.shape == (1, 4)
    ended = rollout.sampler(["12"], 8, stop_token_ids=list(range(16)))
    assert len(ended.tokens[0]) == 1 and ended.text == [""]  # what ended it is a token, but no text
    for name in ("beam_size", "echo", "return_logits", "pad_output"):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            rollout.sampler("12", 8, **{name: 1})
    with pytest.raises(ValueError, match="one is not"):
        rollout.get_per_token_logps(jnp.array([[1, 4, 5]]), jnp.array([[3, 3, 3, 3]]))


def test_sizes() -> None:
    mesh = meshes()[1]
    asked = {
        (tp, dp): _sizes(RolloutConfig(tensor_parallel_size=tp, data_parallel_size=dp), mesh)
        for tp in (-1, 2)
        for dp in (-1, 2)
    }
    assert {key: (sizes["tp_size"], sizes["dp_size"]) for key, sizes in asked.items()} == {
        (-1, -1): (4, 1), (-1, 2): (2, 2), (2, -1): (2, 2), (2, 2): (2, 2),
    }  # fmt: skip
    assert _sizes(RolloutConfig(data_type=jnp.bfloat16, expert_parallel_size=2), mesh) == {
        "tp_size": 4, "dp_size": 1, "ep_size": 2, "dtype": "bfloat16",
    }  # fmt: skip


def test_lora_is_added_to_the_weights(tmp_path: pathlib.Path) -> None:
    module, config, theirs = CASES["qwen3"]
    trainers, engines = meshes()
    plain = drawn_anew(module(config, rngs=nnx.Rngs(0)), trainers)
    provider = qwix.LoraProvider(module_path=".*q_proj|.*o_proj|.*gate_proj", rank=2, alpha=4.0)
    actor = qwix.apply_lora_to_model(plain, provider, **plain.get_model_input(), rngs=nnx.Rngs(1))
    make = functools.partial(JaxserveRollout, rollout_actor=actor, tokenizer=Digits(), mesh=engines, rollout_config=ROLLOUT)
    folder = folder_of(theirs, tmp_path)
    rollout = make(model_path=folder, lora_scaling=2.0, **SHAPES)
    lora = jax.tree.map(lambda array: array + 0.2, nnx.state(actor, nnx.LoRAParam))
    nnx.update(actor, lora)
    with jax.transfer_guard("disallow_explicit"):
        rollout.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
    assert_alike(actor, rollout)
    rollout.shutdown()
    with pytest.raises(ValueError, match="needs lora_scaling"):
        make(model_path=folder, **SHAPES)


@pytest.mark.parametrize("is_shared", [False, True], ids=["two-meshes", "one-mesh"])
def test_grpo_learns(tmp_path: pathlib.Path, is_shared: bool) -> None:
    """Two iterations over each batch, so that logprobs of the samples are asked for."""
    module, config, theirs = CASES["qwen3"]
    trainers, engines = meshes()
    actor, steps = drawn_anew(module(config, rngs=nnx.Rngs(0)), trainers), 16
    rollout_mesh = trainers if is_shared else engines
    roles = {rl_cluster.Role.ACTOR: trainers, rl_cluster.Role.REFERENCE: trainers, rl_cluster.Role.ROLLOUT: rollout_mesh}
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(3e-3),
        eval_every_n_steps=1000,
        max_steps=2 * steps,
        mini_batch_size=8,
        train_micro_batch_size=8,
    )
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=Digits(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=roles,
            rollout_engine=functools.partial(JaxserveRollout, model_path=folder_of(theirs, tmp_path), **SHAPES),
            training_config=training,
            rollout_config=ROLLOUT,
        ),
    )
    rewards: list[float] = []

    def reward(prompts: list[str], completions: list[str], **others: Any) -> list[float]:
        of_each = [sum(digit in "02468" for digit in text) / ROLLOUT.max_tokens_to_generate for text in completions]
        rewards.append(float(np.mean(of_each)))
        return of_each

    rng = np.random.default_rng(0)
    batches = [{"prompts": np.array(["".join(map(str, row)) for row in rng.integers(10, size=(8, 4))])} for _ in range(steps)]
    GRPOLearner(cluster, GRPOConfig(num_generations=8, num_iterations=2, beta=0.0), reward).train(batches)
    cluster.rollout.shutdown()
    assert np.mean(rewards[:2]) < 0.5 < 0.8 < np.mean(rewards[-2:]), rewards
