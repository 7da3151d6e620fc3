"""A plot of a training run's loss: `python -m assets.demo_model.curve log.jsonl curve.svg`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 320, 48
_COLOURS = {"loss": "#888888", "held_out_loss": "#2f6fb0"}
_NAMES = {"loss": "training, answers of one batch", "held_out_loss": "held out"}


def draw(rows: Sequence[dict[str, float]]) -> str:
    """An SVG of the losses against the tokens seen, both axes labelled, losses on a logarithmic scale.

    Args:
        rows: The log's rows; a row has `tokens` and `loss` or `held_out_loss` in nats.

    Returns:
        The picture as text.

    Raises:
        ValueError: There is no loss in the rows.
    """
    curves = {name: [(row["tokens"], row[name]) for row in rows if name in row] for name in _COLOURS}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError("the log has no losses")
    most = max(tokens for tokens, _ in points)
    low = math.floor(math.log10(min(loss for _, loss in points)))
    high = math.ceil(math.log10(max(loss for _, loss in points)))

    def at(tokens: float, loss: float) -> str:
        x = MARGIN + tokens / most * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (math.log10(loss) - low) / max(1, high - low) * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        left, right = at(0, 10.0**power), at(most, 10.0**power)
        parts.append(f'<polyline points="{left} {right}" stroke="#dddddd" fill="none"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{left.split(",")[1]}" text-anchor="end">{10.0**power:g}</text>')
    for line, (name, curve) in enumerate(curves.items()):
        path = " ".join(at(tokens, loss) for tokens, loss in curve)
        parts.append(f'<polyline points="{path}" stroke="{_COLOURS[name]}" stroke-width="1.5" fill="none"/>')
        y = MARGIN + 16 * line
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{y}" text-anchor="end" fill="{_COLOURS[name]}">{_NAMES[name]}</text>'
        )
    parts.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 14}" text-anchor="middle">tokens seen (0 to {most:,.0f})</text>')
    parts.append(f'<text x="{MARGIN}" y="20">loss (nats a token, answers only)</text></svg>')
    return "\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Command line of the picture."""
    parser = argparse.ArgumentParser(prog="python -m assets.demo_model.curve", description=__doc__)
    parser.add_argument("log", type=Path, help="log.jsonl of a training run")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    given = parser.parse_args(arguments)
    rows = [json.loads(line) for line in given.log.read_text(encoding="utf-8").splitlines()]
    given.picture.write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
