"""Known mistakes of published code, put into a copy of the source: the law tests must fail there.

Run as ``python tests/mutants.py [NAME ...]``. Each mistake is a replacement of one text that must
occur exactly once. The status is 0 if the tests pass without a change and every mutant is caught.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TESTS = "tests/test_exactness.py"
# pytest, if the package that it will test is the copy
RUN = """
import pathlib, sys, csd_policy, pytest
found, expected = pathlib.Path(csd_policy.__file__).resolve(), pathlib.Path.cwd().resolve()
assert found.is_relative_to(expected), f"csd_policy is {found}, expected one below {expected}"
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Mutant:
    """``old`` in ``csd_policy/file`` becomes ``new``; ``caught_by`` is the test that must fail."""

    name: str
    mistake: str
    file: str
    old: str
    new: str
    caught_by: str


MUTANTS = (
    Mutant(
        "older-law",
        "a draft that the coupling keeps is stored with the older law that it was drawn from",
        "drafts.py",
        "        return torch.where(kept & (p > 0), tail.drafts, redrawn), tail.q\n",
        "        kept = kept & (p > 0)\n"
        "        stored = torch.where(kept[..., None], tail.p, tail.q)\n"
        "        return torch.where(kept, tail.drafts, redrawn), stored\n",
        "test_coupled_drafts_follow_the_law_they_are_stored_with",
    ),
    Mutant(
        "kept-unseen",
        "the coupling keeps every draft, whatever its new law",
        "drafts.py",
        "kept = uniform * p < q",
        "kept = uniform < 1",
        "test_coupled_drafts_follow_the_law_they_are_stored_with",
    ),
    Mutant(
        "plain-residual",
        "the residual of a rule below the exact one is left at q - p",
        "policies/base.py",
        "whole.q - whole.p * self.acceptance(whole)",
        "whole.q - whole.p",
        "test_the_residual_makes_up_for_a_veto",
    ),
    Mutant(
        "softmax-residual",
        "the residual is normalised by a softmax",
        "policies/base.py",
        "        return (whole.q - whole.p * self.acceptance(whole)).clamp(min=0)\n",
        "        rest = (whole.q - whole.p * self.acceptance(whole)).clamp(min=0)\n"
        "        return rest.softmax(-1)\n",
        "test_rejected_drafts_are_redrawn_from_the_residual",
    ),
    Mutant(
        "tie-accepted",
        "a uniform number that equals the acceptance probability accepts",
        "verify.py",
        "torch.where(free, uniform < b, inside)",
        "torch.where(free, uniform <= b, inside)",
        "test_a_tie_rejects",
    ),
    Mutant(
        "batch-minimum",
        "all images advance by the smallest accepted count, drafts accepted beyond it stay drafts",
        "decoder.py",
        "            committed = rows.commit(verdict, position, self._slots, q)\n"
        "            self._redraft(rows, q, committed, noise)\n",
        "            drafts, least = rows.drafts.clone(), int(verdict.accepted.amin())\n"
        "            beyond = verdict.accepted - least\n"
        "            padded = torch.nn.functional.pad(drafts, (0, 1))\n"
        "            extra = torch.where(beyond > 0, padded[:, least], verdict.extra)\n"
        "            least_of_all = torch.full_like(beyond, least)\n"
        "            verdict = type(verdict)(least_of_all, extra, verdict.finite, verdict.fields)\n"
        "            committed = rows.commit(verdict, position, self._slots, q)\n"
        "            self._redraft(rows, q, committed, noise)\n"
        "            held = drafts[:, least + 1 :]\n"
        "            ahead = rows.drafts[:, : held.shape[1]]\n"
        "            again = torch.arange(held.shape[1]) < beyond[:, None] - 1\n"
        "            ahead.copy_(torch.where(again, held, ahead))\n",
        "test_rejected_drafts_are_redrawn_from_the_residual",
    ),
    Mutant(
        "gumbel-residual",
        "the residual is drawn with the noise that the draft was drawn with",
        "verify.py",
        "noise.exponential(Purpose.RESIDUAL, place)",
        "noise.exponential(Purpose.TARGET, place)",
        "test_the_residual_has_noise_of_its_own",
    ),
    Mutant(
        "shared-uniform",
        "the coupling keeps a draft by the uniform number that verification compares with later",
        "drafts.py",
        "tail.noise.uniform(Purpose.COUPLE_ACCEPT, tail.position, tail.passes)",
        "tail.noise.uniform(Purpose.ACCEPT, tail.position)",
        "test_coupled_drafts_follow_the_law_they_are_stored_with",
    ),
    Mutant(
        "shared-redraw",
        "the coupling redraws with the noise that the residual is drawn with later",
        "drafts.py",
        "tail.noise.exponential(Purpose.COUPLE_REDRAW, tail.position, tail.passes)",
        "tail.noise.exponential(Purpose.RESIDUAL, tail.position)",
        "test_the_redraw_of_a_coupling_has_noise_of_its_own",
    ),
)


def copy_source(folder: Path, mutant: Mutant | None = None) -> None:
    """The package without its weights and the tests, with the change of a mutant."""
    skipped = shutil.ignore_patterns("weights", "__pycache__")
    shutil.copytree(ROOT / "csd_policy", folder / "csd_policy", ignore=skipped)
    (folder / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py", TESTS):
        shutil.copy(ROOT / name, folder / name)
    if mutant is not None:
        path = folder / "csd_policy" / mutant.file
        path.write_text(mutated(mutant))


def mutated(mutant: Mutant) -> str:
    """The changed text of the mutant's file; SystemExit if the mutant no longer applies."""
    text = (ROOT / "csd_policy" / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise SystemExit(
            f"mutant {mutant.name}: its text occurs {count} times in {mutant.file}, expected once:"
            f"\n{mutant.old}"
        )
    return text.replace(mutant.old, mutant.new)


def run(tests: list[str], mutant: Mutant | None = None) -> dict[str, str]:
    """How each test failed, empty if it passed; SystemExit if they did not run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_source(folder, mutant)
        command = [sys.executable, "-c", RUN, "-q", "--junitxml=report.xml"]
        found = subprocess.run(
            [*command, *(f"{TESTS}::{test}" for test in tests)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": name},
            capture_output=True,
            text=True,
        )
        report = folder / "report.xml"
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    ran = bool(cases) and all(case.find("error") is None for case in cases)
    if not ran or found.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run:\n{found.stdout}{found.stderr}")
    failures = {case.attrib["name"]: case.find("failure") for case in cases}
    return {
        name: "" if failure is None else failure.attrib["message"].splitlines()[0]
        for name, failure in failures.items()
    }


def main(names: list[str]) -> int:
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := set(names) - set(known):
        raise SystemExit(f"no mutant {sorted(unknown)}, expected some of {', '.join(known)}")
    chosen = [known[name] for name in names] or list(MUTANTS)
    for mutant in chosen:
        mutated(mutant)  # before anything takes time
    start = time.monotonic()
    broken = {k: v for k, v in run(sorted({m.caught_by for m in chosen})).items() if v}
    if broken:
        raise SystemExit(f"fails without a mutant: {broken}")
    line = "{:<16}  {:<55}  {:>7}  {}".format
    say(line("mutant", "caught by", "seconds", "failure"))
    say(line("(none)", "-", f"{time.monotonic() - start:.1f}", ""))
    survivors = []
    for mutant in chosen:
        start = time.monotonic()
        failures = list(run([mutant.caught_by], mutant).values())
        caught = all(failure.startswith(("assert ", "AssertionError")) for failure in failures)
        if not caught:
            survivors.append(mutant)
        seconds = f"{time.monotonic() - start:.1f}"
        shown = failures[0].removeprefix("AssertionError: ")
        say(line(mutant.name, mutant.caught_by if caught else "NOT CAUGHT", seconds, shown))
    for mutant in survivors:
        say(f"{mutant.name} survives {mutant.caught_by}: {mutant.mistake}")
    return 1 if survivors else 0


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
