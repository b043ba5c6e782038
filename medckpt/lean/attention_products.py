"""Attention of windows by plain products over chunks of windows: on the CPU, and on a GPU where no kernel fits.

The method is that of FlashAttention (Dao et al., 2022, algorithms 1 and 4): forward keeps one number per row, the
logarithm of its sum, and backward makes the probabilities again from it. It is laid out for a CPU:

* A chunk of scores stays in the cache while bias, exponential and products pass over it, in place.
* The row's logarithm is one more column of the product q k^T, and dO . O one more of dO v^T: no passes of their own.
* Powers of two take half the time of `exp`; log2(e) goes into the scale of q, the bias and the mask.
* Operands lie as (head size, tokens), the tokens filled up to whole vectors: products with a thin matrix are several
  times slower the other way round. Where an operand is filled up it is zero, so what is filled up adds nothing.
* Where the largest elements show that no score is large, powers are taken without the row's maximum, which saves two
  more passes, and what is masked is zero instead of the 1e-44 of MONAI's -100: products with denormals are slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from medckpt.lean.shift_masks import ShiftMasks

LOG2_E = math.log2(math.e)
CHUNK_BYTES = {"cpu": 3 * 2**20, "cuda": 64 * 2**20}
"""Of the scores of one chunk by kernels; backward holds two such buffers. A chunk has at least one window."""
SMALL_EXPONENT = 30.0
"""Scores of this magnitude, as powers of two, neither overflow nor vanish in a row's sum."""
VOID_EXPONENT = -122.0
"""A mask below it leaves less of small scores than float64 can add: 2 x 30 for their range, 9 for 512 of them, 53."""
ALIGNED_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What an attention of windows is, apart from its tensors."""

    heads: int
    scale: float
    dropout: float = 0.0
    seed: int = 0
    """Of the dropout masks: chunk i draws from a generator of its own with seed + i."""


def forward(qkv: Tensor, bias: Tensor, masks: ShiftMasks | None, how: Attention) -> tuple[Tensor, Tensor]:
    """Returns the attention of every window, and the logarithms that `backward` needs.

    Args:
        qkv: shape (windows, tokens, 3 x heads x head size), any strides, any floating dtype; sums are float32, or
            float64 for float64.
        bias: shape (heads, tokens, tokens), any floating dtype; added to the scaled scores.
        masks: of window w modulo their number, added to its scores.
        how: heads, scale and dropout.

    Returns:
        The output, shape (windows, tokens, heads x head size), contiguous, dtype of `qkv`; and the base-2 logarithms
        of the rows' sums of exponentials, shape (windows, heads, tokens), in the dtype of the sums.
    """
    found: tuple[Tensor, Tensor] = torch.ops.medckpt.window_attention(qkv, bias, *_words(masks, how))
    return found


def backward(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor,
    masks: ShiftMasks | None,
    out: Tensor,
    logs: Tensor,
    how: Attention,
    *,
    bias_needed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of `qkv` (its shape and dtype) and `bias` (heads, tokens, tokens; dtype of the sums).

    Args:
        grad: of `out`, same shape, any strides.
        qkv, bias, masks, how: as `forward` got them.
        out, logs: as `forward` returned them.
        bias_needed: whether the gradient of `bias` is wanted; None in its place if not.
    """
    found = torch.ops.medckpt.window_attention_backward(grad, qkv, bias, out, logs, bias_needed, *_words(masks, how))
    return found[0], found[1] if bias_needed else None


def _words(masks: ShiftMasks | None, how: Attention) -> tuple[Any, ...]:
    """Returns masks and settings as arguments that an operator can have."""
    parts = (None, [], [], 0.0) if masks is None else (masks.distinct, masks.which, masks.empty, masks.reach)
    return (*parts, how.heads, how.scale, how.dropout, how.seed)


def _window_attention(qkv: Tensor, bias: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    """`forward` as an operator."""
    work = _Work(qkv, bias, *words)
    how, size, tokens = work.how, work.size, work.tokens
    out = qkv.new_empty(work.windows, tokens, how.heads, size)
    logs = torch.empty(work.windows, how.heads, tokens, dtype=work.dtype, device=qkv.device)
    to = out.permute(0, 2, 3, 1)
    buffers = [work.operand(rows) for rows in (size, size, size + 1, size + 1)]
    # With a row of ones, the product with the powers gives their sums as well.
    buffers[2][:, :, size, :tokens] = 1
    buffers += [work.scores() for _ in range(2 if how.dropout else 1)]
    for many, places in work.passes():
        query, key, value, summed, score, *kept = (buffer[:many] for buffer in buffers)
        query_to, key_to, value_to = query[..., :tokens], key[..., :tokens], value[:, :, :size, :tokens]
        found, row = summed[:, :, :size, :tokens], summed[:, :, size:, :tokens]
        inside, scores_of = score[..., :tokens, :tokens], (query.flatten(0, 1).mT, key.flatten(0, 1))
        flat, flat_value, flat_summed = (each.flatten(0, 1) for each in (score, value, summed))
        for number, at in enumerate(places, work.done(many)):
            torch.mul(work.query[at], how.scale * LOG2_E, out=query_to)
            key_to.copy_(work.key[at])
            value_to.copy_(work.value[at])
            torch.bmm(*scores_of, out=flat)
            small = work.small(query, key)
            work.add_bias(score, *at, small=small)
            top = None if small else inside.amax(-1, keepdim=True)
            if top is not None:
                inside.sub_(top)
            score.exp2_()
            if kept:
                sums = inside.sum(-1)
                score.mul_(work.draw(kept[0], number))
            torch.bmm(flat_value, flat.mT, out=flat_summed)
            if kept:
                row[:, :, 0] = sums
            torch.div(found, row, out=to[at])
            torch.log2(row[:, :, 0], out=logs[at])
            if top is not None:
                logs[at] += top[..., 0]
    return out.flatten(2), logs


def _window_attention_backward(
    grad: Tensor, qkv: Tensor, bias: Tensor, out: Tensor, logs: Tensor, bias_needed: bool, *words: Any
) -> tuple[Tensor, Tensor]:
    """`backward` as an operator; without elements where the gradient of the bias is not needed."""
    work = _Work(qkv, bias, *words)
    how, size, tokens = work.how, work.size, work.tokens
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    to_query, to_key, to_value = work.heads_first(grad_qkv, 3)
    grad_bias = torch.zeros_like(work.bias) if bias_needed else None
    ((outs,), (grads,)) = (work.heads_first(each, 1) for each in (out, grad))
    buffers = [work.operand(rows) for rows in (size + 1, size + 1, size + 1, size + 1, size)]
    for buffer in buffers[1:3]:
        buffer[:, :, size, :tokens] = 1
    buffers += [work.scores() for _ in range(3 if how.dropout else 2)]
    for many, places in work.passes():
        query, key, value, slope_out, result, power, slope, *kept = (buffer[:many] for buffer in buffers)
        query_to, key_to, value_to, grad_to = (b[:, :, :size, :tokens] for b in (query, key, value, slope_out))
        log_to, dots_to = query[:, :, size, :tokens], slope_out[:, :, size, :tokens]
        found = result[..., :tokens]
        flat_query, flat_key, flat_value, flat_out, flat_result, flat_power, flat_slope = (
            each.flatten(0, 1) for each in (query, key, value, slope_out, result, power, slope)
        )
        for number, at in enumerate(places, work.done(many)):
            torch.mul(work.query[at], how.scale * LOG2_E, out=query_to)
            torch.neg(logs[at], out=log_to)
            key_to.copy_(work.key[at])
            value_to.copy_(work.value[at])
            grad_to.copy_(grads[at])
            dots = (grad_to * outs[at]).sum(2)
            torch.bmm(flat_query.mT, flat_key, out=flat_power)
            work.add_bias(power, *at, small=work.small(query[:, :, :size], key[:, :, :size]))
            power.exp2_()
            if kept:
                draw = work.draw(kept[0], number)
                torch.mul(power, draw, out=slope)
                torch.bmm(flat_out[:, :size], flat_slope, out=flat_result)
                torch.bmm(flat_out[:, :size].mT, flat_value[:, :size], out=flat_slope)
                slope.mul_(draw)[..., :tokens, :].sub_(dots[..., None])
            else:
                torch.neg(dots, out=dots_to)
                torch.bmm(flat_out[:, :size], flat_power, out=flat_result)
                torch.bmm(flat_out.mT, flat_value, out=flat_slope)
            to_value[at].copy_(found)
            slope.mul_(power)
            if grad_bias is not None:
                for each in slope:
                    grad_bias[at[1]] += each
            torch.bmm(flat_key[:, :size], flat_slope.mT, out=flat_result)
            torch.mul(found, how.scale, out=to_query[at])
            torch.bmm(flat_query[:, :size], flat_slope, out=flat_result)
            torch.mul(found, 1 / LOG2_E, out=to_key[at])
    return grad_qkv, qkv.new_empty(0) if grad_bias is None else grad_bias[:, :tokens, :tokens].contiguous()


class _Work:
    """The sizes of one call, its buffers, and the steps that forward and backward share."""

    def __init__(
        self,
        qkv: Tensor,
        bias: Tensor,
        masks: Tensor | None,
        which: Sequence[int],
        empty: Sequence[bool],
        reach: float,
        heads: int,
        scale: float,
        dropout: float,
        seed: int,
    ) -> None:
        self.how = Attention(heads=heads, scale=scale, dropout=dropout, seed=seed)
        self.windows, self.tokens, channels = qkv.shape
        self.size = channels // (3 * heads)
        self.wide = -(-self.tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
        self.dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
        self.device = qkv.device
        self.query, self.key, self.value = self.heads_first(qkv, 3)
        limit = CHUNK_BYTES["cuda" if qkv.device.type == "cuda" else "cpu"]
        pairs = max(1, limit // (self.wide**2 * self.dtype.itemsize))
        # A chunk is some windows with all heads, or where these are too many, some heads of one window.
        self.step = min(max(1, pairs // heads), self.windows)
        self.group = next(many for many in range(min(pairs, heads), 0, -1) if heads % many == 0)
        self.bias = self._padded(bias)
        self.masks = None if masks is None else self._padded(masks)
        self.voids = None if self.masks is None else self.masks.masked_fill(self.masks < VOID_EXPONENT, -math.inf)
        self.which, self.empty = which, empty
        # Where reading a value means waiting for a device, the rows' maxima are taken always.
        self.reach = (reach + bias.abs().max().item()) * LOG2_E if qkv.device.type == "cpu" else math.inf

    def _padded(self, added: Tensor) -> Tensor:
        """Returns what is added to scores, in units of powers of two and of the buffers' shape."""
        padded = torch.zeros(added.shape[0], self.wide, self.wide, dtype=self.dtype, device=self.device)
        torch.mul(added, LOG2_E, out=padded[:, : self.tokens, : self.tokens])
        return padded

    def heads_first(self, tensor: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Returns the parts (q, k and v are 3) of a tensor, each of shape (windows, heads, head size, tokens)."""
        return tensor.unflatten(2, (parts, self.how.heads, self.size)).permute(2, 0, 3, 4, 1).unbind()

    def passes(self) -> Iterator[tuple[int, list[tuple[slice, slice]]]]:
        """Yields the number of windows of a chunk, and windows and heads of every chunk with that many."""
        whole = self.windows - self.windows % self.step
        for many, start, stop in ((self.step, 0, whole), (self.windows - whole, whole, self.windows)):
            if start < stop:
                heads = [slice(head, head + self.group) for head in range(0, self.how.heads, self.group)]
                windows = [slice(window, window + many) for window in range(start, stop, many)]
                yield many, [(window, head) for window in windows for head in heads]

    def done(self, many: int) -> int:
        """Returns the number of the first chunk of a pass."""
        return 0 if many == self.step else self.windows // self.step * (self.how.heads // self.group)

    def operand(self, rows: int) -> Tensor:
        """Returns zeros for an operand of a product, shape (windows, heads of a chunk, rows, tokens filled up)."""
        return torch.zeros(self.step, self.group, rows, self.wide, dtype=self.dtype, device=self.device)

    def scores(self) -> Tensor:
        """Returns a buffer for the scores of a chunk: its windows, heads, tokens filled up, twice."""
        return torch.empty(self.step, self.group, self.wide, self.wide, dtype=self.dtype, device=self.device)

    def add_bias(self, scores: Tensor, windows: slice, heads: slice, *, small: bool) -> None:
        """Adds bias and mask to the scores of a chunk, which are `small` or not."""
        scores += self.bias[heads]
        masks = self.voids if small else self.masks
        if masks is None:
            return
        for place, window in enumerate(range(windows.start, windows.stop)):
            mask = self.which[window % len(self.which)]
            if not self.empty[mask]:
                scores[place] += masks[mask]

    def small(self, query: Tensor, key: Tensor) -> bool:
        """Whether the scores are small, by the largest magnitudes of all that is in them."""
        if self.reach >= SMALL_EXPONENT:
            return False
        queries, keys = (each.abs().amax(-1) for each in (query, key))
        return (queries * keys).sum(-1).max().item() + self.reach < SMALL_EXPONENT

    def draw(self, kept: Tensor, number: int) -> Tensor:
        """Fills `kept` with the dropout factors of chunk `number`, 0 or 1 / (1 - p), and returns it."""
        generator = torch.Generator(self.device)
        generator.manual_seed(self.how.seed + number)
        return kept.bernoulli_(1 - self.how.dropout, generator=generator).div_(1 - self.how.dropout)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes the matrix products of two stacks of (windows, heads) into `out`."""
    torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=out.view(-1, *out.shape[2:]))


def _fake(qkv: Tensor, bias: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    windows, tokens, channels = qkv.shape
    dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    return qkv.new_empty(windows, tokens, channels // 3), bias.new_empty(windows, bias.shape[0], tokens, dtype=dtype)


def _fake_backward(
    grad: Tensor, qkv: Tensor, bias: Tensor, out: Tensor, logs: Tensor, bias_needed: bool, *words: Any
) -> tuple[Tensor, Tensor]:
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return grad_qkv, logs.new_empty(bias.shape) if bias_needed else qkv.new_empty(0)


_WORDS = "Tensor? masks, int[] which, bool[] empty, float reach, int heads, float scale, float dropout, int seed"
_LIBRARY = torch.library.Library("medckpt", "FRAGMENT")
"""As operators a step's record has one line for each, not one for every chunk; what they allocate is measured."""
_LIBRARY.define(f"window_attention(Tensor qkv, Tensor bias, {_WORDS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "window_attention_backward(Tensor grad, Tensor qkv, Tensor bias, Tensor out, Tensor logs, bool bias_needed, "
    f"{_WORDS}) -> (Tensor, Tensor)"
)
_LIBRARY.impl("window_attention", _window_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("window_attention_backward", _window_attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("medckpt::window_attention", _fake, lib=_LIBRARY)
torch.library.register_fake("medckpt::window_attention_backward", _fake_backward, lib=_LIBRARY)


def _products(count: int, qkv: tuple[int, ...], bias: tuple[int, ...]) -> int:
    return 2 * count * qkv[0] * bias[1] * bias[2] * qkv[2] // 3


@register_flop_formula(torch.ops.medckpt.window_attention)
def _flops(qkv: Any, bias: Any, *words: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _products(2, qkv, bias)


@register_flop_formula(torch.ops.medckpt.window_attention_backward)
def _flops_backward(grad: Any, qkv: Any, bias: Any, *words: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _products(5, qkv, bias)
