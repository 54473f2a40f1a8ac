"""What a trace of a server's steps says: where the time of a step goes, and what the host did while the devices had nothing."""

from jaxserve.bench.trace.events import Trace, TraceFileError, read_trace
from jaxserve.bench.trace.summary import Gap, Stage, Summary, summarize
from jaxserve.bench.trace.text import lines

__all__ = ["Gap", "Stage", "Summary", "Trace", "TraceFileError", "lines", "read_trace", "summarize"]
