"""Risk from masks: real segment-anything and transformers' SAM at small sizes, and scikit-image."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat_model import FlatModel

from csd_policy import DecodeConfig, JacobiDecoder, load_model
from csd_policy.policies import CSD, RiskGated
from csd_policy.risk import SegmentationRisk
from csd_policy.risk.mask_records import read_masks
from csd_policy.risk.sam import SegmentAnything, TransformersSam
from csd_policy.risk.segmenters import Felzenszwalb, Masks, Picture, Segmenter
from csd_policy.testing import check_risk_map

GRID = (16, 16)


def disc(radius: int = 20, centre: tuple[int, int] = (40, 56)) -> tuple[Picture, Masks]:
    y, x = np.mgrid[:96, :96]
    mask = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 <= radius**2
    picture = np.where(mask[..., None], [220, 60, 20], [30, 40, 160]).astype(np.uint8)
    return picture, mask[None]


def tiny_sam() -> Any:
    from segment_anything.modeling import (
        ImageEncoderViT,
        MaskDecoder,
        PromptEncoder,
        Sam,
        TwoWayTransformer,
    )

    torch.manual_seed(0)
    encoder = ImageEncoderViT(
        depth=1, embed_dim=32, img_size=128, patch_size=16, num_heads=2, out_chans=32,
        qkv_bias=True, use_rel_pos=True, global_attn_indexes=[0], window_size=4, mlp_ratio=2,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
    )  # fmt: skip
    prompts = PromptEncoder(
        embed_dim=32, image_embedding_size=(8, 8), input_image_size=(128, 128), mask_in_chans=4
    )
    two_way = TwoWayTransformer(depth=1, embedding_dim=32, mlp_dim=64, num_heads=2)
    decoder = MaskDecoder(
        num_multimask_outputs=3, transformer=two_way, transformer_dim=32, iou_head_depth=2,
        iou_head_hidden_dim=32,
    )  # fmt: skip
    return Sam(encoder, prompts, decoder).eval()


def test_a_disc_has_its_risk_on_outline_and_inside() -> None:
    picture, masks = disc()
    risk_map = SegmentationRisk(interior=0.5, boundary=1.0, background=0.1, small=0.9)
    risk = risk_map.of_masks(masks, GRID)
    assert risk.shape == GRID and risk[0, 0] == pytest.approx(0.1)
    assert risk[40 // 6, 56 // 6] == pytest.approx(0.5)
    outline = masks[0] & ~np.roll(masks[0], 1, 0)
    rows, columns = np.nonzero(outline)
    assert (risk[rows // 6, columns // 6] == 1).all()
    found = Felzenszwalb().segment(picture)
    assert max(iou(mask, masks[0]) for mask in found) > 0.7  # its soft rim is a region too


def test_small_things_have_a_risk_of_their_own() -> None:
    _, masks = disc(radius=9)
    assert masks.mean() < 0.05
    risk = SegmentationRisk(boundary=0.0, interior=0.2, small=0.8).of_masks(masks, GRID)
    assert risk[40 // 6, 56 // 6] == pytest.approx(0.8)
    large = SegmentationRisk(boundary=0.0, interior=0.2, small=0.8, small_area=0.001)
    assert large.of_masks(masks, GRID).max() == pytest.approx(0.2)


@pytest.mark.parametrize(
    "masks", [np.zeros((0, 96, 96)), np.ones((1, 96, 96)), np.zeros((2, 9, 9))]
)
def test_pictures_without_things_are_background(masks: Any) -> None:
    risk = SegmentationRisk(background=0.25).of_masks(masks.astype(bool), GRID)
    assert risk.eq(0.25).all()


CHECKERS = np.indices((96, 96)).sum(0)[..., None] % 2 * 255 + np.zeros(3)


@pytest.mark.parametrize(
    "picture",
    [np.zeros((96, 96, 3)), np.full((96, 96, 3), 255), CHECKERS],
    ids=["black", "white", "checkers"],
)
def test_degenerate_pictures_give_finite_maps(picture: Any) -> None:
    masks = Felzenszwalb().segment(picture.astype(np.uint8))
    risk = SegmentationRisk().of_masks(masks, GRID)
    assert risk.isfinite().all() and risk.min() >= 0 and risk.max() <= 1


def test_the_contract_holds() -> None:
    check_risk_map(SegmentationRisk())


def iou(a: Any, b: Any) -> float:
    return float((a & b).sum() / (a | b).sum())


@pytest.mark.parametrize("mode", ["binary_mask", "uncompressed_rle"])
def test_masks_of_segment_anything_are_read(mode: str) -> None:
    from segment_anything import SamAutomaticMaskGenerator

    def records(output_mode: str) -> list[dict[str, Any]]:
        generator = SamAutomaticMaskGenerator(
            tiny_sam(), points_per_side=2, pred_iou_thresh=-9, stability_score_thresh=-9,
            output_mode=output_mode,
        )  # fmt: skip
        found: list[dict[str, Any]] = generator.generate(disc()[0])
        return found

    masks = read_masks(records(mode), (96, 96))
    assert masks.dtype == bool and len(masks) > 0
    plain = np.stack([record["segmentation"] for record in records("binary_mask")])
    assert (masks == plain).all()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_compressed_masks_are_read() -> None:
    coco = importlib.import_module("pycocotools.mask")
    mask = disc()[1][0]
    record = {"segmentation": coco.encode(np.asfortranarray(mask.astype(np.uint8)))}
    assert (read_masks([record], (96, 96))[0] == mask).all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"segmentation": "mask"}, "a mask is 'mask', expected an array"),
        ({"segmentation": np.zeros((9, 9))}, r"size \(9, 9\), expected \(96, 96\)"),
    ],
)
def test_wrong_masks_are_named(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_masks([record], (96, 96))


def test_segment_anything_runs_as_a_segmenter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentAnything, "_load", lambda self: tiny_sam())
    segmenter = SegmentAnything(
        "tiny.pth", points_per_side=2, pred_iou_thresh=-9, stability_score_thresh=-9
    )
    masks = segmenter.segment(disc()[0])
    assert masks.dtype == bool and masks.shape[1:] == (96, 96) and len(masks) > 0
    assert (segmenter.segment(disc()[0]) == masks).all()
    check_risk_map(SegmentationRisk(segmenter))


@pytest.mark.slow
def test_a_checkpoint_of_vit_b_is_read(tmp_path: Path) -> None:
    from segment_anything import sam_model_registry

    torch.manual_seed(0)
    sam = sam_model_registry["vit_b"]()
    torch.save(sam.state_dict(), tmp_path / "sam.pth")
    loaded = SegmentAnything(str(tmp_path / "sam.pth"))._load()
    assert all(loaded.state_dict()[name].equal(w) for name, w in sam.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_masks_of_vit_b_are_read_in_every_format() -> None:
    """The published sizes with random weights; a picture of another size than the network's."""
    from segment_anything import SamAutomaticMaskGenerator, sam_model_registry

    torch.manual_seed(0)
    generator = SamAutomaticMaskGenerator(
        sam_model_registry["vit_b"]().eval(), points_per_side=2, pred_iou_thresh=-9,
        stability_score_thresh=-9,
    )  # fmt: skip
    picture, found = disc()[0][:, :80], {}
    for mode in ("binary_mask", "uncompressed_rle", "coco_rle"):
        generator.output_mode = mode
        with torch.inference_mode():
            found[mode] = read_masks(generator.generate(picture), (96, 80))
    first = found["binary_mask"]
    assert len(first) > 0 and 0 < first.mean() < 1
    assert all((masks == first).all() for masks in found.values())


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("", "holds no small SAM"),
        ("nowhere.pth", "nowhere.pth is no file, expected published weights"),
        ("other.pth", "other.pth lacks image_encoder"),
    ],
)
def test_missing_weights_are_named(checkpoint: str, message: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    path = str(tmp_path / checkpoint)
    with pytest.raises(ValueError, match=message):
        SegmentAnything(path).segment(disc()[0])
    with pytest.raises(ValueError, match=message):  # before anything is drawn
        JacobiDecoder(FlatModel(), RiskGated(risk=SegmentationRisk(SegmentAnything(path))))


def test_transformers_sam_is_read(tmp_path: Path) -> None:
    from transformers import (
        SamConfig,
        SamImageProcessor,
        SamMaskDecoderConfig,
        SamModel,
        SamPromptEncoderConfig,
        SamVisionConfig,
    )

    torch.manual_seed(0)
    vision = SamVisionConfig(
        hidden_size=32, output_channels=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=64, patch_size=16, window_size=2, global_attn_indexes=[0], num_pos_feats=16,
        mlp_dim=32,
    )  # fmt: skip
    prompts = SamPromptEncoderConfig(
        hidden_size=32, image_size=64, patch_size=16, mask_input_channels=4
    )
    masks = SamMaskDecoderConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, mlp_dim=32,
        iou_head_depth=2, iou_head_hidden_dim=32,
    )  # fmt: skip
    config = SamConfig(
        vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks
    )
    SamModel(config).save_pretrained(tmp_path)
    SamImageProcessor(
        size={"longest_edge": 64}, pad_size={"height": 64, "width": 64}
    ).save_pretrained(tmp_path)
    segmenter = TransformersSam(
        str(tmp_path), points_per_side=2, pred_iou_thresh=-9, stability_score_thresh=-9
    )
    found = segmenter.segment(disc()[0])
    assert found.dtype == bool and found.shape[1:] == (96, 96)
    with pytest.raises(ValueError, match="no SAM '.*nowhere'"):
        TransformersSam(str(tmp_path / "nowhere")).segment(disc()[0])


class Nothing(Segmenter):
    def segment(self, picture: Picture) -> Masks:
        return np.zeros((0, *picture.shape[:2]), dtype=bool)


def test_the_loop_uses_the_map() -> None:
    model = load_model("emoji-scenes", device="cpu")
    inner, config = CSD(delta=0.65), DecodeConfig(window=16)
    tokens = {}
    for name, policy in {
        "inner": inner,
        "nothing": RiskGated(inner, SegmentationRisk(Nothing(), source="preview")),
        "felzenszwalb": RiskGated(inner, SegmentationRisk()),
    }.items():
        result = JacobiDecoder(model, policy, config=config).generate(
            ["two cats on blue plain"], [0]
        )
        tokens[name] = result.tokens
        if name == "felzenszwalb":
            assert len(result.trace.risk[~result.trace.risk.isnan()].unique()) >= 2
    assert tokens["inner"].equal(tokens["nothing"])  # no thing: all background, the inner rule
    assert not tokens["inner"].equal(tokens["felzenszwalb"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"boundary": 1.5}, "boundary is 1.5, expected a number in"),
        ({"small_area": -1}, "small_area is -1"),
        ({"segmenter": "sam"}, "segmenter is 'sam', expected a Segmenter"),
        ({"source": "sam"}, "source is 'sam'"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentationRisk(**arguments)
