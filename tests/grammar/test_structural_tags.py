"""Structural tags: which texts each format takes, what is said of those that are no good, and special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from grammar_sampler import GrammarSampler, accept_all, allow_all, allowed_ids
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler, GrammarError
from jaxserve.types import Grammar

VOCAB_SIZE, EOS = 2080, (2041, 2042)
EOS_TEXT = "<|im_end|>"
ANY = {"type": "any_text"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def seq(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def token(one: int | str) -> dict[str, Any]:
    return {"type": "token", "token": one}


def triggered(triggers: list[str], *tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **more}


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value, **more}


def whole(one: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": one})


F, G = tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", schema(CITY), "</f>")
PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["x", "y z", 3]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "where": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "age"],
    "$defs": {"place": CITY},
}
QWEN = "<parameter=name>A <b>\n</parameter>\n<parameter=age>\n3\n</parameter>"

TAKEN_AND_REFUSED: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("const", const('a "\\\n'), ['a "\\\n'], ["", "a", 'a "\\\n ']),
    ("any", ANY, ["", "abc\n{"], []),
    ("excludes", {**ANY, "excludes": ["bad", "no"]}, ["", "ba", "go on"], ["bad", "a no"]),
    ("regex", regex(r"\d+[a-c]"), ["12c"], ["c", "1d"]),
    ("ebnf", {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["(x"]),
    ("schema", schema(CITY), ['{"city": "Oslo"}'], ["{}", '{"city": 1}']),
    ("any json", schema(True), ["[1, {}]"], ["[1"]),
    ("sequence", seq(const("a"), NUMBER, const("b")), ["a1b", "a-20b"], ["ab", "a1"]),
    ("empty sequence", seq(const("a"), seq()), ["a"], [""]),
    ("or", {"type": "or", "elements": [const("yes"), NUMBER]}, ["yes", "7"], ["no", ""]),
    ("optional", seq({"type": "optional", "content": const("a")}, const("b")), ["b", "ab"], ["aab"]),
    ("star", seq({"type": "star", "content": const("a")}, const("b")), ["b", "aab"], ["a"]),
    ("plus", seq({"type": "plus", "content": const("a")}, const("b")), ["ab", "aab"], ["b"]),
    ("repeat", {"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
    ("repeat for ever", {"type": "repeat", "min": 1, "max": -1, "content": const("a")}, ["a", "aaaa"], [""]),
    ("tag of text", tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a <b> </ t</t>"], ["<t>a", "a</t>", "<t></t>x"]),
    ("tag with two ends", tag("<t>", ANY, ["</t>", "<end>"]), ["<t>a</t>", "<t>a<end>"], ["<t>a</end>"]),
    ("tag of a regex", tag("<", regex("[a-z<>]+"), ">|"), ["<a>|", "<a>b>|"], ["<>|", "<a>"]),
    ("tag of a sequence", tag("<", seq(NUMBER, ANY), ">"), ["<1>", "<12 a>"], ["<a>"]),
    ("tag without an end", seq(tag('{"n":', NUMBER, ""), const("}")), ['{"n":12}'], ['{"n":}']),
    ("text before a tag", seq(ANY, F, const(".")), ["<f=a>1</f>.", "hi <f <f=a>2</f>."], ["hi", "hi <f=a>x</f>."]),
    ("text before one of two", seq(ANY, {"type": "or", "elements": [F, const("END")]}), ["aEND", "b<f=a>1</f>"], ["a", "ENDx"]),
    ("text before a sequence", seq(ANY, seq(const("#"), NUMBER)), ["a b#3"], ["#", "#3x"]),
    (
        "triggered", triggered(["<f="], F, G),
        ["", "text <f", '<f=a>1</f>', 'a<f=b>{"city":"x"}</f>b<f=a>2</f>'], ["<f=", "<f=c>", "a<f=a>x</f>", "<f=a>1"],
    ),
    (
        "triggered, two triggers", triggered(["<f=a", "<f=b"], F, G),
        ["<f=c>", '<f=a>1</f><f=b>{"city":""}</f>'], ["<f=a", "<f=bb"],
    ),
    ("triggered, at least one", triggered(["<f"], F, at_least_one=True), ["<f=a>1</f>", "<f=a>1</f> and"], ["", "a<f=a>1</f>"]),
    ("triggered, first only", triggered(["<f"], F, stop_after_first=True), ["", "a", "a<f=a>1</f>"], ["<f=a>1</f>b"]),
    (
        "triggered, exactly one", triggered(["<f"], F, at_least_one=True, stop_after_first=True),
        ["<f=a>1</f>"], ["", "a", "<f=a>1</f>b", "<f=a>1</f><f=a>1</f>"],
    ),
    ("triggered, excludes", triggered(["<f"], F, excludes=["bad"]), ["a<f=a>1</f>b"], ["bad", "<f=a>1</f>bad"]),
    ("triggered in a tag", tag("[", triggered(["<f"], F), "]"), ["[]", "[a<f=a>1</f>b]"], ["[<f=b>]", "[]]"]),
    (
        "first only in a tag", tag("[", triggered(["<f"], F, stop_after_first=True), "]"),
        ["[]", "[a]", "[a<f=a>1</f>]"], ["[<f=a>1</f>b]"],
    ),
    (
        "separated", {"type": "tags_with_separator", "tags": [F, G], "separator": ", "},
        ["", "<f=a>1</f>", '<f=a>1</f>, <f=b>{"city":""}</f>'], ["<f=a>1</f>, ", "<f=a>1</f><f=a>1</f>", " "],
    ),
    (
        "separated, at least one", {"type": "tags_with_separator", "tags": [F], "separator": "", "at_least_one": True},
        ["<f=a>1</f>", "<f=a>1</f><f=a>1</f>"], [""],
    ),
    (
        "separated, first only", {"type": "tags_with_separator", "tags": [F], "separator": ",", "stop_after_first": True},
        ["", "<f=a>1</f>"], ["<f=a>1</f>,<f=a>1</f>"],
    ),
    (
        "qwen", {"type": "qwen_xml_parameter", "json_schema": PARAMETERS},
        [
            QWEN, f"\n{QWEN}\n<parameter=kind>y z</parameter>", f"{QWEN}<parameter=kind> 3</parameter>",
            f"{QWEN}<parameter=code>AB</parameter><parameter=where>{{\"city\": \"</parameter>\"}}</parameter>",
            f"{QWEN}<parameter=note>free</parameter>",
        ],
        [
            "<parameter=age>3</parameter>", "<parameter=name>a</parameter><parameter=age>x</parameter>",
            f"{QWEN}<parameter=code>ABC</parameter>", f"{QWEN}<parameter=other>1</parameter>",
            f"{QWEN}<parameter=kind>z</parameter>",
        ],
    ),
    (
        "minimax", schema(PARAMETERS, style="minimax_xml"),
        ['<parameter name="name">a</parameter><parameter name="age">3</parameter>'], ["{}"],
    ),
    (
        "glm", schema(PARAMETERS, style="glm_xml"),
        ["<arg_key>name</arg_key><arg_value>a</arg_value>\n<arg_key>age</arg_key><arg_value>3</arg_value>"], ["{}"],
    ),
    (
        "qwen, any parameters", schema({"type": "object", "additionalProperties": {"type": "integer"}}, style="qwen_xml"),
        ["", "<parameter=a>1</parameter>\n<parameter=b_2>2</parameter>"],
        ["<parameter=a>x</parameter>", "<parameter=a b>1</parameter>"],
    ),
    (
        "special tokens", tag("<tool_call>\n", NUMBER, "\n</tool_call>"),
        ["<tool_call>\n1\n</tool_call>"], ["<tool_call>1</tool_call>"],
    ),
    ("special end", tag("<t>", ANY, "</tool_call>"), ["<t>a</tool_call>", "<t><tool_call></tool_call>"], ["<t>a"]),
    (
        "special trigger", triggered(["<tool_call>"], tag("<tool_call>", NUMBER, "</tool_call>")),
        ["a", "a<tool_call>1</tool_call>b", "a<tool_response>b<tool_call>1</tool_call>"], ["<tool_call>a", "a<tool_call>"],
    ),
    (
        "trigger inside a special token", triggered(["<tool"], tag("<tool_call>", NUMBER, "x")),
        ["<tool_call>1x", "<tool"], ["<tool_call>x"],
    ),
    ("tokens", tag(token("<tool_call>"), ANY, token(2045)), ["<tool_call>a b</tool_call>"], ["<tool_call>a", "a</tool_call>"]),
    ("text before a token", seq(ANY, token("<tool_call>"), NUMBER), ["a<tool_call>3", "<tool_call>3"], ["a"]),
    ("end of sequence at the end", tag("<t>", ANY, EOS_TEXT), ["<t>", "<t>abc"], ["a"]),
    ("unicode", triggered(["，"], tag("，，", schema(CITY), "。")), ["无用，，{\"city\": \"é\"}。无用"], ["，x"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "taken", "refused"), TAKEN_AND_REFUSED, ids=[case[0] for case in TAKEN_AND_REFUSED])
def test_texts_of_a_format(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, one: Any, taken: list[str], refused: list[str]
) -> None:
    compiled = compiler.submit(Grammar("structural_tag", whole(one))).result()
    for text in (*taken, *refused):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        matcher = compiled.matcher()
        is_taken = accept_all(matcher, ids) == len(ids) and matcher.may_end
        assert is_taken == (text in taken), text


def test_the_older_form(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    older = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": json.dumps(CITY), "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    compiled = compiler.submit(Grammar("structural_tag", json.dumps(older))).result()
    for text, is_taken in ('a<f=a>1</f>b<f=b>{"city":"x"}</f>', True), ("<f=b>1</f>", False):
        ids = tokenizer.encode(text).ids
        assert (accept_all(compiled.matcher(), ids) == len(ids)) is is_taken


def test_a_special_token_is_not_to_be_spelled_out(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    one = triggered(["<tool_call>"], tag("<tool_call>", NUMBER, "</tool_call>"))
    matcher = compiler.submit(Grammar("structural_tag", whole(one))).result().matcher()
    spelled = [i for part in ("<tool", "_call", ">") for i in tokenizer.encode(part).ids]
    assert 2044 not in spelled
    assert accept_all(matcher, spelled) == len(spelled) - 1
    mask = allow_all(1, VOCAB_SIZE)[0]
    matcher.fill_mask(mask)
    assert {2044, 2046, 2047} <= set(allowed_ids(mask))  # all but the tag's end may stand in free text
    assert 2045 in allowed_ids(mask) and 2043 not in allowed_ids(mask)


WALKED = [
    (triggered(["<f="], F, G, at_least_one=True, stop_after_first=True), r"<f=a>-?\d+</f>|<f=b>\{\s*\"city\"(?s:.*)\}</f>"),
    (seq(const("Answer: "), {"type": "or", "elements": [NUMBER, const("none")]}), r"Answer: (-?\d+|none)"),
    (schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, style="qwen_xml"),
     r"\s*<parameter=a>\s*-?\d+\s*</parameter>\s*"),
    (tag("<tool_call>", NUMBER, "</tool_call>"), r"<tool_call>-?\d+</tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "pattern"), WALKED)
def test_every_complete_output_is_in_the_language(
    compiler: GrammarCompiler, sampler: GrammarSampler, tokenizer: Tokenizer, one: Any, pattern: str
) -> None:
    compiled = compiler.submit(Grammar("structural_tag", whole(one))).result()
    num_complete = 0
    for walk in range(6):
        drawn = sampler.draw(compiled.matcher(), np.random.default_rng(walk), max_tokens=150, hurry_after=4 * walk)
        if drawn.is_complete:
            num_complete += 1
            text = tokenizer.decode(drawn.token_ids, skip_special_tokens=False)
            assert re.fullmatch(pattern, text), text
    assert num_complete >= 3


_WRONG: list[tuple[str, str]] = [
    ("{", "structural_tag is not valid JSON: Expecting property name"),
    ("[]", "structural_tag: must be object, not array."),
    ('{"type": "structural_tag"}', "structural_tag: format is missing."),
    ('{"type": "other", "format": {"type": "any_text"}}', "structural_tag: type: invalid enum value 'other'."),
    (whole({"type": "fancy"}), "structural_tag: format.type: invalid value 'fancy'."),
    (whole(seq({})), "structural_tag: format.elements[0]: type is missing."),
    (whole(seq(ANY, {"type": "tag", "begin": "a"})), "structural_tag: format.elements[1]: content is missing."),
    (whole({**ANY, "max_tokens": 5}), "structural_tag: format: max_tokens is not known here."),
    (whole(tag(5, ANY, "x")), "structural_tag: format.begin must be str | object, not int."),
    (whole(schema([])), "structural_tag: format.json_schema must be bool | object, not array."),
    (whole(schema({}, style="other")), "structural_tag: format.style: invalid enum value 'other'."),
    (whole(seq(NUMBER, schema({"type": "intege"}))), "structural_tag: format.elements[1]: Invalid type: intege."),
    (whole(seq(NUMBER, schema(False))), "structural_tag: format.elements[1]: nothing matches the schema false."),
    (whole(tag("a", schema({"not": {}}), "b")), 'structural_tag: format.content: Unimplemented keys: ["not"].'),
    (whole(tag("a", regex("(x"), "b")), "structural_tag: format.content: the regular expression is not valid: unclosed group."),
    (whole(regex("a\\")), "structural_tag: format: the regular expression is not valid: it ends with a lone backslash."),
    (whole({"type": "grammar", "grammar": "x"}), "structural_tag: format: ebnf: a rule (name ::= ...) is expected"),
    (whole(seq(ANY, NUMBER)), "structural_tag: format.elements[0]: free text must be followed by a fixed text"),
    (whole(seq(triggered(["<f"], F), NUMBER)), "structural_tag: format.elements[0]: free text must be followed by"),
    (whole({"type": "star", "content": ANY}), "structural_tag: format.content: free text must be followed by"),
    (whole(triggered(["x"], F)), "tags[0].begin '<f=a>' must begin with exactly one of the triggers; it does with none."),
    (whole(triggered(["<f", "<f="], F)), "exactly one of the triggers; it does with '<f' and '<f='."),
    (whole(triggered(["<f"], tag(token("<tool_call>"), ANY, "x"))), "format.tags[0].begin must be a text in triggered_tags."),
    (whole(triggered(["a<tool"], tag("a<tool_call>", ANY, "x"))), "tags[0]: the trigger 'a<tool' ends inside a special token."),
    (whole(triggered([], *[])), "structural_tag: format.tags holds nothing to choose from."),
    (whole({"type": "or", "elements": []}), "structural_tag: format holds nothing to choose from."),
    (whole({"type": "repeat", "min": 3, "max": 2, "content": ANY}), "format: min 3 and max 2 leave no number of times."),
    (whole(tag("a", ANY, ["x", ""])), "structural_tag: format.end must be one text, or several that are not empty."),
    (whole(tag("a", ANY, [])), "structural_tag: format.end must be one text"),
    (whole(token("two tokens")), "structural_tag: format: 'two tokens' is not one token that an output may hold."),
    (whole(token(99999)), "structural_tag: format: 99999 is not one token"),
    (whole(token(EOS_TEXT)), f"structural_tag: format: '{EOS_TEXT}' is not one token"),
    (whole(const(f"a{EOS_TEXT}b")), f"structural_tag: format: nothing can follow {EOS_TEXT}."),
    (whole(schema({"type": "string"}, style="qwen_xml")), "structural_tag: format must describe an object for style qwen_xml."),
    (
        whole(schema({"properties": {"a": {"$ref": "#/$defs/b"}}}, style="qwen_xml")),
        "structural_tag: format.properties.a: #/$defs/b is not one of the schema's definitions.",
    ),
    (
        whole(schema({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, style="qwen_xml")),
        "structural_tag: format.properties.a: its references go in a circle.",
    ),
    (
        '{"type": "structural_tag", "structures": [{"begin": "a", "end": "b"}], "triggers": []}',
        "structural_tag: structures[0]: schema is missing.",
    ),
    (
        '{"type": "structural_tag", "structures": [{"begin": "a", "schema": "{", "end": "b"}], "triggers": ["a"]}',
        "structural_tag: structures[0].schema is not valid JSON",
    ),
    ('{"type": "structural_tag", "structures": []}', "structural_tag: triggers is missing."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), _WRONG)
def test_what_is_wrong_is_named_with_its_place(compiler: GrammarCompiler, text: str, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.submit(Grammar("structural_tag", text)).result()
    sentence = str(caught.value)
    assert words in sentence
    assert sentence.startswith("structural_tag") and sentence.endswith(".") and len(sentence) < 400


@pytest.fixture
def own_compiler(tokenizer_json: str) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer_json, VOCAB_SIZE, EOS, timeout_s=2.0)
    yield made
    made.close()


def _nested(depth: int) -> Any:
    one: Any = ANY
    for _ in range(depth):
        one = tag("a", one, "b")
    return one


@pytest.mark.parametrize(
    "one",
    [
        _nested(60),
        triggered(["<"], *(tag(f"<{i}>", NUMBER, ">") for i in range(2000))),
        triggered([f"<{i};" for i in range(900)], *(tag(f"<{i};>", ANY, ">") for i in range(900))),
        triggered(["<" * 100_000], tag("<" * 100_000, ANY, ">")),
        tag("a", {"type": "repeat", "min": 0, "max": 10**9, "content": NUMBER}, "b"),
        seq(*[ANY, {"type": "or", "elements": [const("a"), const("b")]}] * 60),
    ],
    ids=["deep", "tags", "triggers", "long", "repeat", "choices"],
)
def test_hostile_ones_are_served_or_refused_soon(own_compiler: GrammarCompiler, one: Any) -> None:
    try:
        matcher = own_compiler.submit(Grammar("structural_tag", whole(one))).result().matcher()
    except GrammarError as error:
        print(error)
    else:
        matcher.fill_mask(allow_all(1, VOCAB_SIZE)[0])


def test_formats_are_nested_64_deep_at_most(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="structural_tag: formats may be nested at most 64 deep"):
        compiler.submit(Grammar("structural_tag", whole(_nested(65)))).result()
