"""The EBNF that users of SGLang write (xgrammar's, which is llama.cpp's GBNF), parsed to expressions.

    root ::= "say " (name | [A-Z]+){1,3}   # the rule to begin with is called root
    name ::= "x" | "y"

Expressions are trees of five kinds of node. What becomes of them is `lark`'s business.
"""

from __future__ import annotations

import dataclasses
import re

from jaxserve.grammar.errors import GrammarError

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\#[^\n]*)+)
  | (?P<head>[A-Za-z_][\w.-]*)[ \t]*(?=::=)
  | (?P<name>[A-Za-z_][\w.-]*)
  | (?P<literal>"(?:[^"\\\n]|\\.)*")
  | (?P<characters>\[(?:[^\]\\\n]|\\.)*\])
  | (?P<repeat>[*+?]|\{\s*(?P<least>\d{1,9})\s*(?P<range>,\s*(?P<most>\d{1,9})?\s*)?\})
  | (?P<sign>::=|[|().])
    """,
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|u\{([0-9a-fA-F]{1,6})\}|(.))", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "e": "\x1b"}
_ESCAPED_SIGNS = frozenset("\"'\\[]-^/?{}()*+.|$")
_DEEPEST = 64


@dataclasses.dataclass(frozen=True)
class Literal:
    text: str


@dataclasses.dataclass(frozen=True)
class Characters:
    """One character of some ranges, or with `negated` one outside of them. No ranges and negated: any character."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool


@dataclasses.dataclass(frozen=True)
class Reference:
    name: str


@dataclasses.dataclass(frozen=True)
class Repeat:
    item: Expression
    least: int
    most: int | None  # None: no limit


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several sequences; a group in parentheses, too."""

    sequences: tuple[tuple[Expression, ...], ...]


Expression = Literal | Characters | Reference | Repeat | Choice


def parse(text: str) -> dict[str, Choice]:
    """Rules by name. Raises GrammarError; that every name has a rule is checked, too."""
    rules = _Parser(text).parse()
    if "root" not in rules:
        raise GrammarError("ebnf: there is no rule named root; rules are written as: root ::= ...")
    for name, rule in rules.items():
        for wanted in references(rule):
            if wanted not in rules:
                raise GrammarError(f"ebnf: rule {name} refers to {wanted}, which is not defined.")
    return rules


def references(expression: Expression) -> set[str]:
    """Names of the rules it refers to."""
    match expression:
        case Reference(name):
            return {name}
        case Repeat(item):
            return references(item)
        case Choice(sequences):
            return {name for sequence in sequences for item in sequence for name in references(item)}
        case _:
            return set()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._skip_space()

    def parse(self) -> dict[str, Choice]:
        rules: dict[str, Choice] = {}
        while self._at < len(self._text):
            head = self._take("head")
            if head is None:
                raise self._error("a rule (name ::= ...) is expected")
            self._take("sign", "::=")
            if head in rules:
                raise self._error(f"rule {head} is defined twice")
            rules[head] = self._choice(0)
        return rules

    def _choice(self, depth: int) -> Choice:
        if depth > _DEEPEST:
            raise self._error(f"parentheses may be nested at most {_DEEPEST} deep")
        sequences = [self._sequence(depth)]
        while self._take("sign", "|"):
            sequences.append(self._sequence(depth))
        return Choice(tuple(sequences))

    def _sequence(self, depth: int) -> tuple[Expression, ...]:
        items: list[Expression] = []
        while (item := self._item(depth)) is not None:
            items.append(self._repeated(item))
        return tuple(items)

    def _item(self, depth: int) -> Expression | None:
        if (literal := self._take("literal")) is not None:
            return Literal("".join(character for character, _ in self._unescape(literal[1:-1])))
        if (characters := self._take("characters")) is not None:
            return self._characters(characters[1:-1])
        if (name := self._take("name")) is not None:
            return Reference(name)
        if self._take("sign", "."):
            return Characters((("\n", "\n"),), negated=True)
        if self._take("sign", "("):
            group = self._choice(depth + 1)
            if not self._take("sign", ")"):
                raise self._error("a closing parenthesis is expected")
            return group
        if self._text.startswith(('"', "["), self._at):
            raise self._error("a literal or a character class does not end in its line")
        return None

    def _repeated(self, item: Expression) -> Expression:
        match = self._peek("repeat")
        if match is None:
            return item
        sign = self._take("repeat")
        least = int(match["least"]) if match["least"] else int(sign == "+")
        most = 1 if sign == "?" else None
        if match["least"] and (not match["range"] or match["most"]):
            most = int(match["most"] or least)
        if most is not None and most < least:
            raise self._error(f"{sign} asks for at least {least} and at most {most}")
        if self._peek("repeat") is not None:
            raise self._error(f"{sign} cannot be repeated without parentheses")
        return Repeat(item, least, most)

    def _characters(self, inner: str) -> Characters:
        negated = inner.startswith("^")
        characters = self._unescape(inner[1:] if negated else inner)
        ranges: list[tuple[str, str]] = []
        at = 0
        while at < len(characters):
            first = last = characters[at][0]
            # A dash between two characters makes a range, unless it is escaped.
            if at + 2 < len(characters) and characters[at + 1] == ("-", False):
                last = characters[at + 2][0]
                at += 2
            if last < first:
                raise self._error(f"the range {first}-{last} is empty")
            ranges.append((first, last))
            at += 1
        if not ranges and not negated:
            raise self._error("[] matches nothing")
        return Characters(tuple(ranges), negated)

    def _unescape(self, text: str) -> list[tuple[str, bool]]:
        """Characters, each with whether it was escaped."""
        characters: list[tuple[str, bool]] = []
        at = 0
        while at < len(text):
            escape = _ESCAPE.match(text, at)
            characters.append((text[at], False) if escape is None else (self._escaped(escape), True))
            at = at + 1 if escape is None else escape.end()
        return characters

    def _escaped(self, escape: re.Match[str]) -> str:
        digits = escape[1] or escape[2] or escape[3] or escape[4]
        if digits is None:
            character = escape[5]
            if character not in _PLAIN_ESCAPES and character not in _ESCAPED_SIGNS:
                raise self._error(f"{escape[0]} is not a known escape")
            return _PLAIN_ESCAPES.get(character, character)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"{escape[0]} is not a character")
        return chr(code)

    def _peek(self, kind: str) -> re.Match[str] | None:
        match = _TOKEN.match(self._text, self._at)
        return match if match is not None and match[kind] is not None else None

    def _take(self, kind: str, text: str | None = None) -> str | None:
        match = self._peek(kind)
        if match is None or (text is not None and match[kind] != text):
            return None
        self._at = match.end()
        self._skip_space()
        return match[kind]

    def _skip_space(self) -> None:
        if (space := self._peek("space")) is not None:
            self._at = space.end()

    def _error(self, problem: str) -> GrammarError:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + 20].split("\n", 1)[0]
        place = f"before {rest!r}" if rest else "at the end"
        return GrammarError(f"ebnf: {problem} (line {line}, {place}).")
