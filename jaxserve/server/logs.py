"""Logging of our own processes: one line per record on stderr, and nothing that a user sent can begin a line of its own.

Text from outside (request ids, paths, what an exception's message quotes) reaches the log in many places, also by libraries. So
it is escaped where records become text, for all of them: control characters are written as in a Python string, and the lines of
a traceback are indented. Whoever has several lines to say makes several records: `log_lines`.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from types import TracebackType
from typing import Any

from jaxserve.progress import CLEAR_LINE, terminal_columns

# C0 and C1 (line breaks and ANSI escapes are among them), Unicode's own line breaks, what turns the direction of writing, and
# halves of surrogate pairs. A tab is harmless.
_HIDDEN = "\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[{_HIDDEN}\r\n]")
_CONTROL_BUT_LINES = re.compile(f"{re.escape(CLEAR_LINE)}|[{_HIDDEN}]")
_INDENT = "    "


def escaped(text: str) -> str:
    """One line without control characters."""
    return _CONTROL.sub(_escape, text)


def escaped_output(text: str) -> str:
    """A process's output as it is, with its lines and redrawn lines, but without other control characters."""
    return _CONTROL_BUT_LINES.sub(lambda match: match[0] if match[0] == CLEAR_LINE else _escape(match), text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def log_lines(logger: logging.Logger, level: int, text: str) -> None:
    """A record per line."""
    for line in text.split("\n"):
        logger.log(level, "%s", line)


def configure_logging(level: str, process: str | None = None) -> None:
    """One line per record on stderr, the process's name in front. For processes that are ours from start to end."""
    where = f" {process}" if process else ""
    handler = logging.StreamHandler(sys.stderr)
    clear = CLEAR_LINE if terminal_columns() else ""  # a progress bar may stand there, also another process's
    handler.setFormatter(_Formatter(f"{clear}[%(asctime)s{where}] %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Some libraries' loggers have a handler of their own; this reaches them, too.
    logging.setLogRecordFactory(_Record)
    # What nobody catches and what warns is text of the same kind.
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_of_thread
    sys.unraisablehook = _log_unraisable
    for chatty in ("jax", "absl", "httpx", "urllib3", "filelock", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, getattr(logging, level.upper())))


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802 (logging's name)
        return escaped(super().getMessage())


class _Formatter(logging.Formatter):
    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (logging's name)
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    """Its own line breaks stay, and so may those of an exception's message: no line of it looks like a record's."""
    return "\n".join(_INDENT + escaped(line) for line in text.split("\n"))


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logging.getLogger(__name__).critical("An error that nobody caught.", exc_info=(kind, error, traceback))


def _log_uncaught_of_thread(hook: threading.ExceptHookArgs) -> None:
    if hook.exc_value is not None and not issubclass(hook.exc_type, SystemExit):
        _log_uncaught(hook.exc_type, hook.exc_value, hook.exc_traceback)


def _log_unraisable(hook: sys.UnraisableHookArgs) -> None:
    """Of a destructor, for example. Not the hook's object: it may be half gone, and is kept alive by who keeps it."""
    error = (hook.exc_type, hook.exc_value, hook.exc_traceback) if hook.exc_value is not None else None
    logging.getLogger(__name__).error(hook.err_msg or "An error where none can be raised.", exc_info=error)
