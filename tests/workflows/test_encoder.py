"""Training from the weights of a published encoder, and what is recorded of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pathoseg.models import unet_resnet
from pathoseg.models.bundle import load_bundle
from pathoseg.models.model_options import VIT_SIZES
from pathoseg.models.unet_resnet import RESNETS, ResNetEncoder, ResNetUNet
from tests.forked import Forked

Command = Callable[..., tuple[int, str]]

OPTIONS = """
[data]
assume_mpp = 0.5
[tiles]
tile = 64
[model]
name = "unet_resnet18"
encoder_weights = "resnet/model.safetensors"
[train]
epochs = 1
batch = 2
samples_per_epoch = 2
"""
CONFIG = {
    "architecture": "resnet18",
    "pretrained_cfg": {"mean": [0.7, 0.5, 0.7], "std": [0.2, 0.25, 0.2], "license": "cc-by-nc-4.0"},
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders in this process have their own names and layers, and few channels."""
    monkeypatch.setattr(ResNetEncoder.__init__, "__defaults__", (8,))
    monkeypatch.setattr(ResNetUNet.__init__, "__defaults__", ("batch", 8))
    monkeypatch.setattr(unet_resnet, "_DECODER", 2)
    monkeypatch.setitem(VIT_SIZES, "S", (24, 4, 2))


@pytest.fixture
def published(narrow: None, toy_slides: Path) -> dict[str, torch.Tensor]:
    """The encoder of `resnet/model.safetensors`, beside `encoder.toml`, which trains from it."""
    return _publish()


def _publish() -> dict[str, torch.Tensor]:
    state = ResNetEncoder(*RESNETS[18]).state_dict()
    Path("resnet").mkdir()
    safetensors.torch.save_file({**state, "fc.bias": torch.zeros(9)}, "resnet/model.safetensors")
    Path("resnet/config.json").write_text(json.dumps(CONFIG))
    Path("encoder.toml").write_text(OPTIONS)
    return state


def test_a_run_starts_from_an_encoder_and_records_it(
    published: dict[str, torch.Tensor], command: Command
) -> None:
    arguments = ("train", "--slides", "slides", "--config", "encoder.toml", "--out", "run")
    code, said = command(*arguments)
    assert code == 0, said
    assert "Encoder resnet18 (cc-by-nc-4.0) from resnet/model.safetensors" in said
    assert "In the file alone: fc.bias." in said
    begun = load_bundle(Path("run/start"))[0].state_dict()
    for name, tensor in published.items():
        assert torch.equal(begun[f"encoder.{name}"], tensor), name
    model, card = load_bundle(Path("run/model"))
    assert (card.mean, card.std) == ((0.7, 0.5, 0.7), (0.2, 0.25, 0.2))
    digest = hashlib.sha256(Path("resnet/model.safetensors").read_bytes()).hexdigest()
    recorded = {key: value for key, value in card.training.items() if key.startswith("encoder")}
    assert recorded == {
        "encoder": "resnet18",
        "encoder_file": "resnet/model.safetensors",
        "encoder_sha256": digest,
        "encoder_licence": "cc-by-nc-4.0",
    }
    trained = model.state_dict()

    # Killed before its first checkpoint, it begins with the same weights, whatever became of the
    # file.
    shutil.rmtree("resnet")
    for folder in ("run/checkpoints", "run/model"):
        shutil.rmtree(folder)
    Path("run/summary.json").unlink()
    code, said = command(*arguments, "--resume")
    assert code == 0, said
    model, card = load_bundle(Path("run/model"))
    torch.testing.assert_close(model.state_dict(), trained, rtol=0, atol=0)
    assert card.training["encoder_licence"] == "cc-by-nc-4.0"

    Path("all.toml").write_text("[infer]\nmin_region_um2 = 0\n")  # else there may be no region
    infer = ("infer", "slides/slide0.png", "--model", "run", "--assume-mpp", "0.5")
    code, said = command(*infer, "--config", "all.toml")
    assert code == 0, said
    [warning] = json.loads(Path("results/slide0/summary.json").read_text())["warnings"]
    assert warning == "the model's encoder has the licence cc-by-nc-4.0: not for commercial use"

    # What is trained from that model has its encoder, licence, mean and standard deviation.
    Path("further.toml").write_text(
        OPTIONS.replace('encoder_weights = "resnet', 'norm = "batch" #')
    )
    command_line = ("train", "--slides", "slides", "--config", "further.toml", "--from", "run")
    code, said = command(*command_line, "--out", "further")
    assert code == 0, said
    card = load_bundle(Path("further/model"))[1]
    assert card.mean == (0.7, 0.5, 0.7)
    assert card.training["encoder_licence"] == "cc-by-nc-4.0"


def test_a_run_lends_its_encoder_to_another_task(
    narrow: None, toy_slides: Path, command: Command
) -> None:
    own = OPTIONS.replace('encoder_weights = "resnet/model.safetensors"', "{}")
    Path("own.toml").write_text(own.format("mean = [0.7, 0.5, 0.7]\nstd = [0.2, 0.25, 0.2]"))
    code, said = command("train", "--slides", "slides", "--config", "own.toml", "--out", "own")
    assert code == 0, said
    objects = own.format('encoder_weights = "own"\ntask = "objects"')
    Path("other.toml").write_text(f'{objects}[annotations]\nmask = "instances"\n')
    arguments = ("train", "--slides", "slides", "--config", "other.toml", "--mpp", "1")
    code, said = command(*arguments, "--out", "run")
    assert code == 0, said  # no licence is asked for a model of one's own
    said = " ".join(said.split())
    assert "Encoder unet_resnet18 from own/model/weights.safetensors: 120 tensors." in said
    assert "It was trained at 0.5 µm per pixel, and sees 1 µm now." in said
    (theirs, _), (begun, card) = (load_bundle(Path(run)) for run in ("own/model", "run/start"))
    assert (card.mean, card.std) == ((0.7, 0.5, 0.7), (0.2, 0.25, 0.2))
    assert card.training["encoder_licence"] is None
    state = begun.encoder.state_dict()
    for name, tensor in theirs.encoder.state_dict().items():
        assert torch.equal(state[name], tensor), name
    one, two = (model.decoder[0].convolve.conv1.weight for model in (theirs, begun))
    assert not torch.equal(one, two)


def test_a_plan_takes_the_encoders_file_and_knows_what_is_frozen(
    published: dict[str, torch.Tensor], command: Command
) -> None:
    memory = {}
    for encoder in ("tuned", "frozen"):
        Path("plan.toml").write_text(OPTIONS.replace("[train]", f'[train]\nencoder = "{encoder}"'))
        options = ("--config", "plan.toml", "--hardware", "v100", "--ranks", "1", "--out", encoder)
        code, said = command("plan", *options)
        assert code == 0, said
        [memory[encoder]] = json.loads((Path(encoder) / "plan.json").read_text())["memory"]
    # Beside activations, gradients and AdamW's two moments: 12 bytes a number.
    size = 4 * sum(tensor.numel() for tensor in published.values())
    assert memory["tuned"] - memory["frozen"] > 2 * size


@pytest.mark.parametrize(
    ("line", "instead", "told"),
    [
        ("", "", "Nothing states the licence of resnet/model.safetensors"),
        ('name = "unet_resnet18"', 'name = "unet_resnet50"', "has the shape"),
        ('name = "unet_resnet18"', 'name = "vit_seg"', "holds a ResNet"),
        ('name = "unet_resnet18"', 'name = "unet"', "the model unet has no encoder"),
        ("epochs = 1", 'start_from = "run"', "both say what the encoder starts from"),
    ],
)
def test_an_encoder_that_cannot_be_is_refused_at_once(
    published: dict[str, torch.Tensor], command: Command, line: str, instead: str, told: str
) -> None:
    Path("resnet/config.json").unlink()
    licence = 'encoder_weights = "resnet/model.safetensors"\nlicence = "MIT"' if line else None
    text = OPTIONS.replace(line, instead, 1) if line else OPTIONS
    if licence:
        text = text.replace('encoder_weights = "resnet/model.safetensors"', licence)
    Path("encoder.toml").write_text(text)
    code, said = command("train", "--slides", "slides", "--config", "encoder.toml", "--out", "run")
    assert code == 2, said
    assert told in " ".join(said.split())
    assert not Path("run").exists()


@pytest.mark.process
def test_a_frozen_encoder_stays_on_ranks_and_under_a_memory_limit(
    toy_slides: Path, start: Callable[..., Forked]
) -> None:
    published = _publish()
    text = OPTIONS.replace("[train]", '[train]\nencoder = "frozen"\noptimizer = "sgd"')
    Path("frozen.toml").write_text(text)
    arguments = ("--slides", "slides", "--config", "frozen.toml", "--out", "run")
    more = ("--ranks", "2", "--order", "gpipe", "--memory", "1GiB")
    process = start("train", *arguments, *more)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    state = load_bundle(Path("run/model"))[0].state_dict()
    begun = load_bundle(Path("run/start"))[0].state_dict()
    for name, tensor in published.items():
        assert torch.equal(state[f"encoder.{name}"], tensor), name
    assert not torch.equal(state["head.weight"], begun["head.weight"])


def test_low_rank_additions_are_new_to_an_earlier_model_trained_and_resumed(
    narrow: None, toy_slides: Path, command: Command
) -> None:
    options = (
        "[data]\nassume_mpp = 0.5\n[tiles]\ntile = 40\n[train]\nepochs = 1\nbatch = 1\n"
        "samples_per_epoch = 1\nencoder_lr = 0.5\nlayer_decay = 0.9\n{}"
        '[model]\nname = "vit_seg"\noptions = {{ patch = 16 }}\n'
    )
    Path("frozen.toml").write_text(options.format('encoder = "frozen"\n'))
    Path("lora.toml").write_text(options.format('encoder = "lora"\n').partition("[model]")[0])
    arguments = ("train", "--slides", "slides", "--config")
    code, said = command(*arguments, "frozen.toml", "--out", "frozen")
    assert code == 0, said
    further = (*arguments, "lora.toml", "--out", "run", "--from", "frozen")
    code, said = command(*further)
    assert code == 0, said
    code, said = command(*further, "--resume", "--epochs", "2")
    assert code == 0, said
    assert "goes on to 2 epochs" in said
    frozen = load_bundle(Path("frozen/model"))[0].state_dict()
    model, card = load_bundle(Path("run/model"))
    assert card.model.options == {"patch": 16, "lora": 8}
    for name, tensor in model.encoder.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(tensor, frozen[f"encoder.{name}"]), name
    assert model.encoder.blocks[0].attn.qkv.lora_b.abs().sum() > 0
    code, said = command("infer", "slides/slide0.png", "--model", "run", "--assume-mpp", "0.5")
    assert code == 0, said
