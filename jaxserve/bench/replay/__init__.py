"""Requests of a dump, sent again: does a server answer them now as it did then?"""

from jaxserve.bench.replay.compare import KINDS, Difference, differences
from jaxserve.bench.replay.dump_file import Dump, DumpFileError, Recorded, read_dump
from jaxserve.bench.replay.sending import Answer, replay

__all__ = ["KINDS", "Answer", "Difference", "Dump", "DumpFileError", "Recorded", "differences", "read_dump", "replay"]
