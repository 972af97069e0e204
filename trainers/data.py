"""Scenes as batches: the Lightning data modules of the tokenizer and of the AR prior."""

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from tqdm import tqdm

from csd_policy.models.vq import VQAutoencoder
from trainers.prior import build_tokenizer
from trainers.scenes import SCENES_VERSION, Scene, SceneGenerator


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
        dataset = SceneDataset(self.train_scenes, start, count, pixels_of)
        return DataLoader(dataset, self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        dataset = SceneDataset(self.validation, 0, self.validation_scenes, pixels_of)
        return DataLoader(dataset, self.batch_size)


class EncodedScenes(L.LightningDataModule):
    """Captions and image codes for the prior, encoded once and kept on disk in shards.

    A batch is ``(ids, targets)``, int64 ``[B, T]`` each: ``<bos> words <boi> codes``, padded at the
    right; ``targets`` is the next token where that is an image code, else -100. The rows of an
    epoch are shuffled by the epoch's number. Needs ``reload_dataloaders_every_n_epochs=1``.

    Args:
        folder: pictures, see ``trainers.pictures``.
        vq_folder: holds ``vq.safetensors`` and ``vq_config.json``.
        cache: folder for the shards; a sub-folder per tokenizer, named by the weights' hash.
        train_scenes, validation_scenes: how many scenes to encode.
        batches_per_epoch: checkpoints and validation happen once an epoch.
    """

    SHARD = 2048

    def __init__(
        self,
        folder: str = "data/pictures",
        vq_folder: str = "csd_policy/models/weights/emoji-scenes",
        cache: str = "data/codes",
        train_scenes: int = 81_920,
        validation_scenes: int = 1024,
        batch_size: int = 32,
        batches_per_epoch: int = 200,
    ) -> None:
        super().__init__()
        self.folder, self.vq_folder, self.cache = folder, Path(vq_folder), Path(cache)
        self.counts = {"train": train_scenes, "validation": validation_scenes}
        self.batch_size, self.batches_per_epoch = batch_size, batches_per_epoch

    def prepare_data(self) -> None:
        """Encode the shards that are missing."""
        missing = [
            (split, i)
            for split, count in self.counts.items()
            for i in range(-(-count // self.SHARD))
            if not self._shard(split, i).exists()
        ]
        if not missing:
            return
        vq = VQAutoencoder.from_folder(self.vq_folder)
        encode = torch.compile(vq.encode)
        generators = {split: SceneGenerator(self.folder, split) for split in self.counts}
        for split, i in tqdm(missing, desc="encoding scenes"):
            self._encode_shard(split, i, generators[split], encode)

    def _shard(self, split: str, i: int) -> Path:
        return self.cache / self._digest / f"{split}_{i:04d}.npz"

    @cached_property
    def _digest(self) -> str:
        """Of everything that the codes and captions depend on."""
        digest = hashlib.sha256((self.vq_folder / "vq.safetensors").read_bytes())
        digest.update(f"scenes {SCENES_VERSION}".encode())
        for path in sorted(Path(self.folder).rglob("*.png")):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
        return digest.hexdigest()[:12]

    @torch.inference_mode()
    @torch.autocast("cpu", torch.bfloat16)
    def _encode_shard(
        self, split: str, i: int, generator: SceneGenerator, encode: Callable[[Tensor], Tensor]
    ) -> None:
        codes, captions = [], []
        for start in range(i * self.SHARD, (i + 1) * self.SHARD, 64):
            batch = [generator(j) for j in range(start, start + 64)]
            captions += [scene.caption for scene in batch]
            codes.append(encode(torch.stack([to_pixels(scene.image) for scene in batch])))
        path = self._shard(split, i)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            array = torch.cat(codes).to(torch.int16).numpy()
            np.savez(file, codes=array, captions=np.array(captions))
        partial.replace(path)

    def setup(self, stage: str) -> None:
        self.rows = {split: self._load(split) for split in self.counts}

    def _load(self, split: str) -> TensorDataset:
        tokenizer = build_tokenizer()
        count = self.counts[split]
        shards = [np.load(self._shard(split, i)) for i in range(-(-count // self.SHARD))]
        codes = np.concatenate([shard["codes"] for shard in shards])[:count]
        captions = np.concatenate([shard["captions"] for shard in shards])[:count]
        batch = tokenizer(captions.tolist(), padding=True, return_tensors="np")
        first = tokenizer.convert_tokens_to_ids("<image_0000>")
        lengths = batch["attention_mask"].sum(1, keepdims=True)
        n, width = len(codes), batch["input_ids"].shape[1]
        ids = np.full((n, width + codes.shape[1]), tokenizer.pad_token_id, dtype=np.int64)
        ids[:, :width] = batch["input_ids"]
        np.put_along_axis(ids, lengths + np.arange(codes.shape[1]), codes + first, axis=1)
        targets = np.where(ids[:, 1:] >= first, ids[:, 1:], -100)
        return TensorDataset(torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets))

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        rows = self.rows["train"]
        per_epoch = self.batches_per_epoch * self.batch_size
        passes, first = divmod(self.trainer.current_epoch * per_epoch, len(rows))
        order = np.concatenate(
            [
                np.random.default_rng(passes + k).permutation(len(rows))
                for k in range(2 + per_epoch // len(rows))
            ]
        )
        subset = Subset(rows, order[first : first + per_epoch].tolist())
        return DataLoader(subset, self.batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows["validation"], self.batch_size, drop_last=True)
