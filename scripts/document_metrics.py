"""Writes the tables of docs/metrics.md from jaxserve/metrics/families.py: `python scripts/document_metrics.py`."""

from __future__ import annotations

from pathlib import Path

from jaxserve.metrics import FAMILIES, PREFIX, Family, Source

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
MARK = "## All metrics\n"
SECTIONS: dict[Source, str] = {
    "scheduler": "Scheduler",
    "main": "Requests and HTTP",
    "detokenizer": "Detokenizer",
    "every": "Each process",
}


def tables() -> str:
    lines = []
    for source, title in SECTIONS.items():
        lines += ["", f"### {title}", "", "| metric | kind | labels | |", "|---|---|---|---|"]
        lines += [_row(family) for family in FAMILIES.values() if family.source == source]
    return "\n".join(lines) + "\n"


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels) + (" (custom)" if family.per_request else "")
    return f"| `{PREFIX}{family.name}` | {family.kind} | {labels.strip()} | {family.help} |"


def main() -> None:
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(head + MARK + tables())


if __name__ == "__main__":
    main()
