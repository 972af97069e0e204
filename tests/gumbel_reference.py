"""Jacobi decoding with shared Gumbel noise, written again in NumPy, one place at a time.

Shares with the package the tables of what a policy answers, and nothing of the loop: rows are
arrays over runs, noise is NumPy's, and laws are looked up by (position, previous code).
"""

import numpy as np
import numpy.typing as npt

from csd_policy.policies import AcceptancePolicy
from csd_policy.testing import TableModel, table_laws
from csd_policy.testing.own_law import Rules
from csd_policy.types import DecodeConfig

Ints = npt.NDArray[np.int64]


def gumbel_counts(
    model: TableModel, policy: AcceptancePolicy, config: DecodeConfig, runs: int, seed: int = 0
) -> Ints:
    """How often each image came out, int64 ``[V^N]``."""
    laws = table_laws(model, config).numpy()
    codes, _, size = laws.shape
    rules = Rules(model, policy.bind(model), config, laws)
    rng = np.random.default_rng(seed)
    tokens = [_decode(laws, rules, config.window - 1, rng) for _ in range(runs)]
    place = size ** np.arange(codes - 1, -1, -1)
    return np.bincount(np.array(tokens) @ place, minlength=size**codes)


def _decode(
    laws: npt.NDArray[np.float64], rules: Rules, width: int, rng: np.random.Generator
) -> list[int]:
    codes, _, size = laws.shape
    shared = rng.gumbel(size=(codes, size))  # the noise of each position's own draw

    def own_draw(position: int, before: int) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(laws[position, before]) + shared[position]))

    out: list[int] = []
    drafts: list[tuple[int, int | None]] = [(int(rng.integers(size)), None) for _ in range(width)]
    while len(out) < codes:
        done = len(out)
        before = [out[-1] + 1 if out else 0] + [token + 1 for token, _ in drafts]
        accepted = 0
        while accepted < width and done + accepted < codes:
            draft = drafts[accepted]
            b, redraw = rules(accepted, done + accepted, draft, before[accepted])
            if rng.random() >= b[draft[0]]:
                out.append(int(rng.choice(size, p=redraw)))
                break
            out.append(draft[0])
            accepted += 1
        else:
            if done + accepted < codes:
                out.append(own_draw(done + accepted, before[accepted]))
        gained = len(out) - done
        drafts = [
            (own_draw(done + place, before[place]), before[place])
            if place <= width and done + place < codes
            else (int(rng.integers(size)), None)
            for place in range(gained, gained + width)
        ]
    return out
