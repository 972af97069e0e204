"""``csd-policy bench``: what policies and draft strategies add to a forward pass, in time."""

import copy
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from csd_policy import drafts, policies
from csd_policy.arguments import class_names
from csd_policy.bench_table import Row, notes_text, table_cells
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import Tail
from csd_policy.models import SHIPPED, Dtype, ImageTokenModel, find_device, load_model
from csd_policy.models.options import Options
from csd_policy.policies import CSD, AcceptancePolicy
from csd_policy.provenance import provenance
from csd_policy.results import prepare_folder, write_json, write_text
from csd_policy.risk import FixedRisk
from csd_policy.rows import Keep, Rows
from csd_policy.sampling import Noise, Purpose, draw, take
from csd_policy.served import MOST_WINDOW
from csd_policy.tables import markdown_table, text_table
from csd_policy.types import DecodeConfig

if TYPE_CHECKING:
    from csd_policy.models.emoji_scenes import EmojiScenes

logger = logging.getLogger(__name__)

SIZES = [1024, 8192, 16384, 32768]
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads")
Step = tuple[str, str, str, Callable[[], Any]]  # kind, name, what it is, and what is timed


def bench(
    window: int = 16,
    batch_size: int = 1,
    model: str = "emoji-scenes",
    model_options: Options | None = None,
    sizes: list[int] | None = None,
    rounds: int = 20,
    device: str | None = None,
    dtype: Dtype = "float32",
    output: str = "outputs/bench",
) -> str:
    """Time what each policy and each draft strategy adds to a forward pass.

    On a model, and on random LLaMA models of the shipped one's shape with larger codebooks. Writes
    ``bench.json`` and ``bench.md``.

    Args:
        window: slots per forward pass, 2 to 256.
        batch_size: images in a pass, 1 or more.
        model: name of a shipped model, a folder, or an id owner/name of the Hugging Face hub.
        model_options: what the model's adapter takes beyond that, KEY: VALUE, see docs/models.md.
        sizes: codebook sizes of the random models, 2 or more each; default is 1024 to 32768 beside
            the shipped model, and none beside another.
        rounds: how often each step is timed, 1 or more.
        device: where to run; default is CUDA if there is a card, else the CPU.
        dtype: of the model's network; the random ones are in float32.
        output: folder to write to.

    Returns:
        the table and its legend.
    """
    if not 2 <= window <= MOST_WINDOW:
        raise ValueError(f"window is {window}, expected 2 (one draft) to {MOST_WINDOW}")
    for name, value in (("batch_size", batch_size), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected 1 or more")
    if sizes is None:
        sizes = SIZES if model == "emoji-scenes" else []
    if any(size < 2 for size in sizes) or len(set(sizes)) < len(sizes):
        raise ValueError(f"sizes is {sizes}, expected different numbers of 2 or more")
    where, folder = find_device(device), Path(output)
    prepare_folder(folder)
    columns: list[Row] = []
    for size in (None, *sizes):
        if size is None:
            timed = load_model(model, where, getattr(torch, dtype), **(model_options or {}))
        else:
            timed = make_model(size, where)
        logger.info("%s, V %d", timed.name, timed.num_codes)
        steps = measure(make_steps(timed, window, batch_size), where, rounds)
        columns.append(facts_of(timed) | {"steps": steps})
    settings = {"window": window, "batch_size": batch_size, "rounds": rounds, "sizes": sizes}
    write_json(folder / "bench.json", {"settings": settings, "models": columns})
    head, cells = table_cells(columns)
    notes = notes_text(columns, settings)
    write_text(folder / "bench.md", f"{markdown_table(head, cells)}\n\n{notes}\n")
    return f"{text_table(head, cells)}\n\n{notes}"


def make_model(size: int, device: torch.device) -> "EmojiScenes":
    """A model of the shipped one's shape with random weights and V = ``size``.

    It has a head and a codebook ``[V, 8]`` of that size; it draws no pictures.
    """
    from transformers import LlamaForCausalLM

    from csd_policy.models.emoji_scenes import EmojiScenes

    model = EmojiScenes(SHIPPED / "emoji-scenes", device, torch.float32)
    config = copy.deepcopy(model._prior.config)
    config.vocab_size = model._first + size  # words come first
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model._prior = LlamaForCausalLM(config).eval().requires_grad_(False)
        model.codebook = torch.randn(size, 8).to(device)
    model.backbone = model._prior.model
    model._prior.to(device)  # type: ignore[arg-type]  # transformers' stub of Module.to
    model.name, model.num_codes = "random weights", size
    return model


def facts_of(model: ImageTokenModel) -> Row:
    """Provenance and V; of a network of transformers the number of parameters and its shape too."""
    facts = provenance(model) | {"num_codes": model.num_codes}
    network = getattr(model, "_prior", getattr(model, "backbone", None))
    if network is None:
        return facts | {"parameters": 0, "shape": {}}
    shape = {name: getattr(network.config, name) for name in SHAPE}
    return facts | {"parameters": network.num_parameters(), "shape": shape}


@torch.inference_mode()
def make_steps(model: ImageTokenModel, window: int, batch_size: int) -> list[Step]:
    """The forward pass, each policy and each draft strategy, in the middle of an image."""
    device, codes = model.device, len(model.code_of_slot)
    place = torch.arange(window, device=device)
    noise = Noise(torch.arange(batch_size, device=device), model.num_codes)
    rows = Rows.empty(noise, window - 1, codes, torch.float32, Keep(risk=True))
    rows.done += (codes - window) // 2
    rows.fresh.fill_(False)
    position = rows.done[:, None] + place
    # laws that resemble each other, as those of two passes do
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, batch_size, window, model.num_codes)
    logits, change = torch.randn(shape, generator=generator, device=device)
    q = (2 * logits).softmax(-1)
    rows.p.copy_((2 * logits + 0.5 * change).softmax(-1)[:, :-1])
    rows.drafts.copy_(draw(rows.p, noise.exponential(Purpose.REDRAW, position[:, :-1])))
    state = model.prefill(list(islice(cycle(model.example_prompts), batch_size)), True, window)
    tokens = torch.cat([rows.last[:, None], rows.drafts], dim=1)

    def forward() -> torch.Tensor:
        hidden = model.forward(state, model.embed(state, tokens, position - 1), position - 1)
        model.head(hidden)
        return hidden

    hidden = forward()[:batch_size]

    def verification(policy: AcceptancePolicy, config: DecodeConfig) -> Callable[[], Any]:
        loop = JacobiDecoder(model, policy, config=config)
        return lambda: loop._verify(rows, q, hidden, position, noise)

    config = DecodeConfig(window)
    steps: list[Step] = [("forward", "forward pass", model.name, forward)]
    for name in class_names("csd_policy.policies"):
        policy = getattr(policies, name)()
        if "risk" in policy.needs:
            policy = getattr(policies, name)(risk=FixedRisk())
        steps.append(("policy", name, repr(policy), verification(policy, config)))
    cheap = verification(CSD(), replace(config, spent_tv="estimate"))
    steps.append(("policy", "CSD, spent_tv estimate", repr(CSD()), cheap))
    source = (1 + place[:-1]).expand_as(rows.drafts)  # behind one committed token
    tail = Tail(take(q, source), position[:, 1:], rows.passes[:, None], noise, rows.drafts,
                rows.p, source)  # fmt: skip
    for name in class_names("csd_policy.drafts"):
        draft = getattr(drafts, name)()
        steps.append(("draft", f"{name} redraw", repr(draft), partial(draft.redraw, tail)))
    return steps


@torch.inference_mode()
def measure(steps: list[Step], device: torch.device, rounds: int) -> list[Row]:
    """What each step is, its median ``ms`` over the rounds, their ``quartiles``, and ratios.

    ``ratio`` is to the forward pass; a policy has ``ms_above_exact``.
    """
    wait: Callable[[], Any] = lambda: None  # noqa: E731
    if device.type == "cuda":
        wait = partial(torch.cuda.synchronize, device)
    shuffled = random.Random(0)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(1 + rounds):  # the first one warms up
        for i in shuffled.sample(range(len(steps)), len(steps)):
            wait()
            start = time.perf_counter()
            steps[i][3]()
            wait()
            times[i].append(1000 * (time.perf_counter() - start))
    lines: list[Row] = []
    for (kind, name, what, _), found in zip(steps, times, strict=True):
        low, middle, high = np.percentile(found[1:], [25, 50, 75]).tolist()
        about = {"kind": kind, "name": name, "what": what}
        lines.append({**about, "ms": middle, "quartiles": [low, high]})
    base = {line["name"]: line["ms"] for line in lines}
    for line in lines:
        line["ratio"] = line["ms"] / base["forward pass"]
        if line["kind"] == "policy":
            line["ms_above_exact"] = line["ms"] - base["Exact"]
    return lines
