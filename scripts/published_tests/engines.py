"""`jaxserve.Engine` where a foreign test makes theirs, and the demo model where a test loads theirs beside it."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxserve import Engine
from scripts.published_tests.launch import options_of_environment, options_of_file, served_model, translate

# Names of options of newer checkouts that say what another option says here.
_OTHER_NAMES = {"return_hidden_states_mode": "enable_return_hidden_states"}


class TheirEngine(Engine):
    """Takes SGLang's options by their names. Raises NotOursError for those that we lack."""

    def __init__(self, model_path: str = "", **theirs: Any) -> None:
        options: dict[str, Any] = {"served_model_name": model_path or None, **_given()}
        for name, value in theirs.items():
            if value is None or value is False:
                continue  # switched off
            for kept in translate([_flag(_OTHER_NAMES.get(name, name))]):
                options[_field(kept)] = True if name in _OTHER_NAMES else value
        super().__init__(served_model(), **options)


def _given() -> dict[str, Any]:
    """By the file and by environment variables, of which those that count are flags here."""
    flags = {_field(flag): True for flag in options_of_environment({})}
    return {_field(option): int(value) if value.isdigit() else value for option, value in options_of_file()} | flags


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def load_local_models() -> None:
    """`from_pretrained` of a name of the Hub loads the model that is served, whatever it is called."""
    import transformers

    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        theirs = getattr(transformers, name)
        setattr(transformers, name, type(name, (), {"from_pretrained": staticmethod(_local(theirs.from_pretrained))}))


def _local(load: Any) -> Any:
    def from_pretrained(path: str, *args: Any, device_map: Any = None, **options: Any) -> Any:  # one device is there
        return load(path if pathlib.Path(path).is_dir() else served_model(), *args, **options)

    return from_pretrained
