"""Window attention of Swin networks that never keeps its scores: exact, with the gradient of the position bias.

MONAI's `WindowAttention` (networks/nets/swin_unetr.py, after Liu et al., Swin Transformer, 2021) makes
softmax(q k^T scale + bias + mask) v of windows of up to 343 voxels and saves several matrices of the size of the scores
for backward. Here q, k, v (one tensor), the output and one number per row are saved, and the scores are made again for
a few windows at a time.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from medckpt.lean import attention_cuda, attention_products
from medckpt.lean.attention_products import Attention
from medckpt.lean.forward import LeanForward, kernels_for
from medckpt.lean.parts import is_monai
from medckpt.lean.shift_masks import ShiftMasks, has_values, is_labels, mask_of, shift_masks

_ATTRIBUTES = (
    "num_heads", "scale", "window_size", "qkv", "proj", "attn_drop", "proj_drop", "softmax",
    "relative_position_bias_table", "relative_position_index",
)  # fmt: skip
_MOST_SEED = 2**62


class TakesLabels(LeanForward):
    """A forward of a `WindowAttention` that may be handed labels (`shift_masks`) in the place of a mask."""

    __slots__ = ()

    def plain(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The module's own forward, which takes masks only."""
        if mask is not None and is_labels(mask):
            mask = mask_of(mask)
        found: Tensor = super().plain(x, mask)
        return found


class LabelledWindowAttention(TakesLabels):
    """The module's own forward, handed labels: it makes the mask itself, and drops it.

    A stage hands one thing to all of its blocks (`LeanSwinLayer`), whether their attention is lean or not.
    """

    __slots__ = ()

    operator: ClassVar[str] = "window_mask"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if not is_monai(module, "WindowAttention"):
            return "it is no WindowAttention of MONAI"
        return None

    def lean(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.plain(x, mask)


class LeanWindowAttention(TakesLabels):
    """The forward of a `WindowAttention`: `lean(x, mask)`.

    `qkv` and `proj` stay the module's own layers, with their hooks and under autocast as ever. Scores, softmax and sums
    are float32 (float64 for float64), whatever dtype q, k and v arrive in; on CUDA the bias is read in their dtype.
    Against MONAI's own forward: equal up to the order of additions. Dropout of attention has the same distribution but
    draws other numbers; forward takes one number from the random state of the CPU (on CUDA, where the kernel runs,
    from that of the device) and backward none, so recompute makes the same again.
    """

    __slots__ = ()

    operator: ClassVar[str] = "window_attention"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """Returns why it cannot stand in for `module`'s forward, or None where it can."""
        if type(module).__name__ != "WindowAttention":
            return f"{type(module).__name__} is not a WindowAttention"
        missing = [name for name in _ATTRIBUTES if not hasattr(module, name)]
        if missing:
            return f"this WindowAttention has no {', '.join(missing)}, unlike MONAI's"
        parts: Any = module
        if type(parts.softmax) is not nn.Softmax or parts.softmax.dim not in (-1, 3):
            return "its softmax is not nn.Softmax over the last dimension"
        if type(parts.attn_drop) is not nn.Dropout:
            return f"its attn_drop is {type(parts.attn_drop).__name__}, not nn.Dropout"
        for name in ("softmax", "attn_drop"):
            part = getattr(module, name)
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                return f"its {name} has hooks, which would not be called"
        return None

    def lean(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The module's forward without a matrix of scores.

        Args:
            x: shape (windows, tokens, channels), the windows of one sample after those of another.
            mask: shape (windows of one sample, tokens, tokens), added to the scores; or labels, shape (windows of one
                sample, tokens), integers; None for windows not shifted.

        Returns:
            Shape and dtype of the module's own output.
        """
        module: Any = self.module
        windows, tokens, _ = x.shape
        # What does not fit goes to the module, whose error it is; and it alone has a gradient for the mask.
        if not x.numel() or (mask is not None and (mask.requires_grad or not _fits(mask, windows, tokens))):
            return self.plain(x, mask)
        masks = None if mask is None else shift_masks(mask, 2 ** len(module.window_size))
        qkv = module.qkv(x)
        size = qkv.shape[2] // (3 * module.num_heads)
        kernel = kernels_for(qkv) == "cuda" and attention_cuda.takes(qkv, size)
        dropout = module.attn_drop.p if module.attn_drop.training else 0.0
        seed = _drawn() if dropout and not kernel else 0
        how = Attention(heads=module.num_heads, scale=module.scale, dropout=dropout, seed=seed)
        index = module.relative_position_index[:tokens, :tokens]
        out = _attend(qkv, module.relative_position_bias_table, index, masks, how, kernel)
        return module.proj_drop(module.proj(out))


def _fits(mask: Tensor, windows: int, tokens: int) -> bool:
    shape = (tokens,) if is_labels(mask) else (tokens, tokens)
    return mask.shape[1:] == shape and windows % mask.shape[0] == 0


@torch._disable_dynamo
def _drawn() -> int:
    """Takes a number from the CPU's random state."""
    number = torch.randint(_MOST_SEED, (), device="cpu")
    return int(number) if has_values(number) else 0


# The compiler would unroll the loops over chunks.
@torch._disable_dynamo
def _attend(
    qkv: Tensor, table: Tensor, index: Tensor, masks: ShiftMasks | None, how: Attention, kernel: bool
) -> Tensor:
    """Returns the attention of all windows, shape (windows, tokens, channels).

    Args:
        qkv: shape (windows, tokens, 3 x channels).
        table: position biases, shape (relative positions, heads).
        index: shape (tokens, tokens), the row of `table` for each pair.
        masks: of shifted windows.
        how: heads, scale and dropout.
        kernel: whether CUDA's kernel is to be called, else products.
    """
    return _Attention.apply(qkv, table, index, masks, how, kernel)


class _Attention(torch.autograd.Function):
    """`_attend` and its derivative."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, table: Tensor, index: Tensor, masks: ShiftMasks | None, how: Attention, kernel: bool
    ) -> Tensor:
        with torch.autocast(qkv.device.type, enabled=False):
            bias = _bias(table, index)
            if kernel:
                out, states = attention_cuda.forward(qkv, bias, masks, how)
                kept = [tensor for state in states for tensor in (state.logs, state.seed, state.offset)]
            else:
                out, logs = attention_products.forward(qkv, bias, masks, how)
                kept = [logs]
        distinct, ctx.masks = (None, None) if masks is None else masks.apart()
        ctx.save_for_backward(qkv, table, index, distinct, out, *kept)
        ctx.how, ctx.kernel = how, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, table, index, distinct, out, *kept = ctx.saved_tensors
        masks = None if ctx.masks is None else ShiftMasks(distinct=distinct, **ctx.masks)
        needed = ctx.needs_input_grad[1]
        with torch.autocast(qkv.device.type, enabled=False):
            bias = _bias(table, index)
            if ctx.kernel:
                chunks = zip(kept[::3], kept[1::3], kept[2::3], strict=True)
                states = [attention_cuda.ChunkState(*state) for state in chunks]
                found = attention_cuda.backward(grad, qkv, bias, masks, out, states, ctx.how, bias_needed=needed)
            else:
                found = attention_products.backward(grad, qkv, bias, masks, out, kept[0], ctx.how, bias_needed=needed)
            grad_qkv, grad_bias = found
            return grad_qkv, None if grad_bias is None else _table(grad_bias, table, index), None, None, None, None


def _bias(table: Tensor, index: Tensor) -> Tensor:
    """Returns the bias of each pair, shape (heads, tokens, tokens), from the table of relative positions."""
    return table.T.index_select(1, index.reshape(-1)).view(-1, *index.shape)


def _table(grad: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Returns the gradient of the table from that of `_bias`."""
    rows, places = grad.flatten(1), index.reshape(-1)
    if grad.device.type == "cpu":
        return grad.new_zeros(table.T.shape).index_add_(1, places, rows).T.to(table.dtype)
    # As the module itself does it: on a GPU this one adds in a fixed order.
    return grad.new_zeros(table.shape).index_put_((places,), rows.T, accumulate=True).to(table.dtype)
