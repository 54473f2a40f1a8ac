"""`bench plot`: pictures of serving records. Needs matplotlib, which the extra `plots` brings; importing this imports it."""

from jaxserve.bench.plots.figures import Picture, pictures
from jaxserve.bench.plots.runs import Run, load_runs
from jaxserve.bench.plots.style import save

__all__ = ["Picture", "Run", "load_runs", "pictures", "save"]
