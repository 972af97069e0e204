"""The report of a comparison: one table in three files, grids of pictures, the trade-off plot."""

import csv
import io
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from csd_policy.comparison import Comparison, Method
from csd_policy.figures import MEANINGS, commit_map, tradeoff_figure
from csd_policy.grids import labelled_grid
from csd_policy.metrics import Interval, bootstrap_interval, bootstrap_ratio
from csd_policy.policies import AcceptancePolicy
from csd_policy.results import load_row, write_atomic, write_json, write_text
from csd_policy.tables import markdown_table, text_table
from csd_policy.trace import Trace

Row = dict[str, Any]
COMPRESSION, SECONDS = "accept/compression", "speed/seconds_per_image"
GAP = "quality/log_likelihood_gap"
METRICS = {  # key in the files and in wandb: title, digits, and where an image's row has it
    "accept/forward_passes": ("passes", 1, "forward_passes"),
    COMPRESSION: ("compression", 2, "forward_passes"),
    "accept/tokens_per_pass": ("tokens per pass", 2, "tokens_per_pass"),
    SECONDS: ("s per image", 3, "seconds"),
    "quality/spent_tv": ("spent TV", 3, "spent_tv"),
    "quality/log_likelihood": ("log-likelihood", 3, "log_likelihood"),
    GAP: ("gap to AR", 3, "log_likelihood"),
}
PARTS = ("forward", "verification", "rest")  # of the time; the prefill counts as rest
SHOWN_PROMPTS = 16  # in the grids
SHOWN_METHODS = 20  # in the grids, and each with a colour of its own in the trade-off plot
LEGEND = """\
Each cell is `mean [low, high]`. The interval is a 95 % bootstrap over prompts (over batches for
the time, which images of a batch share; with few batches it shows little more than their range).
Compression is the passes of the method with window 1 divided by the method's. Seconds are the
batch's, divided by its size, from prefill to the last token; pictures are decoded outside of them,
and {warm_up} warm-up passes in front are not counted. The share of model forward / verification /
rest follows. Spent TV is summed over an image: the mean bounds the total variation between the law
of the method's images and the model's, and says nothing above 1. Log-likelihood is the mean per
code under the model, in nats, without top-k and top-p. Its gap to AR is the mean difference to the
window-1 picture of the same prompt and seed: one of either sign that the exact methods do not have
is a deviation."""


def write(comparison: Comparison, facts: Row) -> str:
    """Write the report of a complete comparison into its folder; the table as text.

    Args:
        facts: provenance of the results.
    """
    c, output = comparison, Path(comparison.output)
    rows = {method.name: load_rows(c, method) for method in c.methods}
    reference = next((rows[method.name] for method in c.methods if method.window == 1), None)
    table = [summarise(c, method, rows[method.name], reference) for method in c.methods]
    threads = {row["batch"]["threads"] for images in rows.values() for row in images}
    facts = facts | {"threads": sorted(threads)}
    images = {
        name: [{k: v for k, v in row.items() if k != "tokens"} for row in images]
        for name, images in rows.items()
    }
    data = {"provenance": facts, "config": c.to_config(), "table": table, "images": images}
    write_json(output / "results.json", data)
    head, cells = table_cells(table)
    notes = LEGEND.format(warm_up=facts["warm_up_passes"]) + "\n\n" + facts_text(c, facts)
    write_text(output / "table.md", markdown_table(head, cells) + "\n\n" + notes + "\n")
    write_text(output / "table.csv", table_csv(table))
    write_figures(c, facts, table)
    return text_table(head, cells)


def load_rows(comparison: Comparison, method: Method) -> list[Row]:
    """The records of a method's images in the order of the plan; ValueError if one is missing."""
    rows = []
    for batch in comparison.batches():
        for job in batch:
            stem = comparison.stem(method, job)
            row = load_row(stem)
            if row is None:
                raise ValueError(f"{stem}.json is missing or broken, run the comparison again")
            rows.append(row | {"file": str(stem.relative_to(comparison.output)) + ".png"})
    return rows


def summarise(
    comparison: Comparison, method: Method, rows: list[Row], reference: list[Row] | None
) -> Row:
    """One line of the table: settings, and each metric as mean, low and high.

    Args:
        rows: of the method's images.
        reference: of the images with window 1; None leaves compression out.
    """
    size = comparison.batch_size
    line: Row = {
        "method": method.name,
        "images": len(rows),
        "settings": {key: rows[0][key] for key in ("model", "policy", "draft", "decode")},
    }
    for key, (_, _, name) in METRICS.items():
        if key == SECONDS:
            seconds = [row["seconds"]["total"] for row in rows]
            batches = [seconds[i : i + size] for i in range(0, len(seconds), size)]
            interval = bootstrap_interval(batches)
        elif key not in (COMPRESSION, GAP):
            interval = bootstrap_interval(by_prompt(rows, name))
        elif reference is None:
            continue
        elif key == COMPRESSION:
            interval = bootstrap_ratio(by_prompt(reference, name), by_prompt(rows, name))
        else:
            pairs = zip(rows, reference, strict=True)
            gaps = [row | {name: row[name] - ar[name]} for row, ar in pairs]
            interval = bootstrap_interval(by_prompt(gaps, name))
        line[key] = interval._asdict()
    total = sum(row["seconds"]["total"] for row in rows)
    for part in PARTS[:2]:
        line[f"speed/share_{part}"] = sum(row["seconds"][part] for row in rows) / total
    line["speed/share_rest"] = 1 - sum(line[f"speed/share_{part}"] for part in PARTS[:2])
    return line


def by_prompt(rows: list[Row], name: str) -> list[list[float]]:
    """The values of the images of each prompt."""
    clusters: dict[int, list[float]] = {}
    for row in rows:
        clusters.setdefault(row["prompt_number"], []).append(row[name])
    return list(clusters.values())


def table_cells(table: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table for readers."""
    head = ["method", "W", *(title for title, _, _ in METRICS.values())]
    head.insert(head.index("s per image") + 1, "share of time")
    cells = []
    for line in table:
        found = [
            Interval(**line[key]).text(digits) if key in line else "-"
            for key, (_, digits, _) in METRICS.items()
        ]
        shares = " / ".join(f"{line[f'speed/share_{part}']:.0%}" for part in PARTS)
        found.insert(list(METRICS).index(SECONDS) + 1, shares)
        cells.append([line["method"], str(line["settings"]["decode"]["window"]), *found])
    return head, cells


def family_of(policy: AcceptancePolicy) -> str:
    """The policy without its strength: its class, and what differs from the defaults."""
    cls = type(policy)
    usual = cls().parameters()
    changed = [
        f"{name}={value!r}"
        for name, value in policy.parameters().items()
        if name != cls.strength and repr(value) != repr(usual[name])
    ]
    return " ".join([cls.__name__, *changed])


def table_csv(table: list[Row]) -> str:
    """The table for programs: a column each for mean, low and high."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = Interval._fields
    writer.writerow(
        ["method", "window", "images", *(f"{key}/{end}" for key in METRICS for end in ends),
         *(f"speed/share_{part}" for part in PARTS)]
    )  # fmt: skip
    for line in table:
        numbers = [line.get(key, {}).get(end, "") for key in METRICS for end in ends]
        shares = [line[f"speed/share_{part}"] for part in PARTS]
        window = line["settings"]["decode"]["window"]
        writer.writerow([line["method"], window, line["images"], *numbers, *shares])
    return text.getvalue()


def facts_text(comparison: Comparison, facts: Row) -> str:
    """Where and with what the numbers were made, in one sentence."""
    c, threads = comparison, "/".join(map(str, facts["threads"]))
    return (
        f"{facts['model']} ({facts['dtype']}), {len(c.prompts)} prompts x {len(c.seeds)} seeds, "
        f"batches of {c.batch_size}, on {facts['device_name']} ({facts['device']}, "
        f"threads: {threads}), csd_policy {facts['csd_policy']}, torch {facts['torch']}."
    )


def write_figures(comparison: Comparison, facts: Row, table: list[Row]) -> None:
    """Write ``pictures.png`` and ``commits.png`` (of the first seed) and ``tradeoff.png``."""
    c, output = comparison, Path(comparison.output)
    prompts, shown = c.prompts[:SHOWN_PROMPTS], c.methods[:SHOWN_METHODS]
    stems = [[c.stem(m, (i, c.seeds[0])) for i in range(len(prompts))] for m in shown]
    names = [method.name for method in shown]
    pictures = [[Image.open(f"{stem}.png") for stem in line] for line in stems]
    rows, columns = facts["grid"]
    maps = [
        [commit_map(Trace.load(f"{stem}.safetensors"), (rows, columns)) for stem in line]
        for line in stems
    ]
    for name, cells, legend in (("pictures", pictures, None), ("commits", maps, MEANINGS)):
        sheet = labelled_grid(cells, names, prompts, legend=legend)
        write_atomic(output / f"{name}.png", partial(sheet.save, format="PNG"))
    if all(COMPRESSION in line for line in table):
        many = len(c.methods) > SHOWN_METHODS
        figure = tradeoff_figure(
            [family_of(m.policy) if many else m.name for m in c.methods],
            [type(m.draft).__name__ if many else "" for m in c.methods],
            [Interval(**line["quality/spent_tv"]) for line in table],
            [Interval(**line[COMPRESSION]) for line in table],
            facts_text(c, facts),
        )
        write_atomic(output / "tradeoff.png", lambda to: figure.savefig(to, format="png"))
