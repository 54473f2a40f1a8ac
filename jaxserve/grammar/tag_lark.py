"""Structural tags as the Lark dialect of llguidance.

Its lexer knows one way to cut a text: each piece is as long as it can be. Free text would swallow the tag behind it. So free
text is a lazy lexeme that ends with the first of what may stand behind it, and every format is translated together with its
end: what must follow it. Where nothing fixed follows free text, that is an error. As with EBNF, what comes out is always in the
language that was asked for, but a few texts of that language may be out of reach.

Special tokens are no text to llguidance. Wherever a tag's text holds one that the tokenizer has, the grammar has that token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from jaxserve.grammar import ebnf, lark, tag_xml
from jaxserve.grammar import tag_formats as formats
from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.tag_formats import AnyFormat, Tag
from jaxserve.grammar.tokenizer import GrammarTokenizer

_DEEPEST = 64
_ANY = "/(?s:.*)/"
_NOTHING = '""'


@dataclasses.dataclass(frozen=True)
class _End:
    """What follows a format."""

    texts: tuple[str, ...] = ()  # one of these, and it belongs into the format's rule
    token_ids: tuple[int, ...] = ()  # one of these tokens, which others bring
    is_open: bool = False  # something that free text could swallow; else, without texts and tokens, the output's end


_SEALED = _End()
_OPEN = _End(is_open=True)


@dataclasses.dataclass(frozen=True)
class Dialects:
    """How other dialects are written inside of Lark; each is told the place, too."""

    regex: Callable[[str, str], str]  # a pattern, to stand between slashes
    schema: Callable[[bool | dict[str, Any], str], str]  # a schema, as JSON


def to_lark(whole: AnyFormat, tokenizer: GrammarTokenizer, dialects: Dialects) -> str:
    """Raises GrammarError."""
    translator = _Translator(tokenizer, dialects)
    start = translator.translate(whole, _SEALED, "format", 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *translator.lines]) + "\n"


class _Translator:
    def __init__(self, tokenizer: GrammarTokenizer, dialects: Dialects) -> None:
        self._tokenizer = tokenizer
        self._dialects = dialects
        self._names: dict[str, str] = {}  # of rules and terminals, by their heads and bodies
        self._num_grammars = 0
        self.lines: list[str] = []

    def translate(self, one: AnyFormat, end: _End, place: str, depth: int) -> str:
        """The format and its end."""
        if depth > _DEEPEST:
            raise GrammarError(f"structural_tag: formats may be nested at most {_DEEPEST} deep.")
        depth += 1
        match one:
            case formats.ConstString(value):
                return f"{self._fixed(value, place)} {self._end(end, place)}"
            case formats.Token(token):
                return f"<[{self._token_id(token, place)}]> {self._end(end, place)}"
            case formats.JsonSchema(json_schema=schema, style="json"):
                name = self._rule(f"%json {self._dialects.schema(schema, place)}")
                return f"{name} {self._end(end, place)}"
            case formats.JsonSchema(json_schema=schema, style=style):
                return self.translate(tag_xml.parameters(schema, style, place), end, place, depth)
            case formats.QwenXmlParameter(schema):
                return self.translate(tag_xml.parameters(schema, "qwen_xml", place), end, place, depth)
            case formats.Regex(pattern):
                return self._lexeme(self._terminal(f"/{self._dialects.regex(pattern, place)}/"), end, place)
            case formats.Ebnf(grammar):
                return self._ebnf(grammar, end, place)
            case formats.AnyText(excludes):
                return self._free_text(self._without(excludes), excludes, end, place)
            case formats.Sequence(elements):
                return self._sequence([(e, f"{place}.elements[{i}]") for i, e in enumerate(elements)], end, place, depth)
            case formats.Or(elements):
                return self._or(
                    (self.translate(e, end, f"{place}.elements[{i}]", depth) for i, e in enumerate(elements)), place
                )
            case formats.Tag():
                return f"{self._begin(one, place)} {self._behind_begin(one, end, place, depth)}"
            case formats.TriggeredTags():
                return self._triggered(one, end, place, depth)
            case formats.TagsWithSeparator():
                return self._separated(one, end, place, depth)
            case _:
                return self._repeated(one, end, place, depth)

    # --- what stands in the text as it is

    def _fixed(self, text: str, place: str) -> str:
        pieces = self._tokenizer.pieces(text)
        if pieces and pieces[-1] in self._tokenizer.eos_token_ids:
            pieces.pop()  # the output ends there, with it or without
        for piece in pieces:
            if piece in self._tokenizer.eos_token_ids:
                raise GrammarError(f"structural_tag: {place}: nothing can follow {self._tokenizer.text_of(int(piece))}.")
        return " ".join(lark.quoted(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in pieces) or _NOTHING

    def _end(self, end: _End, place: str) -> str:
        return self._or((self._fixed(text, place) for text in end.texts), place) if end.texts else ""

    def _token_id(self, token: int | str, place: str) -> int:
        if isinstance(token, int):
            if 0 <= token < self._tokenizer.ll.vocab_size and token not in self._tokenizer.eos_token_ids:
                return token
        else:
            pieces = self._tokenizer.ll.tokenize_str(token, parse_special=True)
            if len(pieces) == 1 and pieces[0] not in self._tokenizer.eos_token_ids:
                return pieces[0]
        raise GrammarError(f"structural_tag: {place}: {token!r} is not one token that an output may hold.")

    # --- lexemes

    def _rule(self, body: str, attributes: str = "") -> str:
        return self._named("r", attributes, body)

    def _terminal(self, body: str) -> str:
        return self._named("T", "", body)

    def _named(self, letter: str, attributes: str, body: str) -> str:
        written = f"{attributes}: {body.strip() or _NOTHING}"
        name = self._names.get(letter + written)
        if name is None:
            name = self._names[letter + written] = f"{letter}{len(self._names)}"
            self.lines.append(name + written)
        return name

    def _lexeme(self, term: str, end: _End, place: str) -> str:
        """A terminal and its end. With an end that is text the two are one lexeme, as short as it can be."""
        if not end.texts:
            return term
        return self._or((self._lazy_until(term, text, place) for text in end.texts), place)

    def _lazy_until(self, term: str, text: str, place: str) -> str:
        first, *_ = self._tokenizer.pieces(text)
        if not isinstance(first, str):  # no text can run over a special token
            return f"{term} {self._fixed(text, place)}"
        head = self._rule(f"{term} {lark.quoted(first)}", "[lazy]")
        return f"{head} {self._fixed(rest, place)}" if (rest := text.removeprefix(first)) else head

    def _without(self, excluded: Iterable[str]) -> str:
        """The terminal of any text that holds none of these. Those that begin with a special token are no text."""
        return self._spelled_without(text for text in excluded if isinstance(self._first_piece(text), str))

    def _spelled_without(self, excluded: Iterable[str]) -> str:
        texts = sorted(set(filter(None, excluded)))
        if not texts:
            return self._terminal(_ANY)
        return self._terminal(f"{_ANY} & ~({_ANY} ({' | '.join(map(lark.quoted, texts))}) {_ANY})")

    def _first_piece(self, text: str) -> str | int | None:
        return next(iter(self._tokenizer.pieces(text)), None)

    def _free_text(self, text: str, excludes: Iterable[str], end: _End, place: str) -> str:
        """Any number of tokens that are text although they are marked, with text between, and then text and the end."""
        last = self._free_text_end(text, end, place)
        marks = self._marks({*end.token_ids, *map(self._first_piece, (*excludes, *end.texts))})
        return f"({text} {marks})* {last}" if marks else last

    def _free_text_end(self, text: str, end: _End, place: str) -> str:
        if end.is_open:
            raise GrammarError(
                f"structural_tag: {place}: free text must be followed by a fixed text (of a tag, a const_string), by a token "
                "or by nothing."
            )
        return self._lexeme(text, end, place)

    def _marks(self, excluded: set[str | int | None]) -> str:
        ids = [str(token_id) for token_id in self._tokenizer.marked_text_ids if token_id not in excluded]
        return f"<[{','.join(ids)}]>" if ids else ""

    def _ebnf(self, text: str, end: _End, place: str) -> str:
        suffix = f"_{self._num_grammars}"
        self._num_grammars += 1
        try:
            inlined = lark.inline(ebnf.parse(text), suffix)
        except GrammarError as error:
            raise GrammarError(f"structural_tag: {place}: {error}") from None
        self.lines += inlined.lines
        if inlined.is_terminal:
            return self._lexeme(inlined.root, end, place)
        return f"{inlined.root} {self._end(end, place)}"

    # --- what holds other formats

    def _or(self, choices: Iterable[str], place: str) -> str:
        written = [choice.strip() or _NOTHING for choice in dict.fromkeys(choices)]
        if not written:
            raise GrammarError(f"structural_tag: {place} holds nothing to choose from.")
        return f"({' | '.join(written)})" if len(written) > 1 else written[0]

    def _sequence(self, items: list[tuple[AnyFormat, str]], end: _End, place: str, depth: int) -> str:
        if not items:
            return self._end(end, place)
        (first, first_place), rest = items[0], items[1:]
        if not rest:
            return self.translate(first, end, first_place, depth)
        if not _takes_all(first):
            following = self._rule(self._sequence(rest, end, place, depth))
            return f"{self.translate(first, _OPEN, first_place, depth)} {following}"
        begins = self._begins(rest[0][0], rest[0][1], depth)
        if begins is None:
            following = self._rule(self._sequence(rest, end, place, depth))
            return f"{self.translate(first, _OPEN, first_place, depth)} {following}"
        # What stands behind free text is found by its beginning.
        ways = []
        shared = ""  # what comes after all of them, unless they need to know it
        for start, behind, behind_place in begins:
            head = self.translate(first, start, first_place, depth)
            if _takes_all(behind) or len(rest) == 1:
                following = self._sequence([(behind, behind_place), *rest[1:]], end, place, depth)
            else:
                shared = shared or self._rule(self._sequence(rest[1:], end, place, depth))
                following = f"{self.translate(behind, _OPEN, behind_place, depth)} {shared}"
            ways.append(f"{head} {self._rule(following)}")
        return self._or(ways, place)

    def _begins(self, one: AnyFormat, place: str, depth: int) -> list[tuple[_End, AnyFormat, str]] | None:
        """The texts and tokens that a format can begin with, each with what is to follow it: not the text again, but the token.
        None: it can begin otherwise."""
        if depth > _DEEPEST:
            return None
        match one:
            case formats.ConstString(value) if value:
                return [(_End((value,)), formats.ConstString(value=""), place)]
            case formats.Token(token):
                return [(_End(token_ids=(self._token_id(token, place),)), one, place)]
            case formats.Tag(begin=formats.Token(token)):
                return [(_End(token_ids=(self._token_id(token, f"{place}.begin"),)), one, place)]
            case formats.Tag(begin=str(begin)) if begin:
                return [(_End((begin,)), msgspec.structs.replace(one, begin=""), place)]
            case formats.Or(elements):
                parts = [self._begins(e, f"{place}.elements[{i}]", depth + 1) for i, e in enumerate(elements)]
                return None if None in parts else [begin for part in parts for begin in part or []]
            case formats.Sequence((first, *others)):
                begins = self._begins(first, f"{place}.elements[0]", depth + 1) or []
                return [(start, formats.Sequence(elements=(rest, *others)), at) for start, rest, at in begins] or None
            case _:
                return None

    def _repeated(self, one: AnyFormat, end: _End, place: str, depth: int) -> str:
        assert isinstance(one, formats.Optional | formats.Star | formats.Plus | formats.Repeat), one
        inner_place = f"{place}.content"
        if isinstance(one, formats.Optional):
            return self._or([self.translate(one.content, end, inner_place, depth), self._end(end, place)], place)
        if isinstance(one, formats.Repeat):
            if one.min < 0 or (one.max != -1 and one.max < one.min):
                raise GrammarError(f"structural_tag: {place}: min {one.min} and max {one.max} leave no number of times.")
            times = f"{{{one.min},{'' if one.max == -1 else one.max}}}"
        else:
            times = "*" if isinstance(one, formats.Star) else "+"
        return f"({self.translate(one.content, _OPEN, inner_place, depth)}){times} {self._end(end, place)}"

    # --- tags

    def _begin(self, tag: Tag, place: str) -> str:
        if isinstance(tag.begin, formats.Token):
            return f"<[{self._token_id(tag.begin.token, f'{place}.begin')}]>"
        return self._fixed(tag.begin, f"{place}.begin")

    def _behind_begin(self, tag: Tag, end: _End, place: str, depth: int) -> str:
        content_place, end_place = f"{place}.content", f"{place}.end"
        if isinstance(tag.end, formats.Token):
            token_id = self._token_id(tag.end.token, end_place)
            content = self.translate(tag.content, _End(token_ids=(token_id,)), content_place, depth)
            return f"{content} <[{token_id}]> {self._end(end, place)}"
        texts = (tag.end,) if isinstance(tag.end, str) else tag.end
        if texts == ("",):
            return self.translate(tag.content, end, content_place, depth)
        if not texts or "" in texts:
            raise GrammarError(f"structural_tag: {end_place} must be one text, or several that are not empty.")
        if self._first_piece(texts[0]) in self._tokenizer.eos_token_ids:  # the output ends with it
            return self.translate(tag.content, _SEALED, content_place, depth)
        return f"{self.translate(tag.content, _End(texts), content_place, depth)} {self._end(end, place)}"

    def _separated(self, one: formats.TagsWithSeparator, end: _End, place: str, depth: int) -> str:
        tags = [self.translate(tag, _OPEN, f"{place}.tags[{i}]", depth) for i, tag in enumerate(one.tags)]
        tag = self._rule(self._or(tags, f"{place}.tags"))
        more = "" if one.stop_after_first else f"({self._fixed(one.separator, f'{place}.separator')} {tag})*"
        all_tags = f"{tag} {more} {self._end(end, place)}"
        return all_tags if one.at_least_one else self._or([all_tags, self._end(end, place)], place)

    def _triggered(self, one: formats.TriggeredTags, end: _End, place: str, depth: int) -> str:
        heads = [self._head(tag, one.triggers, f"{place}.tags[{i}]") for i, tag in enumerate(one.tags)]
        behind = [self._rule(self._behind_begin(tag, _OPEN, f"{place}.tags[{i}]", depth)) for i, tag in enumerate(one.tags)]
        first = self._or(
            (f"{self._begin(tag, place)} {rest}" for tag, rest in zip(one.tags, behind, strict=True)), f"{place}.tags"
        )
        if one.at_least_one and one.stop_after_first:
            return f"{first} {self._end(end, place)}"
        # A special token that begins a tag must not be spelled out before it.
        excludes = [*one.excludes, *(self._tokenizer.text_of(head) for head in set(heads) if isinstance(head, int))]
        text = self._spelled_without(excludes)
        groups: dict[str | int, list[str]] = {}
        for tag, head, rest in zip(one.tags, heads, behind, strict=True):
            left = str(tag.begin).removeprefix(head if isinstance(head, str) else self._tokenizer.text_of(head))
            groups.setdefault(head, []).append(f"{self._fixed(left, place)} {rest}")
        tags = self._rule(
            self._or((f"{self._up_to(text, head)} {self._or(ways, place)}" for head, ways in groups.items()), place)
        )
        marks = self._marks({*heads, *end.token_ids, *map(self._first_piece, (*one.excludes, *end.texts))})
        texts = f"{text} {marks}" if marks else ""
        last = self._free_text_end(text, end, place)
        if one.stop_after_first:
            before = f"({texts})*" if texts else ""
            return f"{before} {self._or([f'{tags} {self._end(end, place)}', last], place)}"
        loop = self._or(filter(None, [tags, texts]), place)
        return f"{first if one.at_least_one else ''} ({loop})* {last}"

    def _head(self, tag: Tag, triggers: tuple[str, ...], place: str) -> str | int:
        """Its trigger, or the special token it begins with."""
        if not isinstance(tag.begin, str):
            raise GrammarError(f"structural_tag: {place}.begin must be a text in triggered_tags.")
        fitting = [trigger for trigger in triggers if trigger and tag.begin.startswith(trigger)]
        if len(fitting) != 1:
            which = "none" if not fitting else " and ".join(map(repr, fitting[:2]))
            raise GrammarError(
                f"structural_tag: {place}.begin {tag.begin[:40]!r} must begin with exactly one of the triggers; "
                f"it does with {which}."
            )
        first = self._first_piece(tag.begin)
        if isinstance(first, str) and not first.startswith(fitting[0]):
            raise GrammarError(f"structural_tag: {place}: the trigger {fitting[0][:40]!r} ends inside a special token.")
        return first if isinstance(first, int) else fitting[0]

    def _up_to(self, text: str, head: str | int) -> str:
        if isinstance(head, int):
            return f"{text} <[{head}]>"
        return self._rule(f"{text} {lark.quoted(head)}", "[lazy]")


def _takes_all(one: AnyFormat) -> bool:
    """Whether it would swallow what stands behind it."""
    match one:
        case formats.AnyText() | formats.Regex() | formats.Ebnf():
            return True
        case formats.TriggeredTags(at_least_one=at_least_one, stop_after_first=stop_after_first):
            return not (at_least_one and stop_after_first)
        case formats.Tag(end="", content=content):
            return _takes_all(content)
        case formats.Sequence(elements) if elements:
            return _takes_all(elements[-1])
        case formats.Or(elements):
            return any(map(_takes_all, elements))
        case formats.Optional(content):
            return _takes_all(content)
        case _:
            return False
