"""Plots of a study: statistics with intervals, and maps over pictures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from csd_policy.figures import INK
from csd_policy.models import ImageTokenModel
from csd_policy.study.analysis import FOREGROUND, WHOLE, Row
from csd_policy.study.curves import HARMS, Means
from csd_policy.study.risk import PictureSet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 8  # pictures of a heat map


def study_figure(rows: Sequence[Row], caption: str) -> "Figure":
    """A panel for each set and target: predictors down, one mark with its interval per domain."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    keys = list(
        dict.fromkeys((r.pictures, r.target) for r in rows if r.target in (FOREGROUND, WHOLE))
    )
    figure = Figure(figsize=(5.2 * len(keys) + 1.5, 7.2), dpi=130, layout="constrained")
    domains = list(dict.fromkeys(row.domain for row in rows))
    predictors = list(dict.fromkeys(row.predictor for row in rows))
    colours = {d: INK if i == 0 else colormaps["tab10"](i - 1) for i, d in enumerate(domains)}
    panels: Any = figure.subplots(1, len(keys), sharey=True, squeeze=False)
    for axes, key in zip(panels[0], keys, strict=True):
        statistic = "auroc" if key[1] == FOREGROUND else "spearman"
        for row in rows:
            if (row.pictures, row.target) != key:
                continue
            value = getattr(row.found, statistic)
            shift = (domains.index(row.domain) - (len(domains) - 1) / 2) * 0.8 / len(domains)
            axes.errorbar(
                value.mean, predictors.index(row.predictor) + shift,
                xerr=[[max(0, value.mean - value.low)], [max(0, value.high - value.mean)]],
                fmt="D" if row.domain == domains[0] else "o", markersize=4, elinewidth=1,
                color=colours[row.domain],
            )  # fmt: skip
        name = "AUROC for things" if key[1] == FOREGROUND else f"Spearman with {key[1]}"
        axes.set_xlabel(name)
        axes.set_title(f"{key[0]} pictures", fontsize=10, color=INK)
        axes.axvline(0.5 if key[1] == FOREGROUND else 0, color="#999999", linestyle=":")
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(predictors)), predictors)
    panels[0][0].invert_yaxis()
    for domain in domains:
        panels[0][-1].plot([], [], "o", color=colours[domain], label=domain)
    panels[0][-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.suptitle(caption, fontsize=9, color="#555555")
    return figure


def heat_figure(model: ImageTokenModel, pictures: PictureSet) -> "Figure":
    """The first pictures and what each predictor says of their codes (dark: low, bright: high)."""
    from matplotlib.figure import Figure

    found = pictures.found
    count = min(SHOWN, len(found.tokens))
    images = model.decode(found.tokens[:count])
    names = list(found.predictors)
    figure = Figure(
        figsize=(1.7 * (len(names) + 1), 1.8 * count + 0.4), dpi=110, layout="constrained"
    )
    panels: Any = figure.subplots(count, len(names) + 1, squeeze=False)
    for i, image in enumerate(images):
        panels[i][0].imshow(image)
        panels[i][0].set_ylabel("\n".join(pictures.prompts[i].split(" on ")), fontsize=7)
        for j, name in enumerate(names, 1):
            values = found.predictors[name][i].view(model.grid).numpy()
            grey = np.array(image.convert("L"))
            panels[i][j].imshow(grey, cmap="gray", extent=(0, 1, 0, 1))
            top = float(found.predictors[name].nan_to_num(0).quantile(0.98)) or 1.0
            panels[i][j].imshow(
                values, cmap="inferno", alpha=0.75, extent=(0, 1, 0, 1), vmin=0, vmax=top
            )
        for axes in panels[i]:
            axes.set_xticks([])
            axes.set_yticks([])
    for axes, title in zip(panels[0], ["picture", *names], strict=True):
        axes.set_title(title, fontsize=9, color=INK)
    return figure


def matched_figure(
    means: Mapping[str, Means], names: Sequence[str], families: Mapping[str, Sequence[str]]
) -> "Figure":
    """A panel for each measure of harm: harm against passes, a line for each family.

    Marks have 95 % intervals; ``means`` are of the methods in ``names``, see ``resample``.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(means) + 1.8, 5.6), dpi=130, layout="constrained")
    panels: Any = figure.subplots(1, len(means), squeeze=False)
    for axes, (measure, found) in zip(panels[0], means.items(), strict=True):
        bounds = [np.quantile(v[:-1], [0.025, 0.975], axis=0) for v in found]
        for i, (family, methods) in enumerate(families.items()):
            at = [names.index(name) for name in methods]
            x, y = found.passes[-1, at], found.harm[-1, at]
            errors = [
                np.abs(value - bound[:, at]) for value, bound in zip((x, y), bounds, strict=True)
            ]
            axes.errorbar(
                x, y, yerr=errors[1], xerr=errors[0], marker="os^Dv"[i % 5], markersize=5,
                linewidth=1.2, elinewidth=0.7, label=family, color=colormaps["tab10"](i % 10),
            )  # fmt: skip
        axes.set_xlabel("forward passes per picture")
        axes.set_ylabel(f"{HARMS[measure]} per picture")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure
