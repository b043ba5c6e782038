"""Lean self-attention: MONAI's SABlock in float64, and no matrix of scores kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from medckpt.lean import parts
from medckpt.lean.forward import foreseen_kernels
from medckpt.lean.self_attention import LeanSelfAttention, attention, self_attention
from medckpt.lean.swap import apply_lean
from medckpt.memory.measure import saved_bytes

from .steps import assert_equal, both, distance, one_step, volume

SABlock = pytest.importorskip("monai.networks.blocks").SABlock


def block(dropout: float = 0.0, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return SABlock(16, 4, dropout, **{"qkv_bias": True, **kwargs})


KINDS = [
    {},
    {"qkv_bias": False},
    {"use_combined_linear": False},
    {"include_fc": False},
    {"causal": True, "sequence_length": 9},
    {"dim_head": 6},
    {"use_flash_attention": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
def test_against_monai_in_float64_and_float32(kind):
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        plain, lean = both(block(**kind).to(dtype), volume(2, 9, 16, dtype=dtype))
        assert distance(lean, plain) < limit


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
def test_in_bf16_it_is_as_near_to_float64_as_monai(kind):
    module, x = block(**kind), volume(2, 9, 16)
    plain, lean = both(module, x, bf16=True)
    truth = one_step(copy.deepcopy(module).double(), x.double())
    assert lean.out.dtype == plain.out.dtype
    assert distance(lean, truth) <= 1.5 * distance(plain, truth)


def test_masked_tokens():
    mask = torch.ones(2, 9)
    mask[0, 6:] = mask[1, 2] = 0
    module, x = block().double(), volume(2, 9, 16, dtype=torch.float64)
    assert distance(*both(module, x, mask)) < 1e-12
    with pytest.raises(ValueError, match="does not support attention masks"):
        apply_lean(block(causal=True, sequence_length=9))(x.float(), mask)


def test_inputs_of_any_strides():
    x = volume(16, 9, 2, dtype=torch.float64).permute(2, 1, 0)
    assert distance(*both(block().double(), x)) < 1e-12


def test_gradcheck_with_and_without_a_norm():
    module, norm = block().double(), nn.LayerNorm(16).double()
    x = volume(1, 5, 16, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: self_attention(x, module), (x, *module.parameters()), fast_mode=True)
    parameters = (*module.parameters(), *norm.parameters())
    assert torch.autograd.gradcheck(
        lambda x, *_: self_attention(x, module, None, norm), (x, *parameters), fast_mode=True
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("limit", [parts.LIMIT_BYTES, 1])
def test_dropped_attention_against_a_product_by_hand(monkeypatch, limit, causal):
    monkeypatch.setattr(parts, "LIMIT_BYTES", limit)
    query, key, value = (volume(2, 3, 5, 4, dtype=torch.float64, seed=s).requires_grad_() for s in range(3))
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.float64)
    mask[1, ..., 3] = float("-inf")

    def mine(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attention(*tensors, mask, p=0.3, causal=causal, scale=0.7)

    # What was drawn, read off by values that are unit vectors.
    unit = torch.eye(5, dtype=torch.float64).expand(2, 3, 5, 5)
    dropped = mine(query, key, unit)
    scores = 0.7 * query @ key.transpose(-2, -1) + mask
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    weights = scores.softmax(-1)
    expected = torch.where(dropped != 0, weights / 0.7, 0.0)
    assert torch.allclose(dropped, expected, rtol=1e-12, atol=0)
    assert torch.allclose(mine(query, key, value), expected @ value, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(mine, (query, key, value), fast_mode=True)


def test_dropout_keeps_the_share_it_should():
    module = block(0.25).eval()
    query = torch.zeros(4, 4, 50, 8)
    out = attention(query, query, torch.eye(50)[:, :8].expand(4, 4, 50, 8), None, p=0.25, causal=False, scale=1.0)
    assert abs(float((out != 0).float().mean()) - 0.75) < 0.02
    assert torch.allclose(out[out != 0], torch.tensor(1 / 50 / 0.75))
    # In evaluation nothing is dropped, gradients on or off; but MONAI's flash branch does with gradients on.
    assert distance(*both(module.double(), volume(2, 9, 16, dtype=torch.float64))) < 1e-12
    flash = apply_lean(block(0.5, use_flash_attention=True).eval())
    x = volume(2, 9, 16)
    assert not torch.equal(flash(x), flash(x))


def test_it_keeps_no_matrix_of_scores():
    x = volume(2, 64, 16).requires_grad_()
    tokens = 2 * 64 * 4
    logsumexp = tokens * 4
    assert saved_bytes(apply_lean(block()), x) == tokens * (16 + 48 + 16) + logsumexp
    # With dropout queries, keys and values are kept, and the result for the layer after it.
    assert saved_bytes(apply_lean(block(0.1)), x) == tokens * (16 + 48 + 16)
    assert saved_bytes(block(), x) > 64 * 64 * 4 * 8


def test_on_cuda_dropout_is_left_to_torch_and_its_fused_kernels():
    query = volume(1, 2, 5, 4).requires_grad_()
    with foreseen_kernels("cuda"):
        assert attention(query, query, query, None, p=0.5, causal=False, scale=1.0).grad_fn.name() != "_DroppedBackward"
    assert attention(query, query, query, None, p=0.5, causal=False, scale=1.0).grad_fn.name() == "_DroppedBackward"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bf16", [False, True])
def test_it_repeats_itself_and_under_recompute(dropout, bf16):
    lean, x = apply_lean(block(dropout)), volume(2, 9, 16)
    first = one_step(lean, x, bf16=bf16)
    assert_equal(first, one_step(lean, x, bf16=bf16))

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(lean)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    again = one_step(Recomputed(), x, bf16=bf16)
    assert torch.equal(first.out, again.out)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, again.gradients[name if name == "input" else f"inner.{name}"])
    twice = one_step(lean, x, bf16=bf16, times=2)
    assert torch.equal(twice.gradients["input"], 2 * first.gradients["input"])


def test_frozen_parameters_and_no_grad():
    module, x = block(), volume(2, 9, 16)
    module.qkv.requires_grad_(False)
    plain, lean = both(module, x)
    assert lean.gradients["qkv.weight"] is None
    assert distance(lean, plain) < 1e-5
    with torch.no_grad():
        assert torch.equal(apply_lean(copy.deepcopy(module))(x), module(x))


def test_refusals():
    assert "relative positions" in LeanSelfAttention.refusal(block(rel_pos_embedding="decomposed", input_size=(3, 3)))
    assert "save_attn" in LeanSelfAttention.refusal(block(save_attn=True))
    assert "attention_dtype" in LeanSelfAttention.refusal(block(attention_dtype=torch.float32))
    patched = block()
    patched.out_proj.forward = lambda x: x
    assert "forward of its own" in LeanSelfAttention.refusal(patched)
    assert "no SABlock" in LeanSelfAttention.refusal(nn.Identity())
