"""Do the shipped model's pictures show what was asked for? A classifier judges single objects.

    python -m trainers.evaluate_prior --model emoji-scenes --classifier runs/emoji_classifier/export
        --pictures data/pictures --num_captions 200 --guidance_scale 3.0 --output outputs/prior.json

The captions are the first single-object captions of the test split. Beside the drawn pictures
stand the true scenes of the same captions and their reconstructions by the tokenizer: the
classifier's own errors, and the most that can be expected of a prior over these codes. Writes the
JSON file and, beside it, a contact sheet (PNG) of the drawn pictures.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from tqdm import tqdm

from csd_policy.models import SHIPPED
from csd_policy.models.vq import VQAutoencoder
from trainers.classifier import (
    class_of,
    load_classifier,
    reconstruct,
    single_object_indices,
)
from trainers.data import to_pixels
from trainers.scenes import SIZE, Scene, SceneGenerator, object_kinds

BATCH = 16  # pictures drawn or judged at once
WINDOW = 16
Draw = Callable[[list[str], list[int]], list[Image.Image]]  # captions, seeds -> pictures
logger = logging.getLogger(__name__)


def wilson(hits: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval for a share, by default at 95 % (Wilson 1927)."""
    centre, spread = hits + z * z / 2, z * math.sqrt(hits * (total - hits) / total + z * z / 4)
    low, high = (centre - spread) / (total + z * z), (centre + spread) / (total + z * z)
    return max(0.0, low), min(1.0, high)


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """How many of ``hits`` are True, as a share with its 95 % interval; no share of nothing."""
    if not hits:
        return {"of": 0}
    low, high = wilson(sum(hits), len(hits))
    return {
        "share": round(sum(hits) / len(hits), 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "of": len(hits),
    }


@torch.inference_mode()
def predictions(classifier: nn.Module, pixels: Tensor) -> Tensor:
    """The five likeliest classes, best first, int64 ``[B, 5]``, of pictures in [-1, 1]."""
    logits = [classifier(batch) for batch in pixels.split(BATCH)]
    return torch.cat(logits).topk(5).indices


def summarise(scenes: Sequence[Scene], predicted: Tensor) -> dict[str, Any]:
    """Shares recognised (top 1, top 5), of all scenes and by background and novelty.

    Args:
        scenes: whose captions were drawn, B of them.
        predicted: of the pictures, int64 ``[B, 5]``, see ``predictions``.
    """
    truth = torch.tensor([class_of(scene) for scene in scenes])
    found = predicted == truth[:, None]
    groups = {
        "all": [True for _ in scenes],
        "plain": [scene.kind == "plain" for scene in scenes],
        "photo": [scene.kind == "photo" for scene in scenes],
        "seen": [not scene.held_out for scene in scenes],
        "held_out": [scene.held_out for scene in scenes],
    }
    return {
        name: {f"top{k}": share(found[torch.tensor(members), :k].any(1).tolist()) for k in (1, 5)}
        for name, members in groups.items()
    }


def first_single_scenes(pictures: str | Path, number: int) -> list[Scene]:
    """The first ``number`` scenes of the test split that show one object."""
    generator = SceneGenerator(pictures, "test")
    return [generator(i) for i in islice(single_object_indices(generator), number)]


def draw_all(draw: Draw, captions: list[str]) -> list[Image.Image]:
    """One picture per caption, in batches; caption i has seed i."""
    pictures: list[Image.Image] = []
    for start in tqdm(range(0, len(captions), BATCH), desc="drawing"):
        batch = captions[start : start + BATCH]
        pictures += draw(batch, list(range(start, start + len(batch))))
    return pictures


def contact_sheet(
    pictures: Sequence[Image.Image], scenes: Sequence[Scene], predicted: Tensor, columns: int = 16
) -> Image.Image:
    """The pictures with their captions; below a wrong one, in red, what the classifier saw."""
    width, height = SIZE + 24, SIZE + 30
    sheet = Image.new("RGB", (columns * width, -(-len(pictures) // columns) * height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(9)
    for i, (picture, scene) in enumerate(zip(pictures, scenes, strict=True)):
        x, y = i % columns * width + 2, i // columns * height + 2
        sheet.paste(picture, (x, y))
        pen.text((x, y + SIZE), scene.caption, fill="black", font=font)
        best = int(predicted[i, 0])
        if best != class_of(scene):
            pen.text((x, y + SIZE + 11), object_kinds()[best].name, fill="red", font=font)
    return sheet


def evaluate(
    draw: Draw, classifier: nn.Module, vq: VQAutoencoder, scenes: Sequence[Scene]
) -> tuple[dict[str, Any], Image.Image]:
    """The report's ``recognised`` part, and the contact sheet.

    Args:
        draw: the model under test; its pictures are 96x96 RGB.
        classifier: logits of pictures in [-1, 1], ``[B, 3, 96, 96]``.
        vq: the tokenizer that the model draws with.
        scenes: with one object each.
    """
    drawn = draw_all(draw, [scene.caption for scene in scenes])
    true_pixels = torch.stack([to_pixels(scene.image) for scene in scenes])
    kept = [reconstruct(vq, batch).clamp(-1, 1) for batch in true_pixels.split(BATCH)]
    pixels = {
        "drawn": torch.stack([to_pixels(np.array(picture.convert("RGB"))) for picture in drawn]),
        "reconstructed": torch.cat(kept),
        "true": true_pixels,
    }
    predicted = {name: predictions(classifier, batch) for name, batch in pixels.items()}
    recognised = {name: summarise(scenes, best) for name, best in predicted.items()}
    return recognised, contact_sheet(drawn, scenes, predicted["drawn"])


def make_draw(model: str, guidance_scale: float) -> Draw:
    """Exact decoding with the model's own settings otherwise."""
    from csd_policy import DecodeConfig, JacobiDecoder, load_model
    from csd_policy.drafts import Gumbel
    from csd_policy.policies import Exact

    config = DecodeConfig(window=WINDOW, guidance_scale=guidance_scale)
    decoder = JacobiDecoder(load_model(model), policy=Exact(), draft=Gumbel(), config=config)

    def draw(captions: list[str], seeds: list[int]) -> list[Image.Image]:
        return list(decoder.generate(captions, seeds=seeds).images)

    return draw


def model_folder(model: str) -> Path:
    """``model`` if it is a folder, else the folder of the shipped model of that name."""
    return Path(model) if Path(model).is_dir() else SHIPPED / model


def main(
    model: str,
    classifier: str,
    output: str,
    pictures: str = "data/pictures",
    num_captions: int = 200,
    guidance_scale: float = 3.0,
) -> None:
    """Measure how often a model's single objects are recognised.

    Args:
        model: name of the shipped model, or a folder with a prior and its tokenizer.
        classifier: folder with ``classifier.safetensors``.
        output: JSON file to write; the contact sheet has the same name with ``.png``.
        pictures: folder that the test scenes are made of.
        num_captions: how many captions to draw, 1 or more.
        guidance_scale: of classifier-free guidance.
    """
    if num_captions < 1:
        raise ValueError(f"num_captions is {num_captions}, expected 1 or more")
    draw = make_draw(model, guidance_scale)
    judge, vq = load_classifier(classifier), VQAutoencoder.from_folder(model_folder(model))
    scenes = first_single_scenes(pictures, num_captions)
    begin = time.perf_counter()
    recognised, sheet = evaluate(draw, judge, vq, scenes)
    report = {
        "model": model,
        "classifier": classifier,
        "num_captions": num_captions,
        "guidance_scale": guidance_scale,
        "window": WINDOW,
        "batch_size": BATCH,
        "seconds": round(time.perf_counter() - begin, 1),
        "recognised": recognised,
    }
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path.with_suffix(".png"))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)
    for name, groups in recognised.items():
        logger.info("%s pictures recognised: %s", name, groups["all"]["top1"])


if __name__ == "__main__":
    from jsonargparse import auto_cli

    logging.basicConfig(level=logging.INFO)
    auto_cli(main, as_positional=False)
