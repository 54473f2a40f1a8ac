"""Building a runner in a worker process: what a user can mend becomes a UserError. Imports JAX."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from jaxserve.config import ServerArgs
from jaxserve.executor import BuiltRunner, build_runner, cache_folder
from jaxserve.server.worker_process import UserError, WorkerContext

logger = logging.getLogger(__name__)

_HINT = "--compilation-cache-dir names another folder."


def build(context: WorkerContext) -> BuiltRunner:
    """With the options that the worker was given."""
    with user_errors():
        args = with_usable_cache(context.args, context.folder)
        show_progress = logger.isEnabledFor(logging.WARNING)  # on a terminal; elsewhere it is INFO
        guest = context.guest
        devices, handover = (None, None) if guest is None else (guest.devices, guest.handover)
        return build_runner(args, warmup=args.warmup, show_progress=show_progress, devices=devices, handover=handover)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """The sentence of a ValueError or OSError is for the user."""
    try:
        yield
    except (ValueError, OSError) as error:
        logger.debug("Start-up failed.", exc_info=True)
        raise UserError(str(error)) from error


def with_usable_cache(args: ServerArgs, private: Path) -> ServerArgs:
    """With a folder of compiled programs in the `private` one, which goes with the server, if there is no lasting one."""
    try:
        folder = cache_folder(args.compilation_cache_dir)
        if os.access(folder, os.R_OK | os.X_OK):
            if not os.access(folder, os.W_OK):
                logger.warning(
                    "%s cannot be written to: what is compiled now is compiled again at the next start. %s", folder, _HINT
                )
            return args
        problem = f"The folder of compiled programs {str(folder)!r} cannot be read."
    except OSError as error:
        problem = str(error)
    logger.warning("%s Everything is compiled anew at each start. %s", problem, _HINT)
    return args.replace(compilation_cache_dir=str(private / "compiled"))
