"""Self-attention of a ViT that never keeps the matrix of scores: queries, keys, values and the result are enough.

MONAI's `SABlock` multiplies, scales, normalises and drops as single operators, which keeps up to six matrices of
(heads, tokens, tokens) per sample. `scaled_dot_product_attention` computes the same and makes them again by parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from medckpt.lean import parts
from medckpt.lean.forward import LeanForward, kernels_for
from medckpt.lean.linear import dropout, linear
from medckpt.lean.parts import (
    bypassed,
    draw_seed,
    drawn,
    drop_,
    is_monai,
    is_plain,
    lower_dtype,
    lowered,
    no_autocast,
    seeded,
)

aten = torch.ops.aten


class LeanSelfAttention(LeanForward):
    """MONAI's `SABlock`, causal or not, through `scaled_dot_product_attention`.

    Loss and gradients are those of the block up to the order of sums (in bf16 and fp16 nearer to float64 than it, as
    scores stay in float32). Dropout has the block's probabilities and draws of its own. A sample whose mask leaves no
    token gives NaN in the block and may give 0 here.
    """

    __slots__ = ()

    operator = "self_attention"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if not is_monai(module, "SABlock"):
            return "it is no SABlock of MONAI"
        if module.rel_positional_embedding is not None:
            return "it adds relative positions to the scores"
        if module.save_attn:
            return "it hands out its scores (save_attn=True), so they must be there"
        if module.attention_dtype is not None:
            return "it computes scores in a dtype of its own (attention_dtype)"
        layers = (module.qkv, module.to_q, module.to_k, module.to_v, module.out_proj)
        if not all(is_plain(layer, nn.Linear, nn.Identity) for layer in layers):
            return "its layers are not torch's own nn.Linear"
        if not all(is_plain(drop, nn.Dropout) for drop in (module.drop_weights, module.drop_output)):
            return "its dropout is not torch's own nn.Dropout"
        return bypassed(module)

    def lean(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self_attention(x, self.module, attn_mask)


def self_attention(
    x: Tensor, block: nn.Module, attn_mask: Tensor | None = None, norm: nn.LayerNorm | None = None
) -> Tensor:
    """Computes `block(norm(x), attn_mask)`, or `block(x, attn_mask)`, of a MONAI `SABlock`.

    Args:
        x: shape (B, tokens, features), any floating dtype, any strides.
        block: accepted by `LeanSelfAttention.refusal`.
        attn_mask: (B, tokens), 0 where a token is not looked at; with `use_flash_attention` what torch takes.
        norm: over the last axis; its result is made again in the backward pass.

    Returns:
        Shape (B, tokens, features), in the dtype that the block gives under the autocast in force.

    Raises:
        ValueError: a causal block got a mask (as MONAI's).
    """
    b: Any = block
    heads, flash = b.num_heads, b.use_flash_attention
    if b.causal and attn_mask is not None and not flash:
        raise ValueError("Causal attention does not support attention masks.")
    if b.use_combined_linear:
        made = linear(x, b.qkv, norm)
        # One backward operator stacks the three gradients; single indices would each make zeros of the whole.
        query, key, value = (t.transpose(1, 2) for t in made.view(*made.shape[:2], 3, heads, -1).unbind(2))
    else:
        each = (linear(x, layer, norm) for layer in (b.to_q, b.to_k, b.to_v))
        query, key, value = (t.view(*t.shape[:2], heads, -1).transpose(1, 2) for t in each)
    # MONAI's flash branch drops in evaluation mode too, if gradients are on.
    p = float(b.dropout_rate if flash else b.drop_weights.p) if flash or b.drop_weights.training else 0.0
    mask = attn_mask if attn_mask is None or flash else (attn_mask != 0)[:, None, None, :]
    out = attention(query, key, value, mask, p=p, causal=bool(b.causal), scale=float(b.scale))
    out = out.transpose(1, 2).flatten(2)
    if b.include_fc:
        out = linear(out, b.out_proj)
    return dropout(out, b.drop_output.p, b.drop_output.training)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, p: float, causal: bool, scale: float
) -> Tensor:
    """Computes softmax(scale * query @ key^T) @ value with dropout `p` of the softmax; keeps no matrix of scores.

    Args:
        query: (B, heads, tokens, head size); `key` and `value` alike.
        mask: additive or boolean, broadcastable to (B, heads, tokens, tokens); True is looked at.
        p: probability of dropout. On a CPU, where torch's own attention with dropout keeps all, head by head.
        causal: whether a token looks at earlier ones and itself only.
        scale: of the products.
    """
    if p > 0 and kernels_for(query) == "cpu" and not (mask is not None and mask.requires_grad):
        return _Dropped.apply(query, key, value, mask, p, causal, scale, draw_seed(query))
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=p, is_causal=causal, scale=scale
    )


class _Dropped(torch.autograd.Function):
    """Attention with dropout by groups of heads; keeps queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        p: float,
        causal: bool,
        scale: float,
        seed: int,
    ) -> Tensor:
        lower = lower_dtype(query)
        ctx.dtypes = tuple(t.dtype for t in (query, key, value))
        query, key, value = (lowered(t, lower) for t in (query, key, value))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
        if mask is not None:
            mask = mask.to(query.dtype).expand(*query.shape[:2], *mask.shape[-2:])
        ctx.save_for_backward(query, key, value, mask)
        ctx.p, ctx.causal, ctx.scale, ctx.seed = p, causal, scale, seed
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
        with no_autocast(query):
            generator = seeded(seed, query)
            for where in _groups(query, key):
                weights = _weights(ctx, query[where], key[where], mask, where)
                drop_(weights, p, drawn(weights, p, generator))
                out[where] = weights.matmul(value[where])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask = ctx.saved_tensors
        found = [torch.empty_like(t) for t in (query, key, value)]
        with no_autocast(grad):
            generator = seeded(ctx.seed, query)
            for where in _groups(query, key):
                weights = _weights(ctx, query[where], key[where], mask, where)
                kept = drawn(weights, ctx.p, generator)
                inner = drop_(grad[where].matmul(value[where].transpose(-2, -1)), ctx.p, kept)
                scores = aten._softmax_backward_data(inner, weights, -1, weights.dtype).mul_(ctx.scale)
                del inner
                found[0][where] = scores.matmul(key[where])
                found[1][where] = scores.transpose(-2, -1).matmul(query[where])
                del scores
                found[2][where] = drop_(weights, ctx.p, kept).transpose(-2, -1).matmul(grad[where])
        return *(t.to(dtype) for t, dtype in zip(found, ctx.dtypes, strict=True)), None, None, None, None, None


def _groups(query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """Returns samples and heads to be done at a time: as many heads as keep their scores below the limit."""
    batch, heads, tokens, _ = query.shape
    size = max(1, min(heads, parts.LIMIT_BYTES // max(1, tokens * key.shape[2] * query.element_size())))
    return [
        (slice(sample, sample + 1), slice(head, head + size))
        for sample in range(batch)
        for head in range(0, heads, size)
    ]


def _weights(ctx: Any, query: Tensor, key: Tensor, mask: Tensor | None, where: tuple[slice, slice]) -> Tensor:
    """Returns the softmax of the scores of one group, before dropout, in the dtype of the query."""
    scores = query.matmul(key.transpose(-2, -1)).mul_(ctx.scale)
    if mask is not None:
        scores += mask[where]
    if ctx.causal:
        tokens = scores.shape[-2:]
        later = torch.ones(tokens, dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(later, float("-inf"))
    return scores.softmax(-1)
