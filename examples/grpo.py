"""Reinforcement learning (GRPO) in one process: `python examples/grpo.py [--steps 200] [--same-devices]`.

A tiny Llama, made from nothing, learns to answer a number with digits that are all as even, or as odd, as its last one. The
trainer holds one half of the devices and the engine the other, or both hold all. Weights go from device to device, under their
Hugging Face names: no file, no copy on the host, nothing compiled again. Without an accelerator eight parts of the CPU stand
for devices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve import Engine
from jaxserve.server.rollouts import Rollouts

Tree = dict[str, jax.Array]  # by Hugging Face name: the weights, or something for each of them

DIGITS, VOCAB, HIDDEN, MLP, LAYERS, HEADS, THETA, EPS = 10, 16, 64, 128, 2, 8, 10000.0, 1e-6
PROMPTS, SAMPLES, PROMPT_LEN, ANSWER_LEN = 16, 8, 4, 8  # of one step; lengths in tokens
ANSWERS, CONTEXT_LEN = PROMPTS * SAMPLES, 64
SAMPLING = {"temperature": 1.0, "max_new_tokens": ANSWER_LEN}
CLIP, LEARNING_RATE, BETAS, SHOWN_STEPS = 0.2, 3e-3, (0.9, 0.99), 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "rope_theta": THETA, "rms_norm_eps": EPS, "max_position_embeddings": CONTEXT_LEN, "tie_word_embeddings": False,
    "eos_token_id": DIGITS,
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "random_seed": 0,
    # A KV cache for all answers at once; the rest of the memory is the trainer's. Few shapes: less to compile, a quick start.
    "max_total_tokens": ANSWERS * CONTEXT_LEN, "max_running_requests": ANSWERS, "decode_row_buckets": (ANSWERS,),
    "prefill_token_buckets": (ANSWERS * PROMPT_LEN,),
}  # fmt: skip


def init_params(key: jax.Array) -> Tree:
    """Matrices are [out, in], as checkpoints hold them."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (MLP, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, MLP)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (HIDDEN,)
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) * shape[1] ** -0.5 if len(shape) == 2 else jnp.ones(shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def rotate(x: jax.Array) -> jax.Array:
    """x [N, T, H, D] turned by positions 0..T-1."""
    left, right = jnp.split(x, 2, axis=-1)
    angles = jnp.arange(x.shape[1])[:, None, None] * THETA ** -jnp.linspace(0, 1, left.shape[-1], endpoint=False)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def forward(params: Tree, tokens: jax.Array) -> jax.Array:
    """Logits [N, T, V] of tokens [N, T]."""
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        of = {name.removeprefix(prefix): weight for name, weight in params.items() if name.startswith(prefix)}
        normed = rms_norm(x, of["input_layernorm.weight"])
        q, k, v = ((normed @ of[f"self_attn.{name}_proj.weight"].T).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ of["self_attn.o_proj.weight"].T
        normed = rms_norm(x, of["post_attention_layernorm.weight"])
        gated = jax.nn.silu(normed @ of["mlp.gate_proj.weight"].T) * (normed @ of["mlp.up_proj.weight"].T)
        x = x + gated @ of["mlp.down_proj.weight"].T
    return rms_norm(x, params["model.norm.weight"]) @ params["lm_head.weight"].T


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """The clipped policy gradient: of tokens [N, T], of which the answers are the last columns, with their logprobs as the
    engine drew them, mask and advantages [N, L]."""
    tokens, answers = batch["tokens"], batch["tokens"][:, PROMPT_LEN:]
    logits = forward(params, tokens[:, :-1])[:, PROMPT_LEN - 1 :]
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), answers[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(logprobs - batch["logprobs"])
    gain = jnp.minimum(ratio * batch["advantages"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * batch["advantages"])
    return -jnp.sum(gain * batch["mask"]) / jnp.sum(batch["mask"])


@jax.jit(donate_argnums=(0, 1, 2))
def train_step(params: Tree, first: Tree, second: Tree, step: jax.Array, batch: Tree) -> tuple[Tree, Tree, Tree]:
    """One step of Adam; `first` and `second` are its moments."""
    grads = jax.grad(loss_of)(params, batch)
    first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, grads)
    second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, grads)
    rate = LEARNING_RATE * jnp.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, first, second)
    return params, first, second


def rewards_of(drawn: Rollouts) -> np.ndarray:
    """Of each answer the share of its places that hold a digit of the right parity."""
    parity = drawn.prompt_tokens[:, -1:].repeat(SAMPLES, axis=0) % 2
    return ((drawn.tokens < DIGITS) & (drawn.tokens % 2 == parity) & drawn.mask).mean(axis=1)


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """[N, 1]: against the other answers to the same prompt."""
    groups = rewards.reshape(PROMPTS, SAMPLES)
    centered = groups - groups.mean(axis=1, keepdims=True)
    return (centered / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1, 1)


class Trainer:
    """The weights that are trained, Adam's moments, and the engine that draws answers with these weights."""

    def __init__(self, engine: Engine, mesh: Mesh) -> None:
        self.engine, self.step, self.rng = engine, 0, np.random.default_rng(0)
        self.spread = NamedSharding(mesh, PartitionSpec("fsdp"))  # weights by rows, batches by answers
        self.params = jax.device_put(init_params(jax.random.key(0)), self.spread)
        self.first, self.second = (jax.tree.map(jnp.zeros_like, self.params) for _ in range(2))
        self.hand_over()

    def generate(self) -> Rollouts:
        prompts = self.rng.integers(DIGITS, size=(PROMPTS, PROMPT_LEN))
        return self.engine.rollout(input_ids=list(prompts), sampling_params=SAMPLING, n=SAMPLES, max_len=ANSWER_LEN)

    def train(self, drawn: Rollouts) -> float:
        """Returns the mean reward."""
        self.step, rewards = self.step + 1, rewards_of(drawn)
        batch = {
            "tokens": drawn.sequences, "logprobs": drawn.logprobs, "mask": drawn.mask, "advantages": advantages_of(rewards),
        }  # fmt: skip
        state = self.params, self.first, self.second
        self.params, self.first, self.second = train_step(*state, self.step, jax.device_put(batch, self.spread))
        jax.block_until_ready(self.params)
        return float(rewards.mean())

    def hand_over(self) -> None:
        self.engine.update_weights(self.params, weight_version=f"{self.step}")


@contextlib.contextmanager
def started(*, same_devices: bool) -> Iterator[Trainer]:
    """Trainer and engine, each with one half of the devices, or both with all."""
    jax.config.update("jax_num_cpu_devices", 8)  # where the CPU is what there is
    devices = jax.devices()
    half = 0 if same_devices or len(devices) == 1 else len(devices) // 2
    mesh, engine_mesh = Mesh(devices[:half] or devices, ("fsdp",)), Mesh(devices[half:], ("tp",))
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(CONFIG))
        with Engine(folder, in_process=True, mesh=engine_mesh, **ENGINE) as engine:
            yield Trainer(engine, mesh)


def learn(trainer: Trainer, steps: int) -> None:
    took_s = np.zeros(3)
    for step in range(1, steps + 1):
        times_s = [time.perf_counter()]
        drawn = trainer.generate()
        times_s.append(time.perf_counter())
        reward = trainer.train(drawn)
        times_s.append(time.perf_counter())
        trainer.hand_over()
        took_s += np.diff([*times_s, time.perf_counter()])
        if step % SHOWN_STEPS == 0:
            shown = zip(("generate", "train", "hand over"), 1000 * took_s / SHOWN_STEPS, strict=True)
            times = ", ".join(f"{name} {took_ms:.1f} ms" for name, took_ms in shown)
            print(f"step {step}: reward {reward:.3f}; {times}", flush=True)
            took_s[:] = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--same-devices", action="store_true", help="Trainer and engine share all devices.")
    options = parser.parse_args()
    with started(same_devices=options.same_devices) as trainer:
        learn(trainer, options.steps)


if __name__ == "__main__":
    main()
