"""What a user calls a model (`--model-path`) becomes a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from jaxserve.demo import demo_model_path

DEMO = "demo"


def model_folder(name: str) -> str:
    """The folder that `name` stands for: one on this machine, or `demo`, the model that comes with the package.

    Raises ValueError with a sentence for the user.
    """
    if name == DEMO and not Path(name).is_dir():
        return demo_model_path()
    return name
