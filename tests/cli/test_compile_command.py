"""`jaxserve compile`: what is asked wrongly, what cannot work, and what is printed and written."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.model_configs import GEMMA_3_12B, LLAMA_70B, write_config
from jaxserve.aot import carry, planner, targets
from jaxserve.cli.main import run
from jaxserve.config import ServerArgs
from jaxserve.executor import build_runner

sys.path.insert(0, str(Path(__file__).parents[1] / "aot"))
from shapes import TINY, cpu_target

SMALL = ["--max-running-requests", "2", "--prefill-token-buckets", "16", "--chunked-prefill-size", "16"]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every topology is two devices of this CPU."""
    monkeypatch.setattr(planner, "without_devices", lambda: None)
    monkeypatch.setattr(targets, "parse_target", lambda text: cpu_target(2, 1 << 30))


def test_an_unknown_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", str(write_config(tmp_path, TINY)), "--topology", "v9:2x2"]) == 2
    assert "Known are: v5e:1x1" in capsys.readouterr().err


def test_missing_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", str(tmp_path)]) == 2
    assert "--topology" in capsys.readouterr().err
    assert run(["compile", "--topology", "v6e:1x1"]) == 2
    assert "A model is needed" in capsys.readouterr().err
    assert run(["compile", str(tmp_path), "--topology", "v6e:1x1"]) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_model_that_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "without_devices", lambda: None)
    assert run(["compile", str(write_config(tmp_path, LLAMA_70B)), "--topology", "v5e:2x4", "--context-length", "8192"]) == 1
    error = capsys.readouterr().err
    assert "The weights take" in error and "v5e:4x4 with --tp-size 16" in error


def test_a_missing_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "without_devices", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    targets._tpu_devices.cache_clear()
    assert run(["compile", str(write_config(tmp_path, TINY)), "--topology", "v6e:1x1"]) == 1
    assert "pip install 'jax[tpu]'" in capsys.readouterr().err


def test_heads_that_do_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str], cpu: None) -> None:
    line = ["compile", str(write_config(tmp_path, {**TINY, "num_attention_heads": 3, "num_key_value_heads": 3}))]
    assert run([*line, "--topology", "any"]) == 1
    assert "--tp-size must divide the model's num_heads=3; got 2." in capsys.readouterr().err


def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], cpu: None) -> None:
    out = tmp_path / "plan"
    line = [
        "compile",
        str(write_config(tmp_path, TINY)),
        "--topology",
        "any",
        "--out",
        str(out),
        "--programs",
        "largest",
        *SMALL,
    ]
    assert run(line) == 0
    printed = capsys.readouterr()
    assert "decode R=2" in printed.out and "KV cache" in printed.out and f"Written to {out}" in printed.out
    written = json.loads((out / "plan.json").read_text())
    assert written["fits"] and written["options"]["tp_size"] == 2
    assert (out / "decode_R2.xla").exists()


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], cpu: None) -> None:
    line = ["compile", str(write_config(tmp_path, TINY)), "--topology", "any", "--json", "--programs", "none", *SMALL]
    assert run(line) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"]["tokens"] > 0
    assert run([*line, "--max-total-tokens", "100000000"]) == 1
    printed = capsys.readouterr()
    assert not json.loads(printed.out)["fits"] and "are missing on each device" in printed.err


def test_a_model_of_two_kinds_of_layers_beside_a_part_for_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cpu: None
) -> None:
    tiny = {name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size")}
    tiny |= {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 8, "num_key_value_heads": 2}
    line = ["compile", str(write_config(tmp_path, GEMMA_3_12B)), "--topology", "any", "--json", "--programs", "largest"]
    line += ["--json-model-override-args", json.dumps(tiny), "--context-length", "64"]
    assert run([*line, *SMALL]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["kv_cache"]["tokens"] > 0


def test_a_server_starts_with_what_was_compiled_ahead(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a config.json alone, and without compiling anything again."""
    model, cache, config = checkpoint("qwen3"), str(tmp_path / "cache"), tmp_path / "config"
    config.mkdir()
    shutil.copy(model / "config.json", config)
    command = ["compile", str(config), "--cache-dir", cache, "--max-total-tokens", "256", "--decode-row-buckets", "2", *SMALL]
    assert run(command) == 0
    assert "programs are in" in capsys.readouterr().out
    args = ServerArgs(
        model_path=str(model),
        compilation_cache_dir=cache,
        max_total_tokens=256,
        max_running_requests=2,
        decode_row_buckets=(2,),
        prefill_token_buckets=(16,),
        chunked_prefill_size=16,
    )
    state = build_runner(args, show_progress=False).runner.internal_state()
    assert (state["programs_missing"], state["compiles_total"]) == (0, 0)
    assert run(command) == 0
    assert "0 of them compiled now" in capsys.readouterr().out


def test_a_plan_or_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", str(write_config(tmp_path, TINY))]) == 2
    assert "Give --topology, for a plan, or --cache-dir, for programs, or both" in capsys.readouterr().err
    assert run(["compile", str(tmp_path / "nothing"), "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "nothing' does not exist" in capsys.readouterr().err


def test_programs_to_be_carried_to_a_topology(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/aot and tests/accelerator say that they are found there."""
    monkeypatch.setattr(carry, "without_devices", lambda: None)
    line = [
        "compile",
        str(write_config(tmp_path, TINY)),
        "--topology",
        "any",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--tp-size",
        "1",
        *SMALL,
    ]
    assert run(line) == 1
    assert "need --max-total-tokens, here and of the server" in capsys.readouterr().err
    assert run([*line, "--max-total-tokens", "256"]) == 0
    printed = capsys.readouterr().out
    assert "programs are in" in printed and "timing" not in printed
    assert list((tmp_path / "cache" / "executables").glob("decode-R=2-*.program"))
