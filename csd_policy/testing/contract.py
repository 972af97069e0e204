"""The contract of a policy, checked."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Gumbel, Independent, MaximalCoupling
from csd_policy.parameters import Parametrized
from csd_policy.policies import AcceptancePolicy, Exact
from csd_policy.risk import FixedRisk
from csd_policy.sampling import law
from csd_policy.testing.tables import TableModel, law_error, random_table
from csd_policy.types import DecodeConfig


def make_candidates(
    p: Tensor, q: Tensor, drafted: Tensor | None = None, **fields: Any
) -> Candidates:
    """Candidates (K = 1) for laws ``p`` and ``q`` ``[B, L, V]``, to test a policy's arithmetic.

    ``drafted`` defaults to token 0; everything else can be given by name (see ``Candidates``).
    """
    batch, drafts, _ = q.shape
    zeros = torch.zeros(batch, drafts, 1, dtype=torch.int64)
    index = torch.arange(drafts).expand(batch, drafts)[..., None]
    defaults = {
        "fresh": torch.zeros(batch, drafts, 1, dtype=torch.bool),
        "row": zeros,
        "column": index,
        "index": index,
        "hidden": torch.zeros(batch, drafts, 1, dtype=q.dtype),
        "entropy": torch.special.entr(q).sum(-1, keepdim=True),
        "tv": (p - q).abs().sum(-1, keepdim=True) / 2,
    }
    tokens = zeros[..., 0] if drafted is None else drafted
    return Candidates(p_all=p, q_all=q, drafted=tokens, **(defaults | fields))


def check_policy(policy: AcceptancePolicy, runs: int = 50_000) -> None:
    """Check that a policy keeps the contract of ``AcceptancePolicy``; AssertionError if not.

    Range and shape of its answers, purity, determinism, independence of the rows, agreement of K =
    1 and K = V, the residual and the spent TV, equality with ``Exact`` at ``exact_at``, never below
    it unless ``may_veto``, nothing outside the target's support, NaN refused, copies by repr and
    config. A policy that declares ``exact`` must reproduce an enumerated law in ``runs`` decoded
    images.

    Example:
        >>> from csd_policy.policies import CSD
        >>> check_policy(CSD(delta=0.5))
    """
    bound = policy.bind(TableModel(random_table(0, size=8), codebook=_codes(8)))
    for seed in range(4):
        p, q = _random_laws(seed)
        _check_arithmetic(bound, p, q, seed)
    _check_copies(policy)
    _check_decoding(policy, runs)


def _codes(size: int) -> Tensor:
    """Code vectors ``[size, 2]``, some near each other."""
    return torch.randn(size, 2, generator=torch.Generator().manual_seed(0)) / 2


def _random_laws(seed: int) -> tuple[Tensor, Tensor]:
    """Laws ``[6, 5, 8]``: close, far, one-hot, equal, sparse, and with disjoint supports."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(6, 5, 8, generator=generator)
    other = logits + 0.3 * torch.randn(6, 5, 8, generator=generator)
    other[1] = 2 * torch.randn(5, 8, generator=generator)
    p, q = logits.softmax(-1), other.softmax(-1)
    p[2] = torch.nn.functional.one_hot(p[2].argmax(-1), 8).float()
    p[3] = q[3]
    q[4] = law(other[4], 1.0, 3, 1.0)
    p[5, :, :4], q[5, :, 3:] = 0, 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def _candidates_for(policy: AcceptancePolicy, p: Tensor, q: Tensor, seed: int) -> Candidates:
    generator = torch.Generator().manual_seed(seed)
    drafted = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(p.shape[:2])
    fields: dict[str, Any] = {"fresh": (p.amax(-1, keepdim=True) == 1)}
    if "noise" in policy.needs:
        fields["noise"] = -torch.rand(p.shape, generator=generator).log()
    if "risk" in policy.needs:
        fields["risk"] = torch.rand(*p.shape[:2], 1, generator=generator)
    return make_candidates(p, q, drafted, **fields)


def _check_arithmetic(policy: AcceptancePolicy, p: Tensor, q: Tensor, seed: int) -> None:
    name = repr(policy)
    c = _candidates_for(policy, p, q, seed)
    before, state = copy.deepcopy(vars(c)), copy.deepcopy(policy)
    one, every = policy.accept_prob(c), policy.accept_prob(c.whole())
    assert one.shape == (*p.shape[:2], 1), f"{name}: K = 1 gives shape {tuple(one.shape)}"
    assert every.shape == p.shape, f"{name}: K = V gives shape {tuple(every.shape)}"
    assert not one.isnan().any() and not every.isnan().any(), f"{name}: b is NaN"
    assert not _changed(vars(state), policy), f"{name}: the call changed the policy"
    changed = _changed(before, c)
    assert not changed, f"{name}: the call changed {changed[0]}"
    assert policy.accept_prob(c).equal(one), f"{name}: two equal calls differ"
    b, whole = policy.acceptance(c), c.whole()
    law_b = policy.acceptance(whole)
    assert torch.allclose(law_b.gather(-1, c.tokens), b, atol=1e-6), f"{name}: K = 1 and V differ"
    assert (law_b[q == 0] == 0).all(), f"{name}: accepts a token of target probability 0"
    exact_b = Exact().acceptance(whole)
    if not policy.may_veto:
        assert (law_b >= exact_b - 1e-6).all(), f"{name}: below the exact rule without may_veto"
    given = {k: before[k] for k in ("fresh", "noise", "risk") if before[k] is not None}
    for i in range(len(p)):
        row = slice(i, i + 1)
        fields = {key: value[row] for key, value in given.items()}
        alone = policy.accept_prob(make_candidates(p[row], q[row], c.drafted[row], **fields))
        assert torch.allclose(alone, one[row], atol=1e-6), f"{name}: row {i} depends on others"
    residual = policy.residual(whole)
    assert residual.shape == p.shape and (residual >= 0).all(), f"{name}: residual out of range"
    assert (residual[q == 0] == 0).all(), f"{name}: residual outside the target's support"
    if "noise" in policy.needs:  # the law is one over the noise, which decoding checks
        return
    out = _committed_law(p, q, law_b, residual)
    spent = (out - q).abs().sum(-1) / 2
    assert torch.allclose(policy.spent_tv(whole, law_b), spent, atol=1e-5), f"{name}: spent TV"
    if policy.exact:
        assert spent.max() < 1e-5, (
            f"{name}: declared exact, but its law is off by {spent.max():.2g}"
        )


def _changed(before: dict[str, Any], thing: object) -> list[str]:
    """Names of the attributes of ``thing`` that are not what they were."""

    def same(a: object, b: object) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.equal(b)
        if isinstance(a, Parametrized):
            return repr(a) == repr(b)
        return a == b

    return [name for name, value in before.items() if not same(value, getattr(thing, name))]


def _committed_law(p: Tensor, q: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    """out(x) = p b + P_rej res(x), ``[B, L, V]``; an empty residual draws from q."""
    mass = residual.sum(-1, keepdim=True)
    redrawn = torch.where(mass > 0, residual / mass, q)
    return p * b + (1 - (p * b).sum(-1, keepdim=True)) * redrawn


def _check_copies(policy: AcceptancePolicy) -> None:
    from jsonargparse import ArgumentParser

    cls, config = type(policy), policy.to_config()
    assert isinstance(cls(), AcceptancePolicy), f"{cls.__name__}: no default construction"
    assert policy.needs <= {"risk", "hidden", "noise"}, f"{policy!r}: needs {set(policy.needs)}"
    if all(not isinstance(v, (dict, list, AcceptancePolicy)) for v in config["init_args"].values()):
        again = eval(repr(policy), {cls.__name__: cls})
        assert again.to_config() == config, f"{policy!r}: repr makes {again!r}"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=AcceptancePolicy)
    dumped = parser.dump(parser.parse_object({"policy": config}))
    again = parser.instantiate(parser.parse_string(dumped)).policy
    assert again.to_config() == config, f"{policy!r}: YAML makes {again!r}"
    for named in ({cls.strength} - {None}, set(policy.exact_at or ())):
        missing = named - set(policy.parameter_names())
        assert not missing, f"{policy!r}: strength or exact_at names {missing}, no argument"


def _check_decoding(policy: AcceptancePolicy, runs: int) -> None:
    if "risk" in policy.needs and policy.risk is None:
        if "risk" not in policy.parameter_names():
            return
        policy = type(policy)(**(policy.parameters() | {"risk": FixedRisk()}))
    name, config = repr(policy), DecodeConfig(window=3, top_k=3)
    model = TableModel(random_table(0), random_table(1), codebook=_codes(4))

    def decode(rule: AcceptancePolicy, draft: DraftStrategy, table: TableModel = model) -> Tensor:
        decoder = JacobiDecoder(table, rule, draft, config)
        return decoder.generate([""] * 64, list(range(64))).tokens

    for draft in (Independent(), Gumbel(), MaximalCoupling()):
        tokens = decode(policy, draft)
        assert tokens.equal(decode(policy, draft)), f"{name}: two equal runs differ"
        if policy.exact_at is not None:
            args = policy.parameters() | dict(policy.exact_at)
            same = decode(type(policy)(**args), draft).equal(decode(Exact(), draft))
            assert same, f"{name}: at {dict(policy.exact_at)} it does not decide as Exact does"
        if policy.exact:
            error = law_error(model, policy, draft, config, runs)
            assert error < 0.02, f"{name} with {draft!r}: law off by {error:.3f}"
    broken = random_table(0)
    broken[1] = torch.nan
    table = TableModel(broken, codebook=_codes(4))
    assert _raises(lambda: decode(policy, Independent(), table)), f"{name}: NaN passes"


def _raises(action: Callable[[], Any]) -> bool:
    try:
        action()
    except ValueError:
        return True
    return False
