"""What `gpu.py` trains: networks, patches, batches, precisions and policies, in order of importance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

CLASSES = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step: `policy` is "none", "monai" (the network's own use_checkpoint) or "all" (medckpt's)."""

    net: str
    side: int
    batch: int
    precision: str = "bf16-mixed"
    policy: str = "none"
    budget: bool = False
    """Whether it is run again under budgets just above and just below the forecast."""

    @property
    def name(self) -> str:
        return f"{self.net} {self.side}^3 b{self.batch} {self.precision} {self.policy}"


def cases() -> list[Case]:
    """Returns all cases, the most telling first."""
    swin, nets = "swin_unetr-48", [("vit-l16", 192), ("unetr", 96), ("segresnet-32", 128), ("dynunet-32", 128)]
    first = [
        Case(net=swin, side=96, batch=2, budget=True),
        Case(net=swin, side=96, batch=2, policy="all"),
        Case(net=swin, side=96, batch=2, policy="monai"),
        *(Case(net=net, side=side, batch=1, budget=True) for net, side in nets),
        Case(net="vit-l8", side=96, batch=2),
        Case(net="mae-b16", side=96, batch=4, precision="32"),
        Case(net=swin, side=96, batch=2, precision="32"),
        Case(net=swin, side=96, batch=2, precision="16-mixed"),
    ]
    second = [Case(net=swin, side=96, batch=b, policy=p) for b in (4, 1, 8) for p in ("none", "all")]
    second += [Case(net=swin, side=128, batch=b, policy=p) for b in (1, 4, 2) for p in ("none", "all")]
    second[1] = dataclasses.replace(second[1], budget=True)
    second += [Case(net=net, side=side, batch=b, policy=p) for net, side in nets for b, p in ((1, "all"), (4, "none"))]
    third = [Case(net=swin, side=128, batch=8, policy=p) for p in ("none", "all", "monai")]
    third += [Case(net=swin, side=s, batch=b, policy="monai") for s, b in ((96, 4), (128, 1), (96, 8), (128, 2))]
    third += [Case(net=net, side=side, batch=1, precision="32") for net, side in [*nets, (swin, 128)]]
    third += [Case(net=swin, side=96, batch=b, precision="32", policy=p) for b in (1, 4) for p in ("none", "all")]
    third += [Case(net="vit-l8", side=96, batch=b, policy=p) for b in (1, 8) for p in ("none", "all")]
    third += [Case(net="mae-b16", side=96, batch=b, precision="32", policy="all") for b in (4, 16)]
    return [*first, *second, *third]


def tiny_cases() -> list[Case]:
    """Returns what `--dry-run` runs on a CPU: a case of each ending."""
    return [
        Case(net="tiny", side=16, batch=2, precision="32", budget=True),
        Case(net="tiny", side=16, batch=2, policy="all"),
        Case(net="tiny", side=64, batch=2, precision="32"),
    ]


def build(case: Case) -> nn.Module:
    """Returns the case's network of MONAI, in training mode, on the CPU."""
    from monai.networks import nets

    patch, one = (case.side,) * 3, {"in_channels": 1, "out_channels": CLASSES}
    large = {"hidden_size": 1024, "mlp_dim": 4096, "num_layers": 24, "num_heads": 16}
    stages = {"kernel_size": [3] * 6, "strides": [1, 2, 2, 2, 2, 2], "upsample_kernel_size": [2] * 5}
    filters = [32, 64, 128, 256, 320, 320]
    builders: dict[str, Callable[[], nn.Module]] = {
        "swin_unetr-48": lambda: nets.SwinUNETR(**one, feature_size=48, use_checkpoint=case.policy == "monai"),
        "unetr": lambda: nets.UNETR(**one, img_size=patch, feature_size=16),
        "vit-l16": lambda: nets.ViT(in_channels=1, img_size=patch, patch_size=(16,) * 3, **large),
        "vit-l8": lambda: nets.ViT(in_channels=1, img_size=patch, patch_size=(8,) * 3, **large),
        # MONAI's masked autoencoder assigns values of one type to places of another under autocast: float32 only.
        "mae-b16": lambda: nets.MaskedAutoEncoderViT(in_channels=1, img_size=patch, patch_size=(16,) * 3),
        "segresnet-32": lambda: nets.SegResNet(init_filters=32, out_channels=CLASSES),
        "dynunet-32": lambda: nets.DynUNet(spatial_dims=3, **one, **stages, filters=filters),
        "tiny": lambda: nets.SegResNet(init_filters=8, out_channels=CLASSES, blocks_down=(1, 1), blocks_up=(1,)),
    }
    return builders[case.net]().train()


def inputs_and_loss(case: Case) -> tuple[Tensor, nn.Module | None]:
    """Returns an image (B, 1, D, H, W) and, for networks that segment, Dice + cross-entropy with a label of its own."""
    import torch
    from forecast import dice_cross_entropy

    shape = (case.batch, 1, *(case.side,) * 3)
    if case.net.startswith(("vit", "mae")):
        return torch.rand(shape), None
    return torch.rand(shape), dice_cross_entropy(torch.randint(0, CLASSES, shape))
