"""The lean MLP: the block's own results bit for bit, and less kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from medckpt.lean import parts
from medckpt.lean.mlp import LeanMLP, mlp
from medckpt.lean.swap import apply_lean
from medckpt.memory.apply import apply_recompute
from medckpt.memory.measure import saved_bytes
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step

from .steps import assert_equal, both, distance, one_step, volume

MLPBlock = pytest.importorskip("monai.networks.blocks").MLPBlock


def block(dropout: float = 0.0, mode: str = "vit", act: object = "GELU") -> nn.Module:
    torch.manual_seed(0)
    return MLPBlock(8, 20, dropout, act, mode)


@pytest.mark.parametrize(("dtype", "bf16"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
@pytest.mark.parametrize("mode", ["vit", "swin", "vista3d"])
def test_it_is_the_block_bit_for_bit(dtype, bf16, mode):
    assert_equal(*both(block(mode=mode).to(dtype), volume(2, 5, 8, dtype=dtype), bf16=bf16))


def test_tanh_and_inputs_of_five_axes_and_of_any_strides():
    module = block()
    module.fn = nn.GELU(approximate="tanh")
    assert_equal(*both(module, volume(2, 3, 2, 2, 8)))
    assert_equal(*both(module, volume(8, 5, 2).permute(2, 1, 0)))


def test_without_bias():
    module = block()
    module.linear1, module.linear2 = nn.Linear(8, 20, bias=False), nn.Linear(20, 8, bias=False)
    assert_equal(*both(module, volume(2, 5, 8)))


def test_in_parts_it_is_the_same_up_to_the_order_of_sums(monkeypatch):
    module, x = block().double(), volume(2, 13, 8, dtype=torch.float64)
    monkeypatch.setattr(parts, "LIMIT_BYTES", 5 * 20 * 8)  # five tokens at a time
    plain, lean = both(module, x)
    assert 0 < distance(lean, plain) < 1e-14


def test_gradcheck():
    module = block().double()
    x = volume(2, 3, 8, dtype=torch.float64).requires_grad_()
    norm = nn.LayerNorm(8).double()
    parameters = [*module.parameters(), *norm.parameters()]
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x, module), (x, *parameters[:4]))
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x, module, norm), (x, *parameters))


@pytest.mark.parametrize("frozen", ["linear1", "linear2", "both"])
def test_frozen_parameters_get_no_gradient_and_others_the_right_one(frozen):
    module = block()
    for layer in (module.linear1, module.linear2) if frozen == "both" else (getattr(module, frozen),):
        layer.requires_grad_(False)
    plain, lean = both(module, volume(2, 5, 8))
    assert_equal(plain, lean)
    assert sum(gradient is None for gradient in lean.gradients.values()) == (4 if frozen == "both" else 2)


def test_it_keeps_input_and_pre_activation():
    x = volume(3, 7, 8).requires_grad_()
    lean = apply_lean(block())
    assert saved_bytes(lean, x) == 4 * 21 * (8 + 20)
    assert saved_bytes(lean, x, precision="bf16") == 2 * 21 * (8 + 20)
    assert saved_bytes(block(), x) == 4 * 21 * (8 + 20 + 20)
    # Dropout adds nothing: a seed is kept, and no mask.
    assert saved_bytes(apply_lean(block(0.3)), x) == 4 * 21 * (8 + 20)


@pytest.mark.parametrize("mode", ["vit", "swin"])
def test_dropout_is_that_of_the_block_in_distribution(mode):
    module = block(0.25, mode)
    with torch.no_grad():
        module.linear1.bias.fill_(10.0)  # the activation is its input, up to 1e-20
        module.linear1.weight.zero_()
        module.linear2.weight.copy_(torch.eye(20)[:8])
        module.linear2.bias.zero_()
    module.requires_grad_(False)
    module.linear2.requires_grad_()
    torch.manual_seed(3)
    out = apply_lean(module)(volume(50, 100, 8))
    kept = out != 0
    assert abs(float(kept.float().mean()) - 0.75**2) < 0.01
    assert torch.allclose(out[kept], torch.tensor(10 / 0.75**2))


def test_dropout_has_the_gradient_of_what_it_computed(monkeypatch):
    module, x = block(0.4).double(), volume(2, 5, 8, dtype=torch.float64).requires_grad_()

    def drawn(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return mlp(tensors[0], module)

    assert torch.autograd.gradcheck(drawn, (x, *module.parameters()), fast_mode=True)
    monkeypatch.setattr(parts, "LIMIT_BYTES", 3 * 20 * 8)
    assert torch.autograd.gradcheck(drawn, (x, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize("bf16", [False, True])
def test_recompute_and_a_second_backward_pass_repeat_the_draws(bf16):
    lean, x = apply_lean(block(0.4)), volume(2, 5, 8)

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(lean)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    first = one_step(lean, x, bf16=bf16)
    assert_equal(first, one_step(lean, x, bf16=bf16))
    again = one_step(Recomputed(), x, bf16=bf16)
    assert torch.equal(first.out, again.out)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, again.gradients[name if name == "input" else f"inner.{name}"])
    twice = one_step(lean, x, bf16=bf16, times=2)
    assert torch.equal(twice.gradients["input"], 2 * first.gradients["input"])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_recompute_runs_the_first_layer_alone(dropout):
    net, x = nn.Sequential(apply_lean(block(dropout))), torch.empty(2, 5, 8, requires_grad=True)
    graph = trace_step(apply_recompute(net, ["0"]), x, Step(optimizer=None, precision="32"))
    layers = [op.phase for op in graph.ops if op.name == "addmm.default"]
    assert layers == ["forward", "forward", "backward"]


def test_evaluation_and_no_grad_are_the_block_itself():
    module, x = block(0.4).eval(), volume(2, 5, 8)
    assert_equal(*both(module, x))
    with torch.no_grad():
        assert torch.equal(apply_lean(copy.deepcopy(module))(x), module(x))


def test_an_input_changed_before_backward_is_an_error():
    x = volume(2, 5, 8).requires_grad_() * 1
    out = apply_lean(block())(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_refusals():
    assert LeanMLP.refusal(block()) is None
    assert "no MLPBlock" in LeanMLP.refusal(nn.Linear(2, 2))
    assert "only GELU" in LeanMLP.refusal(block(act="RELU"))
    hooked = block()
    hooked.linear2.register_forward_hook(lambda *_: None)
    assert "hooks" in LeanMLP.refusal(hooked)
    adapted = block()
    adapted.linear1 = nn.utils.parametrizations.spectral_norm(adapted.linear1)
    assert "nn.Linear" in LeanMLP.refusal(adapted)

    class MLPBlock(nn.Module):
        """Another library's, of the same name."""

    assert "no MLPBlock" in LeanMLP.refusal(MLPBlock())
