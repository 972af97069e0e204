"""The shipped SAM: a small one of segment-anything's own classes, trained on emoji scenes."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from csd_policy.risk.segmenters import missing

FOLDER = Path(__file__).parent / "weights/small_sam"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class SmallSamConfig:
    """Sizes of the network.

    Attributes:
        side: pixels of the square that a picture is enlarged to.
        patch: pixels of an image token's side.
        width, depth, heads: of the image encoder.
        window: image tokens of a local attention's side.
        global_blocks: encoder blocks with attention over the whole picture.
        channels: of the image embedding and of the mask decoder.
        decoder_heads, decoder_width: of the mask decoder.
    """

    side: int = 256
    patch: int = 16
    width: int = 128
    depth: int = 4
    heads: int = 4
    window: int = 8
    global_blocks: tuple[int, ...] = (1, 3)
    channels: int = 64
    decoder_heads: int = 4
    decoder_width: int = 256


def build_small_sam(config: SmallSamConfig) -> Any:
    """A ``segment_anything.modeling.Sam`` of these sizes with random weights.

    Raises:
        ModuleNotFoundError: segment-anything is not installed.
    """
    try:
        from segment_anything.modeling import (
            ImageEncoderViT,
            MaskDecoder,
            PromptEncoder,
            Sam,
            TwoWayTransformer,
        )
    except ModuleNotFoundError as error:
        raise missing("segment-anything", "SegmentAnything") from error
    tokens = config.side // config.patch
    return Sam(
        image_encoder=ImageEncoderViT(
            img_size=config.side,
            patch_size=config.patch,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            out_chans=config.channels,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=config.window,
            global_attn_indexes=config.global_blocks,
        ),
        prompt_encoder=PromptEncoder(
            embed_dim=config.channels,
            image_embedding_size=(tokens, tokens),
            input_image_size=(config.side, config.side),
            mask_in_chans=16,
        ),
        mask_decoder=MaskDecoder(
            num_multimask_outputs=3,
            transformer=TwoWayTransformer(
                depth=2,
                embedding_dim=config.channels,
                mlp_dim=config.decoder_width,
                num_heads=config.decoder_heads,
            ),
            transformer_dim=config.channels,
            iou_head_depth=3,
            iou_head_hidden_dim=config.channels,
        ),
    )


def save_small_sam(sam: Any, config: SmallSamConfig, folder: Path) -> None:
    """Write config.json and model.safetensors (fp16)."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous() for name, value in sam.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(asdict(config), indent=1) + "\n")


def load_small_sam(folder: Path = FOLDER) -> Any:
    """The network of a folder that ``save_small_sam`` wrote, fp32, in evaluation mode.

    Raises:
        ValueError: a file is missing or does not hold what it should.
        ModuleNotFoundError: segment-anything is not installed.
    """
    try:
        given = json.loads((folder / CONFIG).read_text())
        given["global_blocks"] = tuple(given["global_blocks"])
        weights = {k: v.float() for k, v in load_file(folder / WEIGHTS).items()}
        sam = build_small_sam(SmallSamConfig(**given))
        sam.load_state_dict(weights)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{folder} holds no small SAM: {error}") from error
    return sam.eval()
