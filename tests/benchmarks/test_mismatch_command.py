"""python -m benchmarks.mismatch: what is compared with what, and the whole command with a tiny checkpoint in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import mismatch
from jaxserve import Rollouts

FEW_PROGRAMS = (
    "--context-length=128", "--max-running-requests=4", "--decode-row-buckets=4", "--prefill-token-buckets=64",
    "--max-top-logprobs=1", "--grammar-backend=none", "--warmup=full", "--random-seed=1",
)  # fmt: skip


def rollouts() -> Rollouts:
    """Prompts 1 2 and 3, two samples of each."""
    return Rollouts(
        prompt_tokens=np.array([[1, 2], [0, 3]], np.int32),
        prompt_lengths=np.array([2, 1], np.int32),
        tokens=np.array([[4, 5, 6], [7, 0, 0], [8, 9, 0], [4, 4, 4]], np.int32),
        lengths=np.array([3, 1, 2, 3], np.int32),
        logprobs=np.zeros((4, 3), np.float32),
        finishes=np.zeros(4, np.int8),
        texts=[""] * 4,
        versions=["1"],
        token_versions=np.zeros((4, 3), np.int32),
        num_samples=2,
        pad_token_id=0,
    )


def test_samples_are_scored_behind_their_prompts() -> None:
    asked: list[dict[str, Any]] = []

    class Engine:
        def generate(self, **fields: Any) -> list[Any]:
            asked.append(fields)
            scored = ([[-float(token), token, None] for token in ids] for ids in fields["input_ids"])
            return [{"meta_info": {"input_token_logprobs": [[None, *ids[0][1:]], *ids[1:]]}} for ids in scored]

    found = mismatch.scored_by_engine(Engine(), rollouts())  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, -rollouts().tokens.astype(np.float32))
    assert asked[0]["input_ids"] == [[1, 2, 4, 5, 6], [1, 2, 7], [3, 8, 9], [3, 4, 4, 4]]
    assert asked[0]["logprob_start_len"] == asked[0]["sampling_params"]["max_new_tokens"] == 0


def test_torch_is_asked_for_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(mismatch.main, ["--model", "nowhere"])
    assert result.exit_code == 1
    assert "Transformers' logprobs need torch (pip install 'jaxserve[dev]'), or --no-transformers." in result.output


def test_the_command(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--prompts=2", "--samples=2", "--tokens=8", "--dtype=float32", f"--compilation-cache-dir={tmp_path}"]
    result = CliRunner().invoke(mismatch.main, ["--model", str(checkpoint("qwen3")), *options, *FEW_PROGRAMS])
    assert result.exit_code == 0, result.output
    assert "2 prompts, 2 samples of 8 tokens, dtype float32" in result.output
    assert re.findall(r"^ours, drawn; (.*)$", result.output, re.M) == ["ours, of given tokens", "Transformers in float32"]
    assert re.findall(r"^tokens +(\d+)$", result.output, re.M) == ["32", "32"]
    differences = [float(found) for found in re.findall(r"^difference +max (\S+)", result.output, re.M)]
    assert len(differences) == 2
    assert max(differences) < 1e-3
