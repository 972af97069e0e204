"""Masks by segment-anything, from its own package or from transformers."""

import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from csd_policy.risk.mask_records import read_masks
from csd_policy.risk.segmenters import Masks, Picture, Segmenter, missing
from csd_policy.risk.small_sam import load_small_sam

PUBLISHED = {
    "points_per_side": 16,  # for pictures of few pixels; segment-anything's own is 32
    "pred_iou_thresh": 0.88,
    "stability_score_thresh": 0.95,
}
SMALL = {  # found on validation scenes, see weights/small_sam/README.md
    "points_per_side": 12,
    "pred_iou_thresh": 0.65,
    "stability_score_thresh": 0.0,
    "box_nms_thresh": 0.3,
}
MOBILE_SAM = "git+https://github.com/ChaoningZhang/MobileSAM.git"


class SegmentAnything(Segmenter):
    """Masks of ``SamAutomaticMaskGenerator`` (Kirillov et al. 2023, arXiv 2304.02643).

    Without a checkpoint the network is the package's own small one, trained on emoji scenes.
    MobileSAM (Zhang et al. 2023, arXiv 2306.14289) is ``vit_t``, by its package ``mobile_sam``.

    Args:
        checkpoint: a file of published weights, or a folder with a small SAM (what
            configs/train/emoji_sam.yaml exports); None is the shipped one.
        model_type: of a file, a key of ``sam_model_registry`` in ``segment_anything``, or
            ``vit_t`` of ``mobile_sam``.
        points_per_side: of the grid of point prompts, 1 or more; None is what suits the network.
        pred_iou_thresh: least quality that SAM itself predicts of a mask it gives; likewise.
        stability_score_thresh: least stability of a mask under another cutoff; likewise.

    Raises:
        ValueError: there is no such file, it does not hold these weights, or is no safe file.
        ModuleNotFoundError: the package of the network is not installed.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        model_type: Literal["vit_b", "vit_l", "vit_h", "vit_t"] = "vit_b",
        points_per_side: int | None = None,
        pred_iou_thresh: float | None = None,
        stability_score_thresh: float | None = None,
    ) -> None:
        if points_per_side is not None and points_per_side < 1:
            raise ValueError(f"points_per_side is {points_per_side!r}, expected 1 or more")
        self.checkpoint, self.model_type = checkpoint, model_type
        self.points_per_side = points_per_side
        self.pred_iou_thresh = pred_iou_thresh
        self.stability_score_thresh = stability_score_thresh

    def load(self) -> None:
        _ = self._generator

    def settings(self) -> dict[str, float]:
        """Arguments of the mask generator: those given, and what suits the network."""
        usual = SMALL if self._is_small() else PUBLISHED
        given = {name: getattr(self, name, None) for name in usual}
        return {name: usual[name] if value is None else value for name, value in given.items()}

    @property
    def predictor(self) -> Any:
        """A ``segment_anything.SamPredictor`` of the network, for prompts of one's own."""
        return self._generator.predictor

    @cached_property
    def _generator(self) -> Any:
        # eval comes last: MobileSAM's network keeps a table of its weights from then on
        sam = self._load().to(self.device).eval()
        return self._package().SamAutomaticMaskGenerator(sam, **self.settings())

    def _is_small(self) -> bool:
        return self.checkpoint is None or Path(self.checkpoint).is_dir()

    def _package(self) -> Any:
        name = "segment_anything"
        if self.model_type == "vit_t" and not self._is_small():
            name = "mobile_sam"
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if name == "segment_anything":
                raise missing("segment-anything", "SegmentAnything") from error
            raise ModuleNotFoundError(
                f"SegmentAnything of model_type {self.model_type!r} needs {error.name}, which is "
                f"not installed: pip install timm {MOBILE_SAM}"
            ) from error

    def _load(self) -> Any:
        if self.checkpoint is None:
            return load_small_sam()
        path = Path(self.checkpoint)
        return load_small_sam(path) if path.is_dir() else self._load_published(path)

    def _load_published(self, path: Path) -> Any:
        from csd_policy.models.published import check_names, read_weights

        sam_model_registry = self._package().sam_model_registry
        if self.model_type not in sam_model_registry:
            known = ", ".join(sam_model_registry)
            raise ValueError(f"model_type is {self.model_type!r}, expected one of {known}")
        weights = read_weights(path, re.compile("(?!)"))
        sam = sam_model_registry[self.model_type]()
        check_names(weights, sam.state_dict(), path)
        try:
            sam.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(
                f"{path} is no {self.model_type} of {self._package().__name__}: {error}"
            ) from error
        return sam

    def segment(self, picture: Picture) -> Masks:
        with torch.inference_mode():
            return read_masks(self._generator.generate(picture), picture.shape[:2])


class TransformersSam(Segmenter):
    """Masks of transformers' ``mask-generation`` pipeline (``SamModel``).

    Args:
        checkpoint: a local folder, or an id owner/name of the Hugging Face hub.
        points_per_side: of the grid of point prompts, 1 or more.
        pred_iou_thresh: least quality that SAM itself predicts of a mask it gives.
        stability_score_thresh: least stability of a mask under another cutoff.
    """

    def __init__(
        self,
        checkpoint: str = "facebook/sam-vit-base",
        points_per_side: int = 16,
        pred_iou_thresh: float = 0.88,
        stability_score_thresh: float = 0.95,
    ) -> None:
        if points_per_side < 1:
            raise ValueError(f"points_per_side is {points_per_side!r}, expected 1 or more")
        self.checkpoint, self.points_per_side = checkpoint, points_per_side
        self.pred_iou_thresh = pred_iou_thresh
        self.stability_score_thresh = stability_score_thresh

    def load(self) -> None:
        _ = self._pipeline

    @cached_property
    def _pipeline(self) -> Any:
        from transformers import SamImageProcessor, SamModel, pipeline

        try:
            loaded: Any = SamModel.from_pretrained(self.checkpoint, output_loading_info=True)
            processor = SamImageProcessor.from_pretrained(self.checkpoint)
        except OSError as error:
            raise ValueError(f"no SAM {self.checkpoint!r}: {error}") from error
        model, info = loaded
        if lacking := [n for n in info["missing_keys"] if "positional_embedding" not in n]:
            raise ValueError(f"{self.checkpoint} lacks weights of SamModel: {sorted(lacking)[:5]}")
        return pipeline(
            "mask-generation", model=model, image_processor=processor, device=self.device
        )

    def segment(self, picture: Picture) -> Masks:
        from PIL import Image

        found = self._pipeline(
            Image.fromarray(picture),
            points_per_crop=self.points_per_side,
            pred_iou_thresh=self.pred_iou_thresh,
            stability_score_thresh=self.stability_score_thresh,
        )
        masks = [np.asarray(mask, dtype=bool) for mask in found["masks"]]
        return np.stack(masks) if masks else np.zeros((0, *picture.shape[:2]), dtype=bool)
