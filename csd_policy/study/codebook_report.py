"""The files of a study of the codebook: the table, how well it fits, and a plot."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from csd_policy.figures import INK
from csd_policy.models import ImageTokenModel
from csd_policy.results import write_json, write_text
from csd_policy.risk.codebook import CodebookTable, codebook_checksum
from csd_policy.study.association import Association, associate
from csd_policy.study.codebook import CodebookStudy
from csd_policy.study.embedding import fit_vectors
from csd_policy.study.pairs import KINDS, Pairs
from csd_policy.study.report import save_figure
from csd_policy.tables import markdown_table, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, BASELINE = "table", "codebook vectors"
ALL, WITHIN = "all pairs", "pairs of one place, compared there only"
LEAST_PAIRS = 20  # of a kind, below which no statistic is given
HIGH = 0.9  # quantile of costs above which one counts as high, for the AUROC


def write(study: CodebookStudy, model: ImageTokenModel, pairs: Pairs, facts: dict[str, Any]) -> str:
    """Fit and judge the table; write it, study.json, study.md and study.png; the table as text."""
    assert model.codebook is not None
    output, codebook = Path(study.output), model.codebook.float().cpu()
    fitted, judges = split(pairs, study.pictures - study.judges)
    if not len(fitted.first) or not len(judges.first):
        raise ValueError(f"no pairs to fit to or to judge by in {output}, expected more pictures")
    fit = fit_vectors(codebook, fitted, study.rank, study.steps, study.seed, study.pull)
    vectors = fit.half().float()
    predicted = {TABLE: squared(vectors, judges), BASELINE: squared(codebook, judges)}
    rows = list(judge(judges, predicted, study.resamples))
    best = {name: found.spearman.mean for domain, name, _, found in rows if domain == ALL}
    table = CodebookTable(
        vectors, model.name, codebook_checksum(codebook), study.net,
        round(best[TABLE], 4), round(best[BASELINE], 4),
    )  # fmt: skip
    table.save(output / "codebook.safetensors")
    counts = {"fitted": len(fitted.first), "held out": len(judges.first)}
    records = [
        {"domain": domain, "predictor": name, "count": count}
        | {k: v._asdict() for k, v in found._asdict().items()}
        for domain, name, count, found in rows
    ]
    write_json(output / "study.json", {"study": study.manifest(), "pictures": study.pictures,
               "held_out": study.judges, "rank": study.rank, "pull": study.pull, "pairs": counts,
               "environment": facts, "rows": records})  # fmt: skip
    head = ("held-out pairs", "number", f"Spearman, {TABLE}", f"Spearman, {BASELINE}")
    cells = _cells(rows)
    sentence = (
        f"A table of rank {study.rank}, fitted to {counts['fitted']} pairs of "
        f"{study.pictures - study.judges} pictures of {model.name}, and judged by LPIPS "
        f"({study.net}) around the place on {counts['held out']} pairs of {study.judges} others."
    )
    write_text(output / "study.md", f"{sentence}\n\n{markdown_table(head, cells)}\n")
    save_figure(output / "study.png", scatter(judges, predicted, sentence))
    return f"{text_table(head, cells)}\n\n{sentence}"


def split(pairs: Pairs, pictures: int) -> tuple[Pairs, Pairs]:
    """Pairs of the first ``pictures``, without pairs of codes that the others have; the others."""
    least, most = (f(pairs.first, pairs.second) for f in (torch.minimum, torch.maximum))
    code = least * (int(most.max()) + 1) + most
    later = pairs.picture >= pictures
    return pairs.where(~later & ~torch.isin(code, code[later])), pairs.where(later)


def squared(vectors: Tensor, pairs: Pairs) -> Tensor:
    """Squared Euclidean distance of the codes of each pair, ``[M]``."""
    return (vectors[pairs.first] - vectors[pairs.second]).square().sum(-1)


def judge(
    pairs: Pairs, predicted: dict[str, Tensor], resamples: int
) -> Iterator[tuple[str, str, int, Association]]:
    """Domain, predictor, pairs and how it agrees with the cost around the place."""
    every = torch.ones_like(pairs.kind, dtype=torch.bool)
    domains = {ALL: every} | {f"{k} pairs": pairs.kind == i for i, k in enumerate(KINDS)}
    place = (pairs.picture * (int(pairs.position.max()) + 1) + pairs.position).numpy()
    for domain, kept in (domains | {WITHIN: every}).items():
        if int(kept.sum()) < LEAST_PAIRS:
            continue
        for name, value in predicted.items():
            x, y = (v[kept].double().numpy() for v in (value, pairs.around))
            if domain == WITHIN:
                x, y = _ranks_within(x, place), _ranks_within(y, place)
            high = y > np.quantile(y, HIGH)
            found = associate(x, y, high, pairs.picture[kept].numpy(), resamples)
            yield domain, name, len(x), found


def _ranks_within(values: Any, group: Any) -> Any:
    """Rank of each value among those of its group, in (0, 1)."""
    found = np.empty(len(values))
    for number in np.unique(group):
        at = np.flatnonzero(group == number)
        found[at] = (values[at].argsort().argsort() + 0.5) / len(at)
    return found


def _cells(rows: list[tuple[str, str, int, Association]]) -> list[list[str]]:
    found: dict[tuple[str, int], dict[str, str]] = {}
    for domain, name, count, stats in rows:
        found.setdefault((domain, count), {})[name] = stats.spearman.text()
    return [[d, str(n), cells[TABLE], cells[BASELINE]] for (d, n), cells in found.items()]


def scatter(pairs: Pairs, predicted: dict[str, Tensor], caption: str) -> "Figure":
    """Measured cost of held-out pairs against each predictor, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    panels: Any = figure.subplots(1, len(predicted), sharey=True)
    for axes, (name, value) in zip(panels, predicted.items(), strict=True):
        for i, kind in enumerate(KINDS):
            at = pairs.kind == i
            axes.scatter(value[at], pairs.around[at], s=4, alpha=0.35, linewidth=0, label=kind)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel(f"squared distance, {name}", color=INK)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    low, high = pairs.around.clamp(min=1e-5).aminmax()
    panels[0].plot([low, high], [low, high], color="#999999", linestyle=":", label="equal")
    panels[0].set_ylabel("LPIPS around the place", color=INK)
    panels[0].legend(frameon=False, markerscale=3)
    figure.suptitle(caption, fontsize=8, color="#555555")
    return figure
