"""How the pictures look, and how they become files: the same bytes for the same records.

Colours are Okabe and Ito's, or steps of viridis where runs have an order: both can be told apart with any colour vision, and
lines differ in dashes or markers besides.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("solid", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
HALO = (withStroke(linewidth=3, foreground="white"),)  # of words that lines may cross
MARKERS = ("o", "s", "^", "D", "v", "P")

_SETTINGS = {
    "svg.hashsalt": "jaxserve",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
# White beneath, also where the page around is dark.
_BENEATH = "white"


def settings() -> matplotlib.RcParams:
    return matplotlib.RcParams({**matplotlib.rcParamsDefault, **_SETTINGS})


def colour(place: int, count: int, *, ordered: bool) -> str:
    """Of the `place`-th of `count` lines. Viridis ends in a yellow that white paper swallows."""
    if not ordered:
        return COLOURS[place % len(COLOURS)]
    return matplotlib.colors.to_hex(colormaps["viridis"](0.85 * place / max(count - 1, 1)))


def panels(count: int, *, title: str, width: float = 4.0, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """Side by side."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def save(figure: Figure, path: Path) -> None:
    about = {"Date": None, "Creator": "jaxserve bench plot"} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context(settings()):
        figure.savefig(path, metadata=about, dpi=150, facecolor=_BENEATH, bbox_inches="tight", pad_inches=0.15)
