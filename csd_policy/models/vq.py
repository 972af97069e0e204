"""The picture tokenizer of emoji-scenes: a small VQ autoencoder with l2-normalised codes.

16x16 tokens of 6x6 pixels, 1024 codes of dimension 16 (van den Oord et al. 2017, arXiv 1711.00937;
normalised codes after Yu et al. 2022, arXiv 2110.04627). Training lives in ``trainers.vq``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class VQConfig:
    """Sizes of the tokenizer; ``image_size`` is the picture's side in pixels."""

    image_size: int = 96
    patch_size: int = 6
    num_codes: int = 1024
    code_dim: int = 16
    width: int = 192
    encoder_blocks: int = 3
    decoder_blocks: int = 6
    pixel_width: int = 16

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )

    @property
    def side(self) -> int:
        """Tokens per row and per column."""
        return self.image_size // self.patch_size


class ResidualBlock(nn.Module):
    """x + conv1x1(silu(conv3x3(norm(x)))) on ``[B, width, side, side]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.out(F.silu(self.mix(self.norm(x))))
        return x + change


class VQAutoencoder(nn.Module):
    """Pictures to codebook ids and back. Pictures are float in [-1, 1], ``[B, 3, size, size]``."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        c, patch_dim = config, 3 * config.patch_size**2
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(c.patch_size),
            nn.Conv2d(patch_dim, c.width, 3, padding=1),
            *(ResidualBlock(c.width) for _ in range(c.encoder_blocks)),
            nn.GroupNorm(8, c.width),
            nn.Conv2d(c.width, c.code_dim, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(c.code_dim, c.width, 3, padding=1),
            *(ResidualBlock(c.width) for _ in range(c.decoder_blocks)),
            nn.GroupNorm(8, c.width),
            nn.Conv2d(c.width, c.pixel_width * c.patch_size**2, 1),
            nn.PixelShuffle(c.patch_size),
            nn.SiLU(),
            nn.Conv2d(c.pixel_width, c.pixel_width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(c.pixel_width, 3, 3, padding=1),
        )
        self.codebook: Tensor
        codebook = F.normalize(torch.randn(c.num_codes, c.code_dim), dim=1)
        self.register_buffer("codebook", codebook)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """The network in ``vq.safetensors`` and ``vq_config.json``: fp32, in evaluation mode."""
        model = cls(VQConfig(**json.loads((folder / "vq_config.json").read_text())))
        weights = load_file(folder / "vq.safetensors")
        model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        return model.eval().requires_grad_(False)

    def latents(self, images: Tensor) -> Tensor:
        """Unit vectors before quantisation, ``[B, code_dim, side, side]``."""
        return F.normalize(self.encoder(images), dim=1)

    def nearest(self, latents: Tensor) -> Tensor:
        """Ids of the nearest codes, int64 ``[B, side, side]`` in [0, num_codes)."""
        return torch.einsum("bdhw,kd->bhwk", latents, self.codebook).argmax(-1)

    def encode(self, images: Tensor) -> Tensor:
        """Codebook ids of pictures in raster order, int64 ``[B, side * side]``."""
        return self.nearest(self.latents(images)).flatten(1)

    def decode(self, ids: Tensor) -> Tensor:
        """Pictures in [-1, 1], ``[B, 3, size, size]``, from ids ``[B, side * side]``."""
        side = self.config.side
        codes = self.codebook[ids].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        return self.pixels(codes)

    def pixels(self, codes: Tensor) -> Tensor:
        """Pictures in [-1, 1] from code vectors, ``[B, code_dim, side, side]``."""
        return torch.tanh(self.decoder(codes))
