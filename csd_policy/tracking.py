"""Mirrors the files of a comparison to wandb: the only module that imports it.

wandb runs in a process of its own, which has no terminal to ask on and a time limit, so that it can
neither stop nor delay an experiment for long. The same process can be started by hand later:

    python -m csd_policy.tracking outputs/compare/emoji --mode online
"""

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

MODES = ("online", "offline", "disabled")
TIME_LIMIT = 600.0  # seconds for all runs

logger = logging.getLogger(__name__)


def choose_mode(mode: str | None) -> str:
    """``mode``, or else WANDB_MODE, or else offline without WANDB_API_KEY and online with it."""
    chosen = mode or os.environ.get("WANDB_MODE")
    if chosen is None:
        return "online" if os.environ.get("WANDB_API_KEY") else "offline"
    if chosen not in MODES:
        raise ValueError(f"the mode of wandb is {chosen!r}, expected one of {', '.join(MODES)}")
    return chosen


def mirror(folder: Path, mode: str, project: str, time_limit: float = TIME_LIMIT) -> None:
    """Mirror ``results.json`` of a folder to wandb, one run per method; at worst a warning.

    Args:
        folder: of the comparison; wandb's own files go to ``folder/wandb``.
        mode: one of ``MODES``.
        project: of wandb; the group is the folder's name.
        time_limit: seconds after which wandb is stopped.
    """
    if mode == "disabled":
        return
    if importlib.util.find_spec("wandb") is None:
        logger.warning("wandb is not installed (pip install 'csd-policy[wandb]'): nothing mirrored")
        return
    command = [sys.executable, "-P", __file__, str(folder), "--mode", mode, "--project", project]
    variables = environment(folder)
    log = folder / "wandb" / "mirror.log"
    try:
        with log.open("wb") as messages:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages,
                start_new_session=True, env=variables,
            )  # fmt: skip
        status = _wait(process, time_limit)
        failed, reason = status != 0, f"status {status}"
        if failed and (lines := log.read_text(errors="replace").split("\n")):
            reason = next((line for line in reversed(lines) if line.strip()), reason)
    except (OSError, subprocess.TimeoutExpired) as error:
        failed, reason = True, str(error)
    if failed:
        logger.warning("wandb (%s) failed, the files in %s are complete: %s", mode, folder, reason)


def _wait(process: "subprocess.Popen[bytes]", time_limit: float) -> int:
    """The exit status; the process and its children are killed if they outlive the limit."""
    try:
        return process.wait(time_limit)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def environment(folder: Path) -> dict[str, str]:
    """Environment of the process: wandb's files inside the folder, no reports to its makers."""
    inside = (folder / "wandb").absolute()
    inside.mkdir(parents=True, exist_ok=True)
    return os.environ | {
        "WANDB_DATA_DIR": str(inside),
        "WANDB_CACHE_DIR": str(inside / "cache"),
        "WANDB_CONFIG_DIR": str(inside / "config"),
        "WANDB_ARTIFACT_DIR": str(inside / "artifacts"),
        "WANDB_ERROR_REPORTING": "false",
    }


def log_results(folder: Path, mode: Literal["online", "offline"], project: str) -> None:
    """One run per method: settings, the line of the table, and one table with the pictures."""
    import wandb

    results = json.loads((folder / "results.json").read_text())
    for line in results["table"]:
        settings = wandb.Settings(
            mode=mode, console="off", silent=True, disable_git=True, save_code=False,
            x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
            x_save_requirements=False, init_timeout=30, finish_timeout=120,
            finish_timeout_raises=True,
        )  # fmt: skip
        config = line["settings"] | {"provenance": results["provenance"]}
        same = json.dumps([str(folder.absolute()), line, results["provenance"]], sort_keys=True)
        number = hashlib.sha256(same.encode()).hexdigest()[:16]
        if mode == "offline" and any((folder / "wandb").glob(f"offline-run-*-{number}")):
            continue  # a repeated command
        with wandb.init(
            project=project,
            group=folder.name,
            name=line["method"],
            id=number,
            resume="allow" if mode == "online" else None,
            dir=str(folder),
            config=config,
            settings=settings,
        ) as run:
            run.log({"pictures": _pictures(folder, results["images"][line["method"]])})
            run.summary.update(flat(line))


def _pictures(folder: Path, rows: list[dict[str, Any]]) -> Any:
    import wandb

    table = wandb.Table(
        columns=["prompt", "seed", "picture", "passes", "tokens_per_pass", "spent_tv"]
    )
    for row in rows:
        picture = wandb.Image(str(folder / row["file"]))
        table.add_data(
            row["prompt"], row["seed"], picture, row["forward_passes"], row["tokens_per_pass"],
            row["spent_tv"],
        )  # fmt: skip
    return table


def flat(line: dict[str, Any]) -> dict[str, float]:
    """The metrics of a line: the mean under the metric's own name, then its interval's ends."""
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if "/" in key and isinstance(value, dict):
            numbers |= {
                key: value["mean"],
                f"{key}_low": value["low"],
                f"{key}_high": value["high"],
            }
        elif "/" in key:
            numbers[key] = value
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Mirror the results of a comparison to wandb.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=MODES[:2], default="online")
    parser.add_argument("--project", default="csd-policy")
    chosen = parser.parse_args()
    log_results(chosen.folder, chosen.mode, chosen.project)
