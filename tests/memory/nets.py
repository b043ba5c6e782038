"""Small networks for the tests of the planner: MONAI's own at their smallest, toys, and trees made at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from monai.losses import DiceCELoss
from monai.networks import nets
from monai.networks.blocks.dynunet_block import UnetOutBlock
from monai.networks.blocks.transformerblock import TransformerBlock
from monai.networks.blocks.unetr_block import UnetrBasicBlock, UnetrUpBlock
from torch import Tensor, nn

from medckpt.memory.fit import Planner
from medckpt.memory.step import Step
from medckpt.profiles import load_profile

SIZES: dict[str, Any] = {"hidden_size": 24, "mlp_dim": 48, "num_layers": 2, "num_heads": 2}
DICE_CE = DiceCELoss(to_onehot_y=True, softmax=True)
"""A mean over samples."""


class UNETR(nn.Module):
    """A U-shaped transformer with MONAI's own blocks; by its class's name its tail is known."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        norm: Any = {"spatial_dims": 3, "norm_name": "instance"}
        self.embed = nn.Conv3d(1, 8, 2, stride=2)
        self.blocks = nn.ModuleList(TransformerBlock(8, 16, 2, dropout) for _ in range(2))
        self.encoder1 = UnetrBasicBlock(in_channels=1, out_channels=4, kernel_size=3, stride=1, res_block=False, **norm)
        self.decoder2 = UnetrUpBlock(
            in_channels=8, out_channels=4, kernel_size=3, upsample_kernel_size=2, res_block=False, **norm
        )
        self.out = UnetOutBlock(spatial_dims=3, in_channels=4, out_channels=3)

    def forward(self, image: Tensor) -> Tensor:
        features = self.embed(image)
        tokens = features.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        features = tokens.transpose(1, 2).reshape(features.shape)
        early = self.encoder1(image)
        return self.out(self.decoder2(features, early))


class First(nn.Module):
    """A network of which only the first output is used."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image)[0]


class Residual(nn.Module):
    """One tensor in, one out."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.InstanceNorm3d, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)
        self.norm = norm(2)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.norm(self.conv(x)))) + x


class Merge(nn.Module):
    """Concatenates a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Conv3d(4, 2, 3, padding=1), nn.GELU())

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([x, skip], 1))


class Unread(nn.Module):
    """Takes a skip whose values its backward pass does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 1)
        self.norm = nn.InstanceNorm3d(2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + 2 * skip


class Plain(nn.Module):
    """Blocks in a row, some of which take what an earlier one made."""

    def __init__(self, blocks: list[nn.Module], skips: list[int], shared: bool = False) -> None:
        """`skips[i]`: which earlier result block `i` takes beside the last one, if it takes two."""
        super().__init__()
        self.stem = nn.Conv3d(1, 2, 3, padding=1)
        self.blocks = nn.ModuleList(blocks)
        self.skips = skips
        self.shared = shared
        self.head = nn.Conv3d(2, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        made = [self.stem(image)]
        for block, skip in zip(self.blocks, self.skips, strict=True):
            two = isinstance(block, (Merge, Unread))
            made.append(block(made[-1], made[skip % len(made)]) if two else block(made[-1]))
        if self.shared:
            made.append(self.blocks[0](made[-1]) if isinstance(self.blocks[0], Residual) else made[-1])
        return self.head(made[-1])


def swin() -> nn.Module:
    return nets.SwinUNETR(
        in_channels=1, out_channels=3, feature_size=12, window_size=4, depths=(1, 1, 1, 1), num_heads=(3, 6, 12, 24)
    )


def unetr() -> nn.Module:
    return nets.UNETR(
        in_channels=1, out_channels=3, img_size=32, feature_size=4, hidden_size=48, mlp_dim=48, num_heads=4
    )


def vit() -> nn.Module:
    return First(nets.ViT(in_channels=1, img_size=(16,) * 3, patch_size=(8,) * 3, dropout_rate=0.1, **SIZES))


def mae() -> nn.Module:
    decoder = {f"decoder_{name}": value for name, value in SIZES.items()}
    return First(nets.MaskedAutoEncoderViT(in_channels=1, img_size=(16,) * 3, patch_size=(8,) * 3, **SIZES, **decoder))


def batch_norm_unet() -> nn.Module:
    """The names of its modules begin with "model.", as those inside of a bound step do."""
    sizes: Any = {"channels": (2, 4, 8), "strides": (2, 2), "num_res_units": 1}
    return nets.UNet(spatial_dims=3, in_channels=1, out_channels=3, norm="BATCH", **sizes)


def skips() -> nn.Module:
    """Two blocks down, one whose skip is not read again, two that concatenate, the first one's twice."""
    return Plain([Residual(), Residual(), Unread(), Merge(), Merge()], [0, 0, 1, 1, 0])


NETS: dict[str, Callable[[], nn.Module]] = {
    "mini": UNETR, "vit": vit, "mae": mae, "unet": batch_norm_unet, "skips": skips, "swin": swin, "unetr": unetr,
}  # fmt: skip
SIDES = {"mini": (8, 8, 8), "vit": (16, 16, 16), "mae": (16, 16, 16), "unet": (16, 16, 16), "skips": (8, 8, 8),
         "swin": (64, 32, 32), "unetr": (32, 32, 32)}  # fmt: skip


def make(name: str) -> nn.Module:
    """Returns one of `NETS`, equal each time."""
    torch.manual_seed(0)
    return NETS[name]().train()


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """Returns a network of two to five blocks, with skips, batch statistics, dropout, and weights used twice."""
    kinds = st.sampled_from([Residual, Merge, Unread, lambda: Residual(nn.BatchNorm3d), lambda: Residual(dropout=0.2)])
    made = [kind() for kind in draw(st.lists(kinds, min_size=2, max_size=5))]
    froms = draw(st.lists(st.integers(0, 5), min_size=len(made), max_size=len(made)))
    return Plain(made, froms, shared=draw(st.booleans())).train()


def image(name: str, samples: int = 2, *, device: str = "cpu") -> Tensor:
    if device == "meta":
        return torch.empty(samples, 1, *SIDES[name], device="meta")
    return torch.randn(samples, 1, *SIDES[name], generator=torch.Generator().manual_seed(1))


def label(name: str, samples: int = 2, *, device: str = "cpu") -> Tensor:
    if device == "meta":
        return torch.empty(samples, 1, *SIDES[name], device="meta", dtype=torch.uint8)
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, (samples, 1, *SIDES[name]), generator=generator).to(torch.uint8)


def planner(
    net: nn.Module, shape: tuple[int, ...], *, samples: int = 2, precision: Any = "bf16-mixed", **more: Any
) -> Planner:
    """Returns the planner of a step on an A100; by samples where `target_loss` is given."""
    if "target_loss" in more:
        more["target"] = torch.empty(samples, 1, *shape, device="meta", dtype=torch.uint8)
    inputs = torch.empty(samples, 1, *shape, device="meta")
    return Planner(net, inputs, Step(precision=precision), load_profile("a100_80gb"), **more)
