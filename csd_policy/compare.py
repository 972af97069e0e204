"""``csd-policy compare``: run the plan of a comparison, image by image, then report."""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csd_policy import report, tracking
from csd_policy.comparison import Comparison, Job, Method
from csd_policy.damage import measure_damage
from csd_policy.decoder import JacobiDecoder
from csd_policy.memory import peak_memory, restart_peak
from csd_policy.metrics import log_likelihood
from csd_policy.models import ImageTokenModel, load_model
from csd_policy.progress import pass_bar
from csd_policy.provenance import check_manifest, provenance, weights_hash
from csd_policy.results import image_row, locked, prepare_folder, save_image, write_json
from csd_policy.risk.lpips import load_lpips
from csd_policy.types import DecodeResult

WARM_UP_PASSES = 8

logger = logging.getLogger(__name__)


def run(comparison: Comparison) -> str:
    """Draw what is missing, write the report, mirror it to wandb; the table as text.

    Raises:
        ValueError: a wrong setting, or a folder with results of other settings (names the field).
    """
    c, output, mode = comparison, Path(comparison.output), tracking.choose_mode(comparison.wandb)
    model = load_model(c.model, c.device, getattr(torch, c.dtype), **c.model_options)
    model.check_prompts(c.prompts)
    model.check_pictures()
    prepare_folder(output)
    with locked(output):
        text = draw_and_report(c, model)
        tracking.mirror(output, mode, c.project)
    return text


def draw_and_report(comparison: Comparison, model: ImageTokenModel) -> str:
    """Draw what is missing and write the report; the table as text."""
    c, output = comparison, Path(comparison.output)
    metric = load_lpips().to(model.device) if c.damage else None
    decoders = {m.name: JacobiDecoder(model, m.policy, m.draft, m.decode) for m in c.methods}
    facts = provenance(model)
    same = ("device_name", "dtype", "torch")  # what changes numbers or times
    environment = {name: facts[name] for name in same} | {
        "weights": weights_hash(c.model),
        "defaults": asdict(model.defaults),
    }
    path = output / "manifest.json"
    write_json(path, check_manifest(path, c.manifest() | {"environment": environment}))
    write_json(output / "resolved_config.json", c.to_config())
    try:
        for method in c.methods:
            run_method(c, method, decoders[method.name], metric)
    except KeyboardInterrupt:
        logger.info("The images so far are in %s; the same command goes on from there.", output)
        raise
    facts |= {"weights": environment["weights"], "warm_up_passes": WARM_UP_PASSES}
    text = report.write(comparison, facts)
    logger.info("The report is in %s.", output)
    return text


def run_method(
    comparison: Comparison, method: Method, decoder: JacobiDecoder, metric: Any = None
) -> None:
    """Draw the batches of which an image is missing; a short warm-up in front is not timed.

    ``metric`` is the LPIPS that damage is measured with.
    """
    missing = comparison.missing(method)
    images = len(comparison.prompts) * len(comparison.seeds)
    logger.info("%s: %d of %d images to draw", method.name, sum(map(len, missing)), images)
    for number, batch in enumerate(missing):
        prompts = [comparison.prompts[i] for i, _ in batch]
        seeds = [seed for _, seed in batch]
        if number == 0:
            warm_up(decoder, prompts, seeds)
        label = f"{method.name}, batch {number + 1} of {len(missing)}"
        restart_peak(decoder.model.device)
        with pass_bar(len(decoder.model.code_of_slot), label) as on_pass:
            result = decoder.generate(prompts, seeds, on_pass, others=metric is not None)
        save_batch(comparison, method, batch, result, metric)


def warm_up(decoder: JacobiDecoder, prompts: list[str], seeds: list[int]) -> None:
    """``WARM_UP_PASSES`` passes and one decoding of pictures, with the shapes of what follows."""

    class Enough(Exception):  # noqa: N818 - no error
        pass

    def stop(number: int, done: list[int]) -> None:
        if number == WARM_UP_PASSES:
            raise Enough

    rows, columns = decoder.model.grid
    decoder.model.decode(torch.zeros(len(prompts), rows * columns, dtype=torch.int64))
    try:
        decoder.generate(prompts, seeds=seeds, on_pass=stop)
    except Enough:
        return


def save_batch(
    comparison: Comparison, method: Method, batch: list[Job], result: DecodeResult,
    metric: Any = None,
) -> None:  # fmt: skip
    """Measure what needs the model, then write the images of a batch one by one."""
    begin = time.perf_counter()
    _ = result.images  # decoded once, here
    seconds = (time.perf_counter() - begin) / len(batch)
    peak = peak_memory(result.model.device)  # without the likelihood, which is a measurement
    prompts = list(result.prompts)
    likelihood = log_likelihood(result.model, result.tokens, prompts, result.config).tolist()
    harm = measure_damage(result.model, result, metric, comparison.damage) if metric else None
    for i, job in enumerate(batch):
        row = {"method": method.name, "prompt_number": job[0]} | image_row(result, i)
        row |= {"log_likelihood": likelihood[i], "picture_seconds": seconds, "peak_memory": peak}
        if harm is not None:
            row |= {"relaxed_tokens": int(harm.relaxed[i]), "damage": float(harm.whole[i])}
        save_image(result, i, comparison.stem(method, job), row)
