"""Options with the model's folder in the place of its name. Both front doors ask, before anything is started."""

from __future__ import annotations

from jaxserve.config import ServerArgs
from jaxserve.models import model_folder


def located(args: ServerArgs) -> ServerArgs:
    """The model is served under the name that it was given. Raises ValueError with a sentence for the user."""
    folder = model_folder(args.model_path)
    tokenizer_folder = None if args.tokenizer_path is None else model_folder(args.tokenizer_path)
    return args.replace(model_path=folder, tokenizer_path=tokenizer_folder, served_model_name=args.effective_served_model_name)
