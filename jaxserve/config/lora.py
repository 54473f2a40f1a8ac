"""--lora-paths: the name and the folder of a LoRA adapter."""

from __future__ import annotations


def split_lora_path(text: str) -> tuple[str, str]:
    """Name and folder out of NAME=PATH, or of PATH, which is then both. ValueError with a sentence if one is empty."""
    name, separator, path = text.partition("=")
    if not separator:
        path = name
    if not name or not path:
        raise ValueError(f"--lora-paths must hold NAME=PATH or PATH; got {text!r}.")
    return name, path
