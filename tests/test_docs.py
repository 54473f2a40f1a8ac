"""Documents that are made from the code are up to date, and links between documents lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import click
import pytest

from jaxserve import Engine
from jaxserve.cli.main import cli
from jaxserve.config import LARGEST_PAGE_SIZE, ServerArgs
from jaxserve.kernels.pallas.gpu import attention as gpu_attention
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.spec import AttentionSpec, Chip
from jaxserve.metrics import FAMILIES
from jaxserve.server.http.app import create_app
from jaxserve.server.native.request import KNOWN_FIELDS
from jaxserve.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.types import SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_options_page_is_what_the_script_writes() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "document_options.py")]
    written = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert written == (ROOT / "docs" / "options.md").read_text(), "run: python scripts/document_options.py > docs/options.md"


def test_the_metrics_page_has_all_metrics() -> None:
    page, script = (ROOT / "docs" / "metrics.md").read_text(), ROOT / "scripts" / "document_metrics.py"
    namespace = runpy.run_path(str(script))
    _, mark, tables = page.partition(namespace["MARK"])
    assert mark and tables == namespace["tables"](), f"run: python {script.relative_to(ROOT)}"
    ends = "seconds|total|reqs|tokens|throughput|rate|usage|missing|length"
    names = set(re.findall(rf"`(?:jaxserve:)?([a-z0-9_]+_(?:{ends}))`", page))
    assert names <= FAMILIES.keys(), f"docs/metrics.md names {sorted(names - FAMILIES.keys())}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_route_is_in_the_api_page() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for file in (ROOT / "jaxserve" / "server").rglob("*.py"):
        for path in re.findall(r"router\.(?:get|post|put|api_route)\(\"([^\"]+)\"", file.read_text()):
            assert f"`{path}`" in text or path.startswith("/get_"), f"docs/api.md does not name {path}"


@pytest.mark.parametrize(
    ("row", "default", "unsupported"),
    [
        ("`pallas` (GPU)", gpu_attention.PallasGpuAttention.default_page_size, gpu_attention._wrong_shape),
        ("`pallas` (TPU)", PallasTpuAttention.default_page_size, PallasTpuAttention.supports),
        ("`reference`", ReferenceAttention.default_page_size, ReferenceAttention.supports),
    ],
)
def test_the_kernels_page_names_the_page_sizes(
    row: str, default: int, unsupported: Callable[[AttentionSpec], str | None]
) -> None:
    """What --page-size takes and the backend can serve."""
    spec = AttentionSpec(Chip("tpu", "TPU v6 lite"), 32, 8, 128, "bfloat16", "bfloat16")
    sizes = [n for n in range(1, LARGEST_PAGE_SIZE + 1) if unsupported(dataclasses.replace(spec, page_size=n)) is None]
    every = sizes == list(range(sizes[0], sizes[-1] + 1))
    named = f"{sizes[0]} to {sizes[-1]}" if every else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    (line,) = [line for line in (ROOT / "docs" / "kernels.md").read_text().splitlines() if line.startswith(f"| {row} |")]
    assert line.endswith(f"| {named}, default {default} |")


def test_the_comparison_with_sglang_knows_what_is_here() -> None:
    """Every option, path, method and field of ours is named, and nothing of it is said to be missing."""
    app = create_app(mock.Mock(), ServerArgs(model_path="model"))
    ours = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServerArgs)}
    ours |= set(app.openapi()["paths"])
    ours |= {name for name in dir(Engine) if not name.startswith("_")}
    ours |= {*KNOWN_FIELDS, *SamplingParams.__struct_fields__}
    openai = {name for kind in (CompletionRequest, ChatCompletionRequest) for name in kind.__struct_fields__}
    page = (ROOT / "docs" / "sglang.md").read_text()
    unnamed = (ours | openai) - set(re.findall(r"`([^` ]+)`", page))
    assert not unnamed, f"docs/sglang.md does not name {sorted(unnamed)}"
    missing = re.findall(r"^Missing.*?\n\n.*?\n(?:\n|$)|^\| missing \|.*?$", page, re.DOTALL | re.MULTILINE)
    named = re.sub(r"^(\|[^|]*\|[^|]*\|).*$", r"\1", "\n".join(missing), flags=re.MULTILINE)  # without the reasons
    said = set(re.findall(r"`([^` ]+)`", named))
    assert len(said) > 150 and not ours & said, f"docs/sglang.md says that these are missing: {sorted(ours & said)}"


# --- what the pages for operators quote exists

OPERATORS_PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "operation",
        "deployment",
        "commands",
        "troubleshooting",
        "serving",
        "gpu_node",
        "tpu_vm",
        "rollouts",
        "from_sglang",
    )
]
# Of docker, kubectl and friends.
FOLDERS = ("/cache", "/tmp", "/home", "/var/", "/dev/")
OTHERS_OPTIONS = {"--time", "--read-only", "--from-literal", "--now", "--privileged", "--network", "--strict"}
EXAMPLES_OPTIONS = {"--replicas", "--gpus", "--tpus", "--lose-one", "--hosts", "--pack", "--address"}


@functools.cache
def literals() -> tuple[str, ...]:
    """Every string of the code; what is filled in later is a NUL."""
    return tuple(_literals())


def _literals() -> Iterator[str]:
    for file in (ROOT / "jaxserve").rglob("*.py"):
        tree = ast.parse(file.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield re.sub(r"%(\.\d)?[sdgf]", "\0", node.value)


def members(group: click.Group) -> list[click.Command]:
    context = click.Context(group)
    return [command for name in group.list_commands(context) if (command := group.get_command(context, name))]


@pytest.mark.parametrize("page", OPERATORS_PAGES, ids=lambda page: page.name)
def test_options_that_operators_read_of_exist(page: pathlib.Path) -> None:
    commands = members(cli)
    commands += [command for group in commands if isinstance(group, click.Group) for command in members(group)]
    known = {option for command in commands for one in command.params for option in (*one.opts, *one.secondary_opts)}
    known |= {"--help", "--x", *OTHERS_OPTIONS, *EXAMPLES_OPTIONS}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text()))
    assert used <= known, f"{page.name} names {sorted(used - known)}"


@pytest.mark.parametrize("page", OPERATORS_PAGES, ids=lambda page: page.name)
def test_paths_and_commands_that_operators_read_of_exist(page: pathlib.Path) -> None:
    app = create_app(mock.Mock(), ServerArgs(model_path="model"))
    paths = {*app.openapi()["paths"], "/docs", "/openapi.json", "/playground", "/dashboard", "/reset", "/exit"}
    text = page.read_text()
    named = {path for path in re.findall(r"`(/[a-z_/0-9.]+)`", text) if not path.startswith(FOLDERS)}
    assert named <= paths, f"{page.name} names {sorted(named - paths)}"
    lines = re.findall(r"`(jaxserve [^`]+)`", text) + re.findall(r"^(jaxserve .*)$", text, re.MULTILINE)
    commands = {line.split()[1] for line in lines}
    known = set(cli.list_commands(click.Context(cli)))
    assert commands <= known, f"{page.name} names {sorted(commands - known)}"
    variables = set(re.findall(r"JAXSERVE_[A-Z_]+", text))
    assert all(any(name in literal for literal in literals()) for name in variables)


def test_messages_that_are_explained_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    first_cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    messages = [message for cell in first_cells for message in re.findall(r"`([^`]{20,})`", cell)]
    assert len(messages) > 50
    known = [literal.replace("\0", "...") for literal in literals() if len(literal) > 10]
    assert not [message for message in messages if not any(holds(literal, fixed_parts(message)) for literal in known)]


# What users are told, by the class that tells it; errors of grammars and checkpoints are ValueErrors.
TOLD = {
    "UserError", "RequestError", "CommandError", "ControlError", "CheckpointError", "GrammarError", "NotCompiledError",
    "ProcessorError", "ServerError", "EngineError", "ClickException", "UsageError", "ValueError", "ConnectionError",
}  # fmt: skip
# Says itself what is wrong and what would be right.
CLEAR = re.compile(r"\bmust\b|\bat most\b|\bneeds\b|is (required|needed|expected|not a field)|got |cannot be combined|not both")
# What only developers see; what measures names the option or file that it speaks of.
NOT_TOLD = (
    "kernels/pallas/", "kernels/rotary.py", "kernels/tuning.py", "aot/", "parsers/", "executor/executable_cache.py",
    "bench/", "cli/bench/", "cli/compile.py",
)  # fmt: skip


def told() -> Iterator[tuple[str, str]]:
    """Sentences of errors that reach users: file, sentence."""
    for file in sorted((ROOT / "jaxserve").rglob("*.py")):
        name = file.relative_to(ROOT / "jaxserve").as_posix()
        if name.startswith(NOT_TOLD):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                function, said = node.exc.func, node.exc.args[0]
                if (function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")) not in TOLD:
                    continue
                if isinstance(said, ast.Constant) and isinstance(said.value, str):
                    yield name, said.value
                elif isinstance(said, ast.JoinedStr):
                    yield name, "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in said.values)


def test_errors_that_do_not_explain_themselves_are_explained() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = [fixed_parts(message) for message in re.findall(r"`([^`]+)`", page) if len(message) > 14]
    silent = [
        f"{file}: {sentence}"
        for file, sentence in told()
        if len(re.findall("[a-z]{2,}", sentence)) > 3  # else a frame for another sentence
        and not CLEAR.search(sentence)
        and not any(parts and holds(sentence, parts) for parts in explained)
    ]
    assert not silent, "docs/troubleshooting.md does not explain:\n" + "\n".join(silent).replace("\0", "...")


def fixed_parts(message: str) -> list[str]:
    pieces = (piece.strip(" :.;,'") for piece in message.split("..."))
    return [piece for piece in pieces if len(piece) > 2]


def holds(sentence: str, parts: list[str]) -> bool:
    """In their order."""
    end = 0
    for part in parts:
        at = sentence.find(part, end)
        if at < 0:
            return False
        end = at + len(part)
    return True
