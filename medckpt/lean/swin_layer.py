"""A stage of a Swin network that does not make the mask of its shifted windows.

MONAI's `BasicLayer` makes a mask of shape (windows, tokens, tokens) in float32, of which at most eight windows differ,
and hands it to every block: 154 MiB for 48^3 voxels in windows of 7^3. A recomputed block keeps what it is handed until
its backward pass. Here the blocks are handed the labels from which the mask is made, one byte per token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from medckpt.lean.forward import LeanForward, laid_on
from medckpt.lean.parts import is_monai
from medckpt.lean.shift_masks import shift_labels
from medckpt.lean.window_attention import TakesLabels


class LeanSwinLayer(LeanForward):
    """MONAI's `BasicLayer` of SwinUNETR, in 2D and 3D, bit for bit; its blocks may have operators of their own.

    It stands in for the layer as long as the attention of every block takes labels ("window_attention" and
    "window_mask" do); else the layer's own forward runs.
    """

    __slots__ = ()

    operator: ClassVar[str] = "swin_layer"
    holds_others: ClassVar[bool] = True

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if not is_monai(module, "BasicLayer"):
            return "it is no BasicLayer of MONAI"
        if getattr(module, "use_hyena", False):
            return "its blocks have no windows"
        blocks: Any = module.blocks
        for block in blocks:
            if not is_monai(block, "SwinTransformerBlock") or not is_monai(block.attn, "WindowAttention"):
                return f"a block is {type(block).__name__}, not MONAI's SwinTransformerBlock"
            if any(part._forward_pre_hooks or part._forward_hooks for part in (block, block.attn)):
                return "a block or its attention has hooks, which would see labels in the place of a mask"
        return None

    def lean(self, x: Tensor) -> Tensor:
        """The layer's forward.

        Args:
            x: shape (B, C, sides of the volume).

        Returns:
            As the layer's own: shape (B, C, sides), or after downsampling (B, 2 C, half of the sides).
        """
        layer: Any = self.module
        sides = x.shape[2:]
        if len(sides) != len(layer.window_size) or not all(_takes_labels(block) for block in layer.blocks):
            return self.plain(x)
        # As `get_window_size`: a window is no larger than the volume, along which it then is not shifted.
        window = [min(side, size) for side, size in zip(sides, layer.window_size, strict=True)]
        shift = [
            step if side > size else 0
            for side, size, step in zip(sides, layer.window_size, layer.shift_size, strict=True)
        ]
        padded = [-(-side // size) * size for side, size in zip(sides, window, strict=True)]
        last = x.dim() - 1
        x = x.permute(0, *range(2, last + 1), 1)
        labels = shift_labels(padded, window, shift, x.device)
        for block in layer.blocks:
            x = block(x, labels)
        x = x.view(x.shape[0], *sides, -1)
        if layer.downsample is not None:
            x = layer.downsample(x)
        return x.permute(0, last, *range(1, last))


def _takes_labels(block: Any) -> bool:
    """Whether a block hands what it is given to attention that takes labels, and nothing else looks at it."""
    outer, inner = list(laid_on(block)), list(laid_on(block.attn))
    known = all(hasattr(forward, "inner") for forward in (*outer, *inner))
    return known and any(isinstance(forward, TakesLabels) for forward in inner)
