"""Scenes as batches: the Lightning data modules of the tokenizer and of the AR prior."""

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainers.scenes import Scene, SceneGenerator


def to_pixels(image: np.ndarray) -> Tensor:
    """A uint8 picture ``[H, W, 3]`` as float in [-1, 1], ``[3, H, W]``."""
    return torch.from_numpy(image).permute(2, 0, 1).float() / 127.5 - 1


class SceneDataset(Dataset[Any]):
    """``count`` scenes from number ``start`` on, each passed through ``transform``."""

    def __init__(
        self,
        generator: SceneGenerator,
        start: int,
        count: int,
        transform: Callable[[Scene], Any],
    ) -> None:
        self.generator, self.start, self.count, self.transform = generator, start, count, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.count:
            raise IndexError(i)
        return self.transform(self.generator(self.start + i))


def pixels_of(scene: Scene) -> Tensor:
    """The picture of a scene, float in [-1, 1], ``[3, 96, 96]``."""
    return to_pixels(scene.image)


class ScenePixels(L.LightningDataModule):
    """Pictures of scenes, new ones in every epoch.

    Epoch ``e`` holds scenes ``e * n`` to ``(e + 1) * n - 1`` of the training split, with n =
    ``batches_per_epoch * batch_size``, so that a run resumed at an epoch sees what an unbroken one
    does. Needs ``reload_dataloaders_every_n_epochs=1``.
    """

    def __init__(
        self,
        folder: str = "data/pictures",
        batch_size: int = 32,
        batches_per_epoch: int = 200,
        validation_scenes: int = 512,
    ) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size
        self.batches_per_epoch, self.validation_scenes = batches_per_epoch, validation_scenes

    def setup(self, stage: str) -> None:
        self.train_scenes = SceneGenerator(self.folder, "train")
        self.validation = SceneGenerator(self.folder, "validation")

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        count = self.batches_per_epoch * self.batch_size
        start = self.trainer.current_epoch * count
        scenes = SceneDataset(self.train_scenes, start, count, pixels_of)
        return DataLoader(scenes, self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        scenes = SceneDataset(self.validation, 0, self.validation_scenes, pixels_of)
        return DataLoader(scenes, self.batch_size)
