"""Options that name a model are served from its folder, under its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.server.located import located


def test_a_model_keeps_the_name_that_it_was_given() -> None:
    args = located(ServerArgs(model_path="demo"))
    assert (args.model_path, args.effective_served_model_name) == (demo_model_path(), "demo")
    assert located(args) == args
    assert located(ServerArgs(model_path="demo", served_model_name="tiny")).effective_served_model_name == "tiny"


def test_a_tokenizer_can_be_named_too() -> None:
    assert (
        located(ServerArgs(model_path=demo_model_path(), tokenizer_path="demo")).effective_tokenizer_path == demo_model_path()
    )
    assert located(ServerArgs(model_path="demo")).effective_tokenizer_path == demo_model_path()


def test_the_name_of_the_built_in_model_brings_its_parsers_and_its_white_space() -> None:
    quiet = '{"enable_thinking": false}'
    brought = [
        (
            args.reasoning_parser, args.tool_call_parser, args.constrained_json_whitespace_pattern,
            args.default_chat_template_kwargs,
        )
        for args in map(located, (
            ServerArgs(model_path="demo"),
            ServerArgs(model_path="demo", tool_call_parser="hermes"),
            ServerArgs(model_path="demo", constrained_json_whitespace_pattern="[ ]{0,2}"),
            ServerArgs(model_path="demo", constrained_json_disable_any_whitespace=True, default_chat_template_kwargs="{}"),
            ServerArgs(model_path=demo_model_path()),
        ))
    ]  # fmt: skip
    assert brought == [
        ("qwen3", "qwen25", " ", quiet), ("qwen3", "hermes", " ", quiet), ("qwen3", "qwen25", "[ ]{0,2}", quiet),
        ("qwen3", "qwen25", None, "{}"), (None, None, None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_path": "nowhere"}, "The model folder 'nowhere' does not exist"),
        ({"model_path": "nowhere", "tokenizer_path": "demo"}, "The model folder 'nowhere' does not exist"),
        ({"model_path": "demo", "tokenizer_path": "nowhere"}, "The tokenizer folder 'nowhere' does not exist"),
        ({"model_path": "empty"}, "The model folder 'empty' holds no config.json"),
        ({"model_path": "demo", "revision": "v1"}, "--revision 'v1' is of a model on the Hugging Face Hub"),
    ],
)
def test_what_is_missing_is_called_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=says):
        located(ServerArgs(**options))  # type: ignore[arg-type]
