"""``csd-policy generate``: pictures, and how each of their tokens was committed."""

import textwrap
from pathlib import Path
from typing import Any

import torch

from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Independent
from csd_policy.figures import decode_figure
from csd_policy.memory import peak_memory, restart_peak
from csd_policy.models import Dtype, load_model
from csd_policy.models.options import Options
from csd_policy.policies import CSD, AcceptancePolicy
from csd_policy.progress import pass_bar
from csd_policy.results import image_row, prepare_folder, save_image, slug, write_atomic
from csd_policy.types import DecodeConfig, DecodeResult, SpentTV, check_seeds

DEFAULT_POLICY = CSD()
DEFAULT_DRAFT = Independent()


def generate(
    prompt: list[str],
    model: str = "emoji-scenes",
    model_options: Options | None = None,
    policy: AcceptancePolicy = DEFAULT_POLICY,
    draft: DraftStrategy = DEFAULT_DRAFT,
    seed: int = 0,
    num_images: int = 1,
    output: str = "outputs/generate",
    window: int = 16,
    guidance_scale: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    tv_budget: float | None = None,
    spent_tv: SpentTV = "exact",
    device: str | None = None,
    dtype: Dtype = "float32",
    batch_size: int = 8,
) -> list[dict[str, Any]]:
    """Draw pictures and show how each token was committed.

    Writes for each picture ``<prompt>_<seed>.png``, ``.json`` (settings, costs, tokens),
    ``.safetensors`` (the trace), and ``_heat.png``.

    Args:
        prompt: what to draw; may be given several times.
        model: name of a shipped model, a folder, or an id owner/name of the Hugging Face hub.
        model_options: what the model's adapter takes beyond that, KEY: VALUE, see docs/models.md.
        policy: when to accept a draft; default CSD().
        draft: how to redraw what was not verified; default Independent().
        seed: of a prompt's first image; the next ones count up.
        num_images: images per prompt, 1 or more.
        output: folder to write to.
        window: slots per forward pass, 1 or more; 1 is plain AR.
        guidance_scale: 0 or more; default is the model's own.
        temperature: 0 or more, 0 is greedy; default is the model's own.
        top_k: 0 or more, 0 keeps every token; default is the model's own.
        top_p: in (0, 1], 1 keeps every token; default is the model's own.
        tv_budget: most spent TV per image, 0 or more; default is no bound.
        spent_tv: sum it over all tokens, or estimate it at the drafted one (large codebooks).
        device: where to run; default is CUDA if there is a card, else the CPU.
        dtype: of the network; laws are computed in float32 or better.
        batch_size: images decoded at once, 1 or more.

    Returns:
        one row per image, see ``csd_policy.results.image_row``, with the path of its ``file``.
    """
    for name, value in (("num_images", num_images), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected 1 or more")
    config = DecodeConfig(
        window, guidance_scale, temperature, top_k, top_p, tv_budget, spent_tv=spent_tv
    )
    jobs = plan(prompt, seed, num_images)
    check_seeds([""] * len(jobs), [number for _, number in jobs.values()])
    image_model = load_model(model, device, getattr(torch, dtype), **(model_options or {}))
    image_model.check_prompts(prompt)
    image_model.check_pictures()
    prepare_folder(Path(output))
    decoder = JacobiDecoder(image_model, policy, draft, config)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(jobs), batch_size):
        names = list(jobs)[start : start + batch_size]
        prompts, seeds = zip(*(jobs[name] for name in names), strict=True)
        label = f"images {start + 1} to {start + len(names)} of {len(jobs)}"
        restart_peak(image_model.device)
        with pass_bar(len(image_model.code_of_slot), label) as on_pass:
            result = decoder.generate(prompts, seeds=seeds, on_pass=on_pass)
        rows += [write_image(result, i, Path(output) / name) for i, name in enumerate(names)]
    return rows


def plan(prompts: list[str], seed: int, num_images: int) -> dict[str, tuple[str, int]]:
    """Prompt and seed behind each file name; ValueError if two images would share one."""
    if not prompts:
        raise ValueError("prompt is [], expected at least one text")
    jobs: dict[str, tuple[str, int]] = {}
    for prompt in prompts:
        for number in range(seed, seed + num_images):
            name = f"{slug(prompt)}_{number}"
            if name in jobs:
                raise ValueError(
                    f"prompts {jobs[name][0]!r} and {prompt!r} both belong into {name}.png, "
                    "expected prompts that differ in their first 60 letters and digits"
                )
            jobs[name] = prompt, number
    return jobs


def write_image(result: DecodeResult, i: int, stem: Path) -> dict[str, Any]:
    """Write all files of image ``i`` to ``stem`` with their suffixes; its row, with ``file``."""
    pictures = result.images  # decoded here, so that the peak counts it
    row = image_row(result, i) | {"peak_memory": peak_memory(result.model.device)}
    save_image(result, i, stem, row)
    told = textwrap.shorten(row["prompt"], 300)
    title = f"{told}, seed {row['seed']}: {row['forward_passes']} passes with {result.policy}"
    figure = decode_figure(pictures[i], result.trace.row(i), result.model.grid, title)
    heat = stem.with_name(stem.name + "_heat.png")
    write_atomic(heat, lambda to: figure.savefig(to, format="png"))
    return row | {"file": str(stem.with_name(stem.name + ".png"))}
