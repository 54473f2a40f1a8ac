"""`jaxserve compile --topology --cache-dir` with the real compilers: entries for devices that are not here. A CPU that is only
compiled for shows the whole way, up to a server that loads what was compiled so and computes the same."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.experimental import topologies

from benchmarks.model_configs import LLAMA_8B, write_config
from jaxserve.aot import carry
from jaxserve.aot.carry import fill_cache_for
from jaxserve.aot.chips import V6E
from jaxserve.aot.targets import Target
from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.executor import build_runner
from tests.executor.test_early_start import tokens

pytestmark = pytest.mark.compile

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    **LLAMA_8B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
OPTIONS: dict[str, Any] = {
    "max_total_tokens": 1024,
    "max_running_requests": 8,
    "decode_row_buckets": (8,),
    "prefill_token_buckets": (64,),
    "chunked_prefill_size": 64,
}


class CompileOnlyCpu(Target):
    """This CPU, described to XLA and not there."""

    def devices(self) -> tuple[Any, ...]:
        topology = topologies.get_attached_topology("cpu").serialize()
        return tuple(topologies.TopologyDescription.deserialize(topology).devices[:1])


def compile_for(topology: str, folder: Path, cache: Path, **environment: str) -> str:
    options = [
        f"--{name.replace('_', '-')}={value[0] if isinstance(value, tuple) else value}" for name, value in OPTIONS.items()
    ]
    command = [sys.executable, "-m", "jaxserve", "compile", str(folder), "--topology", topology, "--cache-dir", str(cache)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("topology", ["h200", "v6e:1x1"])
def test_entries_for_what_is_not_here(topology: str, tmp_path: Path) -> None:
    """Where there are TPUs, JAX sets flags when it is imported; that is done here the second time, and the key is the same."""
    folder, cache = write_config(tmp_path, TINY), tmp_path / "cache"
    printed = compile_for(topology, folder, cache)
    names = {file.name.rsplit("-", 1)[0] for file in (cache / "executables").iterdir()}
    assert f"{len(names)} programs are in {cache}, {len(names)} of them compiled now." in printed
    assert {"decode-R=8", "page-table", "sample-greedy-R=8"} <= names
    assert ("cuBLASLt's first choice" in printed) == (topology == "h200")
    beside_tpus = {"JAX_FORCE_TPU_INIT": "1"} if topology != "h200" else {}
    assert f"{len(names)} programs are in {cache}, 0 of them" in compile_for(topology, folder, cache, **beside_tpus)


def test_what_was_compiled_without_the_device_runs_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "without_devices", lambda: None)
    args = ServerArgs(model_path=demo_model_path(), **OPTIONS)
    carried, own = (args.replace(compilation_cache_dir=str(tmp_path / name)) for name in ("carried", "own"))
    chip = dataclasses.replace(V6E, name="pretended", kind="cpu", platform="cpu")
    filled = fill_cache_for(CompileOnlyCpu(chip, (1,)), args, str(tmp_path / "carried"))
    assert 0 < filled.compiled <= filled.programs, "JAX remembers what other tests compiled"
    runner = build_runner(carried, show_progress=False).runner
    assert runner.internal_state()["compiles_total"] == 0
    assert tokens(runner) == tokens(build_runner(own, show_progress=False).runner)
