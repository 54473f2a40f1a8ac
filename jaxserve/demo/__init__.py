"""The demo model: a tiny Qwen3 that comes with the package, so that everything can be tried offline.

`scripts/train_demo_model.py` makes it; `model/README.md` says how well it does.
"""

from pathlib import Path

# Options that the name `demo` brings where they are not given: how the model marks its thinking and its calls of tools; that it
# thinks only when asked to; and that it writes JSON with single blanks: allowed more, it would wander.
DEFAULTS = {
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen25",
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "constrained_json_whitespace_pattern": " ",
}


def demo_model_path() -> str:
    """The folder of the packaged model, to be passed as `model_path`."""
    return str(Path(__file__).resolve().parent / "model")
