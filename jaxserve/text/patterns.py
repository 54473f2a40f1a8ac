"""Regular expressions as automata: Python's syntax (`re`), without what a single pass over the text cannot decide.

    pattern --re's own parser--> its parse tree --> nodes of a Thompson automaton

A node consumes a character that passes a test, branches, or asserts something about the two characters around a position. Back
references, look-arounds, atomic groups and possessive repeats need more than that and are refused. `$` and `\\Z` hold at the
end of what is written so far, that is, wherever a match may end. Repeats are written out, so the number of nodes is bounded.
`jaxserve.text.scanner` runs the automaton.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

# Nodes of all patterns of a request. One character costs at most a visit to each, about 0.2 us.
MAX_NODES = 1024
# Character classes among them, each of which costs 20 us to compile.
MAX_CLASSES = 128
ACCEPT = 0  # the node where every pattern ends

# What stands beside a position, as far as an assertion can tell.
NOTHING, NEWLINE, ASCII_WORD, OTHER_WORD, OTHER = range(5)

Assertion = Callable[[int, int | None], bool]  # (kind before, kind after; None: not known yet)
Test = Callable[[str], Any]  # does this character pass? Anything but None and False says yes

_TYPE_FLAGS = int(re.ASCII | re.UNICODE)
_CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}
_UNSUPPORTED = {
    ops.GROUPREF: "a back reference",
    ops.GROUPREF_EXISTS: "a conditional group",
    ops.ASSERT: "a look-around",
    ops.ASSERT_NOT: "a look-around",
    ops.ATOMIC_GROUP: "an atomic group",
    ops.POSSESSIVE_REPEAT: "a possessive repeat",
}


@dataclasses.dataclass(slots=True)
class Node:
    """Exactly one of the two is set, or neither (a branch, and ACCEPT)."""

    targets: list[int] = dataclasses.field(default_factory=list)
    test: int | None = None  # index into Automaton.tests; consumes a character that passes
    assertion: Assertion | None = None


@dataclasses.dataclass(slots=True)
class Automaton:
    nodes: list[Node]
    tests: list[Test]
    start: int
    has_assertions: bool


def kind_of(char: str) -> int:
    if char == "\n":
        return NEWLINE
    if char.isalnum() or char == "_":
        return ASCII_WORD if char.isascii() else OTHER_WORD
    return OTHER


def build(patterns: Sequence[str], strings: Sequence[str]) -> Automaton:
    """One automaton that finds any of `patterns` and, literally, any of `strings`.

    Raises ValueError with a sentence for what is not a pattern, not supported, or too large.
    """
    builder = _Builder()
    starts = [builder.literal(string) for string in strings]
    for pattern in patterns:
        tree = _parse(pattern)
        try:
            starts.append(builder.sequence(list(tree), int(tree.state.flags), ACCEPT))
        except _UnsupportedError as error:
            raise ValueError(f"stop_regex {pattern!r} holds {error}.") from None
    start = builder.add(Node(starts))
    return Automaton(builder.nodes, builder.tests, start, builder.has_assertions)


def _parse(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python may come to read differently some day
            tree = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(f"stop_regex {pattern!r} is not a regular expression: {error}.") from None
    except RecursionError:
        raise ValueError(f"stop_regex {pattern!r} is nested too deeply.") from None
    if tree.getwidth()[1] == 0:
        raise ValueError(f"stop_regex {pattern!r} can match nothing but an empty text.")
    return tree


class _UnsupportedError(Exception):
    """What a pattern holds that is not supported."""


class _Builder:
    """Writes nodes from the end of a pattern to its beginning: each part is told which node follows it."""

    def __init__(self) -> None:
        self.nodes = [Node()]
        self.tests: list[Test] = []
        self._test_indices: dict[tuple[str, int], int] = {}  # by a test's source and flags
        self._num_classes = 0
        self.has_assertions = False

    def add(self, node: Node) -> int:
        if len(self.nodes) > MAX_NODES:
            raise ValueError(
                f"stop_regex and stop are too large together: with repeats written out, {MAX_NODES} characters and branches "
                "are permitted."
            )
        self.nodes.append(node)
        return len(self.nodes) - 1

    def literal(self, string: str) -> int:
        return self.sequence([(ops.LITERAL, ord(char)) for char in string], int(re.UNICODE), ACCEPT)

    def sequence(self, items: list[Any], flags: int, following: int) -> int:
        for op, value in reversed(items):
            following = self._item(op, value, flags, following)
        return following

    def _item(self, op: Any, value: Any, flags: int, following: int) -> int:
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            return self.add(Node([following], test=self._test(op, value, flags)))
        if op is ops.BRANCH:
            return self.add(Node([self.sequence(list(branch), flags, following) for branch in value[1]]))
        if op is ops.SUBPATTERN:
            _group, added, removed, inner = value
            kept = flags & ~_TYPE_FLAGS if added & _TYPE_FLAGS else flags
            return self.sequence(list(inner), (kept | added) & ~removed, following)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, list(inner), flags, following)
        if op is ops.AT:
            self.has_assertions = True
            return self.add(Node([following], assertion=_assertion(value, flags)))
        raise _UnsupportedError(f"{_UNSUPPORTED.get(op, str(op).lower())}, which is not supported")

    def _test(self, op: Any, value: Any, flags: int) -> int:
        key = (_character_class(op, value), flags & int(re.IGNORECASE | re.DOTALL | re.ASCII))
        index = self._test_indices.get(key)
        if index is None:
            index = self._test_indices[key] = len(self.tests)
            is_plain = op is ops.LITERAL and not flags & re.IGNORECASE  # by far the most
            self._num_classes += not is_plain
            if self._num_classes > MAX_CLASSES:
                raise ValueError(f"stop_regex may hold at most {MAX_CLASSES} different character classes.")
            self.tests.append(chr(value).__eq__ if is_plain else re.compile(*key).fullmatch)
        return index

    def _repeat(self, least: int, most: int, items: list[Any], flags: int, following: int) -> int:
        if most is ops.MAXREPEAT:
            loop = self.add(Node())
            self.nodes[loop].targets = [self.sequence(items, flags, loop), following]
            entry = loop
        else:
            entry = following
            for _ in range(most - least):
                entry = self.add(Node([self.sequence(items, flags, entry), following]))
        for _ in range(least):
            following, entry = entry, self.sequence(items, flags, entry)
            if entry == following:  # it is nothing that is repeated, perhaps billions of times
                break
        return entry


def _character_class(op: Any, value: Any) -> str:
    """Source of a pattern for one character. What case and Unicode make of it stays Python's business."""
    if op is ops.ANY:
        return "."
    if op is ops.LITERAL:
        return _escaped(value)
    if op is ops.NOT_LITERAL:
        return f"[^{_escaped(value)}]"
    parts = []
    for kind, item in value:
        if kind is ops.NEGATE:
            parts.append("^")
        elif kind is ops.LITERAL:
            parts.append(_escaped(item))
        elif kind is ops.RANGE:
            parts.append(f"{_escaped(item[0])}-{_escaped(item[1])}")
        else:
            parts.append(_CATEGORIES[item])
    return f"[{''.join(parts)}]"


def _escaped(code_point: int) -> str:
    return f"\\U{code_point:08x}"


def _assertion(at: Any, flags: int) -> Assertion:
    if at is ops.AT_BEGINNING_STRING or (at is ops.AT_BEGINNING and not flags & re.MULTILINE):
        return lambda before, after: before == NOTHING
    if at is ops.AT_BEGINNING:
        return lambda before, after: before in (NOTHING, NEWLINE)
    if at is ops.AT_END and flags & re.MULTILINE:
        return lambda before, after: after == NEWLINE
    if at in (ops.AT_BOUNDARY, ops.AT_NON_BOUNDARY):
        word_kinds = (ASCII_WORD,) if flags & re.ASCII else (ASCII_WORD, OTHER_WORD)
        return functools.partial(_is_boundary, word_kinds, at is ops.AT_BOUNDARY)
    return lambda before, after: after is None  # the end of the text


def _is_boundary(word_kinds: tuple[int, ...], wanted: bool, before: int, after: int | None) -> bool:
    return after is not None and ((before in word_kinds) != (after in word_kinds)) == wanted
