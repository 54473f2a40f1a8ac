"""The options about LoRA adapters: the forms in which --lora-paths comes, and what must hold of all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config.args import ServerArgs

_OF_SGLANG = {"lora_name", "lora_path", "pinned"}


def split_lora_path(text: str) -> tuple[str, str]:
    """Name and folder out of NAME=PATH, or of PATH, which is then both. ValueError with a sentence if one is empty."""
    name, separator, path = text.partition("=")
    if not separator:
        path = name
    if not name or not path:
        raise ValueError(f"--lora-paths must hold NAME=PATH or PATH; got {text!r}.")
    return name, path


def lora_paths_of(given: Any) -> tuple[str, ...] | None:
    """`lora_paths` as Python's callers write it, a dict of name to path or a list in SGLang's form, as a tuple of NAME=PATH and
    PATH. Raises ValueError with a sentence."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return tuple(f"{name}={path}" for name, path in given.items())
    if not isinstance(given, list | tuple):
        raise ValueError(f"--lora-paths must be a list of NAME=PATH, or a dict of name to path; got {given!r}.")
    return tuple(map(_as_text, given))


def _as_text(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping) and {"lora_name", "lora_path"} <= entry.keys() <= _OF_SGLANG:
        if entry.get("pinned"):
            raise ValueError(
                f"--lora-paths cannot pin {entry['lora_name']!r}: load it with load_lora_adapter, which takes pinned."
            )
        return f"{entry['lora_name']}={entry['lora_path']}"
    raise ValueError(f"--lora-paths must hold NAME=PATH or PATH; got {entry!r}.")


def check_lora(args: ServerArgs) -> None:
    """Raises ValueError with a sentence that names the option."""
    names = [split_lora_path(text)[0] for text in args.lora_paths or ()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--lora-paths must name different adapters; {twice[0]!r} comes twice.")
    if args.max_loaded_loras is not None and args.max_loaded_loras < args.max_loras_per_batch:
        raise ValueError(
            f"--max-loaded-loras must be at least --max-loras-per-batch, which is {args.max_loras_per_batch}; got "
            f"{args.max_loaded_loras}."
        )
    if args.serves_lora:
        return
    for name in ("max_lora_rank", "lora_target_modules", "max_loaded_loras"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --enable-lora or --lora-paths.")
