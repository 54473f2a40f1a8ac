"""Prompts whose answers have to obey a JSON schema."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jaxserve.bench.serving.datasets.files import json_lines
from jaxserve.bench.serving.datasets.random import random_lens, text_source
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import Task

_TEXT, _NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 999}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# What services ask for: an extraction, an order with a list, a choice with a reason, nesting, optional fields.
SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(name=_TEXT, age=_NUMBER, email=_TEXT),
    _object(order=_NUMBER, items={"type": "array", "items": _object(name=_TEXT, count=_NUMBER), "minItems": 1, "maxItems": 4}),
    _object(label={"enum": ["positive", "neutral", "negative"]}, reason=_TEXT),
    _object(
        city=_TEXT, weather=_object(temperature=_NUMBER, sky={"enum": ["clear", "cloudy", "rain"]}, windy={"type": "boolean"})
    ),
    _object(title=_TEXT, tags={"type": "array", "items": _TEXT, "maxItems": 5}, rating={"type": ["integer", "null"]}),
)


def schema_tasks(options: ServingOptions, tokens: Tokens, rng: np.random.Generator) -> list[Task]:
    """Of a file of {"prompt", "schema"} lines, or the schemas above behind random text of --random-input-len tokens."""
    num = options.num_prompts
    output_lens = random_lens(options.random_output_len, options.random_range_ratio, num, rng)
    if options.dataset_path:
        pairs = [_pair(options.dataset_path, number, line) for number, line in json_lines(options.dataset_path)]
    else:
        source = text_source(tokens, rng)
        lens = random_lens(options.random_input_len, options.random_range_ratio, num, rng)
        schemas = [SCHEMAS[i % len(SCHEMAS)] for i in range(num)]
        pairs = [(_ask(str(source(n)[0]), schema), schema) for n, schema in zip(lens, schemas, strict=True)]
    return [
        Task(turns=[prompt], prompt_len=tokens.prompt_len(prompt), output_len=output_len, schema=schema)
        for (prompt, schema), output_len in zip(pairs[:num], output_lens, strict=False)
    ]


def _ask(filling: str, schema: dict[str, Any]) -> str:
    return f"{filling}\n\nAnswer with JSON that has the fields {', '.join(schema['properties'])}."


def _pair(path: str, number: int, line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    prompt, schema = line.get("prompt"), line.get("schema")
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(prompt, str) or not isinstance(schema, dict):
        raise ValueError(f"{path}, line {number}: a line has prompt (a text) and schema (an object).")
    return prompt, schema
