"""Generation for GRPO in tunix: its own sampler against `jaxserve.integrations.tunix`, with the same actor on the same devices.

    make tunix   # the environment, once
    .venv-tunix/bin/python -m benchmarks.tunix_generation [--prompts 64] [--samples 8] [--prompt-len 16] [--tokens 64]
        [--vocab 256] [--layers 2] [--rounds 5]

A Qwen3 of random weights over four parts of the CPU. Each token may be the one that ends a sample, so with a small --vocab
lengths vary as answers' do: with V tokens they are about V on average, few are several times as long. Both are called as
RLCluster calls them: every prompt is there as often as it has samples. Prints tokens per second of each call, in turns, medians
and the ratio within a round. The first call of each, which compiles, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout.base_rollout import BaseRollout, CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from jaxserve.integrations.tunix import JaxserveRollout

HIDDEN, MLP, HEADS, HEAD_DIM = 256, 768, 4, 64


class Bytes:
    """A tokenizer: letters, and three tokens of its own."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % (self.vocab_size - 3) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def make_actor(mesh: Mesh, layers: int, vocab_size: int) -> nnx.Module:
    config = qwen3.ModelConfig(
        num_layers=layers, vocab_size=vocab_size, embed_dim=HIDDEN, hidden_dim=MLP, num_heads=HEADS, head_dim=HEAD_DIM,
        num_kv_heads=HEADS, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    graph, state = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    specs = nnx.get_partition_spec(state)
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    return nnx.merge(graph, jax.device_put(state, shardings))


def write_config(folder: str, layers: int, vocab_size: int) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab_size, "hidden_size": HIDDEN,
        "intermediate_size": MLP, "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "max_position_embeddings": 4096, "eos_token_id": 2,
    }  # fmt: skip
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"prompts": 64, "samples": 8, "prompt-len": 16, "tokens": 64, "vocab": 256, "layers": 2, "rounds": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()).reshape(1, 4), ("fsdp", "tp"))
    actor, rows = make_actor(mesh, args.layers, args.vocab), args.prompts * args.samples
    config = RolloutConfig(
        max_tokens_to_generate=args.tokens, max_prompt_length=args.prompt_len, kv_cache_size=args.prompt_len + args.tokens,
        temperature=1.0, return_logprobs=True,
    )  # fmt: skip
    cache = CacheConfig(cache_size=config.kv_cache_size, num_layers=args.layers, num_kv_heads=HEADS, head_dim=HEAD_DIM)
    rng = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    prompts = ["".join(rng.choice(list(letters), args.prompt_len - 1)) for _ in range(args.prompts)]
    asked = [prompt for prompt in prompts for _ in range(args.samples)]
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, args.layers, args.vocab)
        tokenizer = Bytes(args.vocab)
        ours = JaxserveRollout(
            actor, tokenizer, mesh, config, model_path=folder, max_running_requests=rows,
            decode_row_buckets=tuple(rows >> halvings for halvings in (5, 4, 3, 2, 1, 0)),  # fewer and fewer go on
            max_total_tokens=rows * config.kv_cache_size + 4096,
        )  # fmt: skip
        rollouts: dict[str, BaseRollout] = {"tunix": VanillaRollout(actor, tokenizer, cache), "jaxserve": ours}
        runs: dict[str, list[float]] = {name: [] for name in rollouts}
        lengths: dict[str, list[int]] = {name: [] for name in rollouts}
        for round_number in range(-1, args.rounds):
            for name in rng.permutation(list(rollouts)).tolist():  # none has the quieter place in each round
                began_s = time.perf_counter()
                drawn = rollouts[name].generate(asked, config)
                speed = sum(map(len, drawn.tokens)) / (time.perf_counter() - began_s)
                print(f"round {round_number}: {name:10}{speed:10.0f} tokens/s", flush=True)
                if round_number >= 0:
                    runs[name].append(speed)
                    lengths[name] += map(len, drawn.tokens)
        ours.shutdown()
    print(f"\n{rows} samples of up to {args.tokens} tokens, {args.layers} layers, medians of {args.rounds} rounds")
    for name, values in runs.items():
        ratio = statistics.median(value / one for value, one in zip(values, runs["tunix"], strict=True))
        length = f"samples of {statistics.mean(lengths[name]):.1f} tokens on average, {max(lengths[name])} at most"
        print(f"{name:10}{statistics.median(values):10.0f} tokens/s{ratio:8.2f}   {length}")


if __name__ == "__main__":
    main()
