"""Documents that are made from the code are up to date, and links between documents lead somewhere."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import pytest
from fastapi.routing import APIRoute

from jaxserve import Engine
from jaxserve.config import LARGEST_PAGE_SIZE, ServerArgs
from jaxserve.kernels.pallas.gpu import attention as gpu_attention
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.spec import AttentionSpec, Chip
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
    ours |= {route.path for route in app.routes if isinstance(route, APIRoute)}
    ours |= {name for name in dir(Engine) if not name.startswith("_")}
    ours |= {*KNOWN_FIELDS, *SamplingParams.__struct_fields__}
    openai = {name for kind in (CompletionRequest, ChatCompletionRequest) for name in kind.__struct_fields__}
    page = (ROOT / "docs" / "sglang.md").read_text()
    unnamed = (ours | openai) - set(re.findall(r"`([^` ]+)`", page))
    assert not unnamed, f"docs/sglang.md does not name {sorted(unnamed)}"
    missing = re.findall(r"^Missing.*?\n\n.*?\n(?:\n|$)|^\| missing \|.*?$", page, re.DOTALL | re.MULTILINE)
    said = {name for part in missing for name in re.findall(r"`([^` ]+)`", part)}
    assert len(said) > 150 and not ours & said, f"docs/sglang.md says that these are missing: {sorted(ours & said)}"
