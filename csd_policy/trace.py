"""What happened at each code of a picture."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ACCEPTED, RESAMPLED, BONUS = 0, 1, 2  # how a token was committed
HOW = ("accepted", "resampled", "bonus")

TRACE_FIELDS = {
    "pass_number": torch.int32,  # the row's pass, from 1, that committed the token
    "how": torch.int8,  # index into HOW
    "draft": torch.int32,  # the code that was verified (-1: bonus, there was none)
    "b": torch.float32,  # acceptance probability of the draft (NaN: bonus)
    "ratio": torch.float32,  # q/p of the draft (NaN: bonus)
    "uniform": torch.float32,  # the number that b was compared with (NaN: bonus)
    "entropy": torch.float32,  # of q, nats
    "tv": torch.float32,  # of p and q (NaN: bonus)
    "spent_tv": torch.float32,  # TV of the committed token's law and q
    "risk": torch.float32,  # what the policy's risk map said (NaN: it has none)
}


@dataclass(frozen=True)
class Trace:
    """What happened at each code of each image; every field is a tensor ``[B, N]``.

    See ``TRACE_FIELDS`` for dtypes and meanings. Forced tokens do not appear.
    """

    pass_number: Tensor
    how: Tensor
    draft: Tensor
    b: Tensor
    ratio: Tensor
    uniform: Tensor
    entropy: Tensor
    tv: Tensor
    spent_tv: Tensor
    risk: Tensor

    @property
    def relaxed(self) -> Tensor:
        """Bool ``[B, N]``: accepted where the exact rule, with the same number, would reject."""
        return (self.how == ACCEPTED) & (self.uniform >= self.ratio)

    def row(self, i: int) -> "Trace":
        """The trace of image ``i`` alone, fields ``[1, N]``."""
        return Trace(**{name: getattr(self, name)[i : i + 1] for name in TRACE_FIELDS})

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        save_file({name: getattr(self, name).contiguous() for name in TRACE_FIELDS}, str(path))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what ``save`` wrote; ValueError if a field is missing or of another dtype."""
        from safetensors.torch import load_file

        data = load_file(str(path))
        for name, dtype in TRACE_FIELDS.items():
            if name not in data or data[name].dtype != dtype:
                found = data[name].dtype if name in data else "missing"
                raise ValueError(f"{path}: trace field {name!r} is {found}, expected {dtype}")
        return cls(**{name: data[name] for name in TRACE_FIELDS})
