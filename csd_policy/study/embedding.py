"""Vectors of codes whose squared distances fit measured costs."""

import torch
from torch import Tensor

from csd_policy.study.pairs import Pairs

LEARNING_RATE = 0.05
FLOOR = 1e-6  # LPIPS that counts as none


def fit_vectors(
    codebook: Tensor, pairs: Pairs, rank: int, steps: int, seed: int = 0, pull: float = 1.0
) -> Tensor:
    """Fit ``|x_a - x_b|^2`` to the mean cost of a and b around their place: fp32 ``[V, rank]``.

    x is a linear map of the codebook plus a residual of each code. A place of a picture shows
    errors more or less than others: each has a factor of its own, of mean 1, which the table drops.
    The loss is that of a gamma law, cost / fit + log fit, under which the fit is the mean of costs,
    and small ones count as much as large ones.

    Args:
        codebook: code vectors ``[V, C]``.
        pairs: measured ones; ``around`` is fitted.
        rank: numbers per code, 1 or more.
        steps: of Adam, each over all pairs.
        seed: of the first residuals.
        pull: weight of the mean squared residual, 0 or more; how hard codes are held to the linear
            map of the codebook.
    """
    inputs = codebook.float().cpu()
    inputs = (inputs - inputs.mean(0)) / inputs.std().clamp(min=FLOOR)
    generator = torch.Generator().manual_seed(seed)
    scale = float(pairs.around.mean()) ** 0.5
    linear = torch.randn(inputs.shape[1], rank, generator=generator) / (rank * len(inputs.T)) ** 0.5
    own = 0.1 * torch.randn(len(inputs), rank, generator=generator) / rank**0.5
    places = pairs.picture * (int(pairs.position.max()) + 1) + pairs.position
    place = places.unique(return_inverse=True)[1]
    factor = torch.zeros(int(place.max()) + 1)
    free = [value.requires_grad_() for value in (linear, own, factor)]
    optimizer = torch.optim.Adam(free, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        vectors = scale * (inputs @ linear + own)
        fitted = (vectors[pairs.first] - vectors[pairs.second]).square().sum(-1) + FLOOR
        log_fit = fitted.log() + (factor - factor.exp().mean().log())[place]
        deviance = (pairs.around.clamp(min=FLOOR).log() - log_fit).exp() + log_fit
        loss = deviance.mean() + pull * own.square().sum(-1).mean() * rank
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    vectors = (scale * (inputs @ linear + own)).detach()
    fitted = (vectors[pairs.first] - vectors[pairs.second]).square().sum(-1)
    vectors = vectors * (pairs.around.sum() / fitted.sum().clamp(min=FLOOR)).sqrt()
    centred: Tensor = vectors - vectors.mean(0)
    return centred
