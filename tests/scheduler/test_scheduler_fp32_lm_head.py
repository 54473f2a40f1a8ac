"""--enable-fp32-lm-head through scheduler and runner: every logprob is that of torch's float32 head on the hidden states of the
same reply, of the prompt and of what was generated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import load_model
from scheduler_harness import Harness

from jaxserve.config import ServerArgs
from jaxserve.executor import build, build_runner

NEW_TOKENS = 6


def test_logprobs_are_those_of_a_float32_head(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "select_devices", lambda device, tp_size: None)  # this process has its eight
    model = checkpoint("llama")
    args = ServerArgs(
        model_path=str(model),
        dtype="bfloat16",
        enable_fp32_lm_head=True,
        tp_size=2,
        enable_return_hidden_states=True,
        max_running_requests=2,
        decode_row_buckets=(2,),
        prefill_token_buckets=(16,),
        context_length=64,
        max_total_tokens=128,
        max_top_logprobs=1,
        grammar_backend="none",
        compilation_cache_dir=str(tmp_path),
    )
    built = build_runner(args, show_progress=False)
    harness = Harness(runner=built.runner, server_args=built.args, overlap=True)
    prompt = np.random.default_rng(0).integers(3, 250, 20).tolist()
    asked = {"return_logprob": True, "logprob_start_len": 0, "return_hidden_states": True, "top_logprobs_num": 1}
    rid = harness.submit(prompt, NEW_TOKENS, ignore_eos=True, **asked)
    harness.run()
    answer = harness.answer(rid)

    states = [part for states in answer.hidden_states for part in (states.prompt, states.outputs) if part is not None]
    hidden = torch.tensor(np.concatenate(states))
    assert torch.equal(hidden, hidden.to(torch.bfloat16).float())
    head = load_model(model).get_output_embeddings().weight.detach().to(torch.bfloat16).float()
    wanted = torch.log_softmax(hidden @ head.T, dim=-1).numpy()
    tokens = prompt + answer.token_ids
    of_tokens = wanted[np.arange(len(tokens) - 1), tokens[1:]]
    assert answer.input_logprobs is not None
    of_prompt = answer.input_logprobs.logprobs.logprobs
    np.testing.assert_allclose(of_prompt, of_tokens[: len(prompt) - 1], atol=1e-5)
    outputs = np.concatenate([part.logprobs for part in answer.logprobs])
    np.testing.assert_allclose(outputs, of_tokens[len(prompt) - 1 :], atol=1e-5)
    top = np.concatenate([part.top_logprobs for part in answer.logprobs])
    np.testing.assert_allclose(top[:, 0], wanted[len(prompt) - 1 :].max(axis=-1), atol=1e-5)
