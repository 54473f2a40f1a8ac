"""docs/from_vllm.md: vLLM has the names on the left, jaxserve those on the right, and none of what is said to be missing."""

from __future__ import annotations

import json
import pathlib
import re
from unittest import mock

import pytest

from jaxserve.cli.serve import serve
from jaxserve.config import ServerArgs
from jaxserve.metrics import FAMILIES, PREFIX
from jaxserve.parsers.reasoning import REASONING_FORMATS
from jaxserve.parsers.tools import TOOL_FORMATS
from jaxserve.server.http.app import create_app
from jaxserve.server.native.request import KNOWN_FIELDS
from jaxserve.server.openai.foreign_fields import WITHOUT_EFFECT
from jaxserve.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.types import SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "from_vllm.md").read_text()
VLLM = {kind: set(names) for kind, names in json.loads((ROOT / "scripts" / "vllm_surface.json").read_text()).items()}
OPTIONS = {option for parameter in serve.params for option in parameter.opts}
OPENAI = {name for kind in (ChatCompletionRequest, CompletionRequest) for name in kind.__struct_fields__}
FIELDS = {*OPENAI, *KNOWN_FIELDS, *SamplingParams.__struct_fields__}
VALUES = {"disallowed_tokens", "thinking_budget"}  # of fields


@pytest.fixture(scope="module")
def paths() -> set[str]:
    return {
        path.replace("{model:path}", "{model}")
        for path in create_app(mock.Mock(), ServerArgs(model_path="model")).openapi()["paths"]
    }


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def columns(text: str) -> tuple[str, str]:
    rows = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ")]
    return "\n".join(row[0] for row in rows), "\n".join(row[-1] for row in rows)


def quoted(text: str, pattern: str) -> set[str]:
    return set(re.findall(f"`({pattern})`", text))


@pytest.mark.parametrize("title", ["Start", "Memory, batches, cache", "Chat, tools, output"])
def test_options_are_called_so(title: str) -> None:
    theirs, ours = columns(section(title))
    assert len(theirs.splitlines()) > 10
    assert quoted(theirs, "--[a-z-]+") <= VLLM["options"]
    named = {option.split()[0] for option in quoted(ours, "--[^`]+")}
    assert named <= OPTIONS, named - OPTIONS


def test_fields_are_called_so() -> None:
    text, missing = section("Fields of requests").split("Missing, and 400:")
    missing, without_effect = missing.split("Without effect:")
    theirs, ours = columns(text)
    said = quoted(theirs, "[a-z_]+")
    assert said <= VLLM["fields"] | VLLM["structured_outputs"]
    assert quoted(ours, "[a-z_]+") <= FIELDS | VALUES
    lacks = quoted(columns(missing)[1], "[a-z_]+")
    assert lacks <= VLLM["fields"]
    assert not lacks & OPENAI
    silent = VLLM["fields"] - OPENAI - said - lacks - quoted(without_effect, "[a-z_]+")
    assert not silent, f"docs/from_vllm.md does not say what becomes of {sorted(silent)}"
    assert quoted(without_effect, "[a-z_]+") <= set(WITHOUT_EFFECT)


def test_endpoints_are_called_so(paths: set[str]) -> None:
    text, missing = section("Endpoints").split("Missing:")
    theirs, ours = columns(text)
    path = r"/[a-z0-9_/]+"
    assert quoted(theirs, path) <= VLLM["paths"] | {"/metrics"}  # which its client library mounts
    same = {line for line in text.splitlines() if line.endswith("| the same |")}
    assert quoted(ours, path) | quoted("\n".join(same), path) <= paths
    lacks = quoted(missing.split("(")[0], path)
    assert lacks <= VLLM["paths"]
    assert not lacks & paths


def test_parsers_are_called_so() -> None:
    for option, ours, theirs in (
        ("--tool-call-parser", TOOL_FORMATS, VLLM["tool_call_parsers"]),
        ("--reasoning-parser", REASONING_FORMATS, VLLM["reasoning_parsers"]),
    ):
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{option}`")]
        pairs = re.findall(r"`([\w-]+)` is `([\w-]+)`", line)
        assert len(pairs) >= 3
        pairs += [
            (name, name)
            for names in re.findall(r"((?:`[\w-]+`(?: and )?)+) (?:is|are) the same", line)
            for name in re.findall(r"[\w-]+(?=`)", names)
        ]
        assert {pair[0] for pair in pairs} <= theirs
        assert {pair[1] for pair in pairs} <= set(ours)


def test_metrics_are_called_so() -> None:
    theirs, ours = columns(section("Metrics"))
    named = {name.removesuffix("_total") for name in quoted(theirs, "vllm:[a-z_]+")}  # which the client library adds
    assert len(named) > 8
    assert named <= VLLM["metrics"]
    same = {
        name.replace("vllm:", PREFIX)
        for line in section("Metrics").splitlines()
        if "the same" in line
        for name in quoted(line, "vllm:[a-z_]+")
    }
    assert quoted(ours, f"{PREFIX}[a-z_]+") | same <= {PREFIX + name for name in FAMILIES}


def test_what_is_missing_is_vllms() -> None:
    named = quoted(section("Missing"), "--[a-z-]+")
    assert named <= VLLM["options"]
    assert not named & OPTIONS
