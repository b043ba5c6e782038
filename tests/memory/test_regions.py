"""Which modules of real networks are found as regions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from medckpt.errors import ConfigError
from medckpt.memory.apply import apply_recompute
from medckpt.memory.regions import find_regions

nets = pytest.importorskip("monai.networks.nets")


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.InstanceNorm3d(outputs)
        self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(x)))


def sequential_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.BatchNorm3d(outputs), nn.ReLU())


class HandUNet(nn.Module):
    """As people write it: attributes, no lists."""

    def __init__(self, make=DoubleConv) -> None:
        super().__init__()
        self.enc1, self.enc2, self.mid = make(1, 4), make(4, 8), make(8, 8)
        self.pool = nn.MaxPool3d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.dec2, self.dec1 = make(16, 4), make(8, 4)
        self.out = nn.Conv3d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.enc1(x)
        two = self.enc2(self.pool(one))
        x = self.mid(self.pool(two))
        x = self.dec2(torch.cat((self.up(x), two), 1))
        return self.out(self.dec1(torch.cat((self.up(x), one), 1)))


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Encoder(nn.Module):
    """A single class that holds repeated blocks as attributes: less than half of the leaves, and still no block."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = DoubleConv(1, 4), DoubleConv(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.ModuleList(DoubleConv(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.decoder:
            x = block(x)
        return x


def classes(model: nn.Module, level: str) -> dict[str, int]:
    modules = dict(model.named_modules())
    return dict(Counter(type(modules[name]).__name__ for name in find_regions(model, level)))


def swin_unetr(**kwargs) -> nn.Module:
    return nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, **kwargs)


def unetr() -> nn.Module:
    return nets.UNETR(1, 2, (32, 32, 32), feature_size=8, hidden_size=48, num_heads=4, mlp_dim=96)


def test_swin_unetr_names():
    model = swin_unetr()
    swin = [
        f"swinViT.layers{i}.0.{part}" for i in (1, 2, 3, 4) for part in ("blocks.0", "blocks.1", "downsample")
    ]  # stages are lists of two blocks and a merging
    convs = ["encoder1", "encoder2", "encoder3", "encoder4", "encoder10"]
    convs += ["decoder5", "decoder4", "decoder3", "decoder2", "decoder1"]
    assert find_regions(model, "block") == (*swin, *convs)
    assert find_regions(model, "all") == ("swinViT.patch_embed", *swin, *convs, "out")
    assert find_regions(model, "none") == ()


@pytest.mark.parametrize(
    ("build", "block", "more"),
    [
        (
            unetr,
            {"TransformerBlock": 12, "UnetrBasicBlock": 1, "UnetrPrUpBlock": 3, "UnetrUpBlock": 4},
            {"PatchEmbeddingBlock": 1, "UnetOutBlock": 1},
        ),
        (
            lambda: nets.ViT(1, (32,) * 3, (8,) * 3, hidden_size=48, mlp_dim=96, num_layers=3, num_heads=4),
            {"TransformerBlock": 3},
            {"PatchEmbeddingBlock": 1},
        ),
        (
            lambda: nets.MaskedAutoEncoderViT(
                1, (32,) * 3, (8,) * 3, hidden_size=48, num_layers=2, num_heads=4, decoder_num_layers=1
            ),
            {"TransformerBlock": 3},
            {"PatchEmbeddingBlock": 1},
        ),
        (  # recursive SkipConnection: nothing but its residual units and upsampling convolutions
            lambda: nets.UNet(3, 1, 2, (4, 8, 16, 32), (2, 2, 2), num_res_units=2),
            {"ResidualUnit": 7, "Convolution": 3},
            {},
        ),
        (lambda: nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=0), {"Convolution": 4}, {}),
        (  # every module is registered twice here, in lists and in recursive skip layers
            lambda: nets.DynUNet(3, 1, 2, [3] * 4, [1, 2, 2, 2], [2, 2, 2], filters=[4, 8, 8, 8]),
            {"UnetBasicBlock": 4, "UnetUpBlock": 3},
            {"UnetOutBlock": 1},
        ),
        (lambda: nets.SegResNet(init_filters=8), {"ResBlock": 12}, {"Sequential": 1}),
        (lambda: nets.BasicUNet(features=(4, 4, 8, 8, 8, 4)), {"TwoConv": 1, "Down": 4, "UpCat": 4}, {}),
        (swin_unetr, {"SwinTransformerBlock": 8, "PatchMerging": 4, "UnetrBasicBlock": 5, "UnetrUpBlock": 5}, None),
    ],
    ids=["unetr", "vit", "mae", "unet", "unet-plain", "dynunet", "segresnet", "basicunet", "swinunetr"],
)
def test_monai_networks(build, block, more):
    model = build()
    assert classes(model, "block") == block
    if more is not None:
        assert classes(model, "all") == block | more


@pytest.mark.parametrize("make", [DoubleConv, sequential_conv], ids=["class", "sequential"])
@pytest.mark.parametrize("prefix", ["", "net.", "net.net."])
def test_hand_written_unet_inside_wrappers(make, prefix):
    model: nn.Module = HandUNet(make)
    for _ in range(prefix.count("net")):
        model = Wrapper(model)
    expected = tuple(f"{prefix}{name}" for name in ("enc1", "enc2", "mid", "dec2", "dec1"))
    assert find_regions(model, "block") == expected
    assert find_regions(model, "all") == expected


def test_single_encoder_is_walked_through():
    expected = ("encoder.one", "encoder.two", "decoder.0", "decoder.1", "decoder.2")
    assert find_regions(EncoderDecoder(), "block") == expected


@pytest.mark.parametrize("build", [swin_unetr, unetr, lambda: nets.DynUNet(3, 1, 2, [3] * 4, [1, 2, 2, 2], [2, 2, 2])])
def test_regions_are_named_modules_in_order_and_not_nested(build):
    model = build()
    names = find_regions(model, "all")
    order = [name for name, _ in model.named_modules()]
    assert [name for name in order if name in names] == list(names)
    modules = [model.get_submodule(name) for name in names]
    inside = [m for module in modules for m in module.modules() if m._modules]
    assert len(inside) == len(set(inside))


def test_applied_recompute_does_not_change_the_answer():
    model = unetr()
    before = find_regions(model, "all")
    assert find_regions(apply_recompute(model, before), "all") == before


def test_flat_stack_has_no_region():
    assert find_regions(nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Conv3d(2, 1, 3)), "all") == ()


def test_unknown_level():
    with pytest.raises(ConfigError, match="Did you mean 'block'"):
        find_regions(nn.Linear(1, 1), "blocks")
