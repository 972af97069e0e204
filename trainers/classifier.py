"""A small classifier of single objects: does a picture show what its caption says?

It judges the pictures of the shipped model (``trainers.evaluate_prior``). A class is an index into
``object_kinds()``.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from csd_policy.models.vq import VQAutoencoder
from trainers.data import SceneDataset, pixels_of
from trainers.scenes import SPLITS, Scene, SceneGenerator, object_kinds
from trainers.schedules import warmup_then_cosine

WEIGHTS = "classifier.safetensors"
MOST_NOISE = 0.1  # standard deviation, of pixels in [-1, 1]


class NormedBlock(nn.Module):
    """relu(x + norm(conv3x3(relu(norm(conv3x3(x)))))), with batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class Classifier(nn.Module):
    """Logits ``[B, classes]`` of pictures, float in [-1, 1], ``[B, 3, 96, 96]``."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in (width // 2, width, 2 * width, 4 * width):
            layers += [
                nn.Conv2d(before, channels, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
            if channels >= width:
                layers.append(NormedBlock(channels))
            before = channels
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, len(object_kinds()))

    def forward(self, pictures: Tensor) -> Tensor:
        features: Tensor = self.features(pictures)
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


def class_of(scene: Scene) -> int:
    """The class of a scene's first object."""
    return _classes()[scene.objects[0].name]


@lru_cache(maxsize=1)
def _classes() -> dict[str, int]:
    return {kind.name: i for i, kind in enumerate(object_kinds())}


def single_object_indices(generator: SceneGenerator) -> Iterator[int]:
    """Numbers of the scenes with one object, in order; composes no picture (some 20 us a scene)."""
    split = SPLITS[generator.split]
    for index in count():
        which, _ = generator._subject(np.random.default_rng((split, index)))
        if len(which) == 1:
            yield index


def labelled(scene: Scene) -> tuple[Tensor, int]:
    """The picture of a scene, float in [-1, 1], ``[3, 96, 96]``, and its class."""
    return pixels_of(scene), class_of(scene)


class SingleObjectScenes(L.LightningDataModule):
    """Pictures of single objects with their classes, new ones in every epoch.

    With n = ``batches_per_epoch * batch_size``, epoch ``e`` holds single-object scenes ``e * n`` to
    ``(e + 1) * n - 1`` of the training split, so that a run resumed at an epoch sees what an
    unbroken one does. Needs ``reload_dataloaders_every_n_epochs=1``.
    """

    def __init__(
        self,
        folder: str = "data/pictures",
        batch_size: int = 64,
        batches_per_epoch: int = 200,
        validation_scenes: int = 512,
    ) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size
        self.batches_per_epoch, self.validation_scenes = batches_per_epoch, validation_scenes

    def setup(self, stage: str) -> None:
        self.train_scenes = SceneGenerator(self.folder, "train")
        self.validation = SceneGenerator(self.folder, "validation")
        self._unread = single_object_indices(self.train_scenes)
        self._indices: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        n = self.batches_per_epoch * self.batch_size
        start = self.trainer.current_epoch * n
        missing = max(0, start + n - len(self._indices))
        self._indices += islice(self._unread, missing)
        return self._loader(self.train_scenes, self._indices[start : start + n])

    def val_dataloader(self) -> DataLoader[Any]:
        indices = islice(single_object_indices(self.validation), self.validation_scenes)
        return self._loader(self.validation, list(indices))

    def _loader(self, generator: SceneGenerator, indices: list[int]) -> DataLoader[Any]:
        scenes = SceneDataset(generator, 0, indices[-1] + 1, labelled)
        return DataLoader(Subset(scenes, indices), self.batch_size)


@torch.no_grad()
def reconstruct(vq: VQAutoencoder, pictures: Tensor) -> Tensor:
    """What the tokenizer leaves of pictures, float in [-1, 1], ``[B, 3, 96, 96]``."""
    return vq.decode(vq.encode(pictures)).float()


def augment(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Blur and noise of a random, mild strength per picture, ``[B, 3, 96, 96]``."""
    device = pictures.device
    blur, noise = torch.rand(2, len(pictures), 1, 1, 1, generator=generator, device=device)
    blurred = F.avg_pool2d(pictures, 3, stride=1, padding=1, count_include_pad=False)
    normal = torch.randn(pictures.shape, generator=generator, device=device)
    return pictures.lerp(blurred, blur) + MOST_NOISE * noise * normal


class ClassifierTraining(L.LightningModule):
    """Cross-entropy training of the object classifier on single-object scenes.

    Args:
        learning_rate: peak of AdamW's rate; warm-up, then cosine over ``max_steps``.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1).
        vq_folder: holds ``vq.safetensors`` and ``vq_config.json``; half of the training pictures
            pass through this tokenizer, since the pictures to be judged have its softness. None
            trains on true pictures only.
        compile: compile the loss and the tokenizer with ``torch.compile``.
        export_to: folder that receives ``classifier.safetensors`` at the end.
    """

    def __init__(
        self,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 100,
        label_smoothing: float = 0.05,
        vq_folder: str | None = None,
        compile: bool = True,
        export_to: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.label_smoothing = warmup_steps, label_smoothing
        self.export_to = export_to
        self.model = Classifier().to(memory_format=torch.channels_last)
        # A list hides the tokenizer from the optimiser and from the checkpoints.
        self._vq = [] if vq_folder is None else [VQAutoencoder.from_folder(Path(vq_folder))]
        self._losses = torch.compile(self.losses) if compile else self.losses
        self._reconstruct = torch.compile(reconstruct) if compile else reconstruct

    def on_fit_start(self) -> None:
        self._vq = [vq.to(self.device, memory_format=torch.channels_last) for vq in self._vq]

    def losses(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in nats; ``pictures`` ``[B, 3, 96, 96]``, ``labels`` int64 ``[B]``."""
        logits = self.model(pictures).float()
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        generator = torch.Generator(self.device).manual_seed(self.global_step)
        half = len(pictures) // 2
        for vq in self._vq:
            pictures = torch.cat([self._reconstruct(vq, pictures[:half]), pictures[half:]])
        pictures = augment(pictures, generator).contiguous(memory_format=torch.channels_last)
        loss: Tensor = self._losses(pictures, labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pictures, labels = batch
        self.log("validation/accuracy", self._accuracy(pictures, labels), prog_bar=True)
        for vq in self._vq:
            accuracy = self._accuracy(reconstruct(vq, pictures), labels)
            self.log("validation/accuracy_reconstructed", accuracy, prog_bar=True)

    def _accuracy(self, pictures: Tensor, labels: Tensor) -> Tensor:
        return (self.model(pictures).argmax(1) == labels).float().mean()

    def on_train_end(self) -> None:
        if self.export_to is not None:
            export_classifier(self.model, Path(self.export_to))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), self.learning_rate, weight_decay=self.weight_decay
        )
        factor = warmup_then_cosine(self.warmup_steps, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def export_classifier(model: Classifier, folder: Path) -> None:
    """Write ``classifier.safetensors`` (fp16)."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)


def load_classifier(folder: str | Path) -> Classifier:
    """The classifier in ``folder``, fp32, in evaluation mode.

    Raises:
        FileNotFoundError: the folder has no ``classifier.safetensors``.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"no classifier at {path}; train one with emoji_classifier.yaml")
    model = Classifier()
    model.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    return model.eval()
