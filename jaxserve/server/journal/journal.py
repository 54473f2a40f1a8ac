"""Journal: keeps records of requests for whoever asked for them: the request log, dumps of requests, and the crash dump.

    Generation -> open(request, its sink) -> the sink that sees its chunks -> accepted -> (chunks) -> close

Where nothing is asked for, a request's own sink is given back and nothing is kept. Can be changed while the server runs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.server.journal.dumps import RecentRequests, RequestDump, entry_of, write
from jaxserve.server.journal.record import Output, RequestRecord
from jaxserve.server.journal.request_log import RequestLog
from jaxserve.server.requests import GenerateReqInput
from jaxserve.server.sinks import ChunkSink

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JournalSettings:
    log_requests: bool = False
    log_requests_level: int = 2
    log_requests_format: str = "text"
    log_requests_target: tuple[str, ...] = ()
    dump_requests_folder: str = ""  # empty: none
    dump_requests_threshold: int = 1000
    crash_dump_folder: str = ""  # empty: none

    @staticmethod
    def of(args: ServerArgs) -> JournalSettings:
        return JournalSettings(
            log_requests=args.log_requests,
            log_requests_level=args.log_requests_level,
            log_requests_format=args.log_requests_format,
            log_requests_target=args.log_requests_target or (),
            crash_dump_folder=args.crash_dump_folder or "",
        )


class Journal:
    def __init__(self, args: ServerArgs, decode: Callable[[list[int]], str]) -> None:
        """`decode`: of prompts that came as ids. Raises ValueError for a folder that cannot be written to."""
        self._args = args
        self._decode = decode
        self._open: set[RequestRecord] = set()
        self._recent = RecentRequests()
        self._log: RequestLog | None = None
        self._dump: RequestDump | None = None
        self.settings = JournalSettings()
        self.configure(JournalSettings.of(args))

    def configure(self, settings: JournalSettings) -> None:
        """From the next chunk on. Raises ValueError, and changes nothing, for a folder that cannot be written to."""
        log = None
        if settings.log_requests:
            form, targets = settings.log_requests_format, settings.log_requests_target
            try:
                log = RequestLog(settings.log_requests_level, form, targets, str(self._args.port), self._decode)
            except OSError as error:
                raise ValueError(f"{error.filename!r} cannot be written to: {error.strerror}.") from error
        if self._log is not None:
            self._log.close()
        if self._dump is not None:
            self._dump.flush()
        self._log, self.settings = log, settings
        folder = settings.dump_requests_folder
        self._dump = RequestDump(folder, settings.dump_requests_threshold) if folder else None
        if not settings.crash_dump_folder:
            self._recent.clear()

    def close(self) -> None:
        if self._dump is not None:
            self._dump.flush()
        if self._log is not None:
            self._log.close()

    def open(self, req: GenerateReqInput, rids: Sequence[str], received_s: float, sink: ChunkSink) -> ChunkSink:
        """Where the chunks of a request go."""
        if req.is_health_check or not (self._log or self._dump or self.settings.crash_dump_folder):
            return sink
        record = RequestRecord(req, rids, received_s, sink, self._ended, self._args.weight_version)
        self._open.add(record)
        return record

    def accepted(self, sink: ChunkSink) -> None:
        """The request goes to the scheduler."""
        if isinstance(sink, RequestRecord) and self._log is not None:
            self._log.received(sink)

    def close_request(self, sink: ChunkSink) -> None:
        """Nobody waits for it any more; what had not ended then was given up."""
        if not isinstance(sink, RequestRecord):
            return
        self._open.discard(sink)
        for output in sink.unfinished if sink.req.prompt_ids else ():  # else it was refused
            reason = {"type": "abort", "message": "Its client left."}
            output.meta = {"id": output.rid, "finish_reason": reason, "completion_tokens": len(output.token_ids)}
            self._ended(sink, output)

    def _ended(self, record: RequestRecord, output: Output) -> None:
        now_s = time.time()
        if self._log is not None:
            self._log.ended(record, output)
        if self._dump is None and not self.settings.crash_dump_folder:
            return
        entry = entry_of(record, output, now_s)
        if self._dump is not None:
            self._dump.add(entry)
        if self.settings.crash_dump_folder:
            self._recent.add(entry)

    def dump_for_crash(self, reason: str) -> None:
        """Writes what runs and what ended in the last minutes, if that is wanted."""
        folder = self.settings.crash_dump_folder
        if not folder:
            return
        if self._dump is not None:
            self._dump.flush()
        running = [entry_of(record, output) for record in self._open for output in record.unfinished]
        recent = list(self._recent)
        head: dict[str, Any] = {"reason": reason, "written_s": time.time(), "server_args": self._args.public_dict()}
        path = write(folder, "crash", [head, *running, *recent])
        if path is not None:
            logger.error("%d unfinished and %d finished requests were written to %s.", len(running), len(recent), path)
