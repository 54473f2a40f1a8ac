"""JSON inside of requests, read strictly: what is not whole by itself must not get into a larger text."""

from __future__ import annotations

import json

from jaxserve.grammar.errors import GrammarError


def read_json(text: str, what: str) -> object:
    """Raises GrammarError; `what` names the text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise GrammarError(f"{what} is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise GrammarError(f"{what} is nested too deeply.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
