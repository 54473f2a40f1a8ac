"""TraceSender: a thread that makes spans and sends them. Nobody waits for it.

If the collector is away, what it should have got is lost, and the log says so once, and once that it is back.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxserve.server.tracing.records import CallTrace, HttpTrace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

_THREAD = "jaxserve-traces"
_MAX_WAITING = 8192  # records; more are lost
_BATCH = 512  # records
_GATHER_S = 0.2  # for a batch
_EXPORT_TIMEOUT_S = 5
_CLOSE_TIMEOUT_S = 3.0

MakeExporter = Callable[[], "SpanExporter"]


class TraceSender:
    def __init__(self, endpoint: str, make_exporter: MakeExporter | None = None) -> None:
        """Raises ValueError if what it needs is not installed. `make_exporter` is called by the thread."""
        for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"):
            if not _is_installed(name):
                raise ValueError("--enable-trace needs OpenTelemetry's SDK and exporter: pip install 'jaxserve[tracing]'.")
        self._endpoint = endpoint
        self._make_exporter = make_exporter or (lambda: _otlp_exporter(endpoint))
        self._waiting: queue.SimpleQueue[HttpTrace | CallTrace | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._is_away = False
        self._thread: threading.Thread | None = None

    def put(self, record: HttpTrace | CallTrace) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            self._num_lost += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
            self._thread.start()
        self._waiting.put(record)

    def close(self) -> None:
        """Sends what waits, if that is quickly done."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_CLOSE_TIMEOUT_S)

    # --- in the thread

    def _run(self) -> None:
        from jaxserve.server.tracing.spans import SpanMaker

        maker, exporter = SpanMaker(), self._make_exporter()
        is_open = True
        while is_open:
            records, is_open = self._gather()
            spans: list[Any] = []
            for record in records:
                try:
                    spans += maker.spans_of(record)
                except Exception:  # of one request: the others have their traces
                    logger.exception("The spans of a request could not be made.")
            if spans:
                self._export(exporter, spans)
        exporter.shutdown()

    def _gather(self) -> tuple[list[HttpTrace | CallTrace], bool]:
        """What came within a moment, and whether more may come."""
        record = self._waiting.get()
        if record is None:
            return [], False
        records, until_s = [record], time.monotonic() + _GATHER_S
        while len(records) < _BATCH and (left_s := until_s - time.monotonic()) > 0:
            try:
                record = self._waiting.get(timeout=left_s)
            except queue.Empty:
                break
            if record is None:
                return records, False
            records.append(record)
        return records, True

    def _export(self, exporter: SpanExporter, spans: list[Any]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            is_done, reason = exporter.export(spans) is SpanExportResult.SUCCESS, ""
        except Exception as error:
            is_done, reason = False, f": {type(error).__name__}: {error}"
        if not is_done:
            self._num_lost += len(spans)
            if not self._is_away:
                logger.warning("Traces cannot be sent to %s%s; they are lost until that works again.", self._endpoint, reason)
        elif self._is_away:
            logger.warning("Traces are sent to %s again; %d spans were lost.", self._endpoint, self._num_lost)
            self._num_lost = 0
        self._is_away = not is_done


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc import exporter as otlp
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # It tells of every attempt that fails, and we say it once.
    otlp.logger.addFilter(lambda record: record.threadName != _THREAD)
    address = endpoint if "://" in endpoint else f"http://{endpoint}"
    return OTLPSpanExporter(endpoint=address, insecure=not address.startswith("https"), timeout=_EXPORT_TIMEOUT_S)
