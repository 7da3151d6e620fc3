"""Style of the report's pictures: colours by method, labels at line ends, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLORS = {
    "rtn": "#7a7a7a",
    "gptq": "#0072b2",
    "awq": "#e07b00",
    "awq-gptq": "#b5478c",
    "squeezellm": "#00916e",
    "llama.cpp": "#1b1b1b",
    "full": "#1b1b1b",
}
"""By method; they differ in lightness too, and to eyes that mix up red and green."""
QUIET = "#6b6b6b"
"""Of what stands in the background."""
_SETTINGS: Any = {
    "svg.hashsalt": "lowbit-chat",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9a9a9a",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.facecolor": "white",
    "legend.frameon": False,
}


def draw_all(wanted: Mapping[str, Callable[[Path], bool]], folder: Path) -> dict[str, Path]:
    """Draw pictures, and take away those of an earlier run that have nothing to show any more.

    Args:
        wanted: By name, what draws a picture into a file and says whether there was anything to show.
        folder: Where the SVG files go.

    Returns:
        The files by name, without those that had nothing to show.
    """
    drawn = {}
    for name, make in wanted.items():
        file = folder / f"{name}.svg"
        if make(file):
            drawn[name] = file
        else:
            file.unlink(missing_ok=True)
    return drawn


@contextmanager
def figure(file: Path, columns: int, rows: int, width: float, height: float, **options: Any) -> Iterator[Any]:
    """Axes [rows, columns] of a picture that is written when the block ends well.

    Args:
        file: The SVG file.
        columns: Axes beside each other.
        rows: Axes above each other.
        width: Inches.
        height: Inches.
        **options: Of matplotlib's `subplots`.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS):
        picture = Figure(figsize=(width, height), layout="constrained")
        yield picture.subplots(rows, columns, squeeze=False, **options)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        canvas: Any = FigureCanvasSVG
        canvas(picture).print_svg(partial, metadata={"Date": None, "Creator": None})
        partial.replace(file)


def label_ends(axes: Any, labels: Sequence[tuple[str, float, str]], x: float, *, size: float = 8.5) -> None:
    """Names at the right ends of lines, moved apart where they would overlap.

    Args:
        axes: Where the lines are, with their limits set.
        labels: Name, height in data and colour of each line.
        x: Where the lines end, in data.
        size: Of the letters, in points.
    """
    if not labels:
        return
    low, high = axes.get_ylim()
    height = axes.get_position().height * axes.figure.get_size_inches()[1] * 72
    least = 1.25 * size * (high - low) / max(height, 1.0)
    places = _apart([y for _, y, _ in labels], least, low, high)
    for (name, y, color), place in zip(labels, places, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(7, (place - y) / (high - low) * height),
            textcoords="offset points",
            color=color,
            fontsize=size,
            va="center",
            annotation_clip=False,
        )


def _apart(heights: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Heights moved as little as need be so that neighbours are `least` apart and all lie between the limits."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [heights[i] for i in order]
    for _ in range(50):
        for i in range(1, len(placed)):
            lack = least - (placed[i] - placed[i - 1])
            if lack > 0:
                placed[i - 1] -= lack / 2
                placed[i] += lack / 2
        shift = max(0.0, low - placed[0]) - max(0.0, placed[-1] - high)
        placed = [place + shift for place in placed]
    found = [0.0] * len(heights)
    for i, place in zip(order, placed, strict=True):
        found[i] = place
    return found


def steps(axes: Any, numbers: Sequence[int], margin: float = 0.2) -> dict[int, int]:
    """Place the numbers of k_chunk at equal distances.

    Args:
        axes: Where.
        numbers: Of k_chunk, ascending.
        margin: Room beside the first and the last, in distances.

    Returns:
        Where each is.
    """
    places = {number: place for place, number in enumerate(numbers)}
    axes.set_xticks(list(places.values()), [str(number) for number in numbers])
    axes.set_xlim(-margin, len(numbers) - 1 + margin)
    return places


def level(axes: Any, height: float, color: str, dashes: tuple[float, float]) -> None:
    """A level line under the curves of `steps`, ending where they do so that a label can follow."""
    low, high = axes.get_xlim()
    axes.plot([low, high + low], [height, height], color=color, linewidth=1.1, linestyle=(0, dashes), zorder=2)
