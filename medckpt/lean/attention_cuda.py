"""Attention of windows by CUDA's memory-efficient kernel, over chunks of windows. Also run on fake tensors.

The kernel adds a bias and returns its gradient, but both have the size of the scores: the sum of position bias and mask
is made for one chunk of windows at a time, and its gradient summed up over the windows of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from medckpt.lean.attention_products import Attention
from medckpt.lean.shift_masks import ShiftMasks

aten = torch.ops.aten

CHUNK_BYTES = 64 * 2**20
"""Of the bias of one chunk in forward; backward holds its gradient as well. A chunk has at least one window."""
_MOST_WINDOWS = 32768
"""Windows are the third dimension of the kernel's grid, of which CUDA allows 65535."""
_ALIGNED_STRIDE = 8
"""Elements; the kernel's rule for all strides of a bias but the last (`pad_bias` in torch's `attention.cpp`)."""


class Kernel:
    """The two calls of the kernel, as class members: a test computes with others where there is no GPU."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, how: Attention) -> tuple[Tensor, ...]:
        """Returns output, logarithms of the rows' sums, and seed and offset of the dropout mask.

        Args:
            query: shape (windows, heads, tokens, head size); `key` and `value` alike, any strides but 1 for the last.
            bias: shape (windows, heads, tokens, tokens), may be expanded over windows.
            how: scale and dropout.
        """
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, True, how.dropout, False, scale=how.scale
        )

    @staticmethod
    def backward(grad: Tensor, saved: tuple[Tensor, ...], how: Attention, bias_needed: bool) -> tuple[Any, ...]:
        """Returns the gradients of query, key, value and bias, the last of no meaning if not needed.

        Args:
            grad: of the output, shape (windows, heads, tokens, head size).
            saved: query, key, value and bias, then the four results of `forward`.
            how: as in forward.
            bias_needed: whether the gradient of the bias is wanted.
        """
        mask = [True, True, True, bias_needed]
        return aten._scaled_dot_product_efficient_attention_backward.default(
            grad, *saved, how.dropout, mask, False, scale=how.scale
        )


@dataclass(frozen=True, slots=True)
class ChunkState:
    """What the kernel wants back from forward, per chunk."""

    logs: Tensor
    seed: Tensor
    offset: Tensor


def takes(qkv: Tensor, size: int) -> bool:
    """Returns whether the kernel runs for this dtype, and this device if it is a real one.

    Other head sizes than multiples of 16 bytes are filled up with zeros, chunk by chunk.
    """
    half = qkv.dtype in (torch.float16, torch.bfloat16)
    if not half and qkv.dtype != torch.float32:
        return False
    if qkv.device.type != "cuda" or isinstance(qkv, FakeTensor) or not torch.version.cuda:
        return True
    capability = torch.cuda.get_device_capability(qkv.device)
    return capability >= ((8, 0) if qkv.dtype == torch.bfloat16 else (5, 0))


def forward(qkv: Tensor, bias: Tensor, masks: ShiftMasks | None, how: Attention) -> tuple[Tensor, list[ChunkState]]:
    """Returns the attention of every window, and the state that `backward` needs.

    Args:
        qkv: shape (windows, tokens, 3 x heads x head size), float32, float16 or bfloat16, its last stride 1.
        bias: shape (heads, tokens, tokens), any floating dtype; read in that of `qkv`.
        masks: of window w modulo their number, added to its scores.
        how: heads, scale and dropout; the mask of dropout is the kernel's own.

    Returns:
        The output, shape (windows, tokens, heads x head size), contiguous, dtype of `qkv`; and one state per chunk.
    """
    work = _Work(qkv, bias, masks, how)
    out = qkv.new_empty(work.windows, work.tokens, how.heads, work.size)
    states = []
    for start, stop in work.chunks():
        result, *state = Kernel.forward(*work.operands(start, stop), work.bias_of(start, stop), how)
        out[start:stop].copy_(result[..., : work.size].transpose(1, 2))
        states.append(ChunkState(*state))
    return out.flatten(2), states


def backward(
    grad: Tensor, qkv: Tensor, bias: Tensor, masks: ShiftMasks | None, out: Tensor, states: list[ChunkState],
    how: Attention, *, bias_needed: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients of `qkv` (its shape and dtype) and `bias` (heads, tokens, tokens; float32).

    Args:
        grad: of `out`, same shape.
        qkv, bias, masks, how: as `forward` got them.
        out, states: as `forward` returned them.
        bias_needed: whether the gradient of `bias` is wanted; None in its place if not.
    """
    work = _Work(qkv, bias, masks, how)
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    to = grad_qkv.unflatten(2, (3, how.heads, work.size)).permute(2, 0, 3, 1, 4)
    shape = (how.heads, work.tokens, work.tokens)
    grad_bias = torch.zeros(shape, dtype=torch.float32, device=qkv.device) if bias_needed else None
    for (start, stop), state in zip(work.chunks(), states, strict=True):
        outgoing, result = (work.heads_first(each, start, stop) for each in (grad, out))
        operands = (*work.operands(start, stop), work.bias_of(start, stop))
        saved = (*operands, result, state.logs, state.seed, state.offset)
        *parts, slopes = Kernel.backward(outgoing, saved, how, bias_needed)
        for part, found in enumerate(parts):
            to[part, start:stop].copy_(found[..., : work.size])
        if grad_bias is not None:
            grad_bias += slopes.sum(0, dtype=torch.float32)
        del parts, slopes  # before the next chunk's are made
    return grad_qkv, grad_bias


class _Work:
    """The sizes of one call, and the operands of each chunk."""

    def __init__(self, qkv: Tensor, bias: Tensor, masks: ShiftMasks | None, how: Attention) -> None:
        self.how, self.masks = how, masks
        self.windows, self.tokens, channels = qkv.shape
        self.size = channels // (3 * how.heads)
        self.missing = -self.size % (16 // qkv.dtype.itemsize)
        self.parts = qkv.unflatten(2, (3, how.heads, self.size)).permute(2, 0, 3, 1, 4)
        self.dtype, self.device = qkv.dtype, qkv.device
        wide = -(-self.tokens // _ALIGNED_STRIDE) * _ALIGNED_STRIDE
        per_window = how.heads * self.tokens * wide * qkv.dtype.itemsize
        self.step = min(max(1, CHUNK_BYTES // per_window), self.windows, _MOST_WINDOWS)
        # Once for all windows alike: bias and mask of each distinct mask, the bias alone without masks.
        self.distinct = self._rows(1 if masks is None else len(masks.empty), wide)
        to = self.distinct[..., : self.tokens]
        if masks is None:
            to.copy_(bias)
        else:
            torch.add(bias, masks.distinct[:, None], out=to)
            self.added = self._rows(self.step, wide)
            self.which = torch.tensor(masks.which, device=self.device).repeat(self.windows // len(masks.which))

    def _rows(self, windows: int, wide: int) -> Tensor:
        return torch.empty(windows, self.how.heads, self.tokens, wide, dtype=self.dtype, device=self.device)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yields first and last (excluded) window of each chunk."""
        for start in range(0, self.windows, self.step):
            yield start, min(start + self.step, self.windows)

    def operands(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of some windows, shape (windows, heads, tokens, head size filled up)."""
        query, key, value = (self._filled_up(part[start:stop]) for part in self.parts)
        return query, key, value

    def heads_first(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Returns some windows of an output or its gradient in the shape of `operands`."""
        return self._filled_up(tensor[start:stop].unflatten(2, (self.how.heads, self.size)).transpose(1, 2))

    def _filled_up(self, tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, self.missing)) if self.missing else tensor

    def bias_of(self, start: int, stop: int) -> Tensor:
        """Returns what is added to the scores of some windows, in a buffer that all chunks share."""
        many = stop - start
        if self.masks is None:
            return self.distinct.expand(many, -1, -1, -1)[..., : self.tokens]
        torch.index_select(self.distinct, 0, self.which[start:stop], out=self.added[:many])
        return self.added[:many, ..., : self.tokens]
