"""Options with the model's folder in the place of its name. Both front doors ask, before anything is started."""

from __future__ import annotations

from pathlib import Path

from jaxserve import demo
from jaxserve.config import ServerArgs
from jaxserve.models import model_folder


def located(args: ServerArgs) -> ServerArgs:
    """The model is served under the name that it was given. What is on the Hub is fetched. The name `demo` brings options
    of that model; its folder is one like any other. ValueError with a sentence for the user."""
    into = args.download_dir
    folder = model_folder(args.model_path, args.revision, weights=args.load_format != "dummy", download_dir=into)
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"The model folder {folder!r} holds no config.json: it is no Hugging Face checkpoint.")
    tokenizer_folder = args.tokenizer_path
    if tokenizer_folder is not None and not args.skip_tokenizer_init:
        tokenizer_folder = model_folder(tokenizer_folder, what="tokenizer", weights=False, download_dir=into)
    if args.model_path != folder == demo.demo_model_path():
        args = _with_demo_defaults(args)
    return args.replace(
        model_path=folder,
        tokenizer_path=tokenizer_folder,
        served_model_name=args.effective_served_model_name,
    )


def _with_demo_defaults(args: ServerArgs) -> ServerArgs:
    missing = {name: value for name, value in demo.DEFAULTS.items() if getattr(args, name) is None}
    if args.constrained_json_disable_any_whitespace:
        missing.pop("constrained_json_whitespace_pattern", None)
    return args.replace(**missing)
