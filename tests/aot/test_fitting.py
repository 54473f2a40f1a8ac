"""Whether weights fit, and what is said where they do not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from shapes import TINY_LATENT, config_of

from benchmarks.model_configs import LLAMA_8B, LLAMA_70B, QWEN3_32B
from jaxserve.aot.chips import H200, TPU7X, V5E, V6E
from jaxserve.aot.fitting import Demand, smallest_fit, weights_too_large
from jaxserve.aot.targets import parse_target

FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4096}


def demand(folder: Path, raw: dict[str, Any], **changes: Any) -> Demand:
    config = config_of(folder, raw)
    made = Demand(config, "bfloat16", "bfloat16", context_len=8192, mem_fraction=0.9, row_table_bytes=1 << 26)
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("raw", "chip", "name"),
    [
        (LLAMA_8B, V5E, "v5e:2x2"),
        (LLAMA_8B, V6E, "v6e:1x1"),
        (LLAMA_70B, V5E, "v5e:4x4"),  # 8 KV heads, each on two devices
        (LLAMA_70B, V6E, "v6e:2x4"),
        (LLAMA_70B, TPU7X, "tpu7x:1x1x1"),
        (LLAMA_70B, H200, "h200:2"),
        (QWEN3_32B, V5E, "v5e:2x4"),
    ],
)
def test_the_smallest_slice(raw: dict[str, Any], chip: Any, name: str, tmp_path: Path) -> None:
    found = smallest_fit(demand(tmp_path, raw), chip)
    assert found is not None and found.target.name == name and found.pp_size == 1


def test_a_sentence_with_numbers(tmp_path: Path) -> None:
    wanted = demand(tmp_path, LLAMA_8B)
    sentence = weights_too_large(wanted, parse_target("v5e:1x1"), 1)
    assert sentence is not None
    weights, allowed, missing = (float(x) for x in re.findall(r"([\d.]+) GiB", sentence))
    assert weights == pytest.approx(16.06e9 / 2**30, abs=0.1)
    assert allowed == pytest.approx(0.9 * 15.75, abs=0.1)
    assert missing == pytest.approx(weights - allowed, abs=0.11)
    assert "one request of 8192 tokens is v5e:2x2 with --tp-size 4" in sentence
    assert weights_too_large(wanted, parse_target("v5e:2x2"), 4) is None


def test_devices_that_share_latents_have_a_part_of_a_request(tmp_path: Path) -> None:
    wanted = demand(tmp_path, TINY_LATENT)
    alone, shared = (dataclasses.replace(wanted, dcp_size=size).request_bytes(wanted.config, 8) for size in (1, 8))
    assert alone == 8 * shared == 2 * 8192 * 24 * 2


def test_where_no_slice_of_the_chip_will_do(tmp_path: Path) -> None:
    wanted = demand(tmp_path, {**LLAMA_70B, "intermediate_size": 1 << 16, **FEW_HEADS})
    sentence = weights_too_large(wanted, parse_target("v5e:2x2"), 2)
    assert sentence is not None and "The smallest known slice" in sentence
    assert "is v5p:2x2x1 with --pp-size 2 --tp-size 2" in sentence
    huge = demand(tmp_path, {**LLAMA_70B, "intermediate_size": 1 << 24})
    sentence = weights_too_large(huge, parse_target("v5e:1x1"), 1)
    assert sentence is not None and "No known slice" in sentence


def test_stages_where_heads_cannot_be_split_further(tmp_path: Path) -> None:
    wanted = demand(tmp_path, {**LLAMA_70B, **FEW_HEADS})
    sentence = weights_too_large(wanted, parse_target("v5e:4x4"), 2)
    assert sentence is not None and "--pp-size 8 --tp-size 2 would do on v5e:4x4." in sentence
    assert "one request of 8192 tokens is v5e:4x4 with --pp-size 8 --tp-size 2." in sentence
    assert weights_too_large(wanted, parse_target("v5e:4x4"), 2, 8) is None
    sentence = weights_too_large(wanted, parse_target("v5e:2x2"), 1, 4, (10, 10, 10, 50))
    assert sentence is not None and sentence.startswith("The weights of stage 4 of 4 (layers 30-79) take ")
    assert "of each v5e device with --pp-size 4 and --tp-size 1" in sentence


def test_of_layers_with_a_window_only_that_is_kept(tmp_path: Path) -> None:
    wanted = demand(tmp_path, LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 1024})
    assert wanted.request_bytes(wanted.config, 8) == 1024 * 32 * 2 * 128 * 2
    assert dataclasses.replace(wanted, context_len=100).request_bytes(wanted.config, 8) == 100 * 32 * 2 * 128 * 2


def test_quantized_caches_carry_scales(tmp_path: Path) -> None:
    plain, int8 = demand(tmp_path, LLAMA_8B), demand(tmp_path, LLAMA_8B, kv_dtype="int8")
    assert plain.request_bytes(plain.config, 8) == 8192 * 32 * 2 * 128 * 2
    assert int8.request_bytes(int8.config, 8) == 8192 * 32 * (2 * 128 + 8)
    assert plain.request_bytes(plain.config, 16) == plain.request_bytes(plain.config, 8)  # a KV head is kept twice


@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("bfloat16", 2 * 24), ("float8_e4m3fn", 24 + 8)])
def test_a_latent_is_key_and_value_of_all_heads(kv_dtype: str, token_bytes: int, tmp_path: Path) -> None:
    wanted = demand(tmp_path, TINY_LATENT, kv_dtype=kv_dtype, context_len=100)
    for tp_size in (1, 4):  # whole on each device
        assert wanted.request_bytes(wanted.config, tp_size) == 2 * 100 * token_bytes
    assert not wanted.fits(V5E, 3), "4 heads"
