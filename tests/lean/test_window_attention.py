"""Lean window attention against MONAI's own: values, every gradient, what is saved, and how it is recomputed."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.losses import DiceCELoss
from monai.networks.nets import SwinUNETR
from monai.networks.nets.swin_unetr import BasicLayer, WindowAttention, compute_mask
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from medckpt.lean import attention_cuda, attention_products
from medckpt.lean.attention_products import Attention
from medckpt.lean.shift_masks import shift_masks
from medckpt.lean.window_attention import LeanWindowAttention
from medckpt.memory.measure import allocations, saved_bytes
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


def module(
    size: tuple[int, ...] = (4, 4, 4), dim: int = 12, heads: int = 3, *, dtype: torch.dtype = FP64, **settings: Any
) -> WindowAttention:
    torch.manual_seed(1)
    made = WindowAttention(dim, heads, size, **{"qkv_bias": True, **settings}).to(dtype)
    # Larger than MONAI's start, so that a wrong bias shows.
    nn.init.normal_(made.relative_position_bias_table)
    return made


def lean(plain: nn.Module) -> nn.Module:
    made = copy.deepcopy(plain)
    for part in made.modules():
        if type(part).__name__ == "WindowAttention":
            part.__dict__["forward"] = LeanWindowAttention(part)
    return made


def shifted(size: tuple[int, ...], dtype: torch.dtype = FP64) -> Tensor:
    """MONAI's mask of 3 x 2 x 2 (or 3 x 2) windows."""
    dims = [side * many for side, many in zip(size, (3, 2, 2), strict=False)]
    return compute_mask(dims, size, [side // 2 for side in size], torch.device("cpu")).to(dtype)


def results(net: nn.Module, x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Output, and the gradients of the input and of every parameter for a fixed outgoing gradient."""
    leaf = x.detach().clone().requires_grad_()
    out = net(leaf, mask)
    outgoing = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=FP64).to(out.dtype)
    wanted = {"x": leaf, **{name: p for name, p in net.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad(out, list(wanted.values()), outgoing)
    return {"out": out.detach(), **dict(zip(wanted, found, strict=True))}


def difference(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    assert all(found[name].dtype == truth[name].dtype and found[name].shape == truth[name].shape for name in truth)
    return max(((found[name] - truth[name]).abs().max() / truth[name].abs().max()).item() for name in truth)


def windows(many: int, size: tuple[int, ...], dim: int = 12, dtype: torch.dtype = FP64) -> Tensor:
    return torch.randn(many, math.prod(size), dim, generator=torch.Generator().manual_seed(2), dtype=FP64).to(dtype)


# --- equal to MONAI's


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(FP64, 1e-12), (FP32, 2e-5)])
@pytest.mark.parametrize("size", [(4, 4, 4), (3, 5, 2), (7, 6)], ids=["cube", "odd", "2d"])
@pytest.mark.parametrize("chunk", [1, 2**30], ids=["a window a chunk", "one chunk"])
def test_output_and_all_gradients_equal_monais(
    size: tuple[int, ...], dtype: torch.dtype, tolerance: float, masked: bool, chunk: int, monkeypatch: Any
) -> None:
    monkeypatch.setitem(attention_products.CHUNK_BYTES, "cpu", chunk)
    plain = module(size, dtype=dtype)
    mask = shifted(size, dtype) if masked else None
    x = windows(24, size, dtype=dtype)
    assert difference(results(lean(plain), x, mask), results(plain, x, mask)) < tolerance


@pytest.mark.parametrize(
    "settings", [{"qkv_bias": False}, {"dim": 24, "heads": 2}, {"dim": 6, "heads": 6}], ids=["no bias", "12", "1"]
)
def test_other_head_sizes_and_no_bias(settings: dict[str, Any]) -> None:
    plain = module((3, 3, 3), **settings)
    x = windows(5, (3, 3, 3), settings.get("dim", 12))
    assert difference(results(lean(plain), x, None), results(plain, x, None)) < 1e-12


@pytest.mark.parametrize("many", [1, 7])
def test_windows_smaller_than_the_modules(many: int) -> None:
    plain, x = module((4, 4, 4)), windows(many, (2, 2, 2))  # MONAI shrinks the window where the volume is smaller
    assert difference(results(lean(plain), x, None), results(plain, x, None)) < 1e-12


def test_gradcheck() -> None:
    net = lean(module((2, 2, 1), dim=4, heads=2))
    mask = shifted((2, 2, 1))[:6]
    mask = torch.where(mask < 0, -2.0, 0.0)  # close enough to the others for a difference to be seen
    x = windows(6, (2, 2, 1), 4).requires_grad_()
    parameters = dict(net.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(net, given, (x, mask))

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))


@pytest.mark.parametrize("factor", [30, 1e-3])
def test_large_scores_do_not_overflow(factor: float) -> None:
    plain = module(dtype=FP32)
    with torch.no_grad():
        plain.qkv.weight.mul_(factor)
    x, mask = windows(12, (4, 4, 4), dtype=FP32), shifted((4, 4, 4), FP32)
    found, truth = results(lean(plain), x, mask), results(plain, x, mask)
    exact = results(plain.double(), x.double(), mask.double())
    for name in truth:
        scale = exact[name].abs().max()
        error, own = ((each[name] - exact[name]).abs().max() / scale for each in (found, truth))
        assert torch.isfinite(found[name]).all()
        assert error < 3 * own + 1e-5


def test_bf16_autocast_is_no_further_from_the_truth_than_monai() -> None:
    plain = module(dtype=FP32)
    x, mask = windows(24, (4, 4, 4), dtype=FP32), shifted((4, 4, 4), FP32)
    exact = results(copy.deepcopy(plain).double(), x.double(), mask.double())
    with torch.autocast("cpu", torch.bfloat16):
        found, own = results(lean(plain), x, mask), results(plain, x, mask)
    assert found["out"].dtype == own["out"].dtype == BF16
    for name in ("out", "x", "relative_position_bias_table", "qkv.weight", "proj.weight"):
        error, monai = ((each[name] - exact[name]).norm() / exact[name].norm() for each in (found, own))
        assert error < 1.05 * monai, name


def test_it_takes_strided_inputs_and_gradients() -> None:
    plain = module()
    x = windows(8, (4, 4, 4), 24)[..., ::2]
    values = []
    for net in (plain, lean(plain)):
        leaf = x.detach().requires_grad_()
        net(leaf, None).sum().backward()  # the gradient of a sum is one number, expanded
        values.append(leaf.grad)
    assert torch.allclose(*values, rtol=0, atol=1e-12)


def test_a_frozen_table_gets_no_gradient() -> None:
    plain = module()
    plain.relative_position_bias_table.requires_grad_(False)
    x = windows(4, (4, 4, 4))
    assert difference(results(lean(plain), x, None), results(plain, x, None)) < 1e-12


def test_two_forwards_before_backward_and_a_kept_graph() -> None:
    net, x = lean(module()), windows(4, (4, 4, 4)).requires_grad_()
    first, second = net(x, None).square().sum(), net(2 * x, None).square().sum()
    once = torch.autograd.grad(first, x, retain_graph=True)[0]
    torch.autograd.grad(second, x)
    assert torch.equal(once, torch.autograd.grad(first, x)[0])


def test_the_same_twice_bit_for_bit() -> None:
    net, x, mask = lean(module(dtype=FP32)), windows(12, (4, 4, 4), dtype=FP32), shifted((4, 4, 4), FP32)
    first, second = results(net, x, mask), results(net, x, mask)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_second_derivatives_are_refused() -> None:
    net, x = lean(module()), windows(2, (4, 4, 4)).requires_grad_()
    grad = torch.autograd.grad(net(x, None).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_without_gradients_the_modules_own_forward_runs() -> None:
    plain, x = module(dtype=FP32), windows(4, (4, 4, 4), dtype=FP32)
    with torch.no_grad():
        assert torch.equal(lean(plain)(x, None), plain(x, None))


def test_copies_and_pickles_with_its_module() -> None:
    net, x = lean(module()), windows(2, (4, 4, 4))
    copied = copy.deepcopy(net)
    assert copied.__dict__["forward"].module is copied
    stream = io.BytesIO()
    torch.save(net, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert torch.equal(loaded(x, None), net(x, None))
    assert net.state_dict().keys() == module().state_dict().keys()


# --- masks


def test_masks_of_shifted_windows_are_eight() -> None:
    mask = compute_mask([20, 15, 15], (5, 5, 5), (2, 2, 2), torch.device("cpu"))
    found = shift_masks(mask, 8)
    assert mask.shape[0] == 36
    assert found.distinct.shape[0] == 8
    assert torch.equal(found.distinct[list(found.which)], mask)
    assert sum(found.empty) == 1
    assert shift_masks(mask, 8) is found


def test_masks_that_differ_in_one_number_are_told_apart() -> None:
    mask = torch.zeros(4, 64, 64)
    mask[2, 33, 17] = -1
    found = shift_masks(mask, 8)
    assert found.which == (0, 0, 1, 0)
    mask[3, 1, 1] = -2
    assert shift_masks(mask, 8).which == (0, 0, 1, 2)


def test_any_mask_is_added_as_it_is() -> None:
    plain, x = module(), windows(12, (4, 4, 4))
    mask = torch.randn(6, 64, 64, dtype=FP64)
    mask[1, :, 5:20] = -torch.inf
    assert difference(results(lean(plain), x, mask), results(plain, x, mask)) < 1e-12


# --- dropout


def test_dropout_of_the_output_is_the_modules_own() -> None:
    plain, x = module(proj_drop=0.5), windows(4, (4, 4, 4))
    found = []
    for net in (plain, lean(plain)):
        torch.manual_seed(3)
        found.append(results(net, x, None))
    assert difference(found[1], found[0]) < 1e-12


def test_dropout_of_attention_keeps_the_mean_and_drops_its_share() -> None:
    size, tokens = (4, 4, 4), 64
    qkv = torch.zeros(512, tokens, 3, 3, 4, dtype=FP64)
    qkv[:, :, 2] = 1
    how = Attention(heads=3, scale=0.5, dropout=0.25, seed=7)
    out, _ = attention_products.forward(qkv.flatten(2), torch.zeros(3, tokens, tokens, dtype=FP64), None, how)
    # Every output is the mean of 64 factors that are 4/3 with a chance of 3/4, else 0.
    out = out.view(-1, 3, 4)
    assert torch.equal(out[..., 0], out[..., 3])
    assert out.mean().item() == pytest.approx(1, abs=1e-3)
    assert out[..., 0].var().item() == pytest.approx((1 / 3) / math.prod(size), rel=0.02)
    kept = out[..., 0] * tokens * 0.75
    assert torch.allclose(kept, kept.round())


def test_gradients_with_dropout_are_those_of_the_mask_that_was_drawn() -> None:
    net, x = lean(module((2, 2, 1), 4, 2, attn_drop=0.4)), windows(2, (2, 2, 1), 4).requires_grad_()

    def call(x: Tensor, table: Tensor) -> Tensor:
        torch.manual_seed(11)
        return torch.func.functional_call(net, {"relative_position_bias_table": table}, (x, None))

    assert torch.autograd.gradcheck(call, (x, net.relative_position_bias_table))
    net.eval()
    assert difference(results(net, x, None), results(module((2, 2, 1), 4, 2), x, None)) < 1e-12


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute_around_it_is_bit_exact_and_draws_the_same(dropout: float) -> None:
    net, mask = lean(module(attn_drop=dropout, proj_drop=dropout, dtype=FP32)), shifted((4, 4, 4), FP32)
    x = windows(12, (4, 4, 4), dtype=FP32)
    found = []
    for call in (net, lambda x, mask: checkpoint(net, x, mask, use_reentrant=False)):
        torch.manual_seed(4)
        leaf = x.clone().requires_grad_()
        out = call(leaf, mask)
        out.square().sum().backward()
        found.append([out, leaf.grad, *(p.grad for p in net.parameters())])
        found[-1].append(torch.rand(1))
        net.zero_grad()
    assert all(map(torch.equal, *found))


# --- memory


def test_it_saves_no_matrix_of_scores() -> None:
    size, many = (4, 4, 4), 120
    x = windows(many, size, dtype=FP32).requires_grad_()
    tokens, dim, heads = 64, 12, 3
    plain = module(size, dtype=FP32)
    own, found = saved_bytes(plain, x, None), saved_bytes(lean(plain), x, None)
    rows = 4 * many * tokens
    # x of qkv, qkv, the output (which is what proj saves), one number per row and head; the parameters come free.
    assert found == rows * (dim + 3 * dim + dim + heads)
    assert own > found + 0.9 * rows * tokens * heads


def test_its_peak_is_two_chunks_over_what_it_saves_and_returns(monkeypatch: Any) -> None:
    chunk, many, tokens = 2**20, 60, 6**3
    monkeypatch.setitem(attention_products.CHUNK_BYTES, "cpu", chunk)
    x = windows(many, (6, 6, 6), dtype=FP32).requires_grad_()
    net = lean(module((6, 6, 6), dtype=FP32))
    found = allocations(lambda: net(x, None).sum().backward())
    row = 4 * many * tokens * 12
    # At once: qkv and its gradient, output and its gradient; of scores two chunks, the bias and its gradient.
    assert 8 * row + 2 * 0.9 * chunk < found.peak < 9 * row + 2 * chunk + 5 * 3 * tokens**2 * 4
    assert found.peak < 0.5 * many * 3 * tokens**2 * 4


# --- on CUDA: the same calls on fake tensors, and the same loop with the kernel's mathematics


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_on_cuda_the_forecast_sees_the_kernel_and_no_scores(precision: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(attention_cuda, "CHUNK_BYTES", 2**18)
    stage = BasicLayer(12, 2, 3, (4, 4, 4), [0.0, 0.0])
    graph = trace_step(lean(stage), torch.empty(1, 12, 32, 16, 16), Step(rules="cuda", precision=precision))
    names = [op.name for op in graph.ops]
    calls = names.count("_scaled_dot_product_efficient_attention.default")
    assert calls == names.count("_scaled_dot_product_efficient_attention_backward.default") > 8
    many, width = 8 * 4 * 4, 4 if precision == "32" else 2
    mine = [storage for storage in graph.storages if storage.region == "blocks.1.attn"]
    kept = sum(storage.nbytes for storage in mine if graph.saved_for_backward(storage))
    chunks = -(-many // (2**18 // (3 * 64 * 64 * width)))
    # The output, a number per row, the distinct masks, seed and offset of each chunk; q, k, v are its layer's.
    assert kept == many * 64 * (12 * width + 3 * 4) + 8 * 64 * 64 * 4 + 16 * chunks
    # Bias and mask of all distinct masks; otherwise nothing larger than a chunk or q, k, v.
    assert max(storage.nbytes for storage in mine) == max(8 * 3 * 64 * 64 * width, many * 64 * 36 * width)


class PlainKernel:
    """CUDA's kernel by its definition: the same arguments, results and layouts, computed by plain products."""

    padded: Callable[[Tensor], bool] = staticmethod(lambda bias: all(s % 8 == 0 for s in bias.stride()[:-1]))

    @classmethod
    def forward(cls, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, how: Attention) -> tuple[Tensor, ...]:
        assert cls.padded(bias)
        assert bias.stride(-1) == query.stride(-1) == 1
        assert query.shape[-1] * query.dtype.itemsize % 16 == 0
        scores = (query @ key.mT) * how.scale + bias
        out = scores.softmax(-1) @ value
        logs = F.pad(scores.logsumexp(-1).float(), (0, -scores.shape[-1] % 32))
        return out.transpose(1, 2).contiguous().transpose(1, 2), logs, torch.tensor(0), torch.tensor(0)

    @classmethod
    def backward(
        cls, grad: Tensor, saved: tuple[Tensor, ...], how: Attention, bias_needed: bool
    ) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, logs = saved[:6]
        assert cls.padded(bias)
        tokens = query.shape[2]
        probabilities = ((query @ key.mT) * how.scale + bias - logs[..., :tokens, None].to(query.dtype)).exp()
        slopes = probabilities * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
        parts = (slopes @ key * how.scale, slopes.mT @ query * how.scale, probabilities.mT @ grad)
        return *parts, slopes if bias_needed else None


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("dim", "masked"), [(12, True), (12, False), (6, True)])
def test_cudas_chunks_with_the_kernels_mathematics(
    dtype: torch.dtype, dim: int, masked: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention_cuda, "Kernel", PlainKernel)
    monkeypatch.setattr(attention_cuda, "CHUNK_BYTES", 5 * 3 * 45 * 48 * dtype.itemsize)  # five windows
    generator = torch.Generator().manual_seed(0)
    size = (5, 3, 3)
    qkv, grad = (torch.randn(24, 45, many, generator=generator).to(dtype) for many in (3 * dim, dim))
    bias = torch.randn(3, 45, 45, generator=generator)
    masks = shift_masks(shifted(size, FP32), 8) if masked else None
    how = Attention(heads=3, scale=0.5)
    out, states = attention_cuda.forward(qkv, bias, masks, how)
    assert len(states) == 5
    found = out, *attention_cuda.backward(grad, qkv, bias, masks, out, states, how, bias_needed=True)
    exact_out, logs = attention_products.forward(qkv.double(), bias.double(), masks, how)
    parts = (grad.double(), qkv.double(), bias.double(), masks, exact_out, logs, how)
    exact = exact_out, *attention_products.backward(*parts, bias_needed=True)
    for mine, truth in zip(found, exact, strict=True):
        error = (mine.double() - truth).norm() / truth.norm()
        assert error < (2e-6 if dtype == FP32 else 2e-2)
    assert found[1].dtype == dtype
    assert found[2].dtype == FP32
    assert attention_cuda.backward(grad, qkv, bias, masks, out, states, how, bias_needed=False)[1] is None


def test_what_the_kernel_does_not_take_goes_the_other_way() -> None:
    assert not attention_cuda.takes(torch.empty(1, 8, 36, dtype=FP64), 4)
    assert attention_cuda.takes(torch.empty(1, 8, 36), 4)


# --- in a network


def test_a_whole_swin_unetr() -> None:
    torch.manual_seed(0)
    plain = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, window_size=4)
    image = torch.randn(1, 1, 64, 32, 32, generator=torch.Generator().manual_seed(8))
    label = torch.randint(0, 2, image.shape, generator=torch.Generator().manual_seed(9))
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    nets = (plain, lean(plain))
    losses = []
    for net in nets:
        loss = criterion(net(image), label)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    scale = max(p.grad.abs().max() for p in plain.parameters() if p.grad is not None)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert (one.grad - other.grad).abs().max() < 1e-4 * scale


def test_what_it_stands_in_for() -> None:
    refusal = LeanWindowAttention.refusal
    assert refusal(module()) is None
    assert "Linear is not a WindowAttention" in str(refusal(nn.Linear(1, 1)))
    hooked = module()
    hooked.softmax.register_forward_hook(lambda *_: None)
    assert "softmax has hooks" in str(refusal(hooked))
    other = module()
    other.attn_drop = nn.Identity()
    assert "Identity, not nn.Dropout" in str(refusal(other))
    del other.relative_position_bias_table
    assert "has no relative_position_bias_table" in str(refusal(other))


def test_a_wrong_mask_raises_monais_error() -> None:
    plain, x = module(), windows(5, (4, 4, 4))
    for net in (plain, lean(plain)):
        with pytest.raises(RuntimeError, match="is invalid for input of size"):
            net(x, shifted((4, 4, 4)))
