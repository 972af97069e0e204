"""The plan of a comparison: one model, several methods, the same prompts and seeds.

The unit of work is a batch formed from the plan, never from what is left, so that every method is
timed on the same batches however often the command was interrupted.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from json import dumps
from pathlib import Path
from typing import Any, Literal

from csd_policy.drafts import DraftStrategy, Independent
from csd_policy.models import Dtype
from csd_policy.models.options import Options
from csd_policy.policies import AcceptancePolicy, Exact
from csd_policy.provenance import check_manifest, package_version
from csd_policy.results import load_row
from csd_policy.tables import text_table
from csd_policy.types import DecodeConfig, SpentTV, check_seeds

Job = tuple[int, int]  # number of the prompt, seed


@dataclass(frozen=True)
class Method:
    """One way to decode; None for a sampling setting means the model's own default.

    Args:
        name: for tables and folders: letters, digits, spaces and ``. _ = + -``.
        policy: when to accept a draft.
        draft: how to redraw what was not verified.
        window: slots per forward pass, 1 or more; 1 is plain AR.
        guidance_scale: 0 or more.
        temperature: 0 or more; 0 is greedy.
        top_k: 0 or more; 0 keeps every token.
        top_p: in (0, 1]; 1 keeps every token.
        tv_budget: most spent TV per image, 0 or more; None is no bound.
        relax_fresh: let a relaxed policy judge drafts that no pass has seen (for studies).
        spent_tv: sum it over all tokens, or estimate it at the drafted one (large codebooks).
    """

    name: str
    policy: AcceptancePolicy = field(default_factory=Exact)
    draft: DraftStrategy = field(default_factory=Independent)
    window: int = 16
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tv_budget: float | None = None
    relax_fresh: bool = False
    spent_tv: SpentTV = "exact"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._=+-]*", self.name):
            raise ValueError(
                f"name of a method is {self.name!r}, expected letters, digits, spaces and . _ = + -"
            )
        for name, kind in (("policy", AcceptancePolicy), ("draft", DraftStrategy)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} of method {self.name!r} is {getattr(self, name)!r}, "
                    f"expected a {kind.__name__}"
                )
        try:
            _ = self.decode
        except ValueError as error:
            raise ValueError(f"method {self.name!r}: {error}") from error

    @property
    def decode(self) -> DecodeConfig:
        """The settings of the decoder."""
        return DecodeConfig(**{f.name: getattr(self, f.name) for f in fields(DecodeConfig)})

    def to_config(self) -> dict[str, Any]:
        """Plain data, from which a config makes the method again."""
        parts = {"policy": self.policy.to_config(), "draft": self.draft.to_config()}
        return {"name": self.name} | parts | asdict(self.decode)


@dataclass(frozen=True)
class Comparison:
    """Compare policies on one model: pictures, tables and plots; a repeated command resumes.

    Args:
        methods: what to compare; compression is measured against the first one with window 1.
        prompts: what to draw, different texts.
        model: name of a shipped model, a folder, or an id owner/name of the Hugging Face hub.
        model_options: what the model's adapter takes beyond that, KEY: VALUE, see docs/models.md.
        seeds: images of each prompt; all methods share their random numbers.
        output: folder to write to.
        batch_size: images decoded at once, 1 or more.
        device: where to run; default is CUDA if there is a card, else the CPU.
        dtype: of the network; laws are computed in float32 or better.
        damage: relaxed tokens of a picture whose counterfactual cost is measured (LPIPS, see
            ``csd_policy.damage``), 0 or more; 0 measures none. It adds a draw to every pass.
        wandb: where wandb mirrors the files; default is offline without WANDB_API_KEY, else online.
        project: of wandb.
    """

    methods: list[Method]
    prompts: list[str] = field(default_factory=list)
    model: str = "emoji-scenes"
    model_options: Options = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    output: str = "outputs/compare"
    batch_size: int = 16
    device: str | None = None
    dtype: Dtype = "float32"
    damage: int = 0
    wandb: Literal["online", "offline", "disabled"] | None = None
    project: str = "csd-policy"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, expected 1 or more")
        if self.damage < 0:
            raise ValueError(f"damage is {self.damage}, expected 0 or more")
        for name in ("methods", "prompts", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is [], expected at least one")
        check_seeds([""] * len(self.seeds), self.seeds)
        _check_distinct("methods", [m.name.lower() for m in self.methods])  # as some folders do
        _check_distinct("prompts", self.prompts)
        _check_distinct("seeds", self.seeds)

    def batches(self) -> Iterator[list[Job]]:
        """The images of each method in batches, seed by seed."""
        jobs = [(i, seed) for seed in self.seeds for i in range(len(self.prompts))]
        for start in range(0, len(jobs), self.batch_size):
            yield jobs[start : start + self.batch_size]

    def stem(self, method: Method, job: Job) -> Path:
        """Path of an image's files without their suffix."""
        return Path(self.output) / "images" / method.name / f"{job[0]:03d}_{job[1]}"

    def missing(self, method: Method) -> list[list[Job]]:
        """The batches of which an image is missing."""
        return [
            batch
            for batch in self.batches()
            if any(load_row(self.stem(method, job)) is None for job in batch)
        ]

    def to_config(self) -> dict[str, Any]:
        """Plain data, from which ``--config`` makes the comparison again."""
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "methods"}
        return {"methods": [method.to_config() for method in self.methods]} | rest

    def manifest(self) -> dict[str, Any]:
        """What two sets of results must share to be compared, as far as no weights are needed."""
        shared = {"csd_policy": package_version()} | self.to_config()
        for name in ("output", "device", "wandb", "project"):
            del shared[name]
        if self.damage == 0:
            del shared["damage"]
        options = self.model_options.items()  # as text: the command line gives 256 as "256"
        shared["model_options"] = {k: v if isinstance(v, str) else dumps(v) for k, v in options}
        return shared | {"methods": {m["name"]: m for m in shared["methods"]}}


def read_prompts(path: Path) -> list[str]:
    """The lines of a UTF-8 text file that are not empty; ValueError if there are none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt_file is {str(path)!r}, expected a text file: {error}") from error
    if not any(lines):
        raise ValueError(f"prompt_file is {str(path)!r}, which is empty, expected a prompt a line")
    return [line for line in lines if line]


def _check_distinct(what: str, values: Sequence[object]) -> None:
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"{what} holds {value!r} twice, expected different ones")


def plan_text(comparison: Comparison) -> str:
    """What ``compare.run`` would do, found without the model.

    Raises:
        ValueError: the output folder holds results of other settings.
    """
    c = comparison
    path = Path(c.output) / "manifest.json"
    check_manifest(path, c.manifest(), ignore=("environment",))
    per_method = len(c.prompts) * len(c.seeds)
    rows = []
    for method in c.methods:
        found = [[load_row(c.stem(method, job)) is not None for job in b] for b in c.batches()]
        there, to_draw = sum(map(sum, found)), sum(len(batch) for batch in found if not all(batch))
        unset = asdict(DecodeConfig(window=method.window))
        changed = {k: v for k, v in asdict(method.decode).items() if v != unset[k]}
        settings = ", ".join(f"{k} {v}" for k, v in changed.items()) or "the model's own"
        rows.append(
            (method.name, repr(method.policy), repr(method.draft), str(method.window), settings,
             str(there), str(to_draw))
        )  # fmt: skip
    head = ("method", "policy", "draft", "window", "sampling", "images there", "to draw")
    facts = [
        f"model     {c.model}" + "".join(f", {k} {v}" for k, v in c.model_options.items()),
        f"prompts   {len(c.prompts)}, seeds {', '.join(map(str, c.seeds))}",
        f"images    {per_method} per method, {per_method * len(c.methods)} in all, "
        f"in batches of {c.batch_size}",
        f"output    {c.output} ({'goes on there' if path.is_file() else 'new'})",
    ]
    return "\n".join(facts) + "\n\n" + text_table(head, rows)
