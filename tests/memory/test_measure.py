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
from medckpt.memory.measure import fake_copy, saved_bytes
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
