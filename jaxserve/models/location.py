"""What a user calls a model (`--model-path`) becomes a folder on this machine.

A name such as `Qwen/Qwen3-0.6B` is a model on the Hugging Face Hub. huggingface_hub keeps what it fetches in its cache
(HF_HOME), asks the Hub at each start whether that is the newest, and takes what is cached where the Hub cannot be reached or
must not be asked (HF_HUB_OFFLINE).
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from jaxserve.demo import demo_model_path

logger = logging.getLogger(__name__)

DEMO = "demo"
# Files at the top of a repository, and of modules of sentence-transformers: configs, templates, tokenizers of all kinds, code
# of tokenizers that bring their own.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
_WEIGHTS = ("*.safetensors",)
# The same weights once more, in other layouts. Folders whose names begin with one digit and _, such as 1_Pooling, are those of
# sentence-transformers' modules.
_NOT_READ = ("[!0-9]*/*", "[0-9][!_]*/*", "*/*/*", "consolidated*.safetensors")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_folder(
    name: str,
    revision: str | None = None,
    *,
    what: str = "model",
    weights: bool = True,
    download_dir: str | None = None,
) -> str:
    """The folder that `name` stands for: one on this machine, `demo`, the model that comes with the package, or a snapshot of a
    model on the Hugging Face Hub, which is fetched if it is not there.

    `revision`: branch, tag or commit on the Hub. Without `weights` only the other files are fetched. `download_dir`: where to,
    instead of the Hub's own cache. Raises ValueError with a sentence for the user, who calls it his `what`.
    """
    if not name:
        raise ValueError(f"A {what} is needed: a folder, {DEMO}, or a name on the Hugging Face Hub (org/name).")
    path = Path(name)
    is_on_hub = not path.exists() and name != DEMO and _HUB_NAME.fullmatch(name) is not None
    if revision is not None and not is_on_hub:
        raise ValueError(f"--revision {revision!r} is of a model on the Hugging Face Hub, and {name!r} is none.")
    if is_on_hub:
        return _snapshot(name, revision, (*_SMALL_FILES, *_WEIGHTS) if weights else _SMALL_FILES, download_dir)
    if path.is_dir():
        return name
    if name == DEMO:
        return demo_model_path()
    problem = "is a file" if path.exists() else "does not exist"
    raise ValueError(f"The {what} folder {name!r} {problem}. A name on the Hugging Face Hub has the form org/name.")


def _snapshot(name: str, revision: str | None, patterns: tuple[str, ...], download_dir: str | None) -> str:
    # Here and not above: it takes a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    logger.info("Taking %s from the Hugging Face Hub or its cache.", name)
    try:
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NOT_READ),
            library_name="jaxserve",
            cache_dir=download_dir,
        )
    except Exception as error:  # of the network, the Hub, the disk or the cache
        raise ValueError(_why_not(name, revision, download_dir, error)) from error


def _why_not(name: str, revision: str | None, download_dir: str | None, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"{name!r} is no folder here"
    if isinstance(error, GatedRepoError):
        return f"{what}, and on the Hugging Face Hub it asks for an agreement: accept it there and set HF_TOKEN."
    if isinstance(error, RepositoryNotFoundError):
        return f"{what}, and on the Hugging Face Hub there is none of that name, or it is private: then set HF_TOKEN."
    if isinstance(error, RevisionNotFoundError):
        return f"{what}, and on the Hugging Face Hub it has no revision {revision!r}."
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        hub = "must not be asked (HF_HUB_OFFLINE)" if constants.is_offline_mode() else "cannot be reached"
        branch = "" if revision is None else f" --revision {revision}"
        cache = download_dir or constants.HF_HUB_CACHE
        return (
            f"{what}, not all of it is in the cache {cache}, and the Hugging Face Hub {hub}. Where there is a "
            f"network: hf download {name}{branch} --local-dir FOLDER; then name that folder."
        )
    return f"{what}, and it cannot be fetched from the Hugging Face Hub: {(str(error) or type(error).__name__).splitlines()[0]}"
