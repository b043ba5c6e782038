"""The whole transformer block of a ViT: the normalised inputs of attention and MLP are not kept either.

Per block it keeps the two residual inputs, queries, keys, values, the result of attention and the pre-activation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from medckpt.lean.forward import LeanForward
from medckpt.lean.mlp import LeanMLP, mlp
from medckpt.lean.parts import bypassed, is_monai, is_plain
from medckpt.lean.self_attention import LeanSelfAttention, self_attention


class LeanTransformerBlock(LeanForward):
    """MONAI's `TransformerBlock` without cross-attention, in ViT, UNETR and MAE: attention and MLP with their norms.

    As exact as `LeanSelfAttention` and `LeanMLP`.
    """

    __slots__ = ()

    operator = "transformer_block"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if not is_monai(module, "TransformerBlock"):
            return "it is no TransformerBlock of MONAI"
        if module.with_cross_attention:
            return "it has cross-attention"
        norms: list[Any] = [module.norm1, module.norm2]
        if not all(is_plain(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1 for norm in norms):
            return "its norms are not torch's own nn.LayerNorm over the last axis"
        for name, kind in (("attn", LeanSelfAttention), ("mlp", LeanMLP)):
            reason = kind.refusal(getattr(module, name))
            if reason is not None:
                return f"its '{name}': {reason}"
        return bypassed(module)

    def lean(self, x: Tensor, context: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        block: Any = self.module
        x = x + self_attention(x, block.attn, attn_mask, block.norm1)
        return x + mlp(x, block.mlp, block.norm2)
