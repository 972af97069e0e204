"""The small SAM: its network and files, the prompts and losses of its training, what it finds."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from csd_policy.risk.sam import PUBLISHED, SMALL, SegmentAnything
from csd_policy.risk.segmenters import Masks, Picture, Segmenter
from csd_policy.risk.small_sam import (
    FOLDER,
    SmallSamConfig,
    build_small_sam,
    load_small_sam,
    save_small_sam,
)
from trainers import evaluate_sam
from trainers.sam import SamTraining, ScenePrompts, decode_masks
from trainers.sam_losses import dice_loss, focal_loss, intersection_over_union
from trainers.sam_prompts import (
    BOXES,
    CLICKS,
    EMPTY_CLICKS,
    MOST_JITTER,
    object_masks,
    prompts_of,
)
from trainers.scenes import SceneGenerator

PICTURES = Path(__file__).parent / "fixtures" / "pictures"
TINY = SmallSamConfig(side=64, width=32, depth=1, window=2, global_blocks=(0,), channels=32,
                      decoder_heads=2, decoder_width=32)  # fmt: skip
SCENES = [SceneGenerator(PICTURES, "test")(i) for i in range(12)]


def tiny_sam() -> Any:
    torch.manual_seed(0)
    return build_small_sam(TINY).eval()


# --- the network and its files ---


def test_the_shipped_network_is_small() -> None:
    weights = load_small_sam().state_dict()
    assert sum(w.numel() for w in weights.values()) < 5e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3e6


def test_files_keep_the_network(tmp_path: Path) -> None:
    sam = tiny_sam()
    save_small_sam(sam, TINY, tmp_path)
    loaded = load_small_sam(tmp_path)
    assert not loaded.training and loaded.image_encoder.img_size == 64
    assert json.loads((tmp_path / "config.json").read_text())["global_blocks"] == [0]
    found = loaded.state_dict()
    assert found.keys() == sam.state_dict().keys()
    for name, value in sam.state_dict().items():
        assert found[name].dtype == torch.float32 and found[name].equal(value.half().float())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def widen(path: Path) -> None:
    path.write_text(path.read_text().replace('"width": 32', '"width": 64'))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("config.json", Path.unlink, "No such file"),
        ("model.safetensors", Path.unlink, "No such file"),
        ("config.json", cut, "Expecting|Unterminated"),
        ("config.json", lambda path: path.write_text("[]"), "list indices"),
        ("config.json", lambda path: path.write_text('{"global_blocks": [], "size": 1}'), "size"),
        ("model.safetensors", cut, "[Hh]eader"),
        ("config.json", widen, "size mismatch"),
    ],
)
def test_missing_and_broken_files_name_the_folder(
    name: str, spoil: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    save_small_sam(tiny_sam(), TINY, folder)
    spoil(folder / name)
    with pytest.raises(ValueError, match=f"(?s)small holds no small SAM: .*({message})"):
        SegmentAnything(str(folder)).load()


def test_settings_suit_the_network(tmp_path: Path) -> None:
    assert SegmentAnything().settings() == SMALL
    assert SegmentAnything(str(tmp_path)).settings() == SMALL
    assert SegmentAnything("sam_vit_b_01ec64.pth").settings() == PUBLISHED
    assert PUBLISHED["pred_iou_thresh"] == 0.88 and PUBLISHED["stability_score_thresh"] == 0.95
    given = SegmentAnything(points_per_side=3, pred_iou_thresh=0.0).settings()
    assert given == SMALL | {"points_per_side": 3, "pred_iou_thresh": 0.0}
    assert SegmentAnything().parameters()["points_per_side"] is None  # as it was given


def test_a_network_of_another_package_is_named(tmp_path: Path) -> None:
    """MobileSAM's encoder has names of its own; segment-anything cannot hold it."""
    weights = {"image_encoder.patch_embed.seq.0.c.weight": torch.zeros(1)}
    torch.save(weights, tmp_path / "mobile_sam.pt")
    path = str(tmp_path / "mobile_sam.pt")
    with pytest.raises(ValueError, match="mobile_sam.pt lacks .* unknown .*patch_embed.seq"):
        SegmentAnything(path).load()
    with pytest.raises(ValueError, match="model_type is 'vit_x', expected one of .*vit_b"):
        SegmentAnything(path, model_type="vit_x").load()  # type: ignore[arg-type]


class Remembering(torch.nn.Module):
    """Keeps a table of its weights from ``eval`` on, as MobileSAM's attention does."""

    def __init__(self, sam: Any) -> None:
        super().__init__()
        self.inner = sam
        self.eval()

    def train(self, mode: bool = True) -> Any:
        self.table = self.inner.mask_decoder.iou_token.weight.detach().clone()
        return super().train(mode)


def test_mobile_sam_is_used_by_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is a stub here: a tiny SAM, and a generator that keeps what it is given."""
    stub = ModuleType("mobile_sam")
    stub.sam_model_registry = {  # type: ignore[attr-defined]
        "vit_t": lambda: Remembering(build_small_sam(TINY))
    }
    stub.SamAutomaticMaskGenerator = (  # type: ignore[attr-defined]
        lambda sam, **settings: SimpleNamespace(
            predictor=sam, settings=settings, generate=lambda picture: []
        )
    )
    sam = Remembering(tiny_sam())
    torch.save(sam.state_dict(), tmp_path / "mobile_sam.pt")
    segmenter = SegmentAnything(str(tmp_path / "mobile_sam.pt"), model_type="vit_t")
    monkeypatch.setitem(sys.modules, "mobile_sam", None)  # as if not installed
    with pytest.raises(ModuleNotFoundError, match="'vit_t' needs mobile_sam.*pip install .*Mobile"):
        segmenter.load()
    monkeypatch.setitem(sys.modules, "mobile_sam", stub)
    assert segmenter.segment(disc()[0]).shape == (0, 96, 96)
    assert segmenter._generator.settings == PUBLISHED
    assert segmenter.predictor.table.equal(sam.inner.mask_decoder.iou_token.weight)
    assert not segmenter.predictor.training
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt lacks .*unknown other"):
        SegmentAnything(str(tmp_path / "other.pt"), model_type="vit_t").load()


# --- training: the network in batches ---


def test_masks_of_several_pictures_are_those_of_the_decoder() -> None:
    """``MaskDecoder.predict_masks`` takes one picture at a time."""
    sam, generator = tiny_sam(), torch.Generator().manual_seed(0)
    images = torch.randn(2, 32, 4, 4, generator=generator)
    sparse, dense = torch.randn(2, 3, 32, generator=generator), torch.randn(2, 32, 4, 4)
    with torch.no_grad():
        masks, quality = decode_masks(sam, images, sparse, dense)
        for i in range(2):
            expected = sam.mask_decoder.predict_masks(
                images[i : i + 1], sam.prompt_encoder.get_dense_pe(), sparse[i : i + 1],
                dense[i : i + 1],
            )  # fmt: skip
            assert torch.allclose(masks[i], expected[0][0], atol=1e-5)
            assert torch.allclose(quality[i], expected[1][0], atol=1e-5)
    assert masks.shape == (2, 4, 16, 16) and quality.shape == (2, 4)


def test_training_sees_what_the_predictor_sees() -> None:
    """Enlarging, prompts and logits of ``SamPredictor``, but for its rounding to 8 bits."""
    from segment_anything import SamPredictor

    training = SamTraining().eval()
    scene = SCENES[0]
    batch = {name: value[None] for name, value in prompts_of(scene).items()}
    predictor = SamPredictor(training.sam)
    predictor.set_image(scene.image)
    clicks = CLICKS + EMPTY_CLICKS
    points = predictor.transform.apply_coords_torch(batch["points"][0, :, None], (96, 96))
    boxes = predictor.transform.apply_boxes_torch(batch["boxes"][0], (96, 96))
    with torch.no_grad():
        logits, quality = training.predict(batch)
        click = predictor.predict_torch(points, torch.ones(clicks, 1), return_logits=True)
        box = predictor.predict_torch(None, None, boxes, None, False, return_logits=True)
    assert logits.shape == (1, clicks + BOXES, 4, 96, 96)
    scale = logits.std()
    assert torch.allclose(logits[0, :clicks, 1:], click[0], atol=0.1 * scale)
    assert torch.allclose(logits[0, clicks:, :1], box[0], atol=0.1 * scale)
    assert torch.allclose(quality[0, :clicks, 1:], click[1], atol=0.01)
    assert torch.allclose(quality[0, clicks:, :1], box[1], atol=0.01)


# --- training: prompts ---


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.caption.replace(" ", "_"))
def test_prompts_fit_their_masks(scene: Any) -> None:
    masks = object_masks(scene)
    assert len(masks) == len(scene.objects) and (masks.any(0) == scene.mask).all()
    assert masks.sum(0).max() == 1  # no pixel of two objects
    batch = prompts_of(scene)
    again = prompts_of(scene)
    assert all(batch[name].equal(again[name]) for name in batch)
    assert batch["image"].equal(torch.from_numpy(scene.image).permute(2, 0, 1))
    for (x, y), mask in zip(batch["points"][:CLICKS].tolist(), batch["masks"], strict=False):
        assert mask[int(y), int(x)] and any((mask.numpy() == one).all() for one in masks)
    for x, y in batch["points"][CLICKS:].tolist():
        assert not scene.mask[int(y), int(x)]
    assert not batch["masks"][CLICKS : CLICKS + EMPTY_CLICKS].any()
    for box, mask in zip(batch["boxes"], batch["masks"][-BOXES:], strict=True):
        (number,) = [i for i, one in enumerate(masks) if (mask.numpy() == one).all()]
        exact = torch.tensor(scene.objects[number].box)
        assert (box - exact).abs().max() <= MOST_JITTER and box.min() >= 0 and box.max() <= 96


def test_scenes_are_new_in_every_epoch() -> None:
    data = ScenePrompts(str(PICTURES), batch_size=2, batches_per_epoch=2, validation_scenes=2)
    data.setup("fit")
    seen = []
    for epoch in (0, 1, 0):
        data.trainer = type("Trainer", (), {"current_epoch": epoch})()  # type: ignore[assignment]
        seen.append(torch.cat([batch["image"] for batch in data.train_dataloader()]))
    assert len(seen[0]) == 4 and seen[0].equal(seen[2]) and not seen[0].equal(seen[1])


# --- training: losses ---


def test_losses_by_hand() -> None:
    """Probabilities 1/2, 3/4, 1/4 and 1/2 of two pixels inside and two outside."""
    logits = torch.tensor([[0.0, math.log(3)], [-math.log(3), 0.0]])
    truth = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    inside = 0.25 * (0.5**2 * math.log(2) + 0.25**2 * math.log(4 / 3))
    outside = 0.75 * (0.25**2 * math.log(4 / 3) + 0.5**2 * math.log(2))
    assert float(focal_loss(logits, truth)) == pytest.approx((inside + outside) / 4)
    assert float(dice_loss(logits, truth)) == pytest.approx(1 - (2 * 1.25 + 1) / (2 + 2 + 1))
    found = intersection_over_union(logits > 0, truth > 0.5)
    assert float(found) == pytest.approx(0.5)
    empty = torch.zeros(2, 2, dtype=torch.bool)
    assert float(intersection_over_union(empty, empty)) == 0


def test_focal_loss_is_that_of_torchvision() -> None:
    from torchvision.ops import sigmoid_focal_loss

    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 5, 8, 8, generator=generator)
    truth = torch.rand(3, 5, 8, 8, generator=generator).round()
    expected = sigmoid_focal_loss(logits, truth, reduction="none").mean((-2, -1))
    assert torch.allclose(focal_loss(logits, truth), expected, atol=1e-6)


def batch_of(count: int) -> dict[str, Tensor]:
    batches = [prompts_of(scene) for scene in SCENES[:count]]
    return {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}


def test_the_loss_takes_the_best_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right masks of the right quality cost nothing; the masks of an empty click are not judged."""
    training, batch = SamTraining(all_masks=0.0), batch_of(2)
    truth = batch["masks"][:, :, None].expand(-1, -1, 4, -1, -1)
    logits = 60 * truth.float() - 30
    logits[:, :CLICKS, 1:3] *= -1  # two of three masks wrong
    logits[:, CLICKS : CLICKS + EMPTY_CLICKS] = 30.0
    logits[:, CLICKS + EMPTY_CLICKS :, 1:] = 30.0  # of a box the first mask counts
    quality = intersection_over_union(logits > 0, truth)
    monkeypatch.setattr(training, "predict", lambda _: (logits, quality))
    assert float(training.losses(batch)["loss"]) == pytest.approx(0, abs=1e-4)
    wrong = quality.clone()
    wrong[:, CLICKS] += 0.5  # an empty click has no mask of any quality
    monkeypatch.setattr(training, "predict", lambda _: (logits, wrong))
    expected = 0.25 * EMPTY_CLICKS / (CLICKS + EMPTY_CLICKS)
    assert float(training.losses(batch)["loss"]) == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(training, "predict", lambda _: (logits, quality))
    training.all_masks = 0.25
    assert float(training.losses(batch)["loss"]) > 1


def test_training_learns_one_batch() -> None:
    torch.manual_seed(0)
    training, batch = SamTraining(), batch_of(2)
    optimizer = torch.optim.AdamW(training.parameters(), 1e-3)
    losses = []
    for _ in range(12):
        loss = training.losses(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


# --- what the shipped network finds ---


def disc() -> tuple[Picture, Masks]:
    y, x = np.mgrid[:96, :96]
    mask = (y - 44) ** 2 + (x - 54) ** 2 <= 22**2
    picture = np.where(mask[..., None], [220, 60, 20], [40, 70, 160]).astype(np.uint8)
    return picture, mask[None]


def test_the_shipped_network_finds_a_disc() -> None:
    picture, truth = disc()
    segmenter = SegmentAnything()
    found = segmenter.segment(picture)
    assert evaluate_sam.match(found, truth)[0] > 0.75
    assert len(found) <= 3 and (segmenter.segment(picture) == found).all()


def test_the_shipped_network_finds_objects() -> None:
    """On test scenes of the pictures in this folder, some 80 % of the objects."""
    segmenter = SegmentAnything()
    found = [evaluate_sam.examine(segmenter, scene) for scene in SCENES]
    matched = np.concatenate([f.matched for f in found])
    assert (matched >= 0.5).mean() > 0.6
    assert sum(f.masks for f in found) < 2 * len(matched)


class Everything(Segmenter):
    def segment(self, picture: Picture) -> Masks:
        return np.ones((1, *picture.shape[:2]), dtype=bool)


# --- evaluation ---


def test_each_mask_counts_for_one_object() -> None:
    truth = np.zeros((2, 4, 4), dtype=bool)
    truth[0, :2], truth[1, 2:] = True, True
    half = truth[0].copy()
    half[1] = False
    found = np.stack([half, truth[0], np.ones((4, 4), dtype=bool)])
    assert evaluate_sam.match(found, truth).tolist() == [1.0, 0.5]
    assert evaluate_sam.match(found[:1], truth).tolist() == [0.5, 0.0]
    assert evaluate_sam.match(found[:0], truth).tolist() == [0.0, 0.0]


class Oracle(Segmenter):
    """The objects themselves, and one mask too many of each picture."""

    def segment(self, picture: Picture) -> Masks:
        (scene,) = [scene for scene in SCENES if (scene.image == picture).all()]
        corner = np.zeros((1, 96, 96), dtype=bool)
        corner[:, :2, :2] = True
        return np.concatenate([object_masks(scene), corner])


class Blind(Segmenter):
    def segment(self, picture: Picture) -> Masks:
        return np.zeros((0, 96, 96), dtype=bool)


def test_perfect_and_blind_segmenters_are_told_apart() -> None:
    seen = evaluate_sam.summarise([evaluate_sam.examine(Oracle(), scene) for scene in SCENES])
    objects = sum(len(scene.objects) for scene in SCENES)
    assert seen["recall_0.5"]["mean"] == seen["recall_0.75"]["low"] == 1
    assert seen["precision_0.5"]["mean"] == pytest.approx(objects / (objects + len(SCENES)))
    assert seen["precision_0.5"]["low"] < seen["precision_0.5"]["mean"]
    # not 1: an outline also marks the cells of background that it touches
    assert seen["risk_auroc"]["mean"] > 0.85
    none = evaluate_sam.summarise([evaluate_sam.examine(Blind(), scene) for scene in SCENES])
    assert none["recall_0.5"]["high"] == 0 and none["risk_auroc"]["mean"] == 0.5
    assert none["masks"] == 0 and "precision_0.5" not in none


def test_evaluation_writes_a_report_and_a_sheet(tmp_path: Path) -> None:
    save_small_sam(tiny_sam(), TINY, tmp_path / "tiny")
    output = tmp_path / "sam.json"
    evaluate_sam.main(str(output), str(tmp_path / "tiny"), str(PICTURES), "validation", 2)
    report = json.loads(output.read_text())
    assert report["scenes"] == report["prompts"]["all"]["scenes"] == 2
    assert len(report["weights_hash"]) == 64 and report["settings"] == SMALL
    assert set(report["found"]) == {"SegmentAnything", "Felzenszwalb"}
    for kind in ("click", "click_best", "box"):
        assert 0 <= report["prompts"]["all"][kind]["mean"] <= 1
    assert (
        report["prompts"]["all"]["click_best"]["mean"] >= report["prompts"]["all"]["click"]["mean"]
    )
    from PIL import Image

    with Image.open(tmp_path / "sam.png") as sheet:
        assert sheet.height > 2 * 96 and sheet.width > 5 * 96
    with pytest.raises(ValueError, match="scenes is 0, expected 1 or more"):
        evaluate_sam.main(str(output), scenes=0)
