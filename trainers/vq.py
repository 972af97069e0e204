"""Training of the picture tokenizer: reconstruction loss, codebook by moving averages."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from csd_policy.models.vq import VQAutoencoder, VQConfig
from trainers.schedules import warmup_then_linear


def gradient_l1(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of horizontal and vertical pixel differences."""
    return (a.diff(dim=-1) - b.diff(dim=-1)).abs().mean() + (
        a.diff(dim=-2) - b.diff(dim=-2)
    ).abs().mean()


class VQTraining(L.LightningModule):
    """VQ autoencoder with an EMA codebook and restart of dead codes.

    Args:
        learning_rate: peak of AdamW's rate; warm-up, then linear to zero at ``max_steps``.
        commitment: weight of the squared distance between latents and their codes.
        ema_decay: of code counts and sums (van den Oord et al. 2017, appendix A.1).
        dead_below: codes with fewer uses per batch (moving average) restart at a random latent.
        pixel_weights: of the absolute and the squared error, and of the error of differences.
        decoder_only: leave encoder and codebook, and with them all codes, as they are.
        compile: compile the loss with ``torch.compile`` (several times faster on CPU).
        init_from: safetensors file of a trained tokenizer to start from.
        export_to: folder that receives ``vq.safetensors`` and ``vq_config.json`` at the end.
    """

    def __init__(
        self,
        learning_rate: float = 1.5e-3,
        commitment: float = 0.1,
        ema_decay: float = 0.97,
        dead_below: float = 0.1,
        pixel_weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
        decoder_only: bool = False,
        compile: bool = True,
        init_from: str | None = None,
        export_to: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.commitment = learning_rate, commitment
        self.ema_decay, self.dead_below, self.export_to = ema_decay, dead_below, export_to
        self.pixel_weights, self.decoder_only = pixel_weights, decoder_only
        self.model = VQAutoencoder(VQConfig()).to(memory_format=torch.channels_last)
        self.model.encoder.requires_grad_(not decoder_only)
        if init_from is not None:
            self.model.load_state_dict(load_file(init_from))
        self.count: Tensor
        self.total: Tensor
        self.register_buffer("count", torch.ones(self.model.config.num_codes))
        self.register_buffer("total", self.model.codebook.clone())
        self._losses = torch.compile(self.losses) if compile else self.losses

    def losses(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, latents ``[B, D, s, s]`` and ids ``[B, s, s]`` of pictures in [-1, 1]."""
        z = self.model.latents(images)
        ids = self.model.nearest(z)
        codes = self.model.codebook[ids].permute(0, 3, 1, 2)
        out = self.model.pixels(z + (codes - z).detach()).float()
        commit = F.mse_loss(z.float(), codes)
        terms = F.l1_loss(out, images), F.mse_loss(out, images), gradient_l1(out, images)
        reconstruction = sum(w * term for w, term in zip(self.pixel_weights, terms, strict=True))
        return reconstruction + self.commitment * commit, z, ids

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss, z, ids = self._losses(batch.contiguous(memory_format=torch.channels_last))
        self.log("train/loss", loss, prog_bar=True)
        return {"loss": loss, "latents": z.detach(), "ids": ids}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Move the codebook; after the optimiser's step, since backward may read the old one."""
        if self.decoder_only:
            return
        z = outputs["latents"].permute(0, 2, 3, 1).reshape(-1, self.total.shape[1]).float()
        ids = outputs["ids"].flatten()
        used = torch.zeros_like(self.count).index_add_(0, ids, torch.ones_like(ids, dtype=z.dtype))
        self.count.lerp_(used, 1 - self.ema_decay)
        self.total.lerp_(torch.zeros_like(self.total).index_add_(0, ids, z), 1 - self.ema_decay)
        dead = self.count < self.dead_below
        generator = torch.Generator().manual_seed(self.global_step)  # the same after a resume
        fresh = z[torch.randint(len(z), dead.shape, generator=generator)]
        self.total[dead], self.count[dead] = fresh[dead], 1.0
        self.model.codebook.copy_(F.normalize(self.total, dim=1))

    def on_validation_epoch_start(self) -> None:
        self._used = torch.zeros(self.model.config.num_codes, dtype=torch.bool)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        ids = self.model.encode(batch)
        error = (self.model.decode(ids).float().clamp(-1, 1) - batch).square().mean((1, 2, 3))
        self._used[ids.flatten().cpu()] = True
        self.log("validation/psnr_db", (10 * torch.log10(4 / error)).mean(), prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log("validation/codes_used", self._used.sum().float(), prog_bar=True)

    def on_train_end(self) -> None:
        if self.export_to is not None:
            export_vq(self.model, Path(self.export_to))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, self.learning_rate, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_linear(100, steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def export_vq(model: VQAutoencoder, folder: Path) -> None:
    """Write ``vq.safetensors`` (fp16) and ``vq_config.json`` as the package ships them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "vq.safetensors")
    (folder / "vq_config.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n")
