"""A table of the perceptual distance between codebook entries, for use inside policies."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from csd_policy.results import write_atomic

if TYPE_CHECKING:
    from csd_policy.models.base import ImageTokenModel

FORMAT = "csd_policy.codebook_table.1"
BLOCK = 1024  # codes whose distances to all others are held at once


@dataclass(frozen=True)
class CodebookTable:
    """How far two codes of a codebook are apart to the eye, whatever the picture around them.

    Each code has a vector, and the squared Euclidean distance of two approximates the mean LPIPS
    (arXiv 1801.03924), around the place, of two pictures that differ in having the one or the other
    code there. ``csd-policy study codebook`` fits it.

    Args:
        vectors: fp32 ``[V, r]``; a file holds them in fp16.
        model: name of the model that it was fitted for, for records.
        checksum: ``codebook_checksum`` of that model.
        net: trunk of the LPIPS, alex or vgg.
        agreement: Spearman's correlation with LPIPS on held-out pairs, in [-1, 1].
        baseline: that of the Euclidean distance of the codebook's own vectors.
    """

    vectors: Tensor
    model: str
    checksum: str
    net: str
    agreement: float
    baseline: float

    @property
    def rank(self) -> int:
        """Numbers per code."""
        return self.vectors.shape[1]

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """LPIPS to expect of codes ``one`` and ``other``, int64 of any shape: fp32, 0 or more."""
        return (self.vectors[one] - self.vectors[other]).square().sum(-1)

    def neighbours(self, k: int) -> Tensor:
        """The ``k`` nearest other codes of each, nearest first, int64 ``[V, k]``.

        Raises:
            ValueError: ``k`` is not in [0, V - 1].
        """
        if not 0 <= k < len(self.vectors):
            raise ValueError(f"k is {k}, expected 0 to {len(self.vectors) - 1}")
        return nearest_rows(self.vectors, k)

    def check(self, model: "ImageTokenModel") -> None:
        """Raise ValueError unless the table was fitted for the codebook of ``model``."""
        if model.codebook is None:
            raise ValueError(f"model {model.name} has no codebook, expected that of {self.model}")
        if (found := codebook_checksum(model.codebook)) != self.checksum:
            raise ValueError(
                f"the table is of the codebook of {self.model}, {self.checksum[:12]}, but that of "
                f"model {model.name} is {found[:12]}, expected a table of `csd-policy study "
                "codebook` for it"
            )
        if len(self.vectors) != model.num_codes:
            raise ValueError(
                f"the table has {len(self.vectors)} codes, expected {model.num_codes} of model "
                f"{model.name}"
            )

    def to(self, device: torch.device) -> "CodebookTable":
        """The same with its vectors on ``device``."""
        return CodebookTable(**vars(self) | {"vectors": self.vectors.to(device)})

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all; numbers are rounded to fp16."""
        facts = {name: value for name, value in vars(self).items() if name != "vectors"}
        metadata = {"format": FORMAT, "table": json.dumps(facts)}
        tensors = {"vectors": self.vectors.half().cpu().contiguous()}
        write_atomic(Path(path), lambda partial: save_file(tensors, str(partial), metadata))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What ``save`` wrote.

        Raises:
            ValueError: the file is missing, broken, or holds something else.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    found = metadata.get("format")
                    raise ValueError(f"its format is {found!r}, expected {FORMAT!r}")
                facts, vectors = json.loads(metadata["table"]), file.get_tensor("vectors").float()
            if vectors.ndim != 2 or not vectors.isfinite().all():
                raise ValueError(
                    f"vectors are {list(vectors.shape)} or not finite, expected finite [V, r]"
                )
            return cls(vectors=vectors, **facts)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is no table of `csd-policy study codebook`: {error}"
            ) from error


def codebook_checksum(codebook: Tensor) -> str:
    """Hexadecimal SHA-256 of the fp32 bytes of ``codebook``, ``[V, C]``."""
    numbers = codebook.detach().float().cpu().contiguous().numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def table_of(source: str, model: "ImageTokenModel") -> CodebookTable:
    """The table of the file ``source``, on the device of ``model``.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another codebook.
    """
    if not Path(source).is_file():
        raise ValueError(f"table is {source!r}, expected a file of `csd-policy study codebook`")
    table = CodebookTable.load(source)
    table.check(model)
    return table.to(model.device)


def nearest_rows(vectors: Tensor, k: int) -> Tensor:
    """The ``k`` nearest other rows of each, nearest first, int64 ``[V, k]``; ``[V, C]`` fp32."""
    rows = []
    for i, part in enumerate(vectors.split(BLOCK)):
        distance = torch.cdist(part, vectors)
        own = BLOCK * i + torch.arange(len(part), device=vectors.device)
        distance.scatter_(1, own[:, None], -1.0)  # the row itself comes first
        order = distance.sort(dim=-1, stable=True).indices
        rows.append(order[:, 1 : k + 1].contiguous())
    return torch.cat(rows)
