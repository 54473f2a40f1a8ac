"""LoRA adapters in a runner driven by hand: rows with different ones in one step get the tokens of PEFT's models, however the
base is divided over devices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_model
from driven_runner import MAX_ROWS, Driver, small_runner
from peft_adapters import load_adapted, make_adapter

from jaxserve.commands import ReadAdapter
from jaxserve.executor import ModelRunner
from jaxserve.runner import AdapterLoad

LLAMA_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The fields of PEFT's LoraConfig of three adapters that together change everything.
ADAPTERS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8, "target_modules": LLAMA_LINEAR},
    {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 2, "lora_alpha": 6, "target_modules": r".*\.1\.(self_attn\.(k|o)|mlp\.gate)_proj", "rank_pattern": {"k_proj": 5}},
]
ENDS = [
    {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
    {"r": 3, "lora_alpha": 6, "target_modules": ["lm_head", "v_proj"]},
    {"r": 2, "target_modules": ["embed_tokens", "o_proj"]},
]
ATTENTION = [{"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, {"r": 3, "target_modules": ["v_proj"]}]
PACKED = [
    {"r": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    {"r": 8, "target_modules": ["qkv_proj"]},
]
LATENT = [
    {"r": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    {"r": 2, "target_modules": ["o_proj"]},
]
STATES = [{"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "out_proj"]}, {"r": 2, "target_modules": ["o_proj"]}]

CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("qwen3", ADAPTERS, {}),
    ("llama", ADAPTERS, {"tp_size": 4, "enable_mixed_chunk": True}),  # more devices than KV heads
    ("qwen3", ADAPTERS, {"tp_size": 4, "attn_dp_size": 2, "speculative_algorithm": "NGRAM"}),
    ("qwen3", ADAPTERS, {"pp_size": 2, "tp_size": 2}),
    ("llama", ADAPTERS, {"quantization": "int8wo"}),
    ("llama", ENDS, {}),
    ("llama", ENDS, {"tp_size": 4, "attn_dp_size": 2}),
    ("qwen2", ENDS, {"tp_size": 2}),  # tied
    ("granite", ENDS, {}),  # its embedding is scaled
    ("llama", ENDS, {"pp_size": 2}),
    ("phi3", PACKED, {"tp_size": 2}),
    ("qwen3-moe", ATTENTION, {"tp_size": 2}),
    ("deepseek-v3", LATENT, {"tp_size": 2}),
    ("qwen3-next", STATES, {}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[2].values())]))
def case(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(case: Any, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(case[0])


@pytest.fixture(scope="module")
def adapters(case: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model, folder / str(index), seed=index, **config) for index, config in enumerate(case[1])]


@pytest.fixture(scope="module")
def runner(case: Any, model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    paths = [f"{index}={folder}" for index, folder in enumerate(adapters)]
    runner = small_runner(model, tmp_path_factory.mktemp("cache"), lora_paths=paths, max_loras_per_batch=2, **case[2])
    for adapter_id, folder in enumerate(adapters):
        runner.execute(ReadAdapter(adapter_id, str(folder))).result()
    return runner


def test_rows_of_one_step_have_adapters_of_their_own(runner: ModelRunner, model: Path, adapters: list[Path], case: Any) -> None:
    driver = Driver(runner)
    plain = load_model(model)
    models = {None: plain} | {index: load_adapted(model, folder) for index, folder in enumerate(adapters)}
    rng = np.random.default_rng(0)
    sequences = {row: rng.integers(3, 250, 3 + row).tolist() for row in range(MAX_ROWS)}
    adapter_of: dict[int, int | None] = {}
    num_changed = 0

    def begin(row: int, adapter: int | None, slot: int) -> dict[int, list[int]]:
        adapter_of[row] = adapter
        driver.slots[row] = slot
        return {row: list(sequences[row])}

    def check(tokens: dict[int, int]) -> None:
        nonlocal num_changed
        with torch.inference_mode():
            for row, token in tokens.items():
                ids = torch.tensor([sequences[row]])
                logits = models[adapter_of[row]](input_ids=ids).logits[0, -1]
                tolerance = 0.2 if case[2].get("quantization") else 2e-4
                assert logits.max() - logits[token] <= tolerance, (row, adapter_of[row])
                num_changed += token != int(plain(input_ids=ids).logits[0, -1].argmax())
                sequences[row].append(token)

    check(driver.run(begin(1, None, -1)))  # nothing but the model
    check(driver.run(begin(2, 0, 1) | begin(0, None, -1), loads=[AdapterLoad(1, 0)]))
    check(driver.run(begin(7, 1, 0) | begin(3, 0, 1), loads=[AdapterLoad(0, 1)]))
    if case[2].get("enable_mixed_chunk"):
        check(driver.run(begin(4, 1, 0), decode=[7, 1, 0]))
    for decoding in ([0, 1, 2, 3, 7], [7], [1], [2, 0]):
        check(driver.run({}, decode=decoding))
    long = rng.integers(3, 250, 40).tolist()
    sequences[5] = long
    begun = begin(5, 1, 0)
    driver.run({5: begun[5][:32]})
    check(driver.run({5: begun[5][32:]}))
    check(driver.run({}, decode=[5, 2, 0, 7]))
    # Another adapter in a slot: rows that used what was there before are over.
    third = len(adapters) - 1
    check(driver.run(begin(6, third, 1), loads=[AdapterLoad(1, third)]))
    check(driver.run({}, decode=[6, 5, 1]))
    assert num_changed >= 5, "adapters that change nothing show nothing"
    assert runner.internal_state()["compiles_after_ready_total"] == 0
