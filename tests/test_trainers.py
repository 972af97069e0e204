"""Training: small parts against slow references, and short runs of the shipped configurations."""

import json
import shutil
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import trainers.data
from csd_policy.models.vq import VQAutoencoder, VQConfig
from csd_policy.risk.small_sam import load_small_sam
from trainers import evaluate_prior
from trainers.classifier import (
    Classifier,
    ClassifierTraining,
    SingleObjectScenes,
    augment,
    class_of,
    export_classifier,
    load_classifier,
    single_object_indices,
)
from trainers.cli import main
from trainers.data import EncodedScenes, SceneDataset, ScenePixels, pixels_of, to_pixels
from trainers.prior import PriorTraining, build_model, build_tokenizer, export_prior
from trainers.sam import SamTraining
from trainers.scenes import SceneGenerator, caption_words, object_kinds
from trainers.schedules import warmup_then_cosine, warmup_then_linear
from trainers.vq import VQTraining, export_vq, gradient_l1

ROOT = Path(__file__).parent.parent
PICTURES = Path(__file__).parent / "fixtures" / "pictures"
SMALL_PRIOR = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate": 64}
STEPS_PER_EPOCH = 2


@pytest.fixture(autouse=True)
def plain_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns if pytest's own arguments are in ``sys.argv``."""
    monkeypatch.setattr("sys.argv", ["pytest"])


def fit(config: str, folder: Path, *options: str) -> Path:
    """Train by a shipped configuration, small and in fp32; the folder of the checkpoints."""
    checkpoints = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": f"{folder}/checkpoints", "save_last": True},
    }
    main(
        [
            "fit",
            f"--config={ROOT}/configs/train/{config}",
            "--model.compile=false",
            f"--model.export_to={folder}/export",
            f"--data.folder={PICTURES}",
            "--data.batch_size=4",
            f"--data.batches_per_epoch={STEPS_PER_EPOCH}",
            "--data.validation_scenes=4",
            f"--trainer.default_root_dir={folder}",
            f"--trainer.logger.save_dir={folder}",
            f"--trainer.callbacks=[{json.dumps(checkpoints)}]",
            "--trainer.precision=32-true",
            "--trainer.max_steps=2",
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            *options,
        ]
    )
    return folder / "checkpoints"


def read(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint, loaded without unpickling of arbitrary objects."""
    return torch.load(checkpoint, weights_only=True)


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Bit-for-bit equality of nested dicts, lists and tensors."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}/{i}")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def vq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with random weights, exported as the package ships it."""
    folder = tmp_path_factory.mktemp("vq")
    torch.manual_seed(0)
    export_vq(VQAutoencoder(VQConfig()), folder)
    return folder


# --- tokenizer ---


def test_encode_and_decode(vq_folder: Path) -> None:
    vq = VQAutoencoder.from_folder(vq_folder)
    pictures = torch.rand(2, 3, 96, 96) * 2 - 1
    with torch.inference_mode():
        ids = vq.encode(pictures)
        decoded = vq.decode(ids)
    assert ids.shape == (2, 256) and ids.dtype == torch.int64
    assert ids.min() >= 0 and ids.max() < vq.config.num_codes
    assert decoded.shape == pictures.shape and decoded.abs().max() <= 1


def test_codes_are_the_nearest(vq_folder: Path) -> None:
    vq = VQAutoencoder.from_folder(vq_folder)
    latents = torch.nn.functional.normalize(torch.randn(2, 16, 3, 3), dim=1)
    ids = vq.nearest(latents)
    for b, row, column in np.ndindex(2, 3, 3):
        distance = (vq.codebook - latents[b, :, row, column]).norm(dim=1)
        assert distance[ids[b, row, column]] <= distance.min() + 1e-3  # the codebook is fp16


def test_picture_size_must_fit_the_patches() -> None:
    with pytest.raises(ValueError, match="image_size 97 is not a multiple of patch_size 6"):
        VQConfig(image_size=97)


def test_gradient_l1_against_loops() -> None:
    a, b = torch.randn(2, 2, 3, 4, 5)
    d = (a - b).double()
    right = [d[i, c, y, x + 1] - d[i, c, y, x] for i, c, y, x in np.ndindex(2, 3, 4, 4)]
    down = [d[i, c, y + 1, x] - d[i, c, y, x] for i, c, y, x in np.ndindex(2, 3, 3, 5)]
    slow = sum(abs(v) for v in right) / len(right) + sum(abs(v) for v in down) / len(down)
    assert gradient_l1(a, b) == pytest.approx(float(slow), rel=1e-5)


def codebook_step(training: VQTraining, latents: Tensor, ids: Tensor) -> None:
    training.on_train_batch_end({"latents": latents, "ids": ids}, torch.empty(0), 0)


def test_codebook_follows_moving_averages() -> None:
    training = VQTraining(ema_decay=0.9, dead_below=0.0, compile=False)
    count, total = training.count.clone(), training.total.clone()
    z = torch.nn.functional.normalize(torch.randn(1, 16, 2, 2), dim=1)
    ids = torch.tensor([[[7, 7], [9, 7]]])
    codebook_step(training, z, ids)
    for code, places in ((7, [(0, 0), (0, 1), (1, 1)]), (9, [(1, 0)]), (0, [])):
        new = sum((z[0, :, y, x] for y, x in places), torch.zeros(16))
        mean = 0.9 * total[code] + 0.1 * new
        assert torch.allclose(training.total[code], mean, atol=1e-6)
        assert training.count[code] == pytest.approx(float(0.9 * count[code] + 0.1 * len(places)))
        assert torch.allclose(training.model.codebook[code], mean / mean.norm(), atol=1e-6)


def test_dead_codes_restart_at_latents_of_the_batch() -> None:
    training = VQTraining(ema_decay=0.9, dead_below=0.95, compile=False)
    z = torch.nn.functional.normalize(torch.randn(1, 16, 2, 2), dim=1)
    codebook_step(training, z, torch.full((1, 2, 2), 3))
    places = z.flatten(2)[0].T
    similarity = training.model.codebook @ places.T
    dead = torch.arange(1024) != 3
    assert (similarity.max(1).values[dead] > 1 - 1e-5).all()
    assert similarity.argmax(1).unique().numel() == 4, "restarts share one latent"
    assert training.count[dead].eq(1).all()


def test_vq_run_and_export(tmp_path: Path) -> None:
    checkpoints = fit("emoji_vq.yaml", tmp_path)
    state = read(checkpoints / "last.ckpt")
    assert state["global_step"] == 2
    exported = VQAutoencoder.from_folder(tmp_path / "export")
    for name, value in exported.state_dict().items():
        assert torch.equal(value, state["state_dict"][f"model.{name}"].half().float())
    text = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text()
    assert "train/loss" in text and "validation/psnr_db" in text
    again = VQTraining(init_from=str(tmp_path / "export" / "vq.safetensors"), compile=False)
    assert_equal(dict(again.model.state_dict()), dict(exported.state_dict()))
    assert torch.equal(again.total, again.model.codebook)


def test_training_the_decoder_alone_leaves_the_codes(tmp_path: Path) -> None:
    fit("emoji_vq.yaml", tmp_path / "first")
    start = tmp_path / "first" / "export"
    weights = f"--model.init_from={start / 'vq.safetensors'}"
    fit("emoji_vq_decoder.yaml", tmp_path, weights, "--model.learning_rate=0.1")
    before, after = (VQAutoencoder.from_folder(f) for f in (start, tmp_path / "export"))
    for name, value in after.state_dict().items():
        same = torch.equal(value, before.state_dict()[name])
        assert same != name.startswith("decoder"), name


def test_scene_pixels_are_new_in_every_epoch() -> None:
    data = ScenePixels(str(PICTURES), batch_size=4, batches_per_epoch=2, validation_scenes=4)
    data.setup("fit")
    make = SceneGenerator(PICTURES, "train")
    for epoch in (0, 3):
        data.trainer = SimpleNamespace(current_epoch=epoch)  # type: ignore[assignment]
        pictures = torch.cat(list(data.train_dataloader()))
        scenes = [make(i) for i in range(8 * epoch, 8 * epoch + 8)]
        assert torch.equal(pictures, torch.stack([to_pixels(scene.image) for scene in scenes]))
    assert len(data.val_dataloader()) == 1


def test_scene_dataset_ends() -> None:
    scenes = SceneDataset(SceneGenerator(PICTURES, "train"), 5, 2, pixels_of)
    assert len(list(scenes)) == 2
    with pytest.raises(IndexError):
        scenes[2]


# --- schedules ---


def test_schedules_rise_and_fall() -> None:
    linear, cosine = warmup_then_linear(10, 100), warmup_then_cosine(10, 100, floor=0.02)
    assert [linear(0), linear(9), linear(55), linear(100)] == pytest.approx([0.1, 0.91, 0.45, 0])
    assert cosine(0) == pytest.approx(0.1)
    assert cosine(50) == pytest.approx(0.51)
    assert cosine(100) == cosine(1000) == pytest.approx(0.02)


# --- text tokenizer ---


def words_of(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(prompt)["input_ids"])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("two cats on blue plain", "<bos> two cats on blue plain <boi>"),
        ("Two CATS on the Blue plain", "<bos> two cats on blue plain <boi>"),
        (
            "a panda above an elephant on  a red photo",
            "<bos> panda above elephant on red photo <boi>",
        ),
        ("koala on blue plain", "<bos> koala on blue plain <boi>"),
        ("two teapots on blue plain", "<bos> two <unk> on blue plain <boi>"),
        ("", "<bos> <boi>"),
    ],
)
def test_prompts_become_words(prompt: str, words: str) -> None:
    assert words_of(build_tokenizer(), prompt) == words.split()


def test_vocabulary_is_closed_and_ordered(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 4 + len(caption_words()) + 1024
    for word in caption_words():
        assert words_of(tokenizer, word) == ["<bos>", word, "<boi>"]
    first = tokenizer.convert_tokens_to_ids("<image_0000>")
    codes = [tokenizer.convert_tokens_to_ids(f"<image_{i:04d}>") for i in range(1024)]
    assert codes == list(range(first, first + 1024))
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    captions = ["Two cats on the blue plain", "taxi", "a teapot on red photo"]
    batch = {"padding": True, "return_tensors": "np"}
    for name, value in tokenizer(captions, **batch).items():
        assert np.array_equal(again(captions, **batch)[name], value)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.pad_token_id == tokenizer.pad_token_id


# --- rows for the prior ---

TRAIN_SCENES, VALIDATION_SCENES = 64, 20


@pytest.fixture(scope="module")
def codes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codes")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shards of 64 scenes, encoded without compilation."""
    monkeypatch.setattr(EncodedScenes, "SHARD", 64)
    monkeypatch.setattr(trainers.data.torch, "compile", lambda function: function)
    yield


@pytest.fixture
def encoded(small_shards: None, vq_folder: Path, codes_folder: Path) -> EncodedScenes:
    data = EncodedScenes(
        str(PICTURES), str(vq_folder), str(codes_folder), TRAIN_SCENES, VALIDATION_SCENES, 4, 6
    )
    data.prepare_data()
    data.setup("fit")
    return data


def test_rows_against_a_slow_construction(encoded: EncodedScenes, vq_folder: Path) -> None:
    make, vocabulary = SceneGenerator(PICTURES, "validation"), build_tokenizer().get_vocab()
    scenes = [make(i) for i in range(64)]
    with torch.inference_mode():
        pixels = torch.stack([to_pixels(scene.image) for scene in scenes])
        plain = VQAutoencoder.from_folder(vq_folder).encode(pixels).numpy()
    codes = np.load(encoded._shard("validation", 0))["codes"][:64]
    assert (codes == plain).mean() > 0.9  # encoded in bfloat16: near ties may differ
    scenes = scenes[:VALIDATION_SCENES]
    longest = max(len(scene.caption.split()) for scene in scenes) + 2 + 256
    ids, targets = encoded.rows["validation"].tensors
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.shape == targets.shape == (VALIDATION_SCENES, longest - 1)
    for i, scene in enumerate(scenes):
        row = ["<bos>", *scene.caption.split(), "<boi>"] + [f"<image_{c:04d}>" for c in codes[i]]
        row += ["<pad>"] * (longest - len(row))
        numbers = [vocabulary[word] for word in row]
        assert ids[i].tolist() == numbers[:-1]
        loss = [vocabulary[word] if word.startswith("<image") else -100 for word in row[1:]]
        assert targets[i].tolist() == loss
        assert int((ids[i] == vocabulary["<boi>"]).nonzero()) == len(scene.caption.split()) + 1


def test_scenes_are_encoded_once(
    encoded: EncodedScenes, codes_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(path.name for path in codes_folder.glob("*/*")) == [
        "train_0000.npz",
        "validation_0000.npz",
    ]
    monkeypatch.setattr(EncodedScenes, "_encode_shard", lambda *_: pytest.fail("encoded again"))
    encoded.prepare_data()


def test_another_tokenizer_gets_codes_of_its_own(
    encoded: EncodedScenes, codes_folder: Path, tmp_path: Path
) -> None:
    export_vq(VQAutoencoder(VQConfig()), tmp_path)
    other = EncodedScenes(str(PICTURES), str(tmp_path), str(codes_folder))
    assert other._shard("train", 0).parent != encoded._shard("train", 0).parent


def test_every_row_is_seen_once_in_every_pass(encoded: EncodedScenes) -> None:
    rows, per_epoch = encoded.rows["train"].tensors[0], 24
    seen: list[bytes] = []
    for epoch in range(-(-2 * len(rows) // per_epoch)):
        encoded.trainer = SimpleNamespace(current_epoch=epoch)  # type: ignore[assignment]
        batches = [ids for ids, _ in encoded.train_dataloader()]
        assert [len(ids) for ids in batches] == [4] * 6
        seen += [row.numpy().tobytes() for row in torch.cat(batches)]
    expected = sorted(row.numpy().tobytes() for row in rows)
    first, second = seen[: len(rows)], seen[len(rows) : 2 * len(rows)]
    assert sorted(first) == sorted(second) == expected
    assert first != second


# --- prior ---


def drop_slowly(ids: Tensor, targets: Tensor, dropped: Tensor, boi: int, pad: int) -> list[Tensor]:
    new_ids, new_targets = ids.clone(), targets.clone()
    for i in dropped.nonzero().flatten().tolist():
        row, loss = ids[i].tolist(), targets[i].tolist()
        start = row.index(boi)
        short = [row[0], *row[start:]]
        new_ids[i] = torch.tensor(short + [pad] * (len(row) - len(short)))
        short = [loss[0], *loss[start:]]
        new_targets[i] = torch.tensor(short + [-100] * (len(loss) - len(short)))
    return [new_ids, new_targets]


@pytest.mark.parametrize("dropout", [0.0, 0.5, 0.999])
def test_drop_captions_against_a_loop(encoded: EncodedScenes, dropout: float) -> None:
    training = PriorTraining(**SMALL_PRIOR, caption_dropout=dropout, compile=False)
    ids, targets = encoded.rows["train"].tensors
    dropped = torch.rand(len(ids), 1, generator=torch.Generator().manual_seed(3)) < dropout
    boi, pad = (training.tokenizer.convert_tokens_to_ids(t) for t in ("<boi>", "<pad>"))
    slow = drop_slowly(ids, targets, dropped[:, 0], boi, pad)
    fast = training._drop_captions(ids, targets, torch.Generator().manual_seed(3))
    assert_equal(list(fast), slow)
    if dropout:
        empty = training.tokenizer("")["input_ids"]
        row = int(dropped[:, 0].nonzero()[0])
        assert fast[0][row, :2].tolist() == empty
        assert (fast[1] != -100).sum(1).eq(256).all()


def test_prior_loss_covers_the_codes_only(encoded: EncodedScenes) -> None:
    training = PriorTraining(**SMALL_PRIOR, compile=False)
    ids, targets = (part[:3] for part in encoded.rows["train"].tensors)
    with torch.inference_mode():
        logits = training.model(input_ids=ids).logits.double().log_softmax(-1)
        loss = float(training.losses(ids, targets))
    places = (targets != -100).nonzero().tolist()
    slow = [-float(logits[i, j, targets[i, j]]) for i, j in places]
    assert len(slow) == 3 * 256
    assert loss == pytest.approx(np.mean(slow), rel=1e-5)


def prior_options(vq_folder: Path, codes_folder: Path) -> list[str]:
    return [
        *(f"--model.{name}={value}" for name, value in SMALL_PRIOR.items()),
        f"--data.vq_folder={vq_folder}",
        f"--data.cache={codes_folder}",
        f"--data.train_scenes={TRAIN_SCENES}",
    ]


def test_prior_run_and_export(
    small_shards: None,
    vq_folder: Path,
    codes_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoints = fit("emoji_prior.yaml", tmp_path, *prior_options(vq_folder, codes_folder))
    state = read(checkpoints / "last.ckpt")["state_dict"]

    def no_network(*_: Any) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    model = LlamaForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[f"model.{name}"].half().float()), name
    layout = json.loads((tmp_path / "export" / "image_model.json").read_text())
    assert layout["grid"] == [16, 16] and layout["num_codes"] == 1024
    assert layout["first_image_token"] == tokenizer.convert_tokens_to_ids("<image_0000>")
    assert model.config.vocab_size == layout["first_image_token"] + 1024 == len(tokenizer)
    again = PriorTraining(**SMALL_PRIOR, init_from=str(tmp_path / "export"), compile=False)
    assert_equal(dict(again.model.state_dict()), dict(model.state_dict()))


def test_export_keeps_the_trained_model(tmp_path: Path) -> None:
    """The export is in fp16; the model in training must stay in fp32."""
    model = build_model(32, 1, 2, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_prior(model, build_tokenizer(), tmp_path)
    assert_equal(dict(model.state_dict()), before)


def test_init_from_another_size_is_an_error(tmp_path: Path) -> None:
    export_prior(build_model(32, 1, 2, 64), build_tokenizer(), tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        PriorTraining(hidden_size=64, layers=1, heads=2, init_from=str(tmp_path), compile=False)


# --- classifier ---


def test_single_objects_are_found_without_composing() -> None:
    make = SceneGenerator(PICTURES, "validation")
    slow = [i for i in range(200) if len(make(i).objects) == 1]
    indices = single_object_indices(make)
    assert [next(indices) for _ in slow] == slow


def test_single_object_scenes_and_their_classes() -> None:
    data = SingleObjectScenes(str(PICTURES), batch_size=4, batches_per_epoch=3, validation_scenes=5)
    data.setup("fit")
    make, kinds = SceneGenerator(PICTURES, "train"), object_kinds()
    singles = [scene for scene in map(make, range(200)) if len(scene.objects) == 1]
    for epoch in (0, 1, 0, 3):  # in order, again, and after a jump, as in a resumed run
        data.trainer = SimpleNamespace(current_epoch=epoch)  # type: ignore[assignment]
        batches = list(data.train_dataloader())
        labels = torch.cat([labels for _, labels in batches]).tolist()
        scenes = singles[12 * epoch : 12 * (epoch + 1)]
        assert [kinds[label].name for label in labels] == [s.objects[0].name for s in scenes]
        pixels = torch.cat([pictures for pictures, _ in batches])
        assert torch.equal(pixels, torch.stack([to_pixels(scene.image) for scene in scenes]))
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 5


def test_augmentation_is_mild_and_reproducible() -> None:
    pictures = torch.stack(
        [to_pixels(SceneGenerator(PICTURES, "train")(i).image) for i in range(8)]
    )
    once = augment(pictures, torch.Generator().manual_seed(1))
    again = augment(pictures, torch.Generator().manual_seed(1))
    assert torch.equal(once, again) and not torch.equal(once, pictures)
    assert (once - pictures).abs().mean() < 0.15
    assert (once - pictures).flatten(1).std(1).unique().numel() == 8


def test_half_of_the_pictures_pass_through_the_tokenizer(
    vq_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = ClassifierTraining(vq_folder=str(vq_folder), compile=False)
    assert not [name for name in training.state_dict() if "codebook" in name]
    seen: list[Tensor] = []
    monkeypatch.setattr("trainers.classifier.augment", lambda pictures, _: pictures)
    monkeypatch.setattr(training, "_losses", lambda pictures, _: seen.append(pictures))
    monkeypatch.setattr(training, "log", lambda *_, **__: None)
    pictures = torch.rand(6, 3, 96, 96) * 2 - 1
    training.training_step((pictures, torch.zeros(6, dtype=torch.int64)), 0)
    vq = VQAutoencoder.from_folder(vq_folder)
    with torch.no_grad():
        assert torch.allclose(seen[0][:3], vq.decode(vq.encode(pictures[:3])), atol=1e-5)
    assert torch.equal(seen[0][3:], pictures[3:])


def test_classifier_run_and_export(vq_folder: Path, tmp_path: Path) -> None:
    checkpoints = fit("emoji_classifier.yaml", tmp_path, f"--model.vq_folder={vq_folder}")
    state = read(checkpoints / "last.ckpt")["state_dict"]
    classifier = load_classifier(tmp_path / "export")
    assert not classifier.training
    for name, value in classifier.state_dict().items():
        assert torch.equal(value, state[f"model.{name}"].half().float())
    assert classifier(torch.zeros(2, 3, 96, 96)).shape == (2, 229)
    text = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text()
    assert "validation/accuracy" in text and "validation/accuracy_reconstructed" in text


def test_classifier_learns_one_batch() -> None:
    """Twenty steps took the loss from 5.4 to 1.4 nats; a third leaves room for other kernels."""
    torch.manual_seed(0)
    make = SceneGenerator(PICTURES, "train")
    scenes = [make(i) for i in islice(single_object_indices(make), 8)]
    training = ClassifierTraining(compile=False)
    pictures = torch.stack([to_pixels(scene.image) for scene in scenes])
    labels = torch.tensor([class_of(scene) for scene in scenes])
    optimizer = torch.optim.AdamW(training.parameters(), 3e-4)
    losses = []
    for _ in range(20):
        loss = training.losses(pictures, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 3


def test_missing_and_wrong_classifier(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no classifier at .*emoji_classifier.yaml"):
        load_classifier(tmp_path)
    export_classifier(Classifier(), tmp_path)
    weights = load_file(tmp_path / "classifier.safetensors")
    weights.pop("head.bias")
    save_file(weights, tmp_path / "classifier.safetensors")
    with pytest.raises(RuntimeError, match="head.bias"):
        load_classifier(tmp_path)


def test_sam_run_and_export(tmp_path: Path) -> None:
    checkpoints = fit("emoji_sam.yaml", tmp_path)
    state = read(checkpoints / "last.ckpt")["state_dict"]
    for name, value in load_small_sam(tmp_path / "export").state_dict().items():
        assert torch.equal(value, state[f"sam.{name}"].half().float())
    text = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text()
    assert "validation/iou_click" in text and "validation/iou_box" in text


# --- resuming ---

RESUMED = {
    "vq": (VQTraining, ["--model.dead_below=0.98"]),
    "prior": (PriorTraining, []),
    "classifier": (ClassifierTraining, []),
    "sam": (SamTraining, []),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_equals_the_unbroken_one(
    name: str,
    small_shards: None,
    vq_folder: Path,
    codes_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four epochs: once at a stretch, and once killed in the third and resumed from the second.

    ``dead_below`` of the tokenizer is so high that codes restart in every step: their places are
    drawn at random, and a generator that the checkpoint does not hold would give others after the
    resumption. Everything else is deterministic, so equality is bit for bit.
    """
    kind, more = RESUMED[name]
    options = [*more, f"--trainer.max_steps={4 * STEPS_PER_EPOCH}", "--data.batch_size=2"]
    if name == "prior":
        options += prior_options(vq_folder, codes_folder)
    elif name == "classifier":
        options += [f"--model.vq_folder={vq_folder}"]
    whole = fit(f"emoji_{name}.yaml", tmp_path / "whole", *options)
    step = kind.training_step

    def killed(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step > 2 * STEPS_PER_EPOCH:
            raise RuntimeError("killed")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(kind, "training_step", killed)
        fit(f"emoji_{name}.yaml", tmp_path / "broken", *options)
    last = tmp_path / "broken" / "checkpoints" / "last.ckpt"
    assert read(last)["global_step"] == 2 * STEPS_PER_EPOCH
    broken = fit(f"emoji_{name}.yaml", tmp_path / "broken", *options, f"--ckpt_path={last}")
    a, b = read(whole / "last.ckpt"), read(broken / "last.ckpt")
    assert a["global_step"] == 4 * STEPS_PER_EPOCH
    for part in ("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers"):
        assert_equal(a[part], b[part], part)


# --- evaluation of the prior ---


@pytest.mark.parametrize(
    ("hits", "total", "interval"),
    [(0, 10, (0, 0.2775)), (10, 10, (0.7225, 1)), (50, 100, (0.4038, 0.5962)), (1, 1, (0.2065, 1))],
)
def test_wilson_interval(hits: int, total: int, interval: tuple[float, float]) -> None:
    assert evaluate_prior.wilson(hits, total) == pytest.approx(interval, abs=1e-4)


def test_shares_by_group() -> None:
    make = SceneGenerator(PICTURES, "test")
    scenes = evaluate_prior.first_single_scenes(PICTURES, 40)
    assert [len(scene.objects) for scene in scenes] == [1] * 40
    assert scenes[0].caption == next(make(i) for i in single_object_indices(make)).caption
    predicted = torch.zeros(40, 5, dtype=torch.int64)
    predicted[:, 0] = torch.tensor([class_of(s) if s.kind == "photo" else 228 for s in scenes])
    predicted[:, 4] = torch.tensor([class_of(s) for s in scenes])
    shares = evaluate_prior.summarise(scenes, predicted)
    photos = sum(scene.kind == "photo" for scene in scenes)
    new = sum(scene.held_out for scene in scenes)
    assert shares["photo"]["top1"]["share"] == 1 and shares["photo"]["top1"]["of"] == photos
    assert shares["plain"]["top1"]["share"] == 0 and shares["plain"]["top5"]["share"] == 1
    assert shares["all"]["top1"]["share"] == pytest.approx(photos / 40, abs=1e-4)
    assert shares["held_out"]["top5"]["of"] == new and shares["seen"]["top5"]["of"] == 40 - new
    assert evaluate_prior.share([]) == {"of": 0}


def test_evaluation_of_a_model_that_draws_the_true_scenes(
    vq_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = evaluate_prior.first_single_scenes(PICTURES, 18)
    asked: list[int] = []

    def draw(captions: list[str], seeds: list[int]) -> list[Image.Image]:
        assert captions == [scenes[seed].caption for seed in seeds]
        asked.extend(seeds)
        return [Image.fromarray(scenes[seed].image) for seed in seeds]

    model = tmp_path / "model"
    shutil.copytree(vq_folder, model)
    export_classifier(Classifier(), tmp_path)
    monkeypatch.setattr(evaluate_prior, "make_draw", lambda *_: draw)
    output = tmp_path / "results" / "report.json"
    evaluate_prior.main(str(model), str(tmp_path), str(output), str(PICTURES), 18, 2.0)
    report = json.loads(output.read_text())
    assert asked == list(range(18))
    assert report["guidance_scale"] == 2.0 and report["num_captions"] == 18
    assert report["recognised"]["drawn"] == report["recognised"]["true"]
    assert report["recognised"]["reconstructed"]["all"]["top1"]["of"] == 18
    with Image.open(output.with_suffix(".png")) as sheet:
        pixels = np.asarray(sheet)
    assert np.array_equal(pixels[2:98, 2:98], scenes[0].image)


def test_evaluation_draws_with_the_package(vq_folder: Path, tmp_path: Path) -> None:
    """A random small prior, twice: the same pictures, and all of them counted."""
    export_prior(build_model(**SMALL_PRIOR), build_tokenizer(), tmp_path)
    for path in vq_folder.iterdir():
        shutil.copy(path, tmp_path)
    export_classifier(Classifier(), tmp_path)
    sheets = []
    for name in ("one.json", "two.json"):
        output = tmp_path / name
        evaluate_prior.main(str(tmp_path), str(tmp_path), str(output), str(PICTURES), 3)
        groups = json.loads(output.read_text())["recognised"]["drawn"]
        assert groups["all"]["top1"]["of"] == 3
        assert groups["plain"]["top1"]["of"] + groups["photo"]["top1"]["of"] == 3
        sheets.append(output.with_suffix(".png").read_bytes())
    assert sheets[0] == sheets[1]


def test_evaluation_needs_captions() -> None:
    with pytest.raises(ValueError, match="num_captions is 0, expected 1 or more"):
        evaluate_prior.main("model", "classifier", "report.json", num_captions=0)
