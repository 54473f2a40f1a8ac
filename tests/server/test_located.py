"""Options that name a model are served from its folder, under its name."""

from __future__ import annotations

from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.server.located import located


def test_a_model_keeps_the_name_that_it_was_given() -> None:
    args = located(ServerArgs(model_path="demo"))
    assert (args.model_path, args.effective_served_model_name) == (demo_model_path(), "demo")
    assert located(args) == args
    assert located(ServerArgs(model_path="demo", served_model_name="tiny")).effective_served_model_name == "tiny"


def test_a_tokenizer_can_be_named_too() -> None:
    assert located(ServerArgs(model_path="m", tokenizer_path="demo")).effective_tokenizer_path == demo_model_path()
    assert located(ServerArgs(model_path="demo")).effective_tokenizer_path == demo_model_path()
