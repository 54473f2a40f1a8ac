"""The same in tunix: its GRPO learner, with jaxserve for the rollouts: `python examples/grpo_tunix.py [--batches 32]`.

A tiny Qwen3 of tunix', made from nothing, learns to answer with even digits. The trainer holds one half of the devices, the
engine the other, or with --same-devices both hold all. After each step tunix hands the actor's weights to the engine, device to
device. Needs `pip install 'jaxserve[tunix]'`. Without an accelerator eight parts of the CPU stand for devices.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import tempfile
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxserve.integrations.tunix import JaxserveRollout

PAD, BEGIN, END, FIRST_DIGIT, VOCAB = 0, 1, 2, 3, 16
PROMPTS, PROMPT_LEN, SAMPLES, ANSWER_LEN = 8, 4, 8, 8  # of a batch; lengths in tokens
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": False, "eos_token_id": END,
}  # fmt: skip
ROWS = PROMPTS * SAMPLES
ENGINE = {"max_running_requests": ROWS, "decode_row_buckets": (ROWS,), "prefill_token_buckets": (512,)}  # little to compile


class Digits:
    """A tokenizer as tunix asks one."""

    def encode(self, text: str) -> list[int]:
        return [FIRST_DIGIT + int(digit) for digit in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(str(token - FIRST_DIGIT) if FIRST_DIGIT <= token < FIRST_DIGIT + 10 else "?" for token in ids)

    def pad_id(self) -> int:
        return PAD

    def bos_id(self) -> int:
        return BEGIN

    def eos_id(self) -> int:
        return END


def make_actor(mesh: Mesh) -> nnx.Module:
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=VOCAB, embed_dim=64, hidden_dim=96, num_heads=8, head_dim=16, num_kv_heads=4,
        rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=False,
    )  # fmt: skip
    graph, state = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(state))
    return nnx.merge(graph, jax.device_put(state, shardings))


def make_meshes(same_devices: bool) -> tuple[Mesh, Mesh]:
    """The trainer's and the engine's."""
    devices = np.array(jax.devices())
    if same_devices or len(devices) == 1:
        mesh = Mesh(devices.reshape(-1, min(2, len(devices))), ("fsdp", "tp"))
        return mesh, mesh
    trainers, engines = np.split(devices[: len(devices) // 2 * 2], 2)
    return Mesh(trainers.reshape(-1, 1), ("fsdp", "tp")), Mesh(engines[:2].reshape(1, -1), ("fsdp", "tp"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--same-devices", action="store_true")
    args = parser.parse_args()
    trainers, engines = make_meshes(args.same_devices)
    rollout = RolloutConfig(
        max_tokens_to_generate=ANSWER_LEN, max_prompt_length=PROMPT_LEN, kv_cache_size=32, temperature=1.0, return_logprobs=True
    )
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(3e-3), eval_every_n_steps=10**6, max_steps=args.batches, mini_batch_size=PROMPTS,
        train_micro_batch_size=PROMPTS,
    )  # fmt: skip
    began_s, rewards = time.monotonic(), list[float]()

    def reward(prompts: list[str], completions: list[str], **others: Any) -> list[float]:
        of_each = [sum(digit in "02468" for digit in text) / ANSWER_LEN for text in completions]
        rewards.append(float(np.mean(of_each)))
        print(f"batch {len(rewards):3}: reward {rewards[-1]:.3f}, {time.monotonic() - began_s:.1f} s", flush=True)
        return of_each

    rng = np.random.default_rng(0)
    batches = [
        {"prompts": np.array(["".join(map(str, row)) for row in rng.integers(10, size=(PROMPTS, PROMPT_LEN))])}
        for _ in range(args.batches)
    ]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(CONFIG))
        cluster = rl_cluster.RLCluster(
            actor=make_actor(trainers),
            tokenizer=Digits(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh={
                    rl_cluster.Role.ACTOR: trainers,
                    rl_cluster.Role.REFERENCE: trainers,
                    rl_cluster.Role.ROLLOUT: engines,
                },
                rollout_engine=functools.partial(JaxserveRollout, model_path=folder, **ENGINE),
                training_config=training,
                rollout_config=rollout,
            ),
        )
        GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, num_iterations=1, beta=0.0), reward).train(batches)
        cluster.rollout.shutdown()
    print(f"reward of the first batch {rewards[0]:.3f}, of the last {rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
