"""How much of SGLang's surface is here: `python scripts/surface.py > surface.md`.

SGLang's names stand in sglang_surface.json (facts about one version). What is here is asked of the code; what differs, and why
something is missing, is what docs/sglang.md says in the row that names it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from jaxserve import Engine
from jaxserve.cli.serve import serve
from jaxserve.config import ServerArgs
from jaxserve.server.http.app import create_app
from jaxserve.server.native.foreign_fields import GENERATE
from jaxserve.server.native.request import KNOWN_FIELDS
from jaxserve.server.openai.foreign_fields import CHAT, COMPLETION
from jaxserve.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.types import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
TITLES = {
    "endpoints": "Endpoints",
    "generate": "Fields of `/generate`",
    "sampling": "Sampling parameters",
    "completions": "Fields of `/v1/completions`",
    "chat": "Fields of `/v1/chat/completions`",
    "options": "Server options",
    "engine": "Methods of `Engine`",
}
SAME, DIFFERS, NO_EFFECT, MISSING = "same", "differs", "without effect", "missing"
# Sections of docs/sglang.md.
SECTIONS = {
    "endpoints": "Endpoints",
    "generate": "`/generate`",
    "sampling": "Sampling parameters",
    "completions": "`/v1/completions` and `/v1/chat/completions`",
    "chat": "`/v1/completions` and `/v1/chat/completions`",
    "options": "Server options",
    "engine": "`Engine`",
}
# Rows that only list names are called so.
PLAIN = ("same", "missing", "both", "chat", "completions", "only here")


@dataclasses.dataclass(frozen=True)
class Row:
    kind: str
    name: str
    status: str
    words: str  # what docs/sglang.md says


def sglangs() -> dict[str, Any]:
    """Its names by kind, and its version."""
    names: dict[str, Any] = json.loads((Path(__file__).parent / "sglang_surface.json").read_text())
    return names


def ours() -> dict[str, set[str]]:
    app = create_app(mock.Mock(), ServerArgs(model_path="model"))
    return {
        "endpoints": paths_of(app.routes) | set(app.openapi()["paths"]),
        "generate": set(KNOWN_FIELDS),
        "sampling": set(SamplingParams.__struct_fields__),
        "completions": set(CompletionRequest.__struct_encode_fields__),
        "chat": set(ChatCompletionRequest.__struct_encode_fields__),
        "options": {option for parameter in serve.params for option in parameter.opts},
        "engine": {name for name in dir(Engine) if not name.startswith("_")},
    }


def paths_of(routes: Iterable[Any]) -> set[str]:
    """Those of included routers, too, which FastAPI may keep whole."""
    paths = {route.path for route in routes if hasattr(route, "path")}
    return paths.union(*(paths_of(route.original_router.routes) for route in routes if hasattr(route, "original_router")))


def rows() -> list[Row]:
    here = ours()
    idle = {"generate": GENERATE.without_effect, "completions": COMPLETION.without_effect, "chat": CHAT.without_effect}
    made = []
    for kind in TITLES:
        said = comparison(kind)
        for name in sglangs()[kind]:
            words, differs = said.get(name, ("", False))
            status = DIFFERS if differs else SAME
            if name in idle.get(kind, ()):
                status, words = NO_EFFECT, idle[kind][name]
            elif name not in here[kind]:
                status = MISSING
            made.append(Row(kind, name, status, words))
    return made


def comparison(kind: str) -> dict[str, tuple[str, bool]]:
    """Name -> what the row of docs/sglang.md says that begins with it, or what the row that lists it is called; and whether
    that is a difference."""
    found: dict[str, tuple[str, bool]] = {}
    page = (ROOT / "docs" / "sglang.md").read_text()
    section = re.search(rf"^## {re.escape(SECTIONS[kind])}$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section, f"docs/sglang.md has no section {SECTIONS[kind]}"
    for row in re.findall(r"^\| (.*) \|$(?!\n\|---)", section[1], re.MULTILINE):
        label, *cells = row.split(" | ")
        named = re.findall(r"`([^` ]+)`", label)
        for name in named:
            found[name] = (" / ".join(cells), True)
        if cells and not named:
            differs = label == "differs"
            for name in re.findall(r"`([^` ]+)`", cells[0]):
                words = cells[0] if differs else "" if label.startswith(PLAIN) else ": ".join((label, *cells[1:]))
                found.setdefault(name, (words, differs))
    return found


def surface_page() -> str:
    version, all_rows = sglangs()["version"], rows()
    lines = [
        f"# SGLang {version} and jaxserve",
        "",
        "Made by `scripts/surface.py`.",
        "",
        "| | same | differs | without effect | missing |",
    ]
    lines.append("|---|--:|--:|--:|--:|")
    for kind, title in TITLES.items():
        counts = collections.Counter(row.status for row in all_rows if row.kind == kind)
        lines.append(f"| {title} | " + " | ".join(str(counts[s]) for s in (SAME, DIFFERS, NO_EFFECT, MISSING)) + " |")
    for kind, title in TITLES.items():
        lines += ["", f"## {title}", "", "| | | |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.status} | {row.words} |" for row in all_rows if row.kind == kind]
    return "\n".join(lines)


if __name__ == "__main__":
    print(surface_page())
