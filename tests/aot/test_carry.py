"""Programs for devices that are elsewhere: what a server there finds, and what is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from shapes import cpu_target

from jaxserve.aot import carry
from jaxserve.aot.carry import fill_cache_for
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.executor import Filled, build, build_runner

H200 = parse_target("h200")


@pytest.fixture(autouse=True)
def _keep_jax_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "without_devices", lambda: None)


def small(model: Path | str) -> ServerArgs:
    return ServerArgs(
        model_path=str(model),
        max_total_tokens=256,
        max_running_requests=2,
        decode_row_buckets=(2,),
        prefill_token_buckets=(16,),
        chunked_prefill_size=16,
    )


def test_a_server_finds_all_of_them(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    args, folder = small(checkpoint("qwen3")), str(tmp_path / "carried")
    filled = fill_cache_for(cpu_target(1, 1 << 30), args, folder)
    assert 0 < filled.compiled <= filled.programs, "JAX remembers what other tests compiled"
    assert fill_cache_for(cpu_target(1, 1 << 30), args, folder) == Filled(filled.programs, 0)
    state = build_runner(args.replace(compilation_cache_dir=folder), show_progress=False).runner.internal_state()
    assert (state["programs_missing"], state["compiles_total"]) == (0, 0)


def test_a_pipeline_finds_those_of_its_stages(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (build, carry):
        monkeypatch.setattr(module, "select_devices", lambda device, num_devices: None)  # this process has its eight
    args, folder = small(checkpoint("qwen3")).replace(pp_size=2), str(tmp_path / "carried")
    assert fill_cache_for(cpu_target(2, 1 << 30), args, folder).programs > 0
    state = build_runner(args.replace(compilation_cache_dir=folder), show_progress=False).runner.internal_state()
    assert (state["programs_missing"], state["compiles_total"]) == (0, 0)


@pytest.mark.parametrize(
    ("topology", "options", "reason"),
    [
        ("h200", {"max_total_tokens": None}, "need --max-total-tokens, here and of the server"),
        ("h200", {"tp_size": 2}, "--tp-size 2 needs as many devices; h200:1 has 1"),
        ("h200:2", {"tp_size": 2, "pp_size": 2}, "--pp-size 2 with --tp-size 2 needs 4 devices; h200:2 has 2"),
        ("v6e:4x4", {"tp_size": 16}, "v6e:4x4 spans 4 hosts"),
        ("h200", {"quantization": "int8wo"}, "--quantization int8wo has matmuls that XLA writes itself on a GPU"),
    ],
)
def test_what_is_refused(topology: str, options: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        fill_cache_for(parse_target(topology), small("model").replace(**options), str(tmp_path))


def test_a_cache_that_does_not_fit(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="GiB are missing on each device for the weights and a KV cache of --max-total-tokens"):
        fill_cache_for(cpu_target(1, 1 << 20), small(checkpoint("qwen3")).replace(max_total_tokens=100_000), str(tmp_path))


def test_a_missing_compiler_is_a_pip_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'jax\[cuda13\]'"):
        fill_cache_for(H200, small("model"), str(tmp_path))
