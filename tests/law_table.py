"""The table of docs/laws.md: every policy with every draft, and how its law tests came out.

Usage:
    python tests/law_table.py docs/laws.md
"""

import sys
from pathlib import Path

from mutants import MUTANTS
from test_laws import (
    DRAFTS,
    FILTERS,
    PLAIN,
    POLICIES,
    RUNS,
    SETTINGS,
    SMALLEST,
    law_p_value,
    table_model,
)
from tqdm import tqdm

from csd_policy.results import write_text
from csd_policy.testing import image_counts, joint_law

HEAD = """# Laws, tested

Every policy with every draft strategy on a model small enough to enumerate (27 images), made by
`python tests/law_table.py docs/laws.md`. Each pair is decoded {runs:,} times under four settings:
no filter, top-k, top-p, guidance. `p` is the smallest of the four p-values of a chi-square test:
of exact rules against the target's law, of relaxed ones against *their own* law, which is
enumerated without the loop's code (for `Gumbel`, decoded by a second, slow decoder in NumPy).
With {pairs} tests, the smallest of all should be near {expected:.3f}; the suite fails below
{smallest:g}. `TV` is the distance of the decoded images from the target's law without a filter
(sampling alone gives about {floor:.3f}), and `spent` the mean spent TV of an image, which bounds
it up to sampling.

"""

MISTAKES = """## Mistakes that the tests catch

`python tests/mutants.py` puts each of these mistakes, most of them found in published code, into a
copy of the package and demands that a test of `tests/test_exactness.py` fails there.

| mistake | in | caught by |
|---|---|---|
"""


def main(path: str) -> None:
    """Run all pairs and write the table; exit status 1 if one fails."""
    lines = ["| policy | law | " + " | ".join(f"{type(d).__name__}: p, TV, spent" for d in DRAFTS),
             "|---|---" + "|---" * len(DRAFTS) + "|"]  # fmt: skip
    lines[0] += " |"
    model, failed = table_model(), []
    target = joint_law(model, PLAIN)
    for policy in tqdm(POLICIES):
        cells = []
        for draft in DRAFTS:
            least = min(law_p_value(policy, draft, SETTINGS[name]) for name in FILTERS)
            counts, spent = image_counts(model, policy, draft, PLAIN, RUNS)
            distance = float((counts / RUNS - target).abs().sum() / 2)
            cells.append(f"{least:.3f}, {distance:.3f}, {spent:.3f}")
            if least < SMALLEST:
                failed.append((policy, draft))
        law = "exact" if policy.exact else "relaxed"
        lines.append(f"| `{policy!r}` | {law} | " + " | ".join(cells) + " |")
    pairs = len(POLICIES) * len(DRAFTS) * len(FILTERS)
    head = HEAD.format(
        runs=RUNS,
        pairs=pairs,
        expected=1 / pairs,
        smallest=SMALLEST,
        floor=(len(target) / (6.283 * RUNS)) ** 0.5,
    )
    text = head + "\n".join(lines) + "\n\n" + MISTAKES
    text += "\n".join(f"| {m.mistake} | `{m.file}` | `{m.caught_by}` |" for m in MUTANTS) + "\n"
    write_text(Path(path), text)
    if failed:
        raise SystemExit(f"not their law: {failed}")


if __name__ == "__main__":
    main(sys.argv[1])
