"""``csd-policy study codebook``: how far are two codes apart to the eye, whatever the picture?"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Independent
from csd_policy.models import Dtype, ImageTokenModel, load_model
from csd_policy.models.options import Options
from csd_policy.policies import Exact
from csd_policy.progress import step_bar
from csd_policy.provenance import check_manifest, package_version, provenance, weights_hash
from csd_policy.results import locked, prepare_folder, write_atomic, write_json
from csd_policy.risk.lpips import Net, load_lpips
from csd_policy.study.pairs import LEAST_CODES, Pairs, draw_pairs
from csd_policy.study.scenes import read_scenes
from csd_policy.types import DecodeConfig


@dataclass(frozen=True)
class CodebookStudy:
    """Measure what one code costs in the place of another, and fit a table of distances to it.

    Pictures are drawn by the exact rule. At random places of each, codes that decoding met there,
    codes near them in the codebook and codes drawn evenly stand in turn, and LPIPS compares every
    two of these pictures around the place. A table of vectors is fitted to the pairs of most
    pictures and judged by those of the others. A repeated command resumes.

    Args:
        prompts: what to draw, in turn; default are the captions of ``scenes``, else the model's
            example prompts.
        scenes: folder of pictures, masks and captions (``python -m trainers.scene_folder``).
        pictures: how many to draw, 2 or more; each picture has a seed of its own.
        held_out: share of the pictures that judge the table, in (0, 1).
        places: places per picture, 1 or more.
        codes: codes per place, 6 or more; their number of pairs is codes (codes - 1) / 2.
        rank: numbers per code in the table, 1 or more.
        steps: of the fit, 1 or more.
        pull: of the fit towards a linear map of the codebook, 0 or more; small values overfit codes
            that were measured rarely.
        model: name of a shipped model, a folder, or an id owner/name of the Hugging Face hub.
        model_options: what the model's adapter takes beyond that, KEY: VALUE, see docs/models.md.
        draft: makes the drafts that decoding meets.
        window: slots per forward pass, 2 or more.
        net: trunk of the LPIPS that measures costs, alex or vgg.
        trunk: file of its weights; default is what is installed, see docs/risk.md.
        seed: of the first picture; the next ones count up.
        resamples: draws of the pictures for an interval, 1 or more.
        output: folder to write to.
        batch_size: pictures drawn at once, 1 or more.
        device: where to run; default is CUDA if there is a card, else the CPU.
        dtype: of the network; laws are computed in float32 or better.
    """

    prompts: list[str] = field(default_factory=list)
    scenes: str | None = None
    pictures: int = 48
    held_out: float = 0.25
    places: int = 12
    codes: int = 8
    rank: int = 16
    steps: int = 2000
    pull: float = 1.0
    model: str = "emoji-scenes"
    model_options: Options = field(default_factory=dict)
    draft: DraftStrategy = field(default_factory=Independent)
    window: int = 16
    net: Net = "alex"
    trunk: str | None = None
    seed: int = 0
    resamples: int = 500
    output: str = "outputs/study/codebook"
    batch_size: int = 8
    device: str | None = None
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        lowest = {"pictures": 2, "places": 1, "codes": LEAST_CODES, "rank": 1, "steps": 1,
                  "window": 2, "resamples": 1, "batch_size": 1, "seed": 0}  # fmt: skip
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {low} or more")
        if not 0 <= self.pull < float("inf"):
            raise ValueError(f"pull is {self.pull}, expected a finite number, 0 or more")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, expected a share in (0, 1)")
        if not 0 < self.judges < self.pictures:
            raise ValueError(
                f"held_out {self.held_out} of {self.pictures} pictures is {self.judges}, "
                f"expected 1 to {self.pictures - 1}"
            )

    @property
    def judges(self) -> int:
        """Pictures, the last ones, that the table is not fitted to."""
        return round(self.held_out * self.pictures)

    def manifest(self) -> dict[str, Any]:
        """What decides the measurements; fit and analysis may differ from run to run."""
        loose = ("output", "device", "resamples", "rank", "steps", "pull", "held_out", "pictures",
                 "draft", "prompts", "scenes")  # fmt: skip
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in loose}
        return {"csd_policy": package_version(), "draft": self.draft.to_config()} | shared


def run(study: CodebookStudy) -> str:
    """Measure what is missing, fit the table, write table and report; the numbers as text.

    Raises:
        ValueError: a wrong setting, a model without a codebook, or a folder with results of other
            settings (names the field).
    """
    from csd_policy.study import codebook_report

    output = Path(study.output)
    captions = [] if study.scenes is None else list(read_scenes(study.scenes).captions)
    model = load_model(
        study.model, study.device, getattr(torch, study.dtype), **study.model_options
    )
    check_codebook(model, study.codes)
    prompts = study.prompts or captions or list(model.example_prompts)
    if not prompts:
        raise ValueError(f"prompts is [], and {model.name} has no example prompts, expected some")
    model.check_prompts(prompts)
    prepare_folder(output)
    with locked(output):
        facts = provenance(model) | {"weights": weights_hash(study.model)}
        path = output / "manifest.json"
        same = {name: facts[name] for name in ("dtype", "weights", "torch")}
        manifest = study.manifest() | {"prompts": prompts, "fits": {}, "environment": same}
        write_json(path, check_manifest(path, manifest, growing="fits"))
        pairs = measure_pairs(study, model, prompts)
        return codebook_report.write(study, model, pairs, facts)


def check_codebook(model: ImageTokenModel, codes: int) -> None:
    """Raise ValueError unless the model has pictures, and a codebook of ``codes`` or more."""
    model.check_pictures()
    if model.codebook is None:
        raise ValueError(f"model {model.name} has no codebook, expected one with code vectors")
    if model.num_codes < codes:
        raise ValueError(f"codes is {codes}, expected at most {model.num_codes} of {model.name}")


def measure_pairs(study: CodebookStudy, model: ImageTokenModel, prompts: Sequence[str]) -> Pairs:
    """All pairs of all pictures; each batch of pictures is measured once and kept in a file."""
    metric = load_lpips(study.net, study.trunk).to(model.device)
    decoder = JacobiDecoder(model, Exact(), study.draft, DecodeConfig(window=study.window))
    parts = []
    starts = range(0, study.pictures, study.batch_size)
    with step_bar(len(starts), "pictures, batches") as step:
        for start in starts:
            path = Path(study.output) / "measurements" / f"pairs_{start:05d}.safetensors"
            batch = list(range(start, min(start + study.batch_size, study.pictures)))
            part = _load(path, batch)
            if part is None:
                texts = [prompts[i % len(prompts)] for i in batch]
                part = draw_pairs(
                    decoder, metric, texts, batch, study.seed, study.places, study.codes
                )
                _save(path, part)
            parts.append(part)
            step()
    return Pairs.join(parts)


def _save(path: Path, part: Pairs) -> None:
    write_atomic(path, lambda partial: save_file(part.to_tensors(), str(partial)))


def _load(path: Path, batch: list[int]) -> Pairs | None:
    """The pairs of a file; None if it is not there, broken, or holds other pictures."""
    try:
        pairs = Pairs(**load_file(str(path)))
    except (OSError, SafetensorError, TypeError):
        path.unlink(missing_ok=True)
        return None
    return pairs if pairs.picture.unique().tolist() == batch else None
