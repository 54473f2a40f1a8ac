"""Schemas of tools: what is one, and what types of other languages become."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from jaxserve.server.openai.tool_schemas import check_schema


@pytest.mark.parametrize(
    ("given", "standard"),
    [
        ("string", "string"), ("varchar", "string"), ("VARCHAR(255)", "string"), ("enum", "string"), ("datetime", "string"),
        ("int", "integer"), ("int32", "integer"), ("uint8", "integer"), ("bigint", "integer"), ("long", "integer"),
        ("float", "number"), ("float64", "number"), ("decimal(10,2)", "number"), ("double", "number"), ("num", "number"),
        ("bool", "boolean"), ("list", "array"), ("list[str]", "array"), ("tuple", "array"), ("dict[str, int]", "object"),
        ("map", "object"), ("Integer", "integer"), (["int", "integer", "null"], ["integer", "null"]),
    ],
)  # fmt: skip
def test_types_by_other_names(given: Any, standard: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": given}, "b": {"anyOf": [{"items": {"type": given}}]}}}
    check_schema(schema, "parameters")
    assert schema["properties"] == {"a": {"type": standard}, "b": {"anyOf": [{"items": {"type": standard}}]}}


BAD: list[tuple[Any, str]] = [
    ({"type": "internal"}, "parameters.type must be one of null"),
    ({"type": []}, "parameters.type must be a type or a list of types, got []"),
    ({"type": 5}, "parameters.type must be one of"),
    ({"type": [["string"]]}, "parameters.type must be one of"),
    ({"properties": []}, "parameters.properties must be an object of JSON schemas, got []"),
    ({"properties": {"a": "string"}}, 'parameters.properties.a must be a JSON schema, got "string"'),
    ({"items": [{"type": "string"}]}, "parameters.items must be a JSON schema"),
    ({"anyOf": []}, "parameters.anyOf must be a list of JSON schemas, got []"),
    ({"allOf": [{"type": "x"}]}, "parameters.allOf[0].type must be"),
    ({"required": "a"}, "parameters.required must be a list of names"),
    ({"enum": "a"}, "parameters.enum must be a list"),
    ({"minLength": -1}, "parameters.minLength must be a number from 0"),
    ({"maximum": "5"}, "parameters.maximum must be a number"),
    ({"description": 1}, "parameters.description must be a string"),
    ({"$defs": {"a": {"uniqueItems": 1}}}, "parameters.$defs.a.uniqueItems must be true or false"),
    ({"additionalProperties": "no"}, "parameters.additionalProperties must be a JSON schema"),
]


@pytest.mark.parametrize(("schema", "words"), BAD)
def test_what_is_no_schema_is_named(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_schema(schema, "parameters")
    with pytest.raises(jsonschema.SchemaError):
        jsonschema.Draft202012Validator.check_schema(schema)


def test_what_is_a_schema() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    check_schema(deep, "parameters")
    for schema in ({}, {"additionalProperties": False, "x-own": 1, "minItems": 1.0, "default": None, "const": []}):
        check_schema(schema, "parameters")
        jsonschema.Draft202012Validator.check_schema(schema)
