"""Grammars and how to tell, without llguidance, whether a text matches one. Also used against a running server.

A case is a kind and a text as they stand in a request, and a check that raises AssertionError for a text outside the language.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import realistic_schemas
import regex

from jaxserve.types import Grammar


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    grammar: Grammar
    check: Callable[[str], None]


def _matches(pattern: str, flags: int = regex.ASCII) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert regex.fullmatch(pattern, text, flags), f"{text!r} does not match {pattern!r}"

    return check


def _regex_case(name: str, pattern: str, flags: int = regex.ASCII) -> Case:
    return Case(name, Grammar("regex", pattern), _matches(pattern, flags))


def _schema_case(name: str, schema: dict[str, Any]) -> Case:
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)

    def check(text: str) -> None:
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not errors, f"{text!r}: {errors}"

    return Case(name, Grammar("json_schema", json.dumps(schema)), check)


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    wanted = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": False, **more}


REGEX_CASES = [
    _regex_case("letters", r"[a-z]{2,6}"),
    _regex_case("phone", r"\(\d{3}\) \d{3}-\d{4}"),
    _regex_case("ipv4", r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"),
    _regex_case("date", r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
    _regex_case("choice", r"(London|Paris|Berlin|New York)"),
    _regex_case("email", r"[a-z0-9._]{1,12}@[a-z0-9]{1,8}\.(com|org|net)"),
    _regex_case("hex colour", r"#[0-9a-fA-F]{6}"),
    _regex_case("anchored", r"^yes|no$"),
    _regex_case("case insensitive", r"(?i)true|false", regex.UNICODE),
    _regex_case("number", r"-?(0|[1-9]\d{0,8})(\.\d{1,4})?([eE][+-]?\d{1,2})?"),
    _regex_case("accents", r"[à-ü]{1,8}"),
    _regex_case("cyrillic", r"[а-яА-Я]{2,5}( [а-я]{2,5})?"),
    _regex_case("emoji", r"(😀|🎉|👍){1,3}"),
    _regex_case("any character", r".{0,40}"),
    _regex_case("lines", r"([a-z ]{1,12}\n){1,3}"),
    _regex_case("escapes", r"\[\{\"k\": \"\\\\w/\"\}\]\t\$\^"),
    _regex_case("optional parts", r"(a(b(c(d)?)?)?)?x"),
    _regex_case("think and answer", r"<think>[^<]{0,30}</think>\n(A|B|C|D)"),
    _regex_case("the letters of a special token", r"<\|im_end\|>[a-z]{0,9}<tool_call>"),
    _regex_case("not a class", r"[^a-zA-Z\n]{3,10}!"),
    _regex_case("words", r"(\w{1,8}[,;] ?){0,4}\w{1,8}\."),
]

SCHEMA_CASES = [
    _schema_case("the letters of special tokens", {"enum": ["<|im_end|>a", "<tool_call>", {"<think>": True}]}),
    _schema_case("flat", _object({"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}})),
    _schema_case(
        "nested",
        _object(
            {"user": _object({"id": {"type": "integer"}, "home": _object({"zip": {"type": "string", "pattern": r"^\d{5}$"}})})}
        ),
    ),
    _schema_case("array of integers", {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5}),
    _schema_case(
        "array of objects",
        {"type": "array", "items": _object({"x": {"type": "number"}, "y": {"type": "number"}}), "maxItems": 3},
    ),
    _schema_case("string enum", {"enum": ["red", "green", "blue"]}),
    _schema_case("mixed enum", {"enum": [1, "one", None, True, [1, 2], {"a": "b"}]}),
    _schema_case("const", _object({"version": {"const": "1.0"}, "kind": {"const": 7}})),
    _schema_case("integer range", _object({"n": {"type": "integer", "minimum": -17, "maximum": 1234}})),
    _schema_case("exclusive range", _object({"n": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100}})),
    _schema_case("number range", _object({"score": {"type": "number", "minimum": 0, "maximum": 1}})),
    _schema_case("multiple of", _object({"n": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}})),
    _schema_case("boolean and null", _object({"ok": {"type": "boolean"}, "why": {"type": "null"}})),
    _schema_case("type list", _object({"v": {"type": ["integer", "null", "boolean"]}})),
    _schema_case(
        "optional",
        _object({"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "string", "maxLength": 5}}, ["b"]),
    ),
    _schema_case("pattern", _object({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"}})),
    _schema_case("lengths", {"type": "string", "minLength": 3, "maxLength": 9}),
    _schema_case(
        "any of",
        {"anyOf": [_object({"circle": {"type": "number"}}), _object({"side": {"type": "integer"}}), {"type": "boolean"}]},
    ),
    _schema_case(
        "one of",
        {
            "oneOf": [
                _object({"type": {"const": "dog"}, "barks": {"type": "boolean"}}),
                _object({"type": {"const": "cat"}, "lives": {"type": "integer", "minimum": 1, "maximum": 9}}),
            ]
        },
    ),
    _schema_case(
        "all of",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                _object({"a": {"maximum": 9}}),
            ]
        },
    ),
    _schema_case(
        "typed additional properties",
        {
            "type": "object",
            "properties": {"id": {"type": "integer"}},
            "required": ["id"],
            "additionalProperties": {"type": "integer"},
        },
    ),
    _schema_case("unicode", _object({"größe": {"enum": ["groß", "小さい", "🎉"]}, "名前": {"type": "string", "maxLength": 6}})),
    _schema_case(
        "definitions",
        {
            "$ref": "#/$defs/pair",
            "$defs": {
                "pair": _object({"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}}),
                "leaf": {"type": "integer", "minimum": 0, "maximum": 99},
            },
        },
    ),
    _schema_case(
        "recursive",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": _object({"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
            },
        },
    ),
    _schema_case(
        "prefix items",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    ),
    _schema_case("formats", _object({"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}})),
    _schema_case("any object", {"type": "object"}),
    *(_schema_case(name, schema) for name, schema in realistic_schemas.SCHEMAS.items()),
]


def _check_sum(text: str) -> None:
    """Numbers, + - * and parentheses, as Python reads them."""
    assert regex.fullmatch(r"[0-9+*()-]+", text), text
    ast.parse(text, mode="eval")


def _check_brackets(text: str) -> None:
    depth = 0
    for character in text:
        assert character in "()", text
        depth += 1 if character == "(" else -1
        assert depth >= 0, text
    assert depth == 0, text


EBNF_CASES = [
    Case(
        "cities",
        Grammar(
            "ebnf",
            'root ::= city | description\ncity ::= "London" | "Paris" | "Berlin" | "Rome"\n'
            'description ::= city " is " status\nstatus ::= "the capital of " country\n'
            'country ::= "England" | "France" | "Germany" | "Italy"\n',
        ),
        _matches(r"(London|Paris|Berlin|Rome)( is the capital of (England|France|Germany|Italy))?"),
    ),
    Case(
        "sum",
        Grammar("ebnf", 'root ::= expr\nexpr ::= term ([-+*] term)*\nterm ::= num | "(" expr ")"\nnum ::= [1-9] [0-9]{0,3}'),
        _check_sum,
    ),
    Case("brackets", Grammar("ebnf", 'root ::= "(" root ")" root | "()"'), _check_brackets),
    Case(
        "alternatives on lines of their own",
        Grammar("ebnf", '# answers\nroot ::=\n    "yes"\n  | "no"   # not sure\n  | "may" "be"?\n'),
        _matches("yes|no|may(be)?"),
    ),
    Case(
        "JSON by hand",
        Grammar(
            "ebnf",
            'root ::= "{" ws "\\"name\\"" ws ":" ws string ws "}"\n'
            'string ::= "\\"" [^"\\\\\\r\\n]{0,12} "\\""\nws ::= [ \\t]{0,2}\n',
        ),
        lambda text: _check_name(json.loads(text, strict=False)),
    ),
    Case(
        "escaped characters",
        Grammar("ebnf", r'root ::= "\u00e9\x41\t" [\u4e00-\u4e10\-\]]{1,3} "a/b"'),
        _matches(r"éA\t[一-丐\-\]]{1,3}a/b"),
    ),
    Case(
        "names that differ in case or dash",
        Grammar(
            "ebnf", 'root ::= my-rule my_rule My_Rule start\nmy-rule ::= "a"\nmy_rule ::= "b"\nMy_Rule ::= "c"\nstart ::= "d"+'
        ),
        _matches("abcd+"),
    ),
]


def _check_name(value: dict[str, Any]) -> None:
    assert list(value) == ["name"] and isinstance(value["name"], str), value


CASES = [*REGEX_CASES, *SCHEMA_CASES, *EBNF_CASES]
