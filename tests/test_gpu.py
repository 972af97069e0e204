"""What must be equal on the CPU and on a CUDA device."""

import pytest
import torch

from csd_policy import DecodeConfig, JacobiDecoder, load_model
from csd_policy.drafts import Gumbel, Independent
from csd_policy.policies import CSD, Exact
from csd_policy.sampling import Noise, Purpose
from csd_policy.testing import TableModel, random_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_random_numbers_are_equal() -> None:
    seeds, position = torch.arange(64), torch.arange(64 * 4).view(64, 4)
    here = Noise(seeds, 16).uniform(Purpose.ACCEPT, position)
    there = Noise(seeds.cuda(), 16).uniform(Purpose.ACCEPT, position.cuda())
    assert here.equal(there.cpu())
    fresh = Noise(seeds.cuda(), 16).token(Purpose.FRESH, position.cuda())
    assert fresh.cpu().equal(Noise(seeds, 16).token(Purpose.FRESH, position))


@pytest.mark.parametrize("draft", [Independent(), Gumbel()], ids=repr)
@pytest.mark.parametrize("policy", [Exact(), CSD(delta=0.6)], ids=repr)
def test_tables_in_double_precision_give_equal_images(policy: object, draft: object) -> None:
    logits, uncond = random_table(2, 24, 6).double(), random_table(3, 24, 6).double()
    config = DecodeConfig(window=6, guidance_scale=2.0)
    tokens = [
        JacobiDecoder(TableModel(logits.to(d), uncond.to(d)), policy, draft, config)  # type: ignore[arg-type]
        .generate([""] * 500, list(range(500)))
        .tokens
        for d in ("cpu", "cuda")
    ]
    assert tokens[0].equal(tokens[1])


def test_the_shipped_model_gives_equal_images_in_double_precision() -> None:
    prompts = ["two cats on blue plain", "rocket on black plain"]
    tokens = [
        JacobiDecoder(load_model("emoji-scenes", device, torch.float64), CSD(), Gumbel())
        .generate(prompts, [0, 1])
        .tokens
        for device in ("cpu", "cuda")
    ]
    assert tokens[0].equal(tokens[1])


def test_no_host_reads_inside_a_step() -> None:
    model = TableModel(random_table(2, 24, 6).cuda())
    decoder = JacobiDecoder(model, CSD(delta=0.6), Gumbel(), DecodeConfig(window=6))
    seen = []

    def strict(number: int, done: list[int]) -> None:
        seen.append(number)

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as caught:
            decoder.generate([""] * 4, list(range(4)), on_pass=strict)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(caught) <= len(seen) + 8  # one per pass, and the set-up and the result
