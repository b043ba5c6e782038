"""Lean convolutional blocks: MONAI's own results bit for bit, with the convolutions' results kept and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from medckpt.lean.norm_act import LeanNormAct, norm_act, norm_act_conv
from medckpt.lean.swap import applied_lean, apply_lean
from medckpt.memory.apply import apply_recompute
from medckpt.memory.measure import saved_bytes
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step
from medckpt.training.precision import keep_thin_convolutions_exact

from .steps import assert_equal, both, one_step, volume

blocks = pytest.importorskip("monai.networks.blocks.dynunet_block")

NORMS = ["instance", ("instance", {"affine": True}), "batch", ("group", {"num_groups": 2})]


def block(norm: object = "instance", inputs: int = 4, kind: str = "UnetResBlock", **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    module = getattr(blocks, kind)(3, inputs, 6, 3, kwargs.pop("stride", 1), norm, **kwargs)
    with torch.no_grad():  # weights and statistics that are not ones and zeros
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "norm" in name and tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return module


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize(("kind", "inputs"), [("UnetResBlock", 4), ("UnetResBlock", 6), ("UnetBasicBlock", 4)])
@pytest.mark.parametrize(("dtype", "bf16"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
def test_it_is_the_block_bit_for_bit(norm, kind, inputs, dtype, bf16):
    module, x = block(norm, inputs, kind).to(dtype), volume(2, inputs, 5, 6, 4, dtype=dtype)
    assert_equal(*both(module, x, bf16=bf16))  # buffers too: running statistics are updated once
    assert_equal(*both(module.eval(), x, bf16=bf16))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"stride": 2},
        {"act_name": "RELU"},
        {"act_name": ("leakyrelu", {"inplace": False, "negative_slope": 0.2})},
    ],
    ids=str,
)
def test_strides_and_activations(kwargs):
    assert_equal(*both(block(**kwargs), volume(2, 4, 6, 6, 6)))


def test_in_two_dimensions_and_channels_last():
    torch.manual_seed(0)
    assert_equal(*both(blocks.UnetResBlock(2, 4, 6, 3, 1, "batch"), volume(2, 4, 7, 8)))
    assert_equal(*both(block(), volume(2, 4, 5, 6, 4).to(memory_format=torch.channels_last_3d)))


def test_thin_convolutions_stay_in_float32():
    module, x = block(), volume(2, 4, 2, 2, 2)
    assert keep_thin_convolutions_exact(module) == 2
    plain, lean = both(module, x, bf16=True)
    assert_equal(plain, lean)
    wide = volume(2, 4, 5, 5, 5)
    assert_equal(*both(module, wide, bf16=True))
    assert saved_bytes(apply_lean(module), wide, precision="bf16") < saved_bytes(block(), wide, precision="bf16")


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_gradcheck(norm):
    module = block(norm).double()
    x = volume(2, 6, 2, 3, 2, dtype=torch.float64).requires_grad_()
    residual = volume(2, 6, 2, 3, 2, dtype=torch.float64, seed=4).requires_grad_()
    norms = [*module.norm1.parameters(), *module.conv2.parameters()]
    assert torch.autograd.gradcheck(
        lambda x, *_: norm_act_conv(x, module.norm1, module.lrelu, module.conv2), (x, *norms), fast_mode=True
    )
    both_norms = [*module.norm2.parameters(), *module.norm3.parameters()]
    assert torch.autograd.gradcheck(
        lambda x, r, *_: norm_act(x, module.norm2, module.lrelu, r, module.norm3),
        (x, residual, *both_norms),
        fast_mode=True,
    )


def test_it_keeps_the_results_of_convolutions():
    x = volume(2, 4, 8, 8, 8).requires_grad_()
    voxels = 2 * 8**3
    assert saved_bytes(apply_lean(block()), x) == 4 * voxels * (4 + 6 + 6 + 6)
    assert saved_bytes(apply_lean(block("batch")), x) == 4 * voxels * (4 + 6 + 6 + 6)
    # Plain: the activated tensor and the result of the block as well (and statistics).
    assert saved_bytes(block(), x) > 4 * voxels * (4 + 6 + 6 + 6 + 6 + 6)


@pytest.mark.parametrize("part", ["norm1", "conv2", "norm3", "conv1"])
def test_frozen_parameters(part):
    module = block("batch")
    getattr(module, part).requires_grad_(False)
    assert_equal(*both(module, volume(2, 4, 5, 5, 5)))
    module.requires_grad_(False)
    module.norm3.requires_grad_()
    assert_equal(*both(module, volume(2, 4, 5, 5, 5)))


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_recompute_a_second_backward_pass_and_no_grad(norm):
    module, x = block(norm), volume(2, 4, 5, 5, 5)
    net = nn.Sequential(copy.deepcopy(module))
    plain, lean = both(net, x)
    assert_equal(plain, lean)
    assert_equal(plain, one_step(apply_recompute(apply_lean(copy.deepcopy(net)), ["0"]), x))
    twice = one_step(apply_lean(copy.deepcopy(module)), x, times=2)
    assert torch.equal(twice.gradients["input"], 2 * plain.gradients["input"])
    with torch.no_grad():
        assert torch.equal(apply_lean(copy.deepcopy(module))(x), copy.deepcopy(module)(x))


def test_casts_of_weights_do_not_stay_in_the_cache_of_autocast():
    """A cast made inside of the operator has no gradient: a second use of the weight must make its own."""
    module, x = apply_lean(block()), volume(2, 4, 5, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x)
        second = nn.functional.conv3d(volume(1, 6, 3, 3, 3), module.conv2.conv.weight)
    assert second.requires_grad


def test_an_input_changed_before_backward_is_an_error():
    module = block()
    x = volume(2, 6, 4, 4, 4).requires_grad_() * 1
    out = norm_act_conv(x, module.norm1, module.lrelu, module.conv2)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_torchs_own_checkpoint():
    module, x = apply_lean(block()), volume(2, 4, 5, 5, 5).requires_grad_()
    (first,) = torch.autograd.grad(module(x).square().sum(), x)
    (again,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(first, again)


def test_refusals():
    refusal = LeanNormAct.refusal
    assert refusal(block()) is None
    assert "no UnetResBlock" in refusal(nn.Identity())
    assert "PReLU" in refusal(block(act_name="PRELU"))
    assert "has dropout" in refusal(block(dropout=0.1))
    assert "LayerNorm" in refusal(block(("layer", {"normalized_shape": (4, 4, 4)})))
    assert "running statistics per instance" in refusal(block(("instance", {"track_running_stats": True})))
    patched = block()
    patched.conv2.conv.forward = lambda x: x
    assert "forward of its own" in refusal(patched)
    recomputed = nn.Sequential(block())
    apply_recompute(recomputed, ["0.norm2"])
    assert applied_lean(apply_lean(recomputed)) == {}


def test_a_recompute_ends_before_the_last_norms():
    """Nothing that comes after the last saved tensor is needed in backward."""
    for inputs in (12, 6):
        net = apply_recompute(apply_lean(nn.Sequential(block(inputs=inputs))), ["0"])
        graph = trace_step(
            net, torch.empty(2, inputs, 8, 8, 8, requires_grad=True), Step(optimizer=None, precision="32")
        )
        again = {op.region.rpartition(".")[2] for op in graph.ops if op.phase == "recompute"}
        assert {name for name in again if "norm" in name} == {"norm1"}


def test_backward_holds_few_tensors_at_once():
    """In units of the block's result: three of convolutions, the gradient that comes in, and the two norms again."""
    net = apply_lean(nn.Sequential(block(inputs=12), nn.Flatten()))
    graph = trace_step(net, torch.empty(2, 12, 16, 16, 16), Step(optimizer=None, precision="32"))
    unit = 2 * 6 * 16**3 * 4
    now = peak = 0
    for index, storage, change in graph.events:
        now += change * graph.storages[storage].nbytes
        if graph.ops[index].phase == "backward" and graph.ops[index].region.startswith("0"):
            peak = max(peak, now)
    assert 6 * unit <= peak < 6.01 * unit


def test_gradients_of_parts_of_a_block_alone():
    """Autograd asks for one side of the sum only: what was made for the other must not be left over."""
    module, x = apply_lean(block("batch")), volume(2, 4, 5, 5, 5).requires_grad_()
    plain = block("batch")
    for name in ("norm2.weight", "norm3.weight", "conv3.conv.weight", "conv1.conv.weight"):
        wanted = [dict(net.named_parameters())[name] for net in (plain, module)]
        found = [
            torch.autograd.grad(net(x).square().sum(), each) for net, each in zip((plain, module), wanted, strict=True)
        ]
        assert torch.equal(*[each[0] for each in found])
