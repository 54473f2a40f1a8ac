"""Replicas on chips that are not there: what `jaxserve compile` says of them, and step times that one can work out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.model_configs import (
    DEEPSEEK_V2_LITE,
    GEMMA_3_1B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
    write_config,
)
from jaxserve.aot.chips import H200
from jaxserve.aot.targets import parse_target
from jaxserve.bench.simulate import Arrival, Report, SharedPrefixes, Simulation
from jaxserve.bench.simulate.plan import ReplicaPlan
from jaxserve.bench.simulate.roofline import RooflineTimes, plan_replica
from jaxserve.cli.bench.simulate import simulate

# Parameters of Llama-3.1-8B that each step reads: all but the embedding, of which it looks rows up.
LLAMA_8B_READ = 8_030_261_248 - 128256 * 4096
LLAMA_8B_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


class Step:
    """`decode`: the length of each row that decodes; `prompts`: new and cached tokens of each."""

    def __init__(self, decode: list[int], prompts: Sequence[tuple[int, int]] = (), rows: Sequence[int] | None = None) -> None:
        self.num_decode_rows, self.num_rows = len(decode), len(decode) + len(prompts)
        self.rows = np.array(rows if rows is not None else range(self.num_rows), np.int32)
        self.extend_lens = np.array([1] * len(decode) + [new for new, _ in prompts], np.int32)
        self.seq_lens = np.array(decode + [new + cached for new, cached in prompts], np.int32)


def plan(folder: Path, config: dict[str, Any], topology: str, longest: int = 2048, **given: Any) -> ReplicaPlan:
    return plan_replica({"model_path": str(write_config(folder, config)), **given}, parse_target(topology), longest)


def times(folder: Path, config: dict[str, Any], topology: str, step: Any, **given: Any) -> list[float]:
    return list(plan(folder, config, topology, **given).stage_times(step))


@pytest.mark.parametrize(
    ("config", "topology", "kv_tokens"),
    [
        (LLAMA_8B, "h200:1", 864_512),
        (LLAMA_8B, "h200:8", 7_773_888),
        (LLAMA_70B, "h200:8", 2_727_872),
        (QWEN3_30B_A3B, "h200:4", 4_641_856),
    ],
)
def test_the_cache_is_that_of_the_capacity_plan(config: dict[str, Any], topology: str, kv_tokens: int, tmp_path: Path) -> None:
    """docs/capacity.md."""
    found = plan(tmp_path, config, topology)
    assert found.spec.max_total_tokens == found.args.max_total_tokens == pytest.approx(kv_tokens, rel=1e-3)
    assert found.num_chips == int(topology.split(":")[1])


def test_a_small_decode_step_reads_weights_and_cache(tmp_path: Path) -> None:
    (seconds,) = times(tmp_path, LLAMA_8B, "h200", Step([640, 1280]))
    num_bytes = 2 * LLAMA_8B_READ + (2 * 960) * LLAMA_8B_TOKEN_BYTES
    assert seconds == pytest.approx(num_bytes / H200.hbm_bytes_per_s, rel=1e-3)


def test_a_large_prefill_step_multiplies(tmp_path: Path) -> None:
    """All parameters, but the head's for one token, and pairs of tokens: two products of 4096 each, in 32 layers."""
    (seconds,) = times(tmp_path, LLAMA_8B, "h200", Step([], [(8192, 0)]))
    products = 8192 * (LLAMA_8B_READ - 128256 * 4096) + 128256 * 4096 + 8192 * 8193 / 2 * 2 * 4096 * 32
    assert seconds == pytest.approx(2 * products / H200.bf16_flops_per_s, rel=1e-3)


def test_stages_have_times_of_their_own(tmp_path: Path) -> None:
    stages = times(tmp_path, LLAMA_8B, "h200:4", Step([640]), pp_size=4)
    (whole,) = times(tmp_path, LLAMA_8B, "h200:1", Step([640]))
    assert len(stages) == 4 and sum(stages) == pytest.approx(whole, rel=1e-3)
    assert stages[3] > 1.2 * stages[1] == pytest.approx(1.2 * stages[2]), "the last one has the head"
    assert len(times(tmp_path, LLAMA_8B, "h200:8", Step([640]), pp_size=2, pp_layer_partition=(20, 12))) == 2


def test_of_shards_the_fullest_counts(tmp_path: Path) -> None:
    """Attention by data parallelism over two devices, of 8 rows each; rows 0-7 are the first one's."""
    found = plan(tmp_path, LLAMA_8B, "h200:2", attn_dp_size=2, max_running_requests=16)
    assert (found.spec.num_shards, found.spec.rows_per_shard) == (2, 8)
    evenly: Any = Step([6400] * 8, rows=[0, 1, 2, 3, 8, 9, 10, 11])
    lopsided: Any = Step([6400] * 8, rows=list(range(8)))
    more_s = 4 * 6400 * LLAMA_8B_TOKEN_BYTES / H200.hbm_bytes_per_s
    (even_s,), (lopsided_s,) = found.stage_times(evenly), found.stage_times(lopsided)
    assert lopsided_s - even_s == pytest.approx(more_s, rel=0.05)
    alone: Any = Step([], [(4096, 0)], rows=[3])
    both: Any = Step([], [(4096, 0), (4096, 0)], rows=[3, 11])
    one: Any = Step([], [(4096, 0), (4096, 0)], rows=[3, 4])
    (alone_s,), (both_s,), (one_s,) = map(found.stage_times, (alone, both, one))
    assert alone_s < both_s < one_s, "two prompts of one shard wait for each other's attention, if for nothing else"


def test_few_tokens_read_few_experts(tmp_path: Path) -> None:
    one, many = (times(tmp_path, QWEN3_30B_A3B, "h200", Step([64] * rows))[0] for rows in (1, 256))
    assert many > 5 * one


def serve(found: ReplicaPlan, requests: list[Arrival] | SharedPrefixes) -> Report:
    return Simulation(found.args, found.spec, found.stage_times, host_s=1e-6, path_s=0.0).run(requests)


def test_a_request_takes_what_its_steps_take(tmp_path: Path) -> None:
    found = plan(tmp_path, LLAMA_8B, "h200")
    report = serve(found, [Arrival(0.0, np.arange(1024, dtype=np.int32), 9)])
    assert isinstance(found.stage_times, RooflineTimes)
    prompt: Any = Step([], [(1024, 0)])
    decode: Any = Step([1024])
    assert report.ttft_s[0] == pytest.approx(found.stage_times(prompt)[0], abs=1e-5)
    assert report.tpot_s[0] == pytest.approx(found.stage_times(decode)[0], rel=0.01)


@pytest.mark.parametrize(
    ("config", "topology", "given"),
    [
        (GEMMA_3_1B, "v6e:1x1", {}),  # layers with a window
        (QWEN3_NEXT_80B_A3B, "h200:2", {"max_running_requests": 64}),  # layers that keep states
        (DEEPSEEK_V2_LITE, "h200:2", {"dcp_size": 2}),  # latents, shared by tokens
        (QWEN3_30B_A3B, "h200:8", {"ep_size": 8, "attn_dp_size": 4}),
        (LLAMA_8B, "tpu7x:1x1x1", {"kv_cache_dtype": "int8", "quantization": "int8wo"}),
        (LLAMA_70B, "h200:2x8", {"pp_size": 2, "enable_dynamic_chunking": True}),
    ],
    ids=["windows", "states", "latents", "experts", "int8", "stages"],
)
def test_every_kind_of_model_is_served(config: dict[str, Any], topology: str, given: dict[str, Any], tmp_path: Path) -> None:
    found = plan(tmp_path, config, topology, **given)
    report = serve(found, SharedPrefixes(rate=500.0, num_groups=4, prompts_per_group=8, shared_len=1600, output_len=20))
    assert (report.completed, report.output_tokens) == (32, 640)
    assert report.cached_tokens > 0
    assert found.num_chips == parse_target(topology).num_chips


def test_an_int8_cache_holds_nearly_twice_the_tokens(tmp_path: Path) -> None:
    plain, small = plan(tmp_path, LLAMA_8B, "h200"), plan(tmp_path, LLAMA_8B, "h200", kv_cache_dtype="int8")
    assert small.spec.max_total_tokens > 1.9 * plain.spec.max_total_tokens


def run_command(*words: str) -> Any:
    small = ["--gsp-num-groups", "4", "--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "64", "--gsp-output-len", "8"]
    return CliRunner().invoke(simulate, [*small, *words])


def test_the_command_says_what_it_assumes(tmp_path: Path) -> None:
    model = str(write_config(tmp_path, LLAMA_8B))
    result = run_command("--topology", "h200:2", "--model-path", model, "--replicas", "1,2", "--goodput", "ttft:100")
    assert result.exit_code == 0, result.output
    first, _, *lines = result.output.strip().splitlines()
    assert first.startswith("Each replica: 2 of h200:2, a KV cache of ")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--topology", "h300", "--model-path", "MODEL"], "--topology 'h300' is not known. Known are"),
        (["--topology", "h200"], "A model is needed"),
        (["--topology", "h200", "--model-path", "EMPTY"], "config.json does not exist"),
        (["--topology", "h200", "--model-path", "MODEL", "--step-ms", "8"], "--step-ms and --topology cannot be combined"),
        (["--topology", "h200", "--model-path", "MODEL", "--step-times", "TABLE"], "--step-times and --topology cannot be"),
        (["--model-path", "MODEL"], "--model-path needs --topology"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype needs --topology"),
        (["--topology", "v5e:1x1", "--model-path", "MODEL"], "The smallest v5e slice that holds them"),
        (["--topology", "h200", "--model-path", "MODEL", "--tp-size", "2"], "--tp-size 2 needs as many devices; h200:1 has 1"),
        (["--topology", "h200", "--model-path", "MODEL", "--pp-size", "0"], "--pp-size must be"),
        (["--topology", "h200", "--model-path", "MODEL", "--max-total-tokens", "64"], "has 64 tokens for one request"),
        (
            ["--topology", "h200", "--model-path", "MODEL", "--max-total-tokens", "9999999"],
            "must be at most what is left of it",
        ),
        (["--topology", "h200", "--model-path", "MODEL", "--context-length", "200"], "A request has 200 tokens, and"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_sentence(words: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "table").write_text("")
    named = {"MODEL": str(write_config(tmp_path / "model", LLAMA_8B)), "EMPTY": str(tmp_path / "empty")}
    named["TABLE"] = str(tmp_path / "table")
    result = run_command(*(named.get(word, word) for word in words))
    assert result.exit_code != 0
    assert says in result.output.replace("\n", " "), result.output
    assert isinstance(result.exception, SystemExit), result.exception
