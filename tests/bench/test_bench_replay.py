"""`jaxserve bench replay` against the app with a fake engine's pipeline, and on files that are no dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.replay import Answer, DumpFileError, Recorded, differences, read_dump
from jaxserve.cli.main import run

STOP = {"type": "stop", "matched": 7}


def entry(rid: str = "r", **changes: Any) -> dict[str, Any]:
    request = {"text": "a", "sampling_params": {"temperature": 0.0, "n": 2}, "stream": True}
    reply = {"text": "bcd", "output_ids": [1, 2, 3], "meta_info": {"finish_reason": STOP}}
    return {"rid": rid, "received_s": 10.0, "ended_s": 11.0, "request": request, "reply": reply, **changes}


def dump_of(folder: Path, *lines: Any) -> str:
    path = folder / "dump.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def recorded(folder: Path, **changes: Any) -> Recorded:
    (found,) = read_dump(dump_of(folder, entry(**changes))).requests
    return found


def test_a_crash_dump(tmp_path: Path) -> None:
    head = {"reason": "it died", "written_s": 1.0, "server_args": {}}
    embeds = entry(request={"input_embeds": "3 x 2", "sampling_params": {}})
    dump = read_dump(dump_of(tmp_path, head, entry("late", received_s=12.0), "", embeds, entry("early")))
    assert (dump.reason, dump.left_out) == ("it died", 1)
    assert [(one.rid, one.line) for one in dump.requests] == [("early", 5), ("late", 2)]
    body = dump.requests[0].body
    assert body == {"text": "a", "sampling_params": {"temperature": 0.0, "n": 1}, "stream": False}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no requests"),
        (["{"], "line 1 is no JSON object"),
        (["[1]"], "line 1 is no JSON object"),
        ([entry(), {"rid": "x"}], "line 2 is not of a dump"),
        ([entry(request={"sampling_params": {}})], "line 1 is not of a dump"),
        ([entry(received_s="soon")], "line 1 is not of a dump"),
        ([entry(reply=[])], "line 1 is not of a dump"),
    ],
)
def test_what_is_no_dump(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DumpFileError, match=message):
        read_dump(dump_of(tmp_path, *lines))


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "replay", str(tmp_path / "no")]) == 1
    assert "cannot be read: No such file or directory." in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert run(["bench", "replay", str(tmp_path / "binary")]) == 1
    assert "is not UTF-8" in capsys.readouterr().err
    assert run(["bench", "replay", dump_of(tmp_path, entry()), "--base-url", "127.0.0.1:1"]) == 1
    assert "No server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "answer", "expected"),
    [
        ({}, Answer(200, "", "bcd", (1, 2, 3), STOP), []),
        ({}, Answer(200, "", "bxd", (1, 9, 3), STOP),
         ["from token 1 of 3 on: 2 then, 9 now", "from character 1 on: 'cd' then, 'xd' now"]),
        ({}, Answer(200, "", "bcd", (1, 2, 3), {"type": "length"}), ["stop at 7 then, length now"]),
        ({}, Answer(200, "", "bc", (1, 2), STOP),
         ["from token 2 of 3 on: 3 then, the end now", "from character 2 on: 'd' then, '' now"]),
        ({}, Answer(503, "full"), ["200 then, 503 (full) now"]),
        ({}, Answer(0, "refused"), ["200 then, no answer (refused) now"]),
    ],
)  # fmt: skip
def test_what_differs(tmp_path: Path, changes: dict[str, Any], answer: Answer, expected: list[str]) -> None:
    assert [one.sentence for one in differences(recorded(tmp_path, **changes), answer)] == expected


def test_as_far_as_it_had_come(tmp_path: Path) -> None:
    whole = Answer(200, "", "bcdef", (1, 2, 3, 4, 5), STOP)
    for meta in ({}, {"finish_reason": {"type": "abort", "message": "Its client left."}}):
        then = recorded(tmp_path, reply={"text": "bcd", "output_ids": [1, 2, 3], "meta_info": meta})
        assert not differences(then, whole)
        assert differences(then, Answer(200, "", "b", (1,), STOP))


def test_refused_then_and_now(tmp_path: Path) -> None:
    abort = {"type": "abort", "message": "no", "status_code": 503}
    then = recorded(tmp_path, reply={"text": "", "output_ids": [], "meta_info": {"finish_reason": abort}})
    assert not differences(then, Answer(503, "still no"))
    assert [one.sentence for one in differences(then, Answer(200, "", "b", (1,), STOP))] == ["503 then, 200 now"]


def test_drawn_tokens_are_not_compared(tmp_path: Path) -> None:
    other = Answer(200, "", "x", (9,), STOP)
    assert not differences(recorded(tmp_path, request={"text": "a", "sampling_params": {}}), other)
    assert differences(recorded(tmp_path, request={"text": "a", "sampling_params": {"sampling_seed": 1}}), other)
