"""The demo model: a tiny Qwen3 that comes with the package, so that everything can be tried offline.

`scripts/train_demo_model.py` makes it; `model/README.md` says how well it does.
"""

from pathlib import Path

# How the model marks its thinking and its calls of tools, by the names of the options.
REASONING_PARSER, TOOL_CALL_PARSER = "qwen3", "qwen25"


def demo_model_path() -> str:
    """The folder of the packaged model, to be passed as `model_path`."""
    return str(Path(__file__).resolve().parent / "model")
