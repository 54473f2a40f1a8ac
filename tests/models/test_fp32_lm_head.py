"""--enable-fp32-lm-head: a bfloat16 model's logits against torch's float32 products of the same hidden states and matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import load_model
from dense_model import mesh_of
from jax.sharding import PartitionSpec

from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.weights import WeightLoader
from jaxserve.models import ModelConfig, abstract_params, build_decoder, load_params
from jaxserve.models.adapters.low_rank import LowRank
from jaxserve.models.arrays import ALL_AXES
from jaxserve.models.quantized_weight import int8_scales, int8_values

CheckpointOf = Callable[[str], Path]
NUM_LINES, RANK = 6, 4
WIDTHS = (1,)  # of one matrix: in one period
# Sums of 64 products, in whatever order; bfloat16 in between is off by a thousand times as much.
EXACT = 5e-6


def head_of(config: ModelConfig, tp_size: int, *, adapts: bool = False) -> Any:
    """Jitted: (params, hidden [R, hidden], LowRank of the head or None, slots int32 [R]) -> logits."""
    decoder = build_decoder(config, tp_size)

    def run(params: Any, hidden: jax.Array, adapters: LowRank | None, slots: jax.Array) -> jax.Array:
        return decoder.logits(params, hidden, adapters, None if adapters is None else slots)

    specs = jax.tree.map(lambda info: info.spec, abstract_params(config, jnp.bfloat16, tp_size))
    whole, of_adapters = PartitionSpec(), LowRank(PartitionSpec(), (PartitionSpec(None, None, ALL_AXES),), WIDTHS)
    in_specs = (specs, whole, of_adapters if adapts else None, whole)
    return jax.jit(jax.shard_map(run, mesh=mesh_of(tp_size), in_specs=in_specs, out_specs=whole, check_vma=False))


def hidden_states(hidden_size: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (NUM_LINES, hidden_size), jnp.bfloat16)


def logits_of(folder: Path, tp_size: int = 1, adapters: LowRank | None = None, **changes: Any) -> np.ndarray:
    config = ModelConfig.from_pretrained(folder).replace(**changes)
    params = load_params(folder, config, mesh_of(tp_size), jnp.bfloat16, progress=False)
    slots = jnp.arange(NUM_LINES, dtype=jnp.int32) % 3 - 1
    head = head_of(config, tp_size, adapts=adapters is not None)
    logits = head(params, hidden_states(config.hidden_size), adapters, slots)
    assert logits.dtype == jnp.float32
    return np.asarray(logits)


def torch_head(folder: Path) -> torch.Tensor:
    """[vocabulary, hidden], as a trainer has it in bfloat16."""
    return load_model(folder).get_output_embeddings().weight.detach().to(torch.bfloat16)


def torch_hidden(hidden_size: int) -> torch.Tensor:
    return torch.tensor(np.asarray(hidden_states(hidden_size), np.float32)).to(torch.bfloat16)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with a head of its own, tied
def test_logits_are_torchs_in_float32(name: str, tp_size: int, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    assert ModelConfig.from_pretrained(folder).tie_word_embeddings == (name == "qwen2")
    head = torch_head(folder)
    wanted = (torch_hidden(head.shape[1]).float() @ head.float().T).numpy()
    np.testing.assert_allclose(logits_of(folder, tp_size, fp32_lm_head=True), wanted, atol=EXACT)
    # A head that gives bfloat16 is far from that. Ours never does: without the option sums are float32, too.
    rounded = (torch_hidden(head.shape[1]) @ head.T).float().numpy()
    assert np.abs(rounded - wanted).max() > 1000 * EXACT
    np.testing.assert_allclose(logits_of(folder, tp_size), wanted, atol=2 * EXACT)


@pytest.mark.parametrize("is_on", [False, True])
def test_what_is_multiplied(is_on: bool, checkpoint: CheckpointOf) -> None:
    config = ModelConfig.from_pretrained(checkpoint("llama")).replace(fp32_lm_head=is_on)
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), abstract_params(config, jnp.bfloat16, 1))
    slots = jax.ShapeDtypeStruct((NUM_LINES,), jnp.int32)
    text = head_of(config, 1).lower(params, jax.eval_shape(lambda: hidden_states(config.hidden_size)), None, slots).as_text()
    (product,) = (line for line in text.splitlines() if "dot_general" in line)
    narrow, wide = f"<{NUM_LINES}x{config.hidden_size}xbf16>", f"<{NUM_LINES}x{config.hidden_size}xf32>"
    assert (wide in product, narrow in product) == (is_on, not is_on)
    assert ("precision = [HIGHEST, HIGHEST]" in product) == is_on


@pytest.mark.parametrize("tp_size", [1, 2])
def test_adapters_of_the_head_are_in_float32_too(tp_size: int, checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    vocab_size, hidden_size = torch_head(folder).shape
    keys = jax.random.split(jax.random.key(1))
    a = jax.random.normal(keys[0], (2, hidden_size, 1, RANK), jnp.bfloat16)
    b = jax.random.normal(keys[1], (2, RANK, vocab_size), jnp.bfloat16)
    adapters = LowRank(a, (b,), WIDTHS)
    hidden, head = torch_hidden(hidden_size).float(), torch_head(folder).float()
    wanted = hidden @ head.T
    wide_a, wide_b = (torch.tensor(np.asarray(array, np.float32)) for array in (a, b))
    for line in range(NUM_LINES):
        if (slot := line % 3 - 1) >= 0:
            wanted[line] += hidden[line] @ wide_a[slot, :, 0] @ wide_b[slot]
    on, off = (logits_of(folder, tp_size, adapters, fp32_lm_head=is_on) for is_on in (True, False))
    np.testing.assert_allclose(on, wanted.numpy(), rtol=1e-5, atol=1e-4)
    assert np.abs(off - wanted.numpy()).max() > 1e-2  # what is between A and B is rounded


def test_a_quantized_head_keeps_its_integers(checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    matrix = jnp.asarray(torch_head(folder).float().numpy().T)
    hidden = np.asarray(hidden_states(len(matrix)), np.float64)
    wanted = hidden @ np.asarray(int8_values(matrix), np.float64) * np.asarray(int8_scales(matrix))
    found = logits_of(folder, fp32_lm_head=True, quantization="int8wo")
    np.testing.assert_allclose(found, wanted, atol=EXACT)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", True), ("float32", False)])
def test_a_float32_model_has_the_same_programs(dtype: str, expected: bool, checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    drawn = [
        Blueprint.draw(
            ServerArgs(model_path=str(folder), dtype=dtype, enable_fp32_lm_head=is_on),
            ModelConfig.from_pretrained(folder),
            mesh_of(1),
        )
        for is_on in (False, True)
    ]
    assert [blueprint.config.fp32_lm_head for blueprint in drawn] == [False, expected]
    assert (drawn[0].config == drawn[1].config) == (not expected)


def test_weights_of_the_same_model_are_taken(checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    config = ModelConfig.from_pretrained(folder)
    loader = WeightLoader(
        config=config.replace(fp32_lm_head=True),
        context_len=config.context_len,
        stages=((None, mesh_of(1)),),
        dtype=jnp.bfloat16,
        model_override_args="{}",
    )
    loader.check(str(folder), "auto")


def test_a_model_of_vectors_has_no_head(checkpoint: CheckpointOf) -> None:
    args = ServerArgs(model_path=str(checkpoint("bert")), enable_fp32_lm_head=True)
    with pytest.raises(ValueError, match="--enable-fp32-lm-head needs a model that generates; BertModel makes vectors"):
        Blueprint.draw(args, ModelConfig.from_pretrained(args.model_path), mesh_of(1))
