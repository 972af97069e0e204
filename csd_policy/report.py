"""The report of a comparison: one table in three files, grids of pictures, the trade-off plot."""

from functools import partial
from pathlib import Path

from PIL import Image

from csd_policy.comparison import Comparison, Method
from csd_policy.figures import MEANINGS, commit_map, tradeoff_figure
from csd_policy.grids import labelled_grid
from csd_policy.metrics import Interval
from csd_policy.results import load_row, write_atomic, write_json, write_text
from csd_policy.summary import COMPRESSION, Row, family_of, summarise, table_cells, table_csv
from csd_policy.tables import markdown_table, text_table
from csd_policy.trace import Trace

SHOWN_PROMPTS = 16  # in the grids
SHOWN_METHODS = 20  # in the grids, and each with a colour of its own in the trade-off plot
LEGEND = """\
Each cell is `mean [low, high]`. The interval is a 95 % bootstrap over prompts (over batches for
the time, which images of a batch share; with few batches it shows little more than their range).
Compression is the passes of the method with window 1 divided by the method's. Seconds are the
batch's, divided by its size, from prefill to the last token; pictures are decoded outside of them,
and {warm_up} warm-up passes in front are not counted. The share of model forward / verification /
rest follows. Peak memory is that of the cards in the method's batches, or of the whole process so
far on a CPU. Spent TV is summed over an image: the mean bounds the total variation between the law
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
