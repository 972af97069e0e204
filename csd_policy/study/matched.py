"""``csd-policy study matched``: families of methods at equal passes and at equal harm."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from csd_policy.results import prepare_folder, write_atomic, write_json, write_text
from csd_policy.study.curves import HARMS, Match, match_families, resample
from csd_policy.summary import Row
from csd_policy.tables import markdown_table, text_table

NOTE = (
    "Family less (or divided by) baseline, with 95 % intervals of resampled prompts, not corrected "
    "for their number; `-` where the family does not reach."
)


@dataclass(frozen=True)
class MatchedStudy:
    """Compare families of methods at equal forward passes and at equal harm.

    A family is one rule at several strengths, and all begin at the exact rule. Between two
    strengths its mean passes and mean harm are joined by a line, which a family attains by choosing
    one of the two for each picture by chance. Every family is read where the baseline's methods
    are. Intervals resample prompts, the same for all methods, which share prompts and seeds.

    Args:
        results: folder of a finished comparison (``csd-policy compare``, ``--damage`` for damage).
        families: the methods of each family by a regular expression for their whole names; default
            are methods that share their name but for the last word.
        baseline: the family that the others are compared with.
        exact: name of the method where every family begins.
        resamples: draws of the prompts for an interval, 1 or more.
        output: folder to write to; default is ``results``.
    """

    results: str
    families: dict[str, str] = field(default_factory=dict)
    baseline: str = "CSD"
    exact: str = "Exact"
    resamples: int = 2000
    output: str | None = None

    def __post_init__(self) -> None:
        if self.resamples < 1:
            raise ValueError(f"resamples is {self.resamples}, expected 1 or more")
        for name, pattern in self.families.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"family {name!r} is {pattern!r}, no pattern: {error}") from error


def run(study: MatchedStudy) -> str:
    """Analyse a finished comparison and write matched.json, .md and .png; the tables as text.

    Raises:
        ValueError: no such results, or no such family, baseline or exact method.
    """
    from csd_policy.study.figures import matched_figure

    images, name = read_images(Path(study.results)), study.exact
    if name not in images:
        raise ValueError(f"exact is {name!r}, expected one of {', '.join(images)}")
    families = find_families(study, list(images))
    measures = [harm for harm in HARMS if harm in images[name][0]]
    means = {harm: resample(images, harm, study.resamples) for harm in measures}
    names, matches = list(images), []
    for harm in measures:
        matches += match_families(means[harm], names, families, study.baseline, name, harm)
    output = Path(study.output or study.results)
    prepare_folder(output)
    kept = asdict(study) | {"families": families}
    write_json(output / "matched.json", {"study": kept, "matches": [m._asdict() for m in matches]})
    tables = [(HARMS[harm], *_table(matches, harm)) for harm in measures]
    text = [f"### {title}\n\n{markdown_table(head, cells)}" for title, head, cells in tables]
    write_text(output / "matched.md", "\n\n".join([*text, NOTE]) + "\n")
    figure = matched_figure(means, names, {k: [name, *v] for k, v in families.items()})
    write_atomic(output / "matched.png", lambda to: figure.savefig(to, format="png"))
    return "\n\n".join(f"{title}\n{text_table(head, cells)}" for title, head, cells in tables)


def read_images(folder: Path) -> dict[str, list[Row]]:
    """The records of each method's images in a folder of results; ValueError if it has none."""
    try:
        images: dict[str, list[Row]] = json.loads((folder / "results.json").read_text())["images"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no results of a finished comparison: {error}") from error
    return images


def find_families(study: MatchedStudy, names: Sequence[str]) -> dict[str, list[str]]:
    """The methods of each family, without the exact one."""
    rest = [name for name in names if name != study.exact]
    found: dict[str, list[str]] = {}
    for family, pattern in study.families.items():
        found[family] = [name for name in rest if re.fullmatch(pattern, name)]
        if not found[family]:
            raise ValueError(f"family {family!r} is {pattern!r}, which no method's name matches")
    if not study.families:
        for name in rest:
            if family := name.rpartition(" ")[0]:
                found.setdefault(family, []).append(name)
    if study.baseline not in found:
        raise ValueError(f"baseline is {study.baseline!r}, expected one of {', '.join(found)}")
    return found


def _table(matches: Sequence[Match], measure: str) -> tuple[list[str], list[list[str]]]:
    title = HARMS[measure]
    head = ["family", "in the place of", f"{title} at equal passes, difference", "ratio",
            f"passes at equal {title}, difference", "ratio"]  # fmt: skip
    cells = []
    for match in matches:
        if match.measure == measure:
            found: list[Any] = [match.harm, match.harm_ratio, match.passes, match.passes_ratio]
            texts = ["-" if value is None else value.text() for value in found]
            cells.append([match.family, match.at, *texts])
    return head, cells
