"""What each of two processes does in the test of steps by samples under DDP; nothing here imports MONAI."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from medckpt.memory.bind import bind
from medckpt.memory.options import lay_on

LEVERS: dict[str, dict[str, Any]] = {"plain": {}, "tail": {"tail": True}, "micro": {"micro_batches": 3}}


class Last(nn.Module):
    """Mixes features with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, features: Tensor, early: Tensor) -> Tensor:
        return self.conv(torch.cat([features, early], 1)).tanh()


class UNETR(nn.Module):
    """By its class's name its tail is known."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2, affine=True), nn.GELU())
        self.encoder1 = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Tanh())
        self.decoder2 = Last()
        self.out = nn.Conv3d(2, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.decoder2(self.embed(image), self.encoder1(image)))


class Together(nn.Module):
    """Model and loss in one, as Lightning's module is: DDP sees the whole step."""

    def __init__(self, model: nn.Module, levers: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.step = bind(model, cross_entropy, **levers)

    def forward(self, pixels: Tensor, target: Tensor) -> Tensor:
        return self.step(pixels, target)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def net() -> nn.Module:
    torch.manual_seed(0)
    return UNETR().double()


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    pixels = torch.randn(3, 1, 6, 6, 6, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(3, (3, 6, 6, 6), generator=generator)


def worker(rank: int, folder: str) -> None:
    """Two accumulated steps under each lever; the gradients go to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for how, levers in LEVERS.items():
        model = lay_on(net(), {"encoder1": "recompute_plain", "embed": "recompute_plain"})
        parallel = nn.parallel.DistributedDataParallel(Together(model, levers))
        for step in range(2):
            parallel(*data(2 * step + rank)).backward()
        torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/{how}-{rank}.pt")
    torch.distributed.destroy_process_group()
