"""The record of tokens per expert, of a real runner beneath the scheduler, against the routers of Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_model
from scheduler_harness import Harness

from jaxserve.config import ServerArgs
from jaxserve.executor import build, build_runner
from jaxserve.scheduler.control.dump_expert_distribution_record import FOLDER_VARIABLE, DumpExpertDistributionReq
from jaxserve.scheduler.control.start_expert_distribution_record import StartExpertDistributionReq
from jaxserve.scheduler.control.stop_expert_distribution_record import StopExpertDistributionReq

NUM_NEW = 9
OPTIONS: dict[str, Any] = {
    "context_length": 256,
    "max_running_requests": 4,
    "decode_row_buckets": (4,),
    "prefill_token_buckets": (64,),
    "chunked_prefill_size": 32,
    "max_total_tokens": 1024,
    "expert_distribution_recorder_mode": "stat",
}


def expected_counts(model: Path, sequences: list[list[int]]) -> np.ndarray:
    """int [layers, experts] of all tokens but each sequence's last, which is in no step."""
    oracle = load_model(model)
    counts = np.zeros((len(oracle.model.layers), oracle.config.num_experts), int)

    def count(layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, outputs: Any) -> None:
            chosen = outputs[2].flatten() if isinstance(outputs, tuple) else outputs.topk(oracle.config.num_experts_per_tok)[1]
            np.add.at(counts[layer], chosen.flatten().numpy(), 1)

        return hook

    for index, layer in enumerate(oracle.model.layers):
        if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(count(index))
    with torch.inference_mode():
        for sequence in sequences:
            oracle(torch.tensor([sequence[:-1]]))
    return counts


def serve(harness: Harness, prompts: list[list[int]]) -> list[list[int]]:
    """The sequences that come of it."""
    rids = [harness.submit(prompt, NUM_NEW, ignore_eos=True) for prompt in prompts]
    harness.run()
    return [prompt + harness.answer(rid).token_ids for prompt, rid in zip(prompts, rids, strict=True)]


def ask(harness: Harness, request: Any) -> Any:
    before = len(harness.control_replies())
    harness.control(request)
    while len(harness.control_replies()) == before:
        harness.turn()
    return harness.control_replies()[-1]


@pytest.mark.parametrize(("case", "tp_size"), [("qwen3-moe-some-layers", 1), ("qwen3-moe", 4)])
def test_each_token_of_the_time_is_counted_once(
    case: str, tp_size: int, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "select_devices", lambda device, tp_size: None)  # this process has its eight
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "records"))
    model = checkpoint(case)
    args = ServerArgs(model_path=str(model), compilation_cache_dir=str(tmp_path), tp_size=tp_size, **OPTIONS)
    built = build_runner(args, show_progress=False)
    harness = Harness(runner=built.runner, server_args=built.args)
    prompts = [np.random.default_rng(length).integers(3, 300, length).tolist() for length in (1, 7, 40, 71, 90)]

    reply = ask(harness, StopExpertDistributionReq())
    assert "No expert distribution is being recorded" in reply
    serve(harness, prompts[:1])
    ask(harness, StartExpertDistributionReq())
    running = [harness.submit(prompts[1], 60, ignore_eos=True)]
    harness.turn(4)
    ask(harness, StartExpertDistributionReq())  # in the middle of a request: forgets
    harness.run()
    ask(harness, StartExpertDistributionReq())
    sequences = serve(harness, prompts[2:])
    assert len(harness.answer(running[0]).token_ids) == 60
    ask(harness, StopExpertDistributionReq())
    serve(harness, prompts[:2])
    reply = ask(harness, DumpExpertDistributionReq())
    assert Path(reply.file).parent == tmp_path / "records"
    counts = np.array(json.loads(Path(reply.file).read_text())["logical_count"])
    np.testing.assert_array_equal(counts, expected_counts(model, sequences))
    assert counts.any()
    assert "No expert distribution" in ask(harness, DumpExpertDistributionReq())  # it is forgotten
    assert harness.scheduler.internal_state()["runner"]["compiles_after_ready_total"] == 0


def test_without_the_option_nothing_is_recorded(make_harness: Callable[..., Harness]) -> None:
    reply = ask(make_harness(), StartExpertDistributionReq())
    assert "--expert-distribution-recorder-mode stat" in reply


def test_a_model_without_experts_is_refused(checkpoint: Callable[[str], Path]) -> None:
    args = ServerArgs(model_path=str(checkpoint("llama")), **OPTIONS)
    with pytest.raises(ValueError, match="--expert-distribution-recorder-mode needs a model with experts; LlamaForCausalLM"):
        build_runner(args, show_progress=False)
