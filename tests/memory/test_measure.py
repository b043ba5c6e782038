"""Saved bytes: against a count by hand, a real run, and published figures."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from medckpt.errors import ConfigError
from medckpt.memory.apply import applied, apply_recompute, undo
from medckpt.memory.measure import allocations, fake_copy, held_bytes, saved_bytes
from medckpt.memory.regions import find_regions

GIB = 2**30


class Exp(nn.Module):
    """Saves its output: 4 bytes per element in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class SelfProduct(nn.Module):
    """Saves two views of one storage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y[:, :4] * y[:, 4:]


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x)) * (random.random() + np.random.rand())


def fake_volume(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*shape)


def test_counts_by_hand():
    x = torch.ones(2, 8, requires_grad=True)
    assert saved_bytes(Exp(), x) == 2 * 8 * 4
    assert saved_bytes(SelfProduct(), x) == 2 * 8 * 4
    linear = nn.Linear(8, 3)
    assert saved_bytes(linear, torch.ones(2, 8)) == 2 * 8 * 4, "the input is saved, the weight is not counted"
    assert saved_bytes(linear, torch.ones(2, 8), precision="bf16") == 2 * 8 * 2, "only the cast input is saved"
    assert saved_bytes(linear, x, precision="bf16") == (2 * 8 + 3 * 8) * 2, "the weight's cast is saved for the input"


def test_a_real_run_changes_nothing():
    model = BatchNormNet()
    x = torch.randn(2, 2, 4, 4, 4)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert saved_bytes(model, x) > 0
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_fake_equals_real():
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12)
    shape = (1, 1, 64, 32, 32)
    assert saved_bytes(model, fake_volume(*shape)) == saved_bytes(model, torch.randn(shape))
    model = nets.UNETR(1, 2, (32,) * 3, feature_size=8, hidden_size=48, num_heads=4, mlp_dim=96)
    apply_recompute(model, find_regions(model, "all"))
    shape = (1, 1, 32, 32, 32)
    real = saved_bytes(model, torch.randn(shape), precision="bf16")
    assert saved_bytes(model, fake_volume(*shape), precision="bf16") == pytest.approx(real, rel=1e-3)


def test_swin_unetr_against_published_figures():
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.SwinUNETR(in_channels=1, out_channels=14, feature_size=48)
    x = fake_volume(1, 1, 96, 96, 96)
    assert saved_bytes(model, x) / GIB == pytest.approx(4.51, rel=0.02)
    apply_recompute(model, find_regions(model, "block"))
    block = saved_bytes(model, x)
    assert block / GIB <= 0.80
    apply_recompute(undo(model), find_regions(model, "all"))
    assert saved_bytes(model, x) <= block


def test_unetr_against_published_figures():
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.UNETR(1, 14, (96, 96, 96), feature_size=16)
    x = fake_volume(1, 1, 96, 96, 96)
    assert saved_bytes(model, x) / GIB == pytest.approx(0.99, rel=0.02)
    apply_recompute(model, find_regions(model, "block"))
    assert saved_bytes(model, x) / GIB <= 0.16


def test_fake_copy_keeps_ties_recompute_and_the_original():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model[1][0].weight = model[0][0].weight
    model[0][0].bias.requires_grad_(False)
    apply_recompute(model, ["0"])
    copied = fake_copy(model, FakeTensorMode())
    assert copied[1][0].weight is copied[0][0].weight
    assert all(isinstance(p, FakeTensor) and isinstance(p, nn.Parameter) for p in copied.parameters())
    assert [p.requires_grad for p in copied.parameters()] == [True, False, True]
    assert applied(copied) == applied(model)
    assert not any(isinstance(p, FakeTensor) for p in model.parameters())


def test_unknown_precision():
    with pytest.raises(ConfigError, match="Known: bf16, fp16, fp32"):
        saved_bytes(nn.Linear(1, 1), torch.ones(1, 1), precision="float8")


# Saved activations per network and patch in GiB, as printed in a survey of medical toolkits (section 1.4; MONAI 1.6.1,
# fake tensors, batch of one patch, 14 classes, bf16 under CPU autocast with weight casts). "both" is MONAI's own flag
# and a recompute of every encoder and decoder. Two rows need a word: the masked autoencoder was measured with `mlp_dim`
# 3072 (MONAI's default of 512 gives 0.05 and 0.14), and UNet with 32..512 channels.
SWIN_CONVOLUTIONS = tuple(f"encoder{n}" for n in (1, 2, 3, 4, 10)) + tuple(f"decoder{n}" for n in (5, 4, 3, 2, 1))
UNETR_CONVOLUTIONS = tuple(f"encoder{n}" for n in (1, 2, 3, 4)) + tuple(f"decoder{n}" for n in (5, 4, 3, 2))


def build(name: str, side: int) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    family, _, kind = name.partition(" ")
    if family.startswith("swin"):
        features, channels = (24, 4) if kind.startswith("4ch") else (int(family.removeprefix("swin")), 1)
        return nets.SwinUNETR(
            in_channels=channels, out_channels=14, feature_size=features,
            use_checkpoint=kind.endswith(("flag", "both")), use_v2=kind.startswith("v2"),
        )  # fmt: skip
    cube = (side,) * 3
    if family == "unetr":
        return nets.UNETR(1, 14, cube, feature_size=16)
    if family in ("vit-b16", "vit-b8"):
        return nets.ViT(1, cube, (int(family.removeprefix("vit-b")),) * 3)
    if family == "mae":
        return nets.MaskedAutoEncoderViT(1, cube, (16,) * 3, mlp_dim=3072)
    if family == "segresnet":
        return nets.SegResNet(init_filters=32, out_channels=14)
    cls = nets.UNet
    if kind == "checkpoint":
        from monai.networks.nets.unet import CheckpointUNet as cls
    return cls(3, 1, 14, channels=(32, 64, 128, 256, 512), strides=(2, 2, 2, 2), num_res_units=2)


def regions_of(name: str) -> tuple[str, ...]:
    if name.endswith(("wrapped", "both")) and name.startswith("swin"):
        return SWIN_CONVOLUTIONS
    if name == "unetr wrapped":
        return (*UNETR_CONVOLUTIONS, *(f"vit.blocks.{n}" for n in range(12)))
    return tuple(f"blocks.{n}" for n in range(12)) if name.endswith("wrapped") else ()


Figures = tuple[float | None, float | None]
QUICK: dict[tuple[str, int], Figures] = {
    ("swin24 flag", 96): (1.37, None),
    ("unetr wrapped", 96): (0.15, 0.09),
    ("vit-b16", 96): (0.15, 0.25),
    ("mae", 96): (0.06, None),
    ("segresnet", 96): (1.65, None),
    ("unet", 128): (0.88, None),
    ("unet checkpoint", 128): (0.10, None),
}
SLOW: dict[tuple[str, int], Figures] = {
    ("swin48", 96): (4.51, 3.71),
    ("swin48 both", 96): (0.75, 0.47),
    ("swin24", 96): (2.93, None),
    ("vit-b8 wrapped", 96): (0.07, 0.07),
    ("swin48 flag", 96): (2.56, 1.48),
    ("swin48 wrapped", 96): (2.69, 2.70),
    ("swin48", 128): (11.39, 9.56),
    ("swin48 flag", 128): (6.15, 3.44),
    ("swin48 both", 128): (1.84, 1.19),
    ("swin48 v2", 96): (4.61, None),
    ("swin48 v2flag", 96): (2.67, None),
    ("swin24 4ch", 128): (7.60, 7.60),
    ("swin24 4chflag", 128): (3.36, 1.99),
    ("swin24 4chboth", 128): (1.20, 0.89),
    ("unetr", 96): (0.99, 0.68),
    ("unetr", 128): (2.44, 1.42),
    ("unetr wrapped", 128): (0.36, 0.20),
    ("vit-b16 wrapped", 96): (0.01, 0.02),
    ("vit-b8", 96): (2.56, 1.50),
    ("vit-b8", 128): (11.27, 5.94),
    ("vit-b8 wrapped", 128): (0.16, 0.16),
    ("mae", 128): (0.17, None),
    ("segresnet", 128): (3.92, None),
}


@pytest.mark.parametrize(
    ("name", "side", "figures"),
    [
        *(pytest.param(name, side, figures, id=f"{name} {side}") for (name, side), figures in QUICK.items()),
        *(
            pytest.param(name, side, figures, id=f"{name} {side}", marks=pytest.mark.slow)
            for (name, side), figures in SLOW.items()
        ),
    ],
)
def test_saved_activations_of_the_published_table(name: str, side: int, figures: Figures) -> None:
    """To the two printed decimals."""
    model = build(name, side)
    if regions_of(name):
        apply_recompute(model, regions_of(name))
    x = fake_volume(1, 4 if "4ch" in name else 1, side, side, side)
    for precision, published in zip(("fp32", "bf16"), figures, strict=True):
        if published is not None:
            assert f"{saved_bytes(model, x, precision=precision) / GIB:.2f}" == f"{published:.2f}", precision


def test_peak_of_some_code_by_hand() -> None:
    def code() -> object:
        first = torch.empty(1000)  # 4000
        second = torch.empty(2000)  # 12000
        del first  # 8000
        third = torch.empty(500)  # 10000
        return second, third

    kept: list[object] = []
    found = allocations(lambda: kept.append(code()))
    assert (found.peak, found.end) == (12000, 10000)
    assert allocations(lambda: None) == type(found)(peak=0, end=0)


def test_the_recorder_stops_when_the_code_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        allocations(lambda: 1 / 0)
    assert allocations(lambda: torch.empty(10)).peak == 40


def test_held_bytes_count_a_storage_once() -> None:
    x = torch.empty(10, 10)
    assert held_bytes([x, x[2:], x.T, torch.empty(5)]) == 400 + 20
    assert held_bytes([]) == 0


def test_a_fake_copy_can_lie_on_another_device() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("meta")
    model[0].weight.requires_grad_(False)
    copied = fake_copy(model, FakeTensorMode(), device="cpu")
    assert {value.device.type for value in copied.state_dict().values()} == {"cpu"}
    assert [p.requires_grad for p in copied.parameters()] == [False, True, True, True]
    assert {value.device.type for value in fake_copy(model, FakeTensorMode()).state_dict().values()} == {"meta"}
