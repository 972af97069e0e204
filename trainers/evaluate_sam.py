"""How well does the small SAM find the objects of scenes, and what is its risk map worth?

    python -m trainers.evaluate_sam --output outputs/sam.json
        --weights runs/emoji_sam/export --folder data/pictures --split test --scenes 200

Mean IoU of clicks and boxes (``trainers.sam_prompts``); recall and precision of the masks that
``SegmentAnything`` finds without a prompt; and how well the risk map of these masks tells codes on
objects from others, beside the same for Felzenszwalb's regions. Intervals are 95 % percentile
intervals of resampled scenes. Writes the JSON file and, beside it, a sheet (PNG) of the first
scenes: the picture, and for each segmenter its masks and the risk map of these.
"""

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from csd_policy.metrics import bootstrap_interval, bootstrap_ratio
from csd_policy.provenance import device_name, package_version, weights_hash
from csd_policy.results import write_atomic, write_json
from csd_policy.risk import SegmentationRisk
from csd_policy.risk.sam import SegmentAnything
from csd_policy.risk.segmenters import Felzenszwalb, Masks, Segmenter
from csd_policy.risk.small_sam import FOLDER
from csd_policy.study.association import associate
from trainers.sam_losses import intersection_over_union
from trainers.sam_prompts import BOXES, CLICKS, object_masks, prompts_of
from trainers.sam_sheet import GRID, contact_sheet
from trainers.scenes import Scene, SceneGenerator

LEVELS = (0.5, 0.75)  # IoU from which an object counts as found
GROUPS: dict[str, Callable[[Scene], bool]] = {
    "all": lambda scene: True,
    "plain": lambda scene: scene.kind == "plain",
    "photo": lambda scene: scene.kind == "photo",
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What a segmenter found in one scene.

    ``matched`` ``[objects]``, see ``match``; ``masks``, how many there are; ``risk`` and
    ``covered`` ``[N]``: the risk of each code, and the share of its place that lies on objects.
    """

    matched: np.ndarray
    masks: int
    risk: np.ndarray
    covered: np.ndarray


def match(found: Masks, truth: Masks) -> np.ndarray:
    """IoU of each true mask with the mask found for it, 0 without one: ``[objects]``.

    Pairs are taken from the best one down, each mask once, so that a second mask of an object is
    one too many.
    """
    best = np.zeros(len(truth))
    pairs = torch.from_numpy(found)[:, None], torch.from_numpy(truth)[None]
    iou = intersection_over_union(*pairs).numpy().copy()
    for _ in range(min(iou.shape)):
        i, j = np.unravel_index(iou.argmax(), iou.shape)
        best[j] = max(0, iou[i, j])
        iou[i], iou[:, j] = -1, -1
    return best


def examine(segmenter: Segmenter, scene: Scene) -> Found:
    """Masks found in a scene without a prompt, against its objects."""
    masks = segmenter.segment(scene.image)
    share = F.adaptive_avg_pool2d(torch.from_numpy(scene.mask).float()[None], GRID)
    risk = SegmentationRisk().of_masks(masks, GRID)
    matched = match(masks, object_masks(scene))
    return Found(matched, len(masks), risk.flatten().numpy(), share.flatten().numpy())


@torch.inference_mode()
def prompted(predictor: Any, scene: Scene) -> dict[str, list[float]]:
    """IoU of masks by prompt, one value a prompt.

    ``click`` is the mask of highest predicted quality, ``click_best`` the best of the three.

    Args:
        predictor: a ``segment_anything.SamPredictor``.
        scene: which is not among those of the training.
    """
    batch, size, resize = prompts_of(scene), scene.image.shape[:2], predictor.transform
    predictor.set_image(scene.image)
    points = resize.apply_coords_torch(batch["points"][:CLICKS, None], size)
    three, quality, _ = predictor.predict_torch(points, torch.ones(CLICKS, 1))
    boxes = resize.apply_boxes_torch(batch["boxes"], size)
    boxed, _, _ = predictor.predict_torch(None, None, boxes=boxes, multimask_output=False)
    iou = intersection_over_union(three, batch["masks"][:CLICKS, None])
    chosen = iou.gather(1, quality.argmax(1, keepdim=True))[:, 0]
    box = intersection_over_union(boxed[:, 0], batch["masks"][-BOXES:])
    return {"click": chosen.tolist(), "click_best": iou.amax(1).tolist(), "box": box.tolist()}


def summarise(found: Sequence[Found]) -> dict[str, Any]:
    """Recall, precision and AUROC of the risk map over scenes, with intervals."""
    objects = [[float(len(f.matched))] for f in found]
    masks = [[float(f.masks)] for f in found]
    hits = {level: [[float((f.matched >= level).sum())] for f in found] for level in LEVELS}
    report = {f"recall_{k:g}": bootstrap_ratio(v, objects)._asdict() for k, v in hits.items()}
    if sum(m[0] for m in masks):
        low = LEVELS[0]
        report[f"precision_{low:g}"] = bootstrap_ratio(hits[low], masks)._asdict()
    risk, covered = (np.concatenate([getattr(f, k) for f in found]) for k in ("risk", "covered"))
    scene = np.arange(len(found)).repeat(len(found[0].risk))
    truth = covered.astype(float)
    auroc = associate(risk.astype(float), truth, truth > 0.5, scene).auroc
    return report | {"risk_auroc": auroc._asdict(), "masks": sum(m[0] for m in masks)}


def by_group(scenes: Sequence[Scene], report: Callable[[list[int]], Any]) -> dict[str, Any]:
    """``report`` of the numbers of the scenes in each group that has any."""
    members = {k: [i for i, s in enumerate(scenes) if belongs(s)] for k, belongs in GROUPS.items()}
    return {name: {"scenes": len(m)} | report(m) for name, m in members.items() if m}


def evaluate(
    sam: SegmentAnything, segmenters: Mapping[str, Segmenter], scenes: Sequence[Scene]
) -> dict[str, Any]:
    """The report's parts ``prompts``, ``found`` and ``seconds_per_picture``.

    Args:
        sam: the network under test.
        segmenters: by name, those whose masks without a prompt are judged.
        scenes: at least one.
    """
    ious = [prompted(sam.predictor, scene) for scene in tqdm(scenes, desc="prompts")]

    def intervals(members: list[int]) -> dict[str, Any]:
        values = {k: [ious[i][k] for i in members] for k in ious[0]}
        return {k: bootstrap_interval(v)._asdict() for k, v in values.items()}

    found, seconds = {}, {}
    for name, segmenter in segmenters.items():
        begin = time.perf_counter()
        each = [examine(segmenter, scene) for scene in tqdm(scenes, desc=name)]
        seconds[name] = round((time.perf_counter() - begin) / len(scenes), 4)
        found[name] = by_group(scenes, lambda members, e=each: summarise([e[i] for i in members]))
    prompts = by_group(scenes, intervals)
    return {"prompts": prompts, "found": found, "seconds_per_picture": seconds}


def main(
    output: str,
    weights: str | None = None,
    folder: str = "data/pictures",
    split: str = "test",
    scenes: int = 200,
) -> None:
    """Measure a small SAM on scenes.

    Args:
        output: JSON file to write; the sheet has the same name with ``.png``.
        weights: folder with config.json and model.safetensors; default is the shipped one.
        folder: pictures that the scenes are made of.
        split: of the scenes, train, validation or test.
        scenes: how many, from the first on, 1 or more.
    """
    if scenes < 1:
        raise ValueError(f"scenes is {scenes}, expected 1 or more")
    generate = SceneGenerator(folder, split)
    sam = SegmentAnything(weights)
    segmenters = {"SegmentAnything": sam, "Felzenszwalb": Felzenszwalb()}
    for segmenter in segmenters.values():
        segmenter.load()
    chosen = [generate(i) for i in range(scenes)]
    report = {
        "weights": weights or "shipped",
        "weights_hash": weights_hash(weights or str(FOLDER)),
        "split": split,
        "scenes": scenes,
        "settings": sam.settings(),
        "csd_policy": package_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device_name": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
    } | evaluate(sam, segmenters, chosen)
    path = Path(output)
    write_json(path, report)
    sheet = contact_sheet([scene.image for scene in chosen[:8]], segmenters)
    write_atomic(path.with_suffix(".png"), lambda partial: sheet.save(partial, format="png"))
    for name, groups in report["found"].items():
        logger.info("%s: %s", name, groups["all"])


if __name__ == "__main__":
    from jsonargparse import auto_cli

    logging.basicConfig(level=logging.INFO)
    auto_cli(main, as_positional=False)
