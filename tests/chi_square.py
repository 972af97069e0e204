"""Chi-square tests of draws against a law that is known."""

import math

import torch
from scipy.stats import chi2  # type: ignore[import-untyped]
from torch import Tensor


def log10_p(found: Tensor, expected: Tensor) -> float:
    """The p-value of counts, as log10. Cells that are expected fewer than 5 times are one cell."""
    cells = torch.where(expected < 5, 0, torch.arange(1, len(expected) + 1))
    found, expected = (
        torch.zeros(len(expected) + 1).double().index_add(0, cells, x.double())
        for x in (found, expected)
    )
    if expected[0] < 5:  # too few even together: they join the rarest of the others
        rarest = 1 + int(expected[1:].where(expected[1:] > 0, torch.inf).argmin())
        for x in (found, expected):
            x[rarest] += x[0]
            x[0] = 0.0
    found, expected = found[expected > 0], expected[expected > 0]
    assert len(expected) > 1 and abs(float(found.sum() - expected.sum())) < 1e-3 * found.sum()
    statistic = float(((found - expected) ** 2 / expected).sum())
    return float(chi2.logsf(statistic, len(expected) - 1)) / math.log(10)


def log10_p_of_codes(codes: Tensor, law: Tensor, groups: int) -> float:
    """The p-value of codes ``[R, 3]`` under their joint law ``[V, V, V]``, as log10.

    Codes that leave the same remainder by ``groups`` share a cell. A draw outside the support of
    the law fails at once.
    """
    assert (law[tuple(codes.T)] > 0).all()
    cell = torch.arange(len(law)) % groups
    cells = (cell[:, None, None] * groups + cell[:, None]) * groups + cell
    expected = torch.zeros(groups**3).double().index_add(0, cells.flatten(), law.double().flatten())
    found = torch.bincount(cells[tuple(codes.T)], minlength=groups**3)
    return log10_p(found, expected * len(codes))
