"""Looks for patterns in a text that arrives in pieces: where the first match ends, where it began, what may still become one.

The first match is the one that ends first; of several that end there, the one that began first. That is a matter of characters
alone, however the text is cut into pieces. `\\b` and `(?m)$` are decided by the character that follows.

All beginnings are followed at once: a state is a tuple of groups, each the automaton's nodes that one beginning has reached,
the oldest beginning first. A node that an older group holds is dropped from younger ones, whose future would be the same. So
one character costs at most two visits to each node, and mostly a dictionary's look-up: moves between states are remembered,
and scanners of the same patterns share them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from jaxserve.text.patterns import ACCEPT, NOTHING, build, kind_of

# Of a match longer than this only so many last characters are known as its text: others may have been given out.
MAX_MATCH_CHARS = 1024
# Nodes and moves remembered per automaton, about 100 bytes each; then all are forgotten and found again.
_MAX_REMEMBERED = 16384


class Match(NamedTuple):
    start: int  # in characters of the whole text
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclasses.dataclass(slots=True)
class _State:
    groups: tuple[frozenset[int], ...]
    before: int  # kind of the last character, if any assertion looks at it
    moves: dict[str, _Move] = dataclasses.field(default_factory=dict)


class _Move(NamedTuple):
    """What a character does to a state with g groups; group g is the beginning at this character."""

    state: _State
    survivors: tuple[int, ...]  # which group each of the new state's was
    late_match: int | None  # the group that had a match before this character, as this character shows
    match: int | None  # the new state's group that has a match with this character


class Moves:
    """The automaton of some patterns and the moves that were needed so far."""

    def __init__(self, patterns: tuple[str, ...], strings: tuple[str, ...]) -> None:
        self._automaton = build(patterns, strings)
        self.start = _State((), NOTHING)
        self._states: dict[tuple[tuple[frozenset[int], ...], int], _State] = {}
        self._passing: dict[str, frozenset[int]] = {}  # character -> tests it passes
        self._remembered = 0

    def find(self, state: _State, char: str) -> _Move:
        move = state.moves.get(char)
        if move is None:
            if self._remembered > _MAX_REMEMBERED:
                self._forget()
            move = state.moves[char] = self._make(state, char)
            self._remembered += 1
        return move

    def _make(self, state: _State, char: str) -> _Move:
        after = kind_of(char) if self._automaton.has_assertions else NOTHING
        passing = self._tests_passed(char)
        groups: list[frozenset[int]] = []
        survivors: list[int] = []
        late_match: int | None = None
        closed: set[int] = set()
        reached: set[int] = set()
        for i, group in enumerate((*state.groups, frozenset((self._automaton.start,)))):
            stepped: set[int] = set()
            accepts = self._close(group, state.before, after, closed, passing, stepped)
            if accepts and late_match is None and i < len(state.groups):  # the beginning here has matched nothing but ""
                late_match = i
            stepped -= reached
            if stepped:
                reached |= stepped
                groups.append(frozenset(stepped))
                survivors.append(i)
        closed = set()
        match = next((i for i, group in enumerate(groups) if self._close(group, after, None, closed, passing, set())), None)
        return _Move(self.state(tuple(groups), after), tuple(survivors), late_match, match)

    def _close(
        self, group: frozenset[int], before: int, after: int | None,
        closed: set[int], passing: frozenset[int], stepped: set[int],
    ) -> bool:  # fmt: skip
        """Follows branches and assertions from `group`, adds to `stepped` where the character leads; is ACCEPT reached?"""
        accepts, waiting, nodes = False, list(group), self._automaton.nodes
        while waiting:
            index = waiting.pop()
            if index in closed:
                continue
            closed.add(index)
            accepts |= index == ACCEPT
            node = nodes[index]
            if node.test is not None:
                if node.test in passing:
                    stepped.update(node.targets)
            elif node.assertion is None or node.assertion(before, after):
                waiting.extend(node.targets)
        return accepts

    def _tests_passed(self, char: str) -> frozenset[int]:
        passed = self._passing.get(char)
        if passed is None:
            tests = self._automaton.tests
            passed = self._passing[char] = frozenset(i for i, test in enumerate(tests) if test(char))
        return passed

    def state(self, groups: tuple[frozenset[int], ...], before: int) -> _State:
        state = self._states.get((groups, before))
        if state is None:
            state = self._states[groups, before] = _State(groups, before)
            self._remembered += 1 + sum(map(len, groups))
        return state

    def _forget(self) -> None:
        for state in (self.start, *self._states.values()):
            state.moves.clear()
        self._states.clear()
        self._passing.clear()
        self._remembered = 0


@functools.lru_cache(maxsize=32)
def moves_of(patterns: tuple[str, ...], strings: tuple[str, ...] = ()) -> Moves:
    """Raises ValueError with a sentence, see `patterns.build`."""
    return Moves(patterns, strings)


class Scanner:
    """One text's search for its first match."""

    __slots__ = ("_length", "_moves", "_starts", "_state", "_tail")

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._state = moves.start
        self._starts: list[int] = []  # where the state's groups began
        self._length = 0
        self._tail = ""  # the last MAX_MATCH_CHARS characters, and sometimes more

    @property
    def held_from(self) -> int:
        """A first match that is still to come, or its last MAX_MATCH_CHARS characters, will not begin before this."""
        start = self._starts[0] if self._starts else self._length
        return max(start, self._length - MAX_MATCH_CHARS)

    def push(self, text: str) -> Match | None:
        """The first match, if it ends in `text` (or with it). The next push then searches the text that follows the match."""
        moves, state, starts, first = self._moves, self._state, self._starts, self._length
        self._tail = self._tail[-MAX_MATCH_CHARS:] + text
        for position, char in enumerate(text, first):
            move = state.moves.get(char) or moves.find(state, char)
            if move.late_match is not None:
                return self._end(starts[move.late_match], position, first + len(text), state)
            if move.survivors:
                starts = [starts[i] if i < len(starts) else position for i in move.survivors]
            elif starts:
                starts = []
            state = move.state
            if move.match is not None:
                return self._end(starts[move.match], position + 1, first + len(text), state)
        self._state, self._starts, self._length = state, starts, first + len(text)
        return None

    def _end(self, start: int, end: int, length: int, state: _State) -> Match:
        """The match [start, end) of a text of `length` characters; `state` is the one at its end."""
        self._tail = self._tail[: len(self._tail) - (length - end)]
        self._state, self._starts, self._length = self._moves.state((), state.before), [], end
        match_chars = min(end - start, MAX_MATCH_CHARS)
        return Match(end - match_chars, self._tail[-match_chars:])
