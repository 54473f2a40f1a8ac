"""How the worker processes get their decoder: the main process, which has loaded the tokenizer anyway, hands it over.

Importing transformers costs each process more than a second; decoding needs only the small `tokenizers` library. So the main
process leaves the tokenizer's JSON in the private folder, and a worker waits for it while it does its own start-up. An empty
file says that only transformers can decode this one, or that there is none (--skip-tokenizer-init). If the main process cannot
load the tokenizer, it ends the workers.
"""

from __future__ import annotations

import time
from pathlib import Path

import tokenizers

from jaxserve.config import ServerArgs
from jaxserve.mailboxes import MailboxClosedError
from jaxserve.server.tokenizer import NoText, RustDecoder, TextDecoder, Tokenizer
from jaxserve.server.worker_process import WorkerContext

_FILE = "decoder.json"
_POLL_S = 0.01


def hand_over(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Called once, by the main process. None: there is no text to be made."""
    unfinished = folder / f"{_FILE}.tmp"
    unfinished.write_text((tokenizer and tokenizer.rust_json) or "", encoding="utf-8")
    unfinished.replace(folder / _FILE)


def wait_for_tokenizer_json(context: WorkerContext) -> str | None:
    """Blocks until it is there. None: only transformers can decode this tokenizer."""
    path = context.folder / _FILE
    while not path.exists():
        if context.is_told_to_end:
            raise MailboxClosedError
        time.sleep(_POLL_S)
    return path.read_text(encoding="utf-8") or None


def make_decoder(tokenizer_json: str | None, args: ServerArgs, *, hide_torch: bool = True) -> TextDecoder:
    """`hide_torch`: this process is all ours."""
    if args.skip_tokenizer_init:
        return NoText()
    if tokenizer_json is not None:
        return RustDecoder(tokenizers.Tokenizer.from_str(tokenizer_json))
    return Tokenizer.load(
        args.effective_tokenizer_path, trust_remote_code=args.trust_remote_code, hide_torch=hide_torch
    ).decoder


def wait_for_decoder(context: WorkerContext) -> TextDecoder:
    """Blocks until the tokenizer is there."""
    return make_decoder(wait_for_tokenizer_json(context), context.args, hide_torch=context.guest is None)
