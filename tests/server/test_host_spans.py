"""What processes without JAX did, in the trace of the one that has it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from jaxserve.config import ServerArgs
from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER, TOKENIZER, HostSpan, ProfileBegan, ProfileEnded, WorkerAddress
from jaxserve.server.host_spans import HostSpans, merge, next_in_chain

NOW_NS = 1_795_458_524_000_000_000


def test_nothing_is_noted_while_no_profile_is_taken() -> None:
    spans = HostSpans()
    with spans("a", 1):
        pass
    first, second = WorkerAddress(SCHEDULER, 0), WorkerAddress(SCHEDULER, 1)
    spans.begin(ProfileBegan(source=first))
    with spans("b", 2):
        spans.begin(ProfileBegan(source=second))
    (noted,) = spans.end(ProfileEnded(folder="", ended_ns=0, source=first))
    assert (noted.name, noted.count) == ("b", 2) and noted.begin_ns <= noted.end_ns
    assert spans.end(ProfileEnded(folder="", ended_ns=0, source=first)) == []
    with spans("c", 3):
        pass
    assert [span.name for span in spans.end(ProfileEnded(folder="", ended_ns=0, source=second))] == ["b", "c"]


def chain_of(args: ServerArgs) -> list[str]:
    chain = [WorkerAddress(DETOKENIZER)]
    while chain[-1].kind != TOKENIZER:
        chain.append(next_in_chain(chain[-1], args))
    return [str(worker) for worker in chain]


def test_every_process_hears_of_a_profile() -> None:
    assert chain_of(ServerArgs()) == ["detokenizer", "tokenizer"]
    assert chain_of(ServerArgs(detokenizer_worker_num=3)) == ["detokenizer", "detokenizer 1", "detokenizer 2", "tokenizer"]
    chain = chain_of(ServerArgs(detokenizer_worker_num=2, tokenizer_worker_num=2))
    assert chain == ["detokenizer", "detokenizer 1", "front", "front 1", "tokenizer"]
    assert next_in_chain(WorkerAddress(FRONT, 1), ServerArgs(tokenizer_worker_num=2)) == WorkerAddress(TOKENIZER)


def test_merging_on_one_clock(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    clock = f'{{"ph":"X","pid":1,"tid":1,"ts":100.5,"dur":2.0,"name":"clock","args":{{"unix_ns":"{NOW_NS}"}}}}'
    text = f'{{"displayTimeUnit":"ns","metadata":{{"highres-ticks":true}},"traceEvents":[{clock},{{}}]}}'
    (folder / "vm.trace.json.gz").write_bytes(gzip.compress(text.encode()))
    spans = [HostSpan("a", NOW_NS + 1_000, NOW_NS + 3_000, 7), HostSpan("late", NOW_NS + 10**9, NOW_NS + 10**9, 1)]
    merge(str(tmp_path), NOW_NS + 5_000, {"detokenizer": spans})
    content = json.loads(gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes()))
    assert content.keys() == {"displayTimeUnit", "traceEvents"}
    process, span, first, _ = content["traceEvents"]
    assert process["args"] == {"name": "detokenizer"} and first["name"] == "clock"
    assert (span["name"], span["ts"], span["dur"], span["args"]) == ("a", 101.5, 2.0, {"count": 7})


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    merge(str(tmp_path), NOW_NS, {"main": []})
    assert not list(tmp_path.iterdir())
