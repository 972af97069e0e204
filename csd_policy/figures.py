"""Figures: how each token was committed, and the trade-off of compression and spent TV."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from csd_policy.trace import HOW, Trace

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from csd_policy.metrics import Interval

RELAXED = len(HOW)  # the kind behind those of HOW: accepted only because of the relaxation
KINDS = {  # label: colour, told apart by colour-blind readers
    "accepted": "#cfd9e6",
    "resampled": "#f0a22e",
    "bonus": "#2f6db5",
    "relaxed": "#c2255c",
}
MEANINGS = dict(  # the same colours, explained
    zip(
        (
            "accepted, as by the exact rule",
            "resampled after a rejection",
            "bonus, drawn from its own law",
            "relaxed: accepted by the policy, not by the exact rule",
        ),
        KINDS.values(),
        strict=True,
    )
)
INK = "#222222"


def commit_kinds(trace: Trace) -> Tensor:
    """How each token was committed, int64 ``[B, N]``: index into ``KINDS``."""
    return trace.how.long().masked_fill(trace.relaxed, RELAXED)


def commit_map(trace: Trace, grid: tuple[int, int], cell: int = 9) -> Image.Image:
    """The token grid of one image's trace: a square of ``cell`` pixels per token, in its colour."""
    rows, columns = grid
    palette = [bytes.fromhex(colour[1:]) for colour in KINDS.values()]
    pixels = b"".join(palette[kind] for kind in commit_kinds(trace)[0].tolist())
    small = Image.frombytes("RGB", (columns, rows), pixels)
    return small.resize((columns * cell, rows * cell), Image.Resampling.NEAREST)


def decode_figure(
    picture: Image.Image, trace: Trace, grid: tuple[int, int], title: str
) -> "Figure":
    """A picture, how each of its tokens was committed, and in which pass.

    Args:
        picture: the decoded picture.
        trace: of this image alone, fields ``[1, N]``.
        grid: (rows, columns) of tokens.
        title: written above.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    kinds = commit_kinds(trace).view(grid).numpy()
    passes = trace.pass_number.view(grid).numpy()
    shares = [(kinds == i).mean() for i in range(len(KINDS))]
    figure = Figure(figsize=(12.6, 5.0), dpi=140, layout="constrained", facecolor="white")
    figure.suptitle(textwrap.fill(title, 110), fontsize=12, color=INK)
    (left, middle, right), (_, legend, bar) = figure.subplots(2, 3, height_ratios=[1, 0.03])
    left.imshow(picture.convert("RGB"), interpolation="nearest")
    left.set_title("picture", fontsize=10, color=INK)
    colours = ListedColormap(list(KINDS.values()))
    middle.imshow(kinds, cmap=colours, vmin=-0.5, vmax=len(KINDS) - 0.5)
    middle.set_title("how each token was committed", fontsize=10, color=INK)
    patches = [
        Patch(facecolor=colour, label=f"{label} {share:.0%}")
        for (label, colour), share in zip(KINDS.items(), shares, strict=True)
    ]
    legend.legend(
        handles=patches, loc="center", ncols=len(KINDS), frameon=False, fontsize=9,
        handlelength=1.0, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip
    shown = right.imshow(passes, cmap="viridis", vmin=1)
    right.set_title(f"in which of {int(passes.max())} passes", fontsize=10, color=INK)
    figure.colorbar(shown, cax=bar, orientation="horizontal").outline.set_visible(False)
    bar.tick_params(labelsize=8)
    for axes in figure.axes:
        if axes is not bar:
            axes.set_axis_off()
    if max(grid) <= 20:
        _write_numbers(right, passes)
    return figure


def _write_numbers(axes: "Axes", passes: "NDArray[np.int32]") -> None:
    half = (1 + int(passes.max())) / 2
    for row, numbers in enumerate(passes.tolist()):
        for column, number in enumerate(numbers):
            axes.text(
                column, row, str(number), ha="center", va="center", fontsize=6,
                color="white" if number < half else INK,
            )  # fmt: skip


def tradeoff_figure(
    names: Sequence[str],
    drafts: Sequence[str],
    spent: Sequence["Interval"],
    compression: Sequence["Interval"],
    caption: str,
) -> "Figure":
    """Compression against spent TV, a point with both intervals for each method.

    Methods of one name have one colour; ``drafts``, if they differ, tell the markers, and a line
    joins the methods that share both.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    families, kinds = list(dict.fromkeys(names)), list(dict.fromkeys(drafts))
    many = len(names) > len(families)
    size = (11.0, 6.6) if many else (9.6, 5.4)
    figure = Figure(figsize=size, dpi=140, layout="constrained", facecolor="white")
    axes = figure.subplots()
    colours, markers = colormaps["tab10" if len(families) <= 10 else "tab20"], "osD^vP*X<>"
    styles: dict[tuple[str, str], dict[str, Any]] = {}
    for family in families:
        for kind in kinds:
            place, shape = families.index(family), kinds.index(kind)
            styles[family, kind] = {
                "color": colours(place % colours.N),
                "marker": markers[(shape if len(kinds) > 1 else place) % len(markers)],
            }
            at = [i for i in range(len(names)) if (names[i], drafts[i]) == (family, kind)]
            at.sort(key=lambda i: spent[i].mean)
            for i in at:
                x, y = spent[i], compression[i]
                axes.errorbar(
                    x.mean, y.mean, fmt="none", ecolor=styles[family, kind]["color"],
                    xerr=[[x.mean - x.low], [x.high - x.mean]],
                    yerr=[[y.mean - y.low], [y.high - y.mean]],
                    elinewidth=0.3 if many else 1, capsize=0 if many else 2.5,
                )  # fmt: skip
            axes.plot(
                [spent[i].mean for i in at], [compression[i].mean for i in at],
                markersize=5 if many else 7, linewidth=0.8, **styles[family, kind],
            )  # fmt: skip
    if max(x.high for x in spent) > 20 and not many:
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color="#999999", linestyle=":", linewidth=1)
    axes.annotate(
        "beyond 1 the bound is void", (1, 1), xycoords=("data", "axes fraction"), rotation=90,
        xytext=(-3, -4), textcoords="offset points", ha="right", va="top", fontsize=8,
        color="#777777",
    )  # fmt: skip
    axes.set_xlabel("spent TV per image (0 is lossless)")
    axes.set_ylabel("compression: forward passes of AR / of the method")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    keys = [Line2D([], [], linestyle="", **styles[f, kinds[0]], label=f) for f in families]
    if len(kinds) > 1:
        for key in keys:
            key.set_marker("s")
        keys += [
            Line2D([], [], linestyle="", color=INK, marker=markers[i % len(markers)], label=kind)
            for i, kind in enumerate(kinds)
        ]
    axes.legend(
        handles=keys, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False,
        fontsize=None if len(keys) <= 12 else 7,
    )  # fmt: skip
    axes.set_title(textwrap.fill(caption, 110), fontsize=8, color="#555555", loc="left")
    return figure
