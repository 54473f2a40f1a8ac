"""Log lines about requests (`--log-requests`): one when a request is accepted, one when each of its sequences ends.

    level 0    ids, counts, times             1    and sampling parameters
          2    and the ends of texts          3    and all of the texts

As text or as JSON; into the server's log, to standard output, or into files of a folder, which are rotated. What users sent is
escaped: a line is a line.
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.server.journal.record import Output, RequestRecord
from jaxserve.server.logs import escaped

logger = logging.getLogger(__name__)

STDOUT = "stdout"
# Of a text at level 2, half from each end.
_SHOWN_CHARS = 2048
# Prompts of a batch that are shown below level 3.
_SHOWN_PROMPTS = 16
_FILE_BYTES = 64 * 1024 * 1024
_FILES_KEPT = 8

Describe = dict[str, Any]


class RequestLog:
    def __init__(self, level: int, form: str, targets: Sequence[str], name: str, decode: Callable[[list[int]], str]) -> None:
        """`targets`: stdout and folders; none: the server's log. `name`: of the files. `decode`: of prompts that are ids.

        Raises OSError for a folder that cannot be written to.
        """
        self._level = level
        self._as_json = form == "json"
        self._decode = decode
        # Not registered anywhere, so that servers of one process do not meet.
        self._loggers = [_target(target, name, as_json=self._as_json) for target in targets] or [logger]

    def close(self) -> None:
        for one in self._loggers:
            if one is not logger:
                for handler in one.handlers:
                    handler.close()

    def received(self, record: RequestRecord) -> None:
        req = record.req
        about: Describe = {
            "num_prompts": req.num_prompts,
            "prompt_tokens": self._some([len(ids) for ids in req.prompt_ids]),
            "stream": req.stream,
        }
        if req.options[0].priority is not None:
            about["priority"] = req.options[0].priority
        if self._level >= 1:
            asked = [record.prompt_of(output) for output in record.outputs[:: req.num_samples][: self._most(req.num_prompts)]]
            about["sampling_params"] = self._shown([one["sampling_params"] for one in asked])
            if self._level >= 2:
                about["text"] = [self._cut(self._text(one)) for one in asked]
        self._log("request.received", self._some([output.rid for output in record.outputs]), about)

    def ended(self, record: RequestRecord, output: Output) -> None:
        about = dict(output.meta)
        del about["id"]
        if self._level >= 2:
            about["text"] = self._cut("".join(output.texts))
            if self._level >= 3:
                about["output_ids"] = output.token_ids
        self._log("request.finished", output.rid, about)

    def _log(self, event: str, rid: Any, about: Describe) -> None:
        if self._as_json:
            now = datetime.datetime.now().astimezone().isoformat()
            key = "obj" if event == "request.received" else "out"
            line = json.dumps({"timestamp": now, "event": event, "rid": rid, key: about})
        else:
            word = "accepted" if event == "request.received" else "ended"
            line = f"Request {word}: rid={rid!r}, " + ", ".join(f"{name}={value!r}" for name, value in about.items())
        for one in self._loggers:
            one.info("%s", line)

    def _text(self, asked: Describe) -> str:
        if "text" in asked:
            text: str = asked["text"]
            return text
        if "input_embeds" in asked:
            return f"{asked['input_embeds']} numbers"
        ids = asked["input_ids"]
        if self._level < 3 and len(ids) > 2 * _SHOWN_CHARS:  # a token is a character at least, nearly always
            ids = ids[:_SHOWN_CHARS] + ids[-_SHOWN_CHARS:]
        return self._decode(ids)

    def _cut(self, text: str) -> str:
        if self._level >= 3 or len(text) <= _SHOWN_CHARS:
            return text
        return f"{text[: _SHOWN_CHARS // 2]} ... {text[-_SHOWN_CHARS // 2 :]}"

    def _shown(self, value: Any) -> Any:
        """With long texts in it cut, and long lists and objects."""
        if isinstance(value, str):
            return self._cut(value)
        if isinstance(value, dict):
            return {name: self._shown(value[name]) for name in list(value)[: self._most(len(value))]}
        if isinstance(value, list | tuple):
            return [self._shown(one) for one in value[: self._most(len(value))]]
        return value

    def _some(self, values: list[Any]) -> Any:
        """One as itself."""
        return values[0] if len(values) == 1 else values[: self._most(len(values))]

    def _most(self, count: int) -> int:
        return count if self._level >= 3 else _SHOWN_PROMPTS


def _target(target: str, name: str, *, as_json: bool) -> logging.Logger:
    handler: logging.Handler = logging.StreamHandler(sys.stdout)
    if target != STDOUT:
        folder = Path(target)
        folder.mkdir(parents=True, exist_ok=True)
        handler = _PrivateFiles(
            folder / f"{socket.gethostname()}_{name}.log", maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT, encoding="utf-8"
        )
    handler.setFormatter(_Lines() if as_json else _Lines("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    made = logging.Logger(target, logging.INFO)
    made.addHandler(handler)
    return made


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class _PrivateFiles(logging.handlers.RotatingFileHandler):
    """What users wrote is nobody else's."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
