"""Writes docs/json_schema.md: `python scripts/document_json_schema.py > docs/json_schema.md`.

The JSON Schema Test Suite lies in tests/grammar/json_schema_test_suite. Each of its schemas becomes a matcher as that of a
request would, and each of its instances, as JSON, goes through it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxserve.demo import demo_model_path
from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.json_schema import KNOWN_FORMATS
from jaxserve.grammar.prototype import compile_prototype
from jaxserve.grammar.setup import JsonStyle, Setup
from jaxserve.grammar.tokenizer import GrammarTokenizer, build_tokenizer
from jaxserve.types import Grammar

_SUITE = Path(__file__).resolve().parents[1] / "tests" / "grammar" / "json_schema_test_suite" / "draft2020-12.jsonl"
_LONGEST_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Case:
    """One schema, and what became of it."""

    file: str
    name: str
    num_instances: int
    refusal: str  # why it is answered with 400; empty: it is served
    too_strict: tuple[str, ...]  # instances that are valid and cannot come out, by their descriptions
    too_lax: tuple[str, ...]  # instances that are not valid and can

    @property
    def lines(self) -> list[str]:
        return [f"* {self.file}: {self.name}: {one}" for one in (*self.too_strict, *self.too_lax)]


def cases() -> Iterator[Case]:
    setup = Setup((Path(demo_model_path()) / "tokenizer.json").read_text(encoding="utf-8"), 2048, ())
    tokenizer = build_tokenizer(setup)
    for line in _SUITE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        folder, _, name = row["file"].rpartition("/")
        if not folder or name in KNOWN_FORMATS:  # the others are annotations
            yield _case(row, tokenizer)


def _case(row: dict[str, Any], tokenizer: GrammarTokenizer) -> Case:
    strict: list[str] = []
    lax: list[str] = []
    refusal = ""
    try:
        prototype = compile_prototype(tokenizer, Grammar("json_schema", json.dumps(row["schema"])), JsonStyle())
    except GrammarError as error:
        refusal = str(error)
    else:
        for test in row["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            token_ids = tokenizer.ll.greedy_tokenize(text)
            matcher = prototype.deep_copy()
            is_taken = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
            if is_taken != test["valid"]:
                (strict if test["valid"] else lax).append(f"{test['description']}: `{_shown(text)}`")
    return Case(row["file"], row["description"], len(row["tests"]), refusal, tuple(strict), tuple(lax))


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _reason(refusal: str) -> str:
    """The same for all refusals of a kind."""
    keywords = re.search(r"Unimplemented keys: \[(.*)\]", refusal)
    if keywords:
        return ", ".join(f"`{name}`" for name in re.findall(r'"([^"]*)"', keywords[1]))
    for words, reason in (
        ("Resource '", "`$ref` to another document"),
        ("oneOf constraints", "`oneOf` whose schemas are not seen to exclude each other"),
        ("nsatisfiable schema", "nothing matches, as the library sees it"),
        ("not disjoint", "`patternProperties` that overlap"),
        ("Expected positive integer", "a length or a count written as 2.0"),
        ("too many digits", "`multipleOf` with too many digits"),
    ):
        if words in refusal:
            return reason
    return refusal.removeprefix("json_schema: ").rstrip(".")


def page(all_cases: list[Case]) -> str:
    served = [case for case in all_cases if not case.refusal]
    strict = [case for case in served if case.too_strict]
    lax = [case for case in served if case.too_lax]
    num_strict, num_lax = sum(len(case.too_strict) for case in strict), sum(len(case.too_lax) for case in lax)
    lines = [
        "# JSON schemas",
        "",
        "What becomes of the JSON Schema Test Suite (draft 2020-12, required tests, and those of the formats below) as",
        f"`json_schema`, with llguidance {version('llguidance')}. Made by `scripts/document_json_schema.py`; that nothing gets",
        "worse is tested.",
        "",
        f"Of {len(all_cases)} schemas {len(served)} are served, {len(all_cases) - len(served)} are answered with 400. Of "
        f"{sum(case.num_instances for case in served)} instances",
        f"of those served {num_strict} are valid and cannot come out, {num_lax} are not valid and can.",
        "",
        "Checked formats are `date-time`, `time`, `date`, `duration`, `email`, `hostname`, `ipv4`, `ipv6`, `uuid` and `uri`;",
        "all others are annotations, as the standard has it. Properties come in the schema's order, and a number is written in",
        "one way.",
        "",
        "## Not served",
        "",
        "| schemas | because of |",
        "|--:|---|",
    ]
    reasons = collections.Counter(_reason(case.refusal) for case in all_cases if case.refusal)
    lines += [f"| {count} | {reason} |" for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))]
    for title, some, number in (
        ("Valid, and cannot come out", strict, num_strict),
        ("Not valid, and can come out", lax, num_lax),
    ):
        lines += ["", f"## {title}: {number}", ""]
        for case in some:
            wrong = case.too_strict if some is strict else case.too_lax
            lines += [f"* {case.file}: {case.name}: {one}" for one in wrong]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(list(cases())), end="")
