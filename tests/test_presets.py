"""The presets of published settings: each can be used as it is, and says what its paper says."""

from pathlib import Path

import pytest

from csd_policy.arguments import config_folder, find_config, make_parser, parse
from csd_policy.drafts import DraftStrategy, Gumbel, Independent, MaximalCoupling
from csd_policy.generate import generate
from csd_policy.policies import (
    CSD,
    GSD,
    LANTERN,
    AcceptancePolicy,
    Addition,
    Amplify,
    CoolSD,
    EntropyAware,
    EntropyOnly,
    Exact,
    JacobiMatch,
)

# policy, draft, window, guidance, top-k
JANUS, LUMINA = (Independent(), 16, 5.0, 0), (Independent(), 16, 3.0, 2000)
PUBLISHED: dict[str, tuple[AcceptancePolicy, DraftStrategy, int, float, int]] = {
    "addition_janus7b": (Addition(0.4), *JANUS),
    "addition_lumina": (Addition(0.1), *LUMINA),
    "amplify_janus7b": (Amplify(4.0), *JANUS),
    "amplify_lumina": (Amplify(1.3), *LUMINA),
    "cool_sd_lumina": (CoolSD(1.1, 0.7), *LUMINA),
    "coupling_lumina": (Exact(), MaximalCoupling(), 64, 3.0, 2000),
    "csd_janus1b": (CSD(0.5, 0.35), *JANUS),
    "csd_janus1b_fast": (CSD(0.5, 0.65), *JANUS),
    "csd_janus7b": (CSD(0.5, 0.65), *JANUS),
    "csd_janus7b_fast": (CSD(0.5, 0.8), *JANUS),
    "csd_kl_janus7b": (CSD(0.5, 0.4, gate="kl"), *JANUS),
    "csd_lumina": (CSD(0.5, 0.35), *LUMINA),
    "csd_reverse_kl_janus7b": (CSD(0.5, 0.4, gate="reverse_kl"), *JANUS),
    "entropy_aware_lumina": (EntropyAware(8.0, 16.0), Independent(), 16, 4.0, 2000),
    "entropy_only_janus7b": (EntropyOnly(0.02), *JANUS),
    "gsd_janus7b": (GSD(35), *JANUS),
    "gsd_lumina": (GSD(25), *LUMINA),
    "gsd_lumina_csd": (GSD(3), *LUMINA),
    "gumbel_janus7b": (Exact(), Gumbel(), 32, 5.0, 0),
    "gumbel_lumina": (Exact(), Gumbel(), 64, 3.0, 2000),
    "jacobi_janus": (JacobiMatch(), *JANUS),
    "lantern_llamagen": (LANTERN(1000, 0.1), Independent(), 16, 7.5, 1000),
    "lantern_plus_lumina": (LANTERN(10, 5.0, multiplicative=True), *LUMINA),
    "sjd_emu3": (Exact(), Independent(), 16, 3.0, 2048),
    "sjd_janus": (Exact(), *JANUS),
    "sjd_llamagen": (Exact(), Independent("left"), 16, 7.5, 1000),
    "sjd_lumina": (Exact(), *LUMINA),
}


def test_every_preset_is_listed() -> None:
    assert {path.stem for path in (config_folder() / "policies").glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset(name: str) -> None:
    parser = make_parser("generate", None)
    parser.add_function_arguments(generate, as_group=False)
    args = ["--config", f"policies/{name}.yaml", "--prompt", '["two cats on blue plain"]']
    values = parse(parser, args)
    policy, draft, window, guidance, top_k = PUBLISHED[name]
    assert repr(values["policy"]) == repr(policy) and repr(values["draft"]) == repr(draft)
    assert (values["window"], values["guidance_scale"]) == (window, guidance)
    assert (values["top_k"], values["temperature"]) == (top_k, 1.0)
    text = Path(find_config(f"policies/{name}.yaml")).read_text()
    assert "arXiv" in text and f"--config policies/{name}.yaml" in text
