"""The contract of a risk map, checked."""

import torch
from torch import Tensor

from csd_policy.models import ImageTokenModel, load_model
from csd_policy.risk import Canvas, RiskMap


def check_risk_map(risk_map: RiskMap, model: ImageTokenModel | None = None) -> None:
    """Check that a map keeps the contract of ``RiskMap``; AssertionError or ValueError if not.

    Shape, range and finite numbers on pictures that are complete, complete in part, not begun, and
    of one code only; determinism; independence of the rows; no look at codes that are not known
    (the answer may differ with ``known`` only); copies by repr and config.

    Args:
        risk_map: with its arguments.
        model: whose pictures it looks at; default is the shipped model.

    Example:
        >>> from csd_policy.risk import FixedRisk
        >>> check_risk_map(FixedRisk())
    """
    found = model or load_model("emoji-scenes", device="cpu")
    bound, name = risk_map.bind(found), repr(risk_map)
    codes = found.grid[0] * found.grid[1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(found.num_codes, (4, codes), generator=generator)
    tokens[2] = tokens[2, 0]
    tokens = tokens.to(found.device)
    known = torch.tensor([codes, codes // 2 + 1, codes, 0], device=found.device)
    prompts = [(found.example_prompts or [""])[0]] * 4

    others = torch.randint(found.num_codes, (4, codes), generator=generator).to(found.device)

    def ask(codes: Tensor, rows: slice = slice(None)) -> Tensor:
        given = others[rows] if risk_map.alternatives else None
        return bound.risk(Canvas.of(codes[rows], known[rows], found, prompts[rows], given))

    risk = ask(tokens)
    assert risk.shape == (4, codes) and risk.isfinite().all(), f"{name}: not finite"
    assert ask(tokens).equal(risk), f"{name}: two equal calls differ"
    for i in range(4):
        alone = ask(tokens, slice(i, i + 1))[0]
        assert torch.allclose(alone, risk[i], atol=1e-4), f"{name}: row {i} depends on others"
    other = tokens.clone()
    other[1, known[1] :] = (other[1, known[1] :] + 1) % found.num_codes
    assert ask(other).equal(risk), f"{name}: depends on codes that are not known"
    _check_copies(risk_map)


def _check_copies(risk_map: RiskMap) -> None:
    from jsonargparse import ArgumentParser

    cls, config = type(risk_map), risk_map.to_config()
    assert isinstance(cls(), RiskMap), f"{cls.__name__}: no default construction"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--risk", type=RiskMap)
    dumped = parser.dump(parser.parse_object({"risk": config}))
    again = parser.instantiate(parser.parse_string(dumped)).risk
    assert again.to_config() == config, f"{risk_map!r}: YAML makes {again!r}"
