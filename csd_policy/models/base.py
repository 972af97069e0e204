"""What the loop needs of a model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from csd_policy.types import SamplingDefaults

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageTokenModel(ABC):
    """An autoregressive model of image codes, as the loop sees it.

    An image is a row of *slots* 0, 1, ...; slot -1 is the last prompt token. A slot holds a code
    (an id of the codebook, in [0, V)) or a *forced* token such as a row end, which the model itself
    knows. ``code_of_slot`` says which: it is the table of forced slots.

    Attributes:
        name: what ``load_model`` was given, for records.
        grid: (rows, columns) of codes; N = rows * columns.
        num_codes: V.
        codebook: code vectors ``[V, C]``, or None if there are none.
        code_of_slot: int64 ``[S]`` on the model's device: the slot's code number in [0, N), or -1
            if its token is forced. S = N plus the number of forced slots.
        dtype: of the hidden states; laws are computed in it, but at least in fp32.
        defaults: sampling settings of the model's own release.
        options: what ``load_model`` was given beside the name, as plain data, for records.
        example_prompts: a few prompts that the model can draw.
    """

    name: str
    grid: tuple[int, int]
    num_codes: int
    codebook: Tensor | None
    code_of_slot: Tensor
    dtype: torch.dtype = torch.float32
    defaults: SamplingDefaults = SamplingDefaults()
    options: Mapping[str, Any] = {}
    example_prompts: Sequence[str] = ()

    @property
    def device(self) -> torch.device:
        """Where the loop runs."""
        return self.code_of_slot.device

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise ValueError if the model cannot read a prompt; called before any work."""

    def check_pictures(self) -> None:
        """Raise ValueError if ``decode`` lacks its weights; called before any work."""

    def check_codes(self, tokens: Tensor) -> None:
        """Raise ValueError if ``tokens`` holds anything but codebook ids."""
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.num_codes:
            raise ValueError(f"codes are in [{low}, {high}], expected [0, {self.num_codes})")

    @abstractmethod
    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> Any:
        """Read the prompts up to, but not including, their last token; allocate the cache.

        Args:
            prompts: B texts.
            guided: keep unconditional rows too; every forward pass then has 2B rows.
            window: largest number of slots that a forward pass will have.

        Returns:
            the state that ``embed`` and ``forward`` take; it holds the cache.
        """

    @abstractmethod
    def embed(self, state: Any, codes: Tensor, slots: Tensor) -> Tensor:
        """Input embeddings ``[B, W, D]`` of ``codes`` in ``slots``, int64 ``[B, W]`` both.

        Forced slots and slot -1 ignore their code.
        """

    @abstractmethod
    def forward(self, state: Any, embeddings: Tensor, slots: Tensor) -> Tensor:
        """Hidden states ``[B or 2B, W, D]`` (conditional rows first), each of the slot's successor.

        Writes the window into the cache at ``slots`` (each row's own places) and attends to all
        earlier slots. Slots at or after the first one of a later call are overwritten before they
        are read.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the image codes alone, ``[..., V]``, from ``[..., D]``."""

    def encode(self, pictures: "Sequence[Image]") -> Tensor:
        """Codebook ids of pictures of the model's size, int64 ``[B, N]`` on the model's device.

        Raises:
            ValueError: the adapter has no encoder, or a picture another size.
        """
        raise ValueError(
            f"{self.name} cannot encode pictures: {type(self).__name__} has no encoder"
        )

    @abstractmethod
    def decode(self, tokens: Tensor) -> "list[Image]":
        """Pictures from codebook ids, int64 ``[B, N]``."""
