"""Training of the small SAM: clicks and boxes on the exact masks of emoji scenes."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from csd_policy.risk.small_sam import SmallSamConfig, build_small_sam, save_small_sam
from trainers.data import SceneDataset
from trainers.sam_losses import dice_loss, focal_loss, intersection_over_union
from trainers.sam_prompts import BOXES, CLICKS, EMPTY_CLICKS, Batch, prompts_of
from trainers.scenes import SceneGenerator
from trainers.schedules import warmup_then_linear


class ScenePrompts(L.LightningDataModule):
    """Scenes with prompts, new ones in every epoch (see ``trainers.data.ScenePixels``)."""

    def __init__(
        self,
        folder: str = "data/pictures",
        batch_size: int = 8,
        batches_per_epoch: int = 200,
        validation_scenes: int = 128,
    ) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size
        self.batches_per_epoch, self.validation_scenes = batches_per_epoch, validation_scenes

    def setup(self, stage: str) -> None:
        self.train_scenes = SceneGenerator(self.folder, "train")
        self.validation = SceneGenerator(self.folder, "validation")

    def train_dataloader(self) -> DataLoader[Batch]:
        assert self.trainer is not None
        count = self.batches_per_epoch * self.batch_size
        start = self.trainer.current_epoch * count
        dataset = SceneDataset(self.train_scenes, start, count, prompts_of)
        return DataLoader(dataset, self.batch_size)

    def val_dataloader(self) -> DataLoader[Batch]:
        dataset = SceneDataset(self.validation, 0, self.validation_scenes, prompts_of)
        return DataLoader(dataset, self.batch_size)


def decode_masks(sam: Any, image: Tensor, sparse: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """``MaskDecoder.predict_masks`` for prompts of several pictures at once.

    Args:
        image: embedding of each prompt's picture, ``[M, D, s, s]``.
        sparse, dense: embeddings of the prompts, ``[M, tokens, D]`` and ``[M, D, s, s]``.

    Returns:
        logits ``[M, 4, 4s, 4s]``, one mask and then three for an ambiguous prompt, and the quality
        of each, ``[M, 4]``.
    """
    decoder = sam.mask_decoder
    out = torch.cat([decoder.iou_token.weight, decoder.mask_tokens.weight])
    tokens = torch.cat([out.expand(len(sparse), -1, -1), sparse], dim=1)
    place = sam.prompt_encoder.get_dense_pe().expand(len(image), -1, -1, -1)
    hidden, keys = decoder.transformer(image + dense, place, tokens)
    large = decoder.output_upscaling(keys.transpose(1, 2).reshape(image.shape))
    weights = torch.stack(
        [mlp(hidden[:, 1 + i]) for i, mlp in enumerate(decoder.output_hypernetworks_mlps)], dim=1
    )
    masks = (weights @ large.flatten(2)).unflatten(2, large.shape[2:])
    return masks, decoder.iou_prediction_head(hidden[:, 0])


class SamTraining(L.LightningModule):
    """Loss of Segment Anything (Kirillov et al. 2023, arXiv 2304.02643, appendix A).

    Focal loss and dice loss, 20 to 1, of the best of three masks for a click and of the first mask
    for a box, and the squared error of the predicted IoU. Here all three masks of a click also get
    a share of the loss, for the objects of these scenes have no parts that a click could mean
    instead; and a click beside the objects has no mask, but an IoU of 0, so that automatic masks
    are those of objects.

    Args:
        learning_rate: peak of AdamW's rate; warm-up, then linear to zero at ``max_steps``.
        all_masks: weight of the mean over the three masks of a click beside the best one.
        compile: compile the networks with ``torch.compile`` (minutes at the start, then faster).
        export_to: folder that receives the trained network at the end.
    """

    def __init__(
        self,
        learning_rate: float = 1e-3,
        all_masks: float = 0.25,
        compile: bool = False,
        export_to: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.all_masks, self.export_to = learning_rate, all_masks, export_to
        self.config = SmallSamConfig()
        self.sam = build_small_sam(self.config)
        self._encode = torch.compile(self.encode) if compile else self.encode
        self._decode = torch.compile(decode_masks) if compile else decode_masks

    def encode(self, images: Tensor) -> Tensor:
        """Embedding ``[B, D, s, s]`` of pictures uint8 ``[B, 3, H, W]``."""
        side = (self.config.side, self.config.side)
        large = F.interpolate(images.float(), side, mode="bilinear")
        embedding: Tensor = self.sam.image_encoder(
            (large - self.sam.pixel_mean) / self.sam.pixel_std
        )
        return embedding

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits ``[B, prompts, 4, 96, 96]`` and quality ``[B, prompts, 4]``; points first."""
        points, boxes = batch["points"], batch["boxes"]
        scale, (count, clicks) = self.config.side / batch["image"].shape[-1], points.shape[:2]
        found = (points * scale).flatten(0, 1)[:, None]
        labels = torch.ones(found.shape[:2], device=found.device)
        encoder = self.sam.prompt_encoder
        click, empty = encoder(points=(found, labels), boxes=None, masks=None)
        box, _ = encoder(points=None, boxes=(boxes * scale).flatten(0, 1), masks=None)
        click, box = click.unflatten(0, (count, clicks)), box.unflatten(0, (count, -1))
        sparse = torch.cat([click, box], dim=1)
        prompts = sparse.shape[1]
        image = self._encode(batch["image"]).repeat_interleave(prompts, dim=0)
        dense = empty[:1].expand(len(image), -1, -1, -1)
        logits, quality = self._decode(self.sam, image, sparse.flatten(0, 1), dense)
        large = F.interpolate(logits.float(), batch["masks"].shape[-2:], mode="bilinear")
        return large.unflatten(0, (count, prompts)), quality.float().unflatten(0, (count, prompts))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The loss and its parts."""
        logits, quality = self.predict(batch)
        truth = batch["masks"][:, :, None].expand_as(logits).float()
        each = 20 * focal_loss(logits, truth) + dice_loss(logits, truth)
        iou = intersection_over_union(logits > 0, truth > 0.5)
        error = (quality - iou).square()
        three = each[:, :CLICKS, 1:]
        clicks = three.amin(-1).mean() + self.all_masks * three.mean()
        boxes = each[:, CLICKS + EMPTY_CLICKS :, 0].mean()
        judged = error[:, : CLICKS + EMPTY_CLICKS, 1:].mean(), error[:, -BOXES:, 0].mean()
        return {"loss": clicks + boxes + sum(judged), "clicks": clicks, "boxes": boxes,
                "quality": judged[0]}  # fmt: skip

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found = self.losses(batch)
        self.log_dict({f"train/{k}": v for k, v in found.items()}, prog_bar=True)
        return found["loss"]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, quality = self.predict(batch)
        iou = intersection_over_union(logits > 0, batch["masks"][:, :, None].expand_as(logits))
        three, sure = iou[:, :CLICKS, 1:], quality[:, :CLICKS, 1:]
        chosen = three.gather(-1, sure.argmax(-1, keepdim=True))
        values = {"click": chosen.mean(), "click_best": three.amax(-1).mean(),
                  "box": iou[:, -BOXES:, 0].mean()}  # fmt: skip
        self.log_dict({f"validation/iou_{k}": v for k, v in values.items()}, prog_bar=True)

    def on_train_end(self) -> None:
        if self.export_to is not None:
            save_small_sam(self.sam, self.config, Path(self.export_to))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_linear(100, steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
