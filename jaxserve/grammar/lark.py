"""Rules of an EBNF grammar as the Lark dialect of llguidance.

There a rule's literals and character classes are lexemes: pieces of text that a lexer finds, each as long as it can be. What
can be matched by a regular expression alone therefore becomes a terminal (a name in capitals), which is exact and fast; rules
that contain themselves stay rules of the parser. Where two pieces of such a rule may begin alike, the longer one wins: what
comes out is always in the grammar's language, but a few texts of that language may be out of reach.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from jaxserve.grammar.ebnf import Characters, Choice, Expression, Literal, Reference, Repeat, references


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A grammar as part of a larger one."""

    root: str
    is_terminal: bool
    lines: list[str]


def to_lark(rules: Mapping[str, Choice]) -> str:
    inlined = inline(rules)
    return "\n".join(["%llguidance {}", f"start: {inlined.root}", *inlined.lines]) + "\n"


def inline(rules: Mapping[str, Choice], suffix: str = "") -> Inlined:
    """`suffix`: of all names."""
    terminals = _terminals(rules)
    # Numbers, because names that differ only in case or in a dash would clash.
    names = {name: f"{'T' if name in terminals else 'r'}{number}{suffix}" for number, name in enumerate(rules)}
    lines = [f"{names[name]}: {_choice(rule, names)}" for name, rule in rules.items()]
    return Inlined(names["root"], "root" in terminals, lines)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _terminals(rules: Mapping[str, Choice]) -> set[str]:
    """Rules that refer, at last, to nothing but literals and characters."""
    waits_for = {name: references(rule) for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, wanted in waits_for.items():
        for one in wanted:
            users[one].append(name)
    terminals: set[str] = set()
    ready = [name for name, wanted in waits_for.items() if not wanted]
    while ready:
        done = ready.pop()
        terminals.add(done)
        for user in users[done]:
            waits_for[user].discard(done)
            if not waits_for[user]:
                ready.append(user)
    return terminals


def _choice(choice: Choice, names: Mapping[str, str]) -> str:
    return " | ".join(" ".join(_item(item, names) for item in sequence) or '""' for sequence in choice.sequences)


def _item(item: Expression, names: Mapping[str, str]) -> str:
    match item:
        case Literal(text):
            return quoted(text)
        case Characters():
            return _characters(item)
        case Reference(name):
            return names[name]
        case Repeat(repeated, least, most):
            return f"({_item(repeated, names)}){_times(least, most)}"
        case Choice():
            return f"({_choice(item, names)})"


def _times(least: int, most: int | None) -> str:
    plain = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return plain or f"{{{least},{'' if most is None else most}}}"


def _characters(item: Characters) -> str:
    if not item.ranges:
        return r"/(.|\n)/"
    ranges = (f"{_code(first)}-{_code(last)}" if first != last else _code(first) for first, last in item.ranges)
    return f"/[{'^' if item.negated else ''}{''.join(ranges)}]/"


def _code(character: str) -> str:
    """Letters and digits as they are, all others by number: no sign needs a rule of its own."""
    return character if character.isalnum() and character.isascii() else f"\\u{{{ord(character):x}}}"
