"""Options under the names that people know."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.config import ALIASES, ServerArgs


def test_every_alias_is_of_a_field_and_is_none_itself() -> None:
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    assert set(ALIASES.values()) <= fields
    assert not fields & set(ALIASES)


@pytest.mark.parametrize("name", ["tp_size", "tp", "tensor_parallel_size"])
def test_an_option_may_be_given_under_any_of_its_names(name: str) -> None:
    assert ServerArgs.of({"model": "m", name: 2}) == ServerArgs(model_path="m", tp_size=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_paralel_size": 2}, r"^There is no option tensor_paralel_size\. Did you mean tensor_parallel_size\?$"),
        ({"max_runing_requests": 2}, r"Did you mean max_running_requests\?$"),
        ({"zzzzzz": 2}, r"^There is no option zzzzzz\.$"),
        ({"tp_size": 2, "tp": 2}, r"^tp_size is given twice, also as tp\.$"),
        ({"tp": 0}, r"--tp-size must be at least 1; got 0"),
    ],
)
def test_what_is_no_option_is_a_sentence(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerArgs.of(options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"constrained_json_whitespace_pattern": "("},
            r"^--constrained-json-whitespace-pattern must be a regular expression: ",
        ),
        (
            {"constrained_json_whitespace_pattern": " ?", "constrained_json_disable_any_whitespace": True},
            r"^--constrained-json-whitespace-pattern has no effect with --constrained-json-disable-any-whitespace\.$",
        ),
    ],
)
def test_options_that_make_no_sense_are_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerArgs(**options)
