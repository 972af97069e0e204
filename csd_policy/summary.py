"""The table of a comparison: each metric of each method with its interval."""

import csv
import io
from typing import Any

from csd_policy.comparison import Comparison, Method
from csd_policy.memory import gigabytes
from csd_policy.metrics import Interval, bootstrap_interval, bootstrap_ratio
from csd_policy.parameters import Parametrized
from csd_policy.policies import AcceptancePolicy

Row = dict[str, Any]
COMPRESSION, SECONDS = "accept/compression", "speed/seconds_per_image"
DAMAGE = "quality/damage"
GAP, PEAK = "quality/log_likelihood_gap", "memory/peak_bytes"
METRICS = {  # key in the files and in wandb: title, digits, and where an image's row has it
    "accept/forward_passes": ("passes", 1, "forward_passes"),
    COMPRESSION: ("compression", 2, "forward_passes"),
    "accept/tokens_per_pass": ("tokens per pass", 2, "tokens_per_pass"),
    SECONDS: ("s per image", 3, "seconds"),
    "quality/spent_tv": ("spent TV", 3, "spent_tv"),
    "quality/log_likelihood": ("log-likelihood", 3, "log_likelihood"),
    GAP: ("gap to AR", 3, "log_likelihood"),
    DAMAGE: ("damage", 3, "damage"),
}
SETTINGS = ("model", "model_options", "policy", "draft", "decode")  # in each image's row
PARTS = ("forward", "verification", "rest")  # of the time; the prefill counts as rest


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
        "settings": {key: rows[0][key] for key in SETTINGS if key in rows[0]},
    }
    for key, (_, _, name) in METRICS.items():
        if key == SECONDS:
            seconds = [row["seconds"]["total"] for row in rows]
            batches = [seconds[i : i + size] for i in range(0, len(seconds), size)]
            interval = bootstrap_interval(batches)
        elif name not in rows[0]:
            continue  # damage, if it was not asked for
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
    if all("peak_memory" in row for row in rows):  # records of older versions have none
        line[PEAK] = max(row["peak_memory"] for row in rows)
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
    shown = {k: v for k, v in METRICS.items() if k != DAMAGE or any(k in line for line in table)}
    head = ["method", "W", *(title for title, _, _ in shown.values())]
    place = head.index("s per image") + 1
    head[place:place] = ["share of time", "peak GB"]
    cells = []
    for line in table:
        found = [
            Interval(**line[key]).text(digits) if key in line else "-"
            for key, (_, digits, _) in shown.items()
        ]
        shares = " / ".join(f"{line[f'speed/share_{part}']:.0%}" for part in PARTS)
        peak = gigabytes(line[PEAK]) if PEAK in line else "-"
        found[place - 2 : place - 2] = [shares, peak]  # behind method and window
        cells.append([line["method"], str(line["settings"]["decode"]["window"]), *found])
    return head, cells


def family_of(policy: AcceptancePolicy) -> str:
    """The policy without its strength: its class, and in short what differs from the defaults."""
    cls = type(policy)
    usual, words = cls().parameters(), [cls.__name__]
    for name, value in policy.parameters().items():
        tuned = name == cls.strength or (cls.strength is None and isinstance(value, float))
        if tuned or repr(value) == repr(usual[name]):
            continue
        if isinstance(value, Parametrized):
            words.append(type(value).__name__)
        else:
            words.append(name if value is True else f"{name}={value}")
    return " ".join(words)


def table_csv(table: list[Row]) -> str:
    """The table for programs: a column each for mean, low and high."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = Interval._fields
    writer.writerow(
        ["method", "window", "images", *(f"{key}/{end}" for key in METRICS for end in ends),
         *(f"speed/share_{part}" for part in PARTS), PEAK]
    )  # fmt: skip
    for line in table:
        numbers = [line.get(key, {}).get(end, "") for key in METRICS for end in ends]
        shares = [line[f"speed/share_{part}"] for part in PARTS]
        window = line["settings"]["decode"]["window"]
        peak = line.get(PEAK, "")
        writer.writerow([line["method"], window, line["images"], *numbers, *shares, peak])
    return text.getvalue()
