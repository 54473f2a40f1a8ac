"""Simulated servers: times that one can add up by hand, and what a simulation must keep of a real one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from jaxserve.bench.simulate import (
    Arrival,
    LinearStepTimes,
    MeasuredStepTimes,
    Report,
    SharedPrefixes,
    Simulation,
    evenly,
    read_trace,
)
from jaxserve.bench.simulate.plan import highest_rate, resolved, runner_spec
from jaxserve.bench.simulate.step_times import Curve
from jaxserve.cli.bench.simulate import simulate
from jaxserve.config import ServerArgs

STEP_S, TOKEN_S, ROW_S, HOST_S, PATH_S = 0.01, 1e-4, 1e-3, 1e-5, 0.002
TIMES = LinearStepTimes(STEP_S, TOKEN_S, ROW_S)


def run(arrivals: Iterable[Arrival], **options: Any) -> Report:
    args = resolved({"page_size": 16, "max_total_tokens": 8192, **options}, "gpu", 1024)
    return Simulation(args, runner_spec(args), evenly(TIMES, args.pp_size), host_s=HOST_S, path_s=PATH_S).run(arrivals)


def prompt(length: int, first: int = 10) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def test_one_request_takes_what_its_steps_take() -> None:
    report = run([Arrival(5.0, prompt(100), 4)])
    (ttft_s,), (tpot_s,), (e2e_s,) = report.ttft_s, report.tpot_s, report.e2e_s
    assert ttft_s == pytest.approx(PATH_S + STEP_S + 100 * TOKEN_S, abs=3 * HOST_S)
    assert tpot_s == pytest.approx(STEP_S + ROW_S, abs=HOST_S)
    assert e2e_s == pytest.approx(ttft_s + 3 * tpot_s)
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (100, 4, 0)


def test_without_overlap_the_host_stands_between_steps() -> None:
    (tpot_s,) = run([Arrival(0.0, prompt(10), 50)], disable_overlap_schedule=True).tpot_s
    assert tpot_s == pytest.approx(STEP_S + ROW_S + HOST_S, rel=1e-6)


def test_who_comes_together_shares_steps_and_who_comes_later_the_cache() -> None:
    report = run([Arrival(0.0, prompt(64), 5), Arrival(0.0, prompt(64, 5000), 5), Arrival(9.0, prompt(64), 5)])
    assert report.ttft_s[0] == report.ttft_s[1] == pytest.approx(PATH_S + STEP_S + 128 * TOKEN_S, abs=3 * HOST_S)
    assert report.cached_tokens == 48, "whole pages, less the last token"
    assert report.ttft_s[2] == pytest.approx(PATH_S + STEP_S + 16 * TOKEN_S, abs=3 * HOST_S)


@pytest.mark.parametrize("dp_size", [1, 5])
@pytest.mark.parametrize("method", ["round_robin", "cache_aware"])
@pytest.mark.parametrize("max_total_tokens", [2048, 65536])
def test_all_are_served_whatever_there_is_room_for(dp_size: int, method: str, max_total_tokens: int) -> None:
    work = SharedPrefixes(rate=200.0, num_groups=8, prompts_per_group=10, shared_len=300, question_len=20, output_len=40)
    options = {"dp_size": dp_size, "load_balance_method": method, "max_total_tokens": max_total_tokens}
    report = run(work, **options)
    assert (report.completed, report.prompt_tokens, report.output_tokens) == (80, 80 * 320, 80 * 40)
    assert min(report.ttft_s) >= PATH_S + STEP_S
    assert report.record({})["device_busy_pct"] <= 100
    assert report.record({}) == run(work, **options).record({}), "nothing is left to chance"


def test_hundreds_of_replicas_and_thousands_of_requests() -> None:
    """What is kept of a request that has been served is three numbers, of eight bytes each."""
    work = SharedPrefixes(rate=8000.0, num_groups=50, prompts_per_group=80, shared_len=64, question_len=16, output_len=3)
    report = run(work, dp_size=200, load_balance_method="cache_aware", max_total_tokens=2048)
    assert (report.num_replicas, report.completed, report.output_tokens) == (200, 4000, 12000)
    assert [len(times) * times.itemsize for times in (report.ttft_s, report.tpot_s, report.e2e_s)] == [8 * 4000] * 3
    assert 0 < report.record({})["device_busy_pct"] < 100


def test_cache_aware_routing_finds_more() -> None:
    work = SharedPrefixes(rate=40.0, num_groups=12, prompts_per_group=8, shared_len=512, question_len=16, output_len=16)
    found = {
        method: run(work, dp_size=4, load_balance_method=method, max_total_tokens=3072).record({"ttft": 100.0})
        for method in ("round_robin", "cache_aware")
    }
    assert found["cache_aware"]["cache_hit_rate_pct"] > 2 * found["round_robin"]["cache_hit_rate_pct"]
    assert found["cache_aware"]["median_ttft_ms"] < found["round_robin"]["median_ttft_ms"]
    assert found["cache_aware"]["goodput_per_chip"] > found["round_robin"]["goodput_per_chip"]


def test_one_request_has_one_stage_at_a_time() -> None:
    report = run([Arrival(0.0, prompt(100), 40)], pp_size=4)
    assert report.tpot_s[0] == pytest.approx(STEP_S + ROW_S, abs=HOST_S)
    assert report.record({})["bubble_pct"] == pytest.approx(75, abs=0.1)


def test_two_requests_take_turns_in_two_stages() -> None:
    """By hand: each has a step of its own, and one is in the other's stage; the prompts go in one step."""
    report = run([Arrival(0.0, prompt(16), 101), Arrival(0.0, prompt(16, 5000), 101)], pp_size=2)
    assert list(report.tpot_s) == pytest.approx([STEP_S + ROW_S] * 2, rel=0.02)
    assert report.record({})["bubble_pct"] < 2


@pytest.mark.parametrize("pp_size", [2, 4])
def test_a_full_pipeline_has_no_bubbles(pp_size: int) -> None:
    work = [Arrival(0.0, prompt(32, 100 * number), 400) for number in range(16)]  # at its beginning and end it has
    whole, staged = run(work, max_total_tokens=16384), run(work, max_total_tokens=16384, pp_size=pp_size)
    assert staged.record({})["bubble_pct"] < 3 and whole.record({})["bubble_pct"] == 0
    assert staged.output_tokens == whole.output_tokens


def test_chunks_that_take_as_long_as_each_other_keep_stages_busy() -> None:
    """Fixed chunks of a long prompt take longer and longer, so each stage waits for the one before it."""
    work = [Arrival(0.0, prompt(8000), 2)]
    times = LinearStepTimes(1e-4, TOKEN_S, ROW_S, pair_s=TOKEN_S / 500)
    found = {}
    for is_dynamic in (False, True):
        options = {"pp_size": 4, "enable_dynamic_chunking": is_dynamic, "chunked_prefill_size": 1024}
        args = resolved({"page_size": 16, "max_total_tokens": 8192, **options}, "gpu", 8190)
        report = Simulation(args, runner_spec(args, times.work_ratio), evenly(times, 4), host_s=HOST_S).run(work)
        found[is_dynamic] = report.record({})["bubble_pct"]
    assert found[True] < 0.7 * found[False]


def test_a_sequence_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-total-tokens 512 has no room for one sequence of 1025 tokens"):
        runner_spec(resolved({"max_total_tokens": 512}, "gpu", 1024))


def test_goodput_counts_those_who_kept_all_limits() -> None:
    report = Report(2)
    for ttft_s, e2e_s in ((0.1, 0.5), (0.3, 0.5), (0.1, 2.0)):
        report.add(Arrival(1.0, prompt(4), 5), 1.0 + ttft_s, 1.0 + e2e_s, 5, 0)
    assert report.goodput({"ttft": 200.0}) == pytest.approx(2 / 3)
    record = report.record({"ttft": 200.0, "e2el": 1000.0}, chips_per_replica=4)
    assert record["goodput"] == pytest.approx(1 / 2.0) and record["goodput_per_chip"] == pytest.approx(1 / 16)


@pytest.mark.parametrize(("limit", "first"), [(37.0, 1.0), (37.0, 500.0), (37.0, 37.0), (0.001, 100.0)])
def test_the_highest_rate_is_found_from_either_side(limit: float, first: float) -> None:
    tried: list[float] = []

    def simulated(rate: float) -> dict[str, Any]:
        tried.append(rate)
        return {"rate": rate, "goodput_pct": 100.0 if rate <= limit else 0.0}

    best = highest_rate(simulated, 99.0, first)
    if limit < first / 1000:
        assert best is None
    else:
        assert best is not None and limit / 1.05 <= best["rate"] <= limit
    assert len(tried) < 25


def test_traces(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 4000, "input_length": 600, "output_length": 2, "hash_ids": [1, 3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    first, second = read_trace(path, speed=2.0)
    assert (first.at_s, second.at_s, len(first.prompt), len(second.prompt)) == (0.0, 2.0, 700, 600)
    assert (first.prompt[:512] == second.prompt[:512]).all() and not (first.prompt[512:600] == second.prompt[512:]).all()
    assert run([first, second]).cached_tokens == 512
    for bad in ("{", '{"timestamp": 0}', '{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1]}'):
        path.write_text(f"{json.dumps(lines[0])}\n{bad}\n")
        with pytest.raises(ValueError, match="line 2, is no request of a Mooncake trace"):
            list(read_trace(path))


def records(step_s: float = 0.002, row_s: float = 1e-4, back_s: float = 1e-7) -> list[dict[str, Any]]:
    """As `bench latency` would have measured a device that is linear."""
    options = {"decode_row_buckets": [1, 4, 16], "prefill_token_buckets": [16, 64, 256], "page_size": 16}
    made = []
    for rows in (1, 4, 16):
        for length in (16, 64):
            decode_s = step_s + row_s * rows + back_s * rows * (length + 4)
            case = {"batch_size": rows, "input_len": length, "output_len": 8, "median_decode_latency": decode_s}
            prefill_s = 0.001 * rows * length + 2e-7 * rows * length**2 / 2
            case |= {"prefill_latency": prefill_s, "server_args": options, "jaxserve_bench": {"kind": "latency"}}
            made.append(case)
    return made


def test_measured_times_are_those_of_buckets() -> None:
    times = MeasuredStepTimes.of_records(records())
    assert times.decode.pair_s == pytest.approx(1e-7) and times.prefill.pair_s == pytest.approx(2e-7)
    assert dict(zip(times.decode.sizes, times.decode.seconds, strict=True)) == pytest.approx({1: 0.0021, 4: 0.0024, 16: 0.0036})
    assert dict(zip(times.prefill.sizes, times.prefill.seconds, strict=True)) == pytest.approx(
        {16: 0.016, 64: 0.064, 256: 0.256}
    )

    class Step:
        """`rows` that decode, and prompts of which a part is cached."""

        def __init__(self, rows: int, seq_len: int, *prompts: tuple[int, int]) -> None:
            self.num_decode_rows = rows
            self.extend_lens = np.array([1] * rows + [new for new, _ in prompts], np.int32)
            self.seq_lens = np.array([seq_len] * rows + [new + cached for new, cached in prompts], np.int32)
            self.input_ids = np.zeros(sum(new for new, _ in prompts), np.int32)

    assert times(Step(3, 100)) == pytest.approx(0.0024 + 300e-7)  # type: ignore[arg-type]
    assert times(Step(0, 0, (40, 0))) == pytest.approx(0.064 + 40 * 20 * 2e-7)  # type: ignore[arg-type]
    assert times(Step(0, 0, (40, 100))) == pytest.approx(0.064 + 40 * 120 * 2e-7)  # type: ignore[arg-type]
    assert times(Step(2, 100, (100, 0))) == pytest.approx(0.256 + (2 * 99.5 + 100 * 50) * 2e-7)  # type: ignore[arg-type]
    assert times(Step(0, 0, (512, 0))) == pytest.approx(0.512 + 512 * 256 * 2e-7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no record of `jaxserve bench latency`"):
        MeasuredStepTimes.of_records([{"jaxserve_bench": {"kind": "serving"}}])


def test_where_pairs_were_not_varied_they_cost_nothing() -> None:
    curve = Curve.fit([(1, 10.0, 0.5), (4, 99.0, 0.8)])
    assert (curve.sizes, curve.seconds, curve.pair_s) == ((1, 4), (0.5, 0.8), 0.0)
    curve = Curve.fit([(1, 10.0, 0.5), (1, 20.0, 0.4), (4, 99.0, 0.8)])
    assert curve.pair_s == 0.0 and curve(1, 0.0) == pytest.approx(0.45)


SMALL = ["--gsp-num-groups", "4", "--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "64", "--gsp-output-len", "8"]


def test_the_command_compares(tmp_path: Path) -> None:
    out, table = tmp_path / "runs.jsonl", tmp_path / "steps.jsonl"
    table.write_text("\n".join(map(json.dumps, records())) + "\n")
    words = ["--replicas", "1,2", "--load-balance-method", "round_robin,cache_aware", "--request-rate", "5,50"]
    result = CliRunner().invoke(simulate, [*SMALL, *words, "--goodput", "ttft:100", "--output-file", str(out)])
    assert result.exit_code == 0, result.output
    assert len(result.output.strip().splitlines()) == 9
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["completed"] for line in lines} == {12} and {line["jaxserve_bench"]["kind"] for line in lines} == {"simulate"}
    words = ["--step-times", str(table), "--target-pct", "99", "--goodput", "ttft:400"]
    result = CliRunner().invoke(simulate, [*SMALL, *words, "--seed", "1"])  # none right behind another, as seed 0 has
    assert result.exit_code == 0, result.output
    assert float(result.output.strip().splitlines()[-1].split()[2]) > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--load-balance-method", "magic"], "'magic' is none of auto, round_robin"),
        (["--goodput", "ttft"], "--goodput is ttft:MS"),
        (["--target-pct", "99"], "--target-pct needs limits"),
        (["--max-total-tokens", "100"], "--max-total-tokens 100 has no room for one sequence"),
        (["--page-size", "0"], "--page-size must be in"),
        (["--replicas", "0"], "--replicas"),
        (["--request-rate", "0"], "--request-rate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_sentence(words: list[str], says: str) -> None:
    result = CliRunner().invoke(simulate, [*SMALL, *words])
    assert result.exit_code != 0
    assert says in result.output, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception


def test_options_that_differ_between_replicas_and_simulations_do_not_matter() -> None:
    args = resolved({"page_size": 16}, "gpu", 100)
    assert isinstance(args, ServerArgs) and args.max_total_tokens == 512 * 1024 and args.context_length == 101
