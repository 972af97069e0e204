"""``csd-policy study risk``: do entropy, TV and risk maps know where an error is seen?"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Independent
from csd_policy.models import Dtype, ImageTokenModel, load_model
from csd_policy.models.options import Options
from csd_policy.policies import Exact
from csd_policy.progress import step_bar
from csd_policy.provenance import check_manifest, package_version, provenance, weights_hash
from csd_policy.results import locked, prepare_folder, write_atomic, write_json
from csd_policy.risk import GroundTruthRisk, RiskMap
from csd_policy.risk.lpips import Net, load_lpips
from csd_policy.study.measure import Measurements, add_maps, measure
from csd_policy.study.scenes import Scenes, read_scenes
from csd_policy.types import DecodeConfig

DRAWN, SCENES = "drawn", "scene"
TRUTH = "exact mask"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RiskStudy:
    """Measure how well entropy, TV and risk maps predict where things are and what errors cost.

    Two sets of pictures: those that the model draws for the prompts, by the exact rule, and, if
    there is a folder of scenes, its pictures, encoded, whose masks are known. A repeated command
    resumes; it may have further maps.

    Args:
        maps: the risk maps to judge, by name.
        domains: regular expressions by name; a picture is in a domain if its prompt matches.
        prompts: what to draw, different texts; default are the captions of ``scenes``.
        scenes: folder of pictures, masks and captions (``python -m trainers.scene_folder``).
        model: name of a shipped model, a folder, or an id owner/name of the Hugging Face hub.
        model_options: what the model's adapter takes beyond that, KEY: VALUE, see docs/models.md.
        draft: makes the drafts whose cost is measured.
        window: slots per forward pass, 2 or more.
        costs: codes per picture whose cost is measured, 1 or more.
        net: trunk of the LPIPS that measures costs, alex or vgg.
        trunk: file of its weights; default is what is installed, see docs/extend.md.
        seed: of the first picture; the next ones count up.
        resamples: draws of the pictures for an interval, 1 or more.
        output: folder to write to.
        batch_size: pictures decoded at once, 1 or more.
        device: where to run; default is CUDA if there is a card, else the CPU.
        dtype: of the network; laws are computed in float32 or better.
    """

    maps: dict[str, RiskMap]
    domains: dict[str, str] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    scenes: str | None = None
    model: str = "emoji-scenes"
    model_options: Options = field(default_factory=dict)
    draft: DraftStrategy = field(default_factory=Independent)
    window: int = 16
    costs: int = 24
    net: Net = "alex"
    trunk: str | None = None
    seed: int = 0
    resamples: int = 500
    output: str = "outputs/study/risk"
    batch_size: int = 16
    device: str | None = None
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        lowest = {"window": 2, "costs": 1, "resamples": 1, "batch_size": 1, "seed": 0}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {low} or more")
        if not self.prompts and self.scenes is None:
            raise ValueError("prompts is [] and scenes None, expected one of them")
        if len(set(self.prompts)) < len(self.prompts):
            raise ValueError("prompts holds a text twice, expected different ones")
        for name, pattern in self.domains.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"domain {name!r} is {pattern!r}, no pattern: {error}") from error
        if taken := {"entropy", "tv", TRUTH} & self.maps.keys():
            raise ValueError(f"a map is called {sorted(taken)[0]!r}, expected another name")

    def manifest(self) -> dict[str, Any]:
        """What decides the measurements; the analysis may differ from run to run."""
        loose = ("output", "device", "resamples", "domains", "maps", "draft")
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in loose}
        parts = {"maps": {k: v.to_config() for k, v in self.maps.items()}}
        return {"csd_policy": package_version(), "draft": self.draft.to_config()} | parts | shared


@dataclass(frozen=True)
class PictureSet:
    """One of the two sets: its measurements, and what is known of its pictures."""

    name: str
    prompts: Sequence[str]
    found: Measurements
    covered: Tensor | None  # share of each code's place that lies on a thing, fp32 [n, N]


def run(study: RiskStudy) -> str:
    """Measure what is missing, analyse, write the report; the tables as text.

    Raises:
        ValueError: a wrong setting, or a folder with results of other settings (names the field).
    """
    from csd_policy.study import report

    output = Path(study.output)
    scenes = None if study.scenes is None else read_scenes(study.scenes)
    model = load_model(
        study.model, study.device, getattr(torch, study.dtype), **study.model_options
    )
    prompts = study.prompts or list(scenes.captions if scenes else ())
    model.check_prompts(prompts)
    prepare_folder(output)
    with locked(output):
        facts = provenance(model) | {"weights": weights_hash(study.model)}
        path = output / "manifest.json"
        same = {name: facts[name] for name in ("dtype", "weights", "torch")}
        manifest = study.manifest() | {"environment": same}
        write_json(path, check_manifest(path, manifest, growing="maps"))
        sets = list(measure_sets(study, model, prompts, scenes))
        return report.write(study, model, sets, facts)


def measure_sets(
    study: RiskStudy, model: ImageTokenModel, prompts: list[str], scenes: Scenes | None
) -> Iterator[PictureSet]:
    """Both sets of pictures, measured, each batch once."""
    metric = load_lpips(study.net, study.trunk).to(model.device)
    maps = {name: risk_map.bind(model) for name, risk_map in study.maps.items()}
    decoder = JacobiDecoder(model, Exact(), study.draft, DecodeConfig(window=study.window))

    def draw(batch: list[int]) -> Tensor:
        seeds = [study.seed + i for i in batch]
        return decoder.generate([prompts[i] for i in batch], seeds).tokens

    yield PictureSet(
        DRAWN, prompts, _measure_set(study, decoder, metric, maps, DRAWN, prompts, draw), None
    )
    if scenes is None:
        return
    truth = GroundTruthRisk(str(study.scenes)).bind(model)

    def encode(batch: list[int]) -> Tensor:
        return model.encode([scenes.pictures[i] for i in batch]).cpu()

    captions = list(scenes.captions)
    known = maps | {TRUTH: truth}
    found = _measure_set(study, decoder, metric, known, SCENES, captions, encode)
    yield PictureSet(SCENES, captions, found, found.predictors[TRUTH])


def _measure_set(
    study: RiskStudy, decoder: JacobiDecoder, metric: Any, maps: dict[str, RiskMap], name: str,
    prompts: list[str], tokens_of: Any,
) -> Measurements:  # fmt: skip
    parts = []
    names = ["entropy", "tv", *maps]
    starts = range(0, len(prompts), study.batch_size)
    with step_bar(len(starts), f"{name} pictures, batches") as step:
        for start in starts:
            batch = list(range(start, min(start + study.batch_size, len(prompts))))
            path = Path(study.output) / "measurements" / f"{name}_{start:05d}.safetensors"
            texts = [prompts[i] for i in batch]
            part, seconds = _load(path)
            if part is None:
                seeds = [study.seed + i for i in batch]
                part = measure(decoder, metric, texts, tokens_of(batch), seeds, study.costs)
            lacking = {k: v for k, v in maps.items() if k not in part.predictors}
            if lacking or not path.is_file():
                part, more = add_maps(part, decoder.model, lacking, texts)
                _save(path, part, seconds | more)
            parts.append(part.of(names))
            step()
    return Measurements.join(parts)


def _save(path: Path, part: Measurements, seconds: dict[str, float]) -> None:
    facts = {"seconds": json.dumps(seconds)}
    write_atomic(path, lambda partial: save_file(part.to_tensors(), str(partial), facts))


def _load(path: Path) -> tuple[Measurements | None, dict[str, float]]:
    """What ``_save`` wrote; None and no seconds if it is not there or broken."""
    try:
        with safe_open(path, "pt") as file:
            seconds = json.loads(file.metadata()["seconds"])
        return Measurements.from_tensors(load_file(str(path))), seconds
    except (OSError, SafetensorError, TypeError):
        path.unlink(missing_ok=True)
        return None, {}


def map_seconds(folder: Path) -> dict[str, list[float]]:
    """Seconds per picture of each risk map, one value a batch."""
    found: dict[str, list[float]] = {}
    for path in sorted((folder / "measurements").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name, value in json.loads(file.metadata()["seconds"]).items():
                found.setdefault(name, []).append(value)
    return found
