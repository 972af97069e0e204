"""The files of a study of risk: numbers, tables, sentences and plots."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csd_policy.metrics import Interval
from csd_policy.models import ImageTokenModel
from csd_policy.results import write_atomic, write_json, write_text
from csd_policy.study.analysis import ALL, FOREGROUND, TOP_SHARE, Row, analyse
from csd_policy.study.figures import heat_figure, study_figure
from csd_policy.study.risk import PictureSet, RiskStudy, map_seconds
from csd_policy.tables import markdown_table, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATISTICS = ("spearman", "auroc")


def write(
    study: RiskStudy, model: ImageTokenModel, sets: Sequence[PictureSet], facts: dict[str, Any]
) -> str:
    """Write study.json, study.csv, study.md, study.png and maps_<set>.png; the tables as text."""
    output, rows = Path(study.output), analyse(sets, study.domains, study.resamples)
    seconds = {k: sum(v) / len(v) for k, v in map_seconds(output).items()}
    counts = {s.name: len(s.prompts) for s in sets}
    data = {"study": study.manifest(), "domains": study.domains, "pictures": counts,
            "seconds_per_picture": seconds, "environment": facts,
            "rows": [row.record() for row in rows]}  # fmt: skip
    write_json(output / "study.json", data)
    write_text(output / "study.csv", _csv(rows))
    caption = ", ".join(f"{n} {name} pictures" for name, n in counts.items())
    figures = {"study": study_figure(rows, f"{caption} of {model.name}; 95 % intervals by picture")}
    figures |= {f"maps_{s.name}": heat_figure(model, s) for s in sets}
    for name, figure in figures.items():
        save_figure(output / f"{name}.png", figure)
    sections = [(title, *table) for title, table in _tables(rows)]
    markdown = [f"### {title}\n\n{markdown_table(head, cells)}" for title, head, cells in sections]
    cost = markdown_table(("map", "s per picture"), [(k, f"{v:.3f}") for k, v in seconds.items()])
    parts = ["\n".join(f"- {line}" for line in sentences(rows)), *markdown, cost]
    write_text(output / "study.md", "\n\n".join(parts) + "\n")
    tables = [f"{title}\n{text_table(head, cells)}" for title, head, cells in sections]
    return "\n\n".join([*tables, "\n".join(sentences(rows))])


def save_figure(path: Path, figure: "Figure") -> None:
    """Write a PNG file, whole or not at all."""
    write_atomic(path, lambda partial: figure.savefig(partial, format="png"))


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = Interval._fields
    facts = ("pictures", "target", "domain", "predictor", "count")
    writer.writerow([*facts, *(f"{s}/{end}" for s in STATISTICS for end in ends)])
    for row in rows:
        numbers = [f"{n:.4f}" for s in STATISTICS for n in getattr(row.found, s)]
        writer.writerow([*(getattr(row, name) for name in facts), *numbers])
    return text.getvalue()


def _tables(rows: Sequence[Row]) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
    """One table per set, target and statistic: predictors down, domains across."""
    found = []
    for key in dict.fromkeys((row.pictures, row.target) for row in rows):
        part = [row for row in rows if (row.pictures, row.target) == key]
        domains = list(dict.fromkeys(row.domain for row in part))
        for statistic in STATISTICS:
            cells = {(r.predictor, r.domain): getattr(r.found, statistic).text() for r in part}
            names = dict.fromkeys(row.predictor for row in part)
            body = [[name, *(cells.get((name, d), "-") for d in domains)] for name in names]
            title = f"{key[0]} pictures, {key[1]}: {statistic}"
            found.append((title, (["predictor", *domains], body)))
    return found


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the numbers over all domains say, a sentence for each predictor, set and target."""
    lines = []
    for row in rows:
        if row.domain != ALL or row.predictor == "low entropy":
            continue
        if row.target == FOREGROUND:
            value, none = row.found.auroc, 0.5
            what = f"of being on a thing (AUROC {value.text()})"
        else:
            value, none = row.found.spearman, 0.0
            what = (
                f"of the {row.target} (Spearman {value.text()}; AUROC {row.found.auroc.text()} for "
                f"the highest {TOP_SHARE:.0%})"
            )
        name = "high entropy" if row.predictor == "high entropy" else row.predictor
        sign = "a sign" if value.low > none else "a sign against" if value.high < none else None
        says = f"is {sign}" if sign else "says nothing that can be told from chance"
        lines.append(f"{row.pictures} pictures: {name} {says} {what}, {row.count} codes.")
    return lines
