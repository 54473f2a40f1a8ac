"""`bench compare`: intervals by hand, which runs are compared, verdicts, and files that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.comparing import Verdict, compare, load_records, pair_up
from jaxserve.bench.comparing.intervals import of_runs, of_samples, values_of
from jaxserve.bench.record import Record, append_record, header, latency_fields
from jaxserve.cli.main import run

# The 97.5 % point of Student's t with two degrees of freedom: tables have it.
T_2 = 4.30265


def serving(rate: float = 1.0, *, output_throughput: float = 100.0, ttfts: list[float] | None = None, **changes: Any) -> Record:
    record = {**header("serving", ["bench"]), "dataset_name": "random", "request_rate": rate, "completed": 4}
    record |= {"output_throughput": output_throughput, **latency_fields("ttft", ttfts or [0.1])}
    if ttfts is not None:
        record |= {"ttfts": ttfts, "errors": [""] * len(ttfts)}
    return record | changes


def write(path: Path, *records: Record) -> Path:
    for record in records:
        append_record(path, record)
    return path


def test_an_interval_over_runs_by_hand() -> None:
    """Logarithms -1, 1 and 1, 3: means 0 and 2, both variances 2, so the error is sqrt(2) with 2 degrees of freedom."""
    interval = of_runs([math.exp(-1), math.exp(1)], [math.exp(1), math.exp(3)])
    reach = T_2 * math.sqrt(2)
    found = (math.log(interval.ratio), math.log(interval.low), math.log(interval.high))
    assert found == pytest.approx((2, 2 - reach, 2 + reach), abs=1e-4)
    same = of_runs([2.0, 2.0], [3.0, 3.0])
    assert (same.ratio, same.low, same.high) == pytest.approx((1.5, 1.5, 1.5))


def test_a_bootstrap_by_hand() -> None:
    """Two values of each side: a mean is 1, 1.5 or 2 with probabilities 1/4, 1/2, 1/4; the extremes are the 2.5 % points."""
    before, after = [np.array([1.0]), np.array([2.0])], [np.array([2.0]), np.array([4.0])]
    interval = of_samples(before, after, ["mean"])["mean"]
    assert (interval.ratio, interval.low, interval.high) == (2.0, 1.0, 4.0)
    assert of_samples(before, after, ["mean"]) == {"mean": interval}  # at every call
    # Gaps of one request stay together: a resample is all ones or all threes, or half of each.
    gaps = [np.array([1.0, 1.0]), np.array([3.0, 3.0])]
    assert of_samples(gaps, [np.array([1.0])] * 2, ["mean"])["mean"].low == pytest.approx(1 / 3)
    assert values_of(np.arange(101.0), ["mean", "median", "p90"]).tolist() == [50, 50, 90]


def test_verdicts() -> None:
    def verdict(key: str, before: list[Record], after: list[Record]) -> Verdict:
        (pair,) = pair_up(before, after).pairs
        return next(one.verdict for one in compare(pair) if one.metric.key == key)

    speeds = [serving(output_throughput=value) for value in (100.0, 101.0, 99.0)]
    faster = [serving(output_throughput=value) for value in (120.0, 121.0, 119.0)]
    assert verdict("output_throughput", speeds, faster) is Verdict.FASTER
    assert verdict("output_throughput", faster, speeds) is Verdict.SLOWER
    assert verdict("output_throughput", speeds, speeds[::-1]) is Verdict.SAME
    assert verdict("output_throughput", speeds[:1], faster[:1]) is Verdict.UNKNOWN
    quick, slow = [serving(ttfts=[0.1, 0.11, 0.12] * 10)], [serving(ttfts=[0.2, 0.21, 0.22] * 10)]
    assert verdict("mean_ttft_ms", quick, slow) is Verdict.SLOWER  # less is better
    assert verdict("median_ttft_ms", slow, quick) is Verdict.FASTER


def test_only_requests_that_were_answered_count() -> None:
    one = serving(ttfts=[0.1, 0.1, 0.0]) | {"errors": ["", "", "HTTP 503"]}
    (pair,) = pair_up([one], [one]).pairs
    (ttft,) = (found for found in compare(pair) if found.metric.key == "mean_ttft_ms")
    assert ttft.interval is not None and (ttft.interval.low, ttft.interval.high) == (1.0, 1.0)


def test_runs_of_one_load_are_compared_with_each_other() -> None:
    before = [serving(1), serving(2), serving(2)]
    after = [serving(2, server_info={"version": "2", "uptime_s": 3.0}, client={"processes": 2}), serving(4)]
    pairing = pair_up(before, after)
    assert [(dict(pair.load)["request_rate"], len(pair.before), len(pair.after)) for pair in pairing.pairs] == [(2, 2, 1)]
    assert [line.partition(" has ")[0] for line in pairing.alone] == ["only the first", "only the second"]
    assert pairing.differences == [("server_info.version", "not said", "2")]
    with pytest.raises(ValueError, match=r"request_rate is 1 in the first and 4 in the second"):
        pair_up([serving(1)], [serving(4)])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = write(tmp_path / "a.jsonl", *(serving(output_throughput=value) for value in (100.0, 101.0)))
    fast = write(tmp_path / "b.jsonl", *(serving(output_throughput=value, failed=1) for value in (120.0, 121.0)))
    assert run(["bench", "compare", str(slow), str(fast), "--fail-if-slower", "5%"]) == 0
    printed = capsys.readouterr()
    assert "faster" in printed.out and "1.199" in printed.out and "2 requests failed" in printed.err
    assert run(["bench", "compare", str(fast), str(slow), "--metric", "output_throughput", "--fail-if-slower", "5%"]) == 1
    assert "Output tokens by 16.6%" in capsys.readouterr().err
    assert run(["bench", "compare", str(fast), str(slow), "--fail-if-slower", "20"]) == 0
    capsys.readouterr()
    assert run(["bench", "compare", str(slow), str(fast), "--json"]) == 0
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert load["runs"] == [2, 2] and load["metrics"][0]["verdict"] == "faster"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no records"),
        ("no json\n", "line 1: not JSON"),
        ("[]\n", "line 1: not an object"),
        ('{"some": "thing"}\n', "record 1: none of the numbers"),
        ('{"jaxserve_bench": {"kind": "kernels"}}\n', "records of bench kernels are not compared"),
        ("\0\ufffe", "not JSON"),
    ],
)
def test_files_that_are_none(content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = tmp_path / "bad.jsonl", write(tmp_path / "good.jsonl", serving())
    bad.write_text(content)
    assert run(["bench", "compare", str(good), str(bad)]) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    with pytest.raises(ValueError, match=words):
        load_records(bad)


def test_what_is_asked_wrongly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(write(tmp_path / "good.jsonl", serving()))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert run(["bench", "compare", good, str(tmp_path / "bytes")]) == 1
    assert "is no text" in capsys.readouterr().err
    assert run(["bench", "compare", good, str(tmp_path / "missing")]) == 2
    assert run(["bench", "compare", good, good, "--fail-if-slower", "much"]) == 2
    assert "is not a share such as 5%" in capsys.readouterr().err
    assert run(["bench", "compare", good, good, "--metric", "speed"]) == 1
    assert "No number is in both files: speed." in capsys.readouterr().err
