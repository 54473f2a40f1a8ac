"""What a trace of a server's steps says: where the time of a step goes, and what the host did while the devices had nothing."""

from jaxserve.bench.trace.events import Event, Trace, TraceFileError, read_trace, stages
from jaxserve.bench.trace.intervals import gaps, overlaps, union
from jaxserve.bench.trace.summary import Gap, Stage, Summary, summarize
from jaxserve.bench.trace.text import lines

__all__ = [
    "Event",
    "Gap",
    "Stage",
    "Summary",
    "Trace",
    "TraceFileError",
    "gaps",
    "lines",
    "overlaps",
    "read_trace",
    "stages",
    "summarize",
    "union",
]
