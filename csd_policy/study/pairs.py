"""Pairs of codes at places of drawn pictures, and what one costs in the place of the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csd_policy.counterfactual import replacement_costs
from csd_policy.decoder import JacobiDecoder
from csd_policy.risk.codebook import nearest_rows
from csd_policy.study.measure import choose
from csd_policy.trace import BONUS
from csd_policy.types import DecodeResult

KINDS = ("met", "near", "any")
LEAST_CODES = 6  # of a place
NEIGHBOURS = 16  # codes nearest in the codebook, of which near ones are drawn
OWN, MET, NEAR, OTHER, NEAR_OTHER, REST = range(6)  # why a code is among those of a place


@dataclass(frozen=True)
class Pairs:
    """M pairs of codes, each at a place of a picture.

    Attributes:
        picture, position: the place, int64 ``[M]``.
        first, second: the codes, int64 ``[M]``, different ones.
        kind: int64 ``[M]``, number in ``KINDS``: decoding met both, or they are near in the
            codebook, or neither.
        whole, around: LPIPS of the two pictures, fp32 ``[M]``, see ``Costs``.
    """

    picture: Tensor
    position: Tensor
    first: Tensor
    second: Tensor
    kind: Tensor
    whole: Tensor
    around: Tensor

    def where(self, kept: Tensor) -> "Pairs":
        """The pairs of a mask, bool ``[M]``."""
        return Pairs(**{name: value[kept] for name, value in vars(self).items()})

    def to_tensors(self) -> dict[str, Tensor]:
        """Plain tensors by name, for a file."""
        return {name: value.contiguous() for name, value in vars(self).items()}

    @classmethod
    def join(cls, parts: "Sequence[Pairs | Mapping[str, Tensor]]") -> "Pairs":
        """All pairs of the parts, which may be tables of ``to_tensors``."""
        tables = [vars(part) if isinstance(part, Pairs) else part for part in parts]
        return cls(**{name: torch.cat([table[name] for table in tables]) for name in tables[0]})


def draw_pairs(
    decoder: JacobiDecoder, metric: Any, prompts: Sequence[str], pictures: Sequence[int],
    seed: int, places: int, codes: int,
) -> Pairs:  # fmt: skip
    """Draw pictures by the exact rule, put other codes at random places, and measure all pairs.

    Of each place the codes are: the picture's own, those that decoding met there (the draft,
    another draw from its law, what the exact rule puts in its stead), two that are near the own
    one in the codebook, one drawn evenly from the codebook with one near it, and more such draws.
    Every code is decoded once, with the rest of its picture, and compared with all others.

    Args:
        decoder: of the exact rule; its draft strategy makes the drafts.
        metric: spatial LPIPS.
        pictures: the number of each prompt's picture; its seed is ``seed`` plus that.
        places: places per picture at most, 1 or more; those with a draft count.
        codes: codes per place, ``LEAST_CODES`` or more.
    """
    model, seeds = decoder.model, [seed + number for number in pictures]
    result = decoder.generate(prompts, seeds, others=True)
    position = choose(result.trace.how != BONUS, seeds, places)
    assert model.codebook is not None
    near = nearest_rows(model.codebook.float(), NEIGHBOURS).cpu()
    parts = []
    for i, number in enumerate(pictures):
        generator = torch.Generator().manual_seed(seeds[i])
        for place in position[i][position[i] >= 0].tolist():
            chosen, roles = _codes_of_place(result, i, place, near, codes, generator)
            one, other = torch.triu_indices(codes, codes, 1)
            count = len(one)
            at = torch.full((count,), place)
            pair = chosen[one], chosen[other]
            tokens = result.tokens[i].expand(count, -1)
            costs = replacement_costs(model, metric, tokens, at, pair, batch_size=count)
            kind = _kind(roles[one], roles[other])
            parts.append(
                Pairs(torch.full((count,), number), at, *pair, kind, costs.whole, costs.around)
            )
    return Pairs.join(parts)


def _codes_of_place(
    result: DecodeResult, picture: int, place: int, near: Tensor, count: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Different codes for a place and why each is there, int64 ``[count]`` both."""

    def any_of(codes: Tensor) -> list[int]:
        order = torch.randperm(len(codes), generator=generator)
        found: list[int] = codes[order].tolist()
        return found

    own = int(result.tokens[picture, place])
    met = [result.trace.draft.long(), result.others["alternative"], result.others["correction"]]
    known = {own: OWN}
    for codes in met:
        known.setdefault(int(codes[picture, place]), MET)
    known.pop(-1, None)

    def add(codes: list[int], role: int, most: int) -> int:
        new = [code for code in codes if code not in known][:most]
        known.update(dict.fromkeys(new, role))
        return new[0] if new else own

    add(any_of(near[own]), NEAR, 2 if count > LEAST_CODES else 1)
    every = torch.arange(len(near))
    other = add(any_of(every), OTHER, 1)
    add(any_of(near[other]), NEAR_OTHER, 1)
    add(any_of(every), REST, max(0, count - len(known)))
    chosen, roles = list(known)[:count], list(known.values())[:count]
    return torch.tensor(chosen), torch.tensor(roles)


def _kind(one: Tensor, other: Tensor) -> Tensor:
    """Number in ``KINDS`` of pairs of roles, int64 ``[M]``."""
    met = (one <= MET) & (other <= MET)
    near = ((one == OWN) | (one == NEAR)) & (other == NEAR)
    near |= (one == OTHER) & (other == NEAR_OTHER)
    return torch.where(met, 0, torch.where(near, 1, 2))
