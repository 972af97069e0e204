"""Mistakes of published code, and tests that they cannot pass.

``tests/mutants.py`` puts each of them into the source and demands that its test here fails.
The images of a test are those of fixed seeds, so that it gives the same p-value each time. Correct
code with other random numbers falls below the limit once in 10,000 tests; with the mistakes it
is below 1e-50.
"""

import math

import chi_square
import pytest
import torch

from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Gumbel, Independent, MaximalCoupling
from csd_policy.policies import AcceptancePolicy, Exact, Veto
from csd_policy.sampling import Noise
from csd_policy.testing import TableModel, image_counts, joint_law, random_table
from csd_policy.trace import ACCEPTED
from csd_policy.types import DecodeConfig

RUNS = 50_000
LIMIT = -4


def log10_p(model: TableModel, policy: AcceptancePolicy, draft: DraftStrategy) -> float:
    """Chi-square test of decoded images against the joint law: log10 of the p-value."""
    config = DecodeConfig(window=len(model.code_of_slot))
    counts, _ = image_counts(model, policy, draft, config, RUNS)
    return round(chi_square.log10_p(counts, RUNS * joint_law(model, config)), 1)


def changing() -> TableModel:
    """Laws that change much with the code before; four positions, the last is redrawn twice."""
    return TableModel(random_table(2, codes=4, size=3))


def confusable() -> TableModel:
    """Residuals with two tokens of equal mass, of which one was likely under the draft's law."""
    logits = torch.tensor([0.5, 0.44, 0.05, 0.01]).log().repeat(3, 5, 1)
    logits[0] = torch.tensor([0.94, 0.02, 0.02, 0.02]).log()
    logits[1, 1] = logits[2, 2] = torch.tensor([0.01, 0.69, 0.29, 0.01]).log()
    return TableModel(logits)


def test_rejected_drafts_are_redrawn_from_the_residual() -> None:
    """A softmax of the residual, or a batch that advances by its smallest accepted count.

    The second is wrong where a draft that was accepted is held back and kept: a draft that was
    rejected there is then redrawn from q in place of the residual.
    """
    assert log10_p(changing(), Exact(), Independent()) > LIMIT


def test_the_residual_makes_up_for_a_veto() -> None:
    """A residual that is left at q - p where the rule accepts less than the exact one."""
    assert log10_p(changing(), Veto(), Independent()) > LIMIT


def test_coupled_drafts_follow_the_law_they_are_stored_with() -> None:
    """The older p stored for a kept draft, q stored for one that was kept without a look at q.

    Or the coupling compares with the number of the acceptance: a draft that was kept at b has then
    a number below b, and verification accepts it too often.
    """
    assert log10_p(changing(), Exact(), MaximalCoupling()) > LIMIT


def test_the_residual_has_noise_of_its_own() -> None:
    """A residual drawn with the noise of the draft, which the rejection has told much about."""
    assert log10_p(confusable(), Exact(), Gumbel()) > LIMIT


def test_the_redraw_of_a_coupling_has_noise_of_its_own() -> None:
    """A coupling that redraws with the noise of the residual: the same, one pass earlier."""
    assert log10_p(confusable(), Exact(), MaximalCoupling()) > LIMIT


@pytest.mark.parametrize(("number", "logit"), [(0.0, -math.inf), (0.5, 0.0)])
def test_a_tie_rejects(number: float, logit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft accepted because its number equals b, even at b = 0, outside the target's support.

    No histogram shows it: ties are rare, and the numbers of the loop are above 0. Here every number
    is the same, and b of a first draft is q of its token: 1/2, or 0 for token 1 at logit -inf.
    """

    def tie(self: Noise, purpose: object, position: torch.Tensor) -> torch.Tensor:
        return torch.full(position.shape, number)

    monkeypatch.setattr(Noise, "uniform", tie)
    model = TableModel(torch.tensor([0.0, logit]).repeat(4, 3, 1))
    decoder = JacobiDecoder(model, Exact(), Independent(), DecodeConfig(window=3))
    trace = decoder.generate([""] * 20, range(20)).trace
    assert (trace.uniform == trace.b).any()
    assert (trace.how == ACCEPTED).equal(trace.uniform < trace.b)
