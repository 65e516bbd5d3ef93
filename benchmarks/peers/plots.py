"""Draws the plots of one run from JSON on stdin into a folder; needs matplotlib and nothing of Baton.

python plots.py FOLDER < data.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw_decode(data: dict[str, Any], path: Path) -> None:
    """Bars of tokens a second by batch size, an engine a colour; engines without a figure are left out."""
    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).subplots()
    engines = {name: values for name, values in data["decode"].items() if any(values)}
    width = 0.8 / max(1, len(engines))
    for index, (name, values) in enumerate(engines.items()):
        places = [at + width * (index - (len(engines) - 1) / 2) for at in range(len(values))]
        axes.bar(places, [value or 0.0 for value in values], width, label=name)
    axes.set_xticks(range(len(data["batches"])), [f"batch {batch}" for batch in data["batches"]])
    axes.set(ylabel="decode, tokens/s")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def draw_goodput(data: dict[str, Any], path: Path) -> None:
    """Good requests a second over the rate at which they are sent; the diagonal is all of them."""
    axes = (figure := Figure(figsize=(6.5, 4.5), layout="constrained")).subplots()
    rates = sorted({rate for points in data["good"].values() for rate, _ in points})
    axes.plot(rates, rates, linestyle=":", color="grey", label="all that are sent")
    for name, points in data["good"].items():
        if points:
            style = "--" if "beside" in name else "-"
            colour = "C0" if name.startswith("Baton") else "C1"
            axes.plot(*zip(*points, strict=True), marker="o", linestyle=style, color=colour, label=name)
    axes.set(xlabel="chats sent a second", ylabel="good chats a second")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw both."""
    data, folder = json.load(sys.stdin), Path(sys.argv[1])
    draw_decode(data, folder / "peers_decode.png")
    draw_goodput(data, folder / "peers_goodput.png")


if __name__ == "__main__":
    main()
