"""The table of ``csd-policy bench``."""

from typing import Any

import numpy as np

Row = dict[str, Any]
LEGEND = """\
Each cell is the median of {rounds} rounds in ms; in brackets its ratio to the forward pass of its
column and, for a policy, the ms above those of Exact. A round times each step once, in random
order. The forward pass has window {window}, batch {batch_size} and both guidance branches. A policy
is timed by the whole verification of a pass, a draft strategy by its redraw of all drafts, on laws
of random logits. Policies have their defaults; RiskGated has a FixedRisk, whose map is counted. The
middle half of a step's rounds spans {typical:.0%} of its median (median over steps; {most:.0%} at
most)."""


def table_cells(columns: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table: steps by models."""
    head = ["step", *(f"{column['model']}, V {column['num_codes']}" for column in columns)]
    together = zip(*(column["steps"] for column in columns), strict=True)
    return head, [[lines[0]["name"], *map(cell, lines)] for lines in together]


def cell(line: Row) -> str:
    """The numbers of one step."""
    digits = 2 if line["ms"] < 10 else 1
    text = f"{line['ms']:.{digits}f}"
    if line["kind"] == "forward":
        return text
    above = f", {line['ms_above_exact']:+.{digits}f}" if line.get("ms_above_exact") else ""
    return f"{text} ({line['ratio']:.2f}{above})"


def notes_text(columns: list[Row], settings: Row) -> str:
    """What the cells mean, and where and with what they were made."""
    lines = [line for column in columns for line in column["steps"]]
    spread = [(line["quartiles"][1] - line["quartiles"][0]) / line["ms"] for line in lines]
    legend = LEGEND.format(typical=np.median(spread), most=max(spread), **settings)
    facts = columns[0]
    shape = ", ".join(f"{name} {value}" for name, value in facts["shape"].items())
    sizes = ", ".join(f"{c['parameters'] / 1e6:.1f} M" for c in columns)
    return (
        f"{legend}\n\nParameters by column: {sizes}; {shape}; {facts['dtype']}. On "
        f"{facts['device_name']} ({facts['device']}, threads: {facts['threads']}), csd_policy "
        f"{facts['csd_policy']}, torch {facts['torch']}."
    )
