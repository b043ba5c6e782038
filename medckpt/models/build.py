"""From a typed model block to a network: an explicit table of builders, nothing looked up by name elsewhere."""

from __future__ import annotations

from torch import nn

from medckpt.blocks import SwinUnetrConfig, Triple, UnetrConfig


def build_model(
    config: SwinUnetrConfig | UnetrConfig, *, in_channels: int, out_channels: int, patch: Triple
) -> nn.Module:
    """Returns a network that maps (B, in_channels, X, Y, Z) to logits (B, out_channels, X, Y, Z).

    Every parameter that asks for a gradient gets one in backward, so plain DDP works.
    """
    if isinstance(config, SwinUnetrConfig):
        return _swin_unetr(config, in_channels, out_channels)
    return _unetr(config, in_channels, out_channels, patch)


def _swin_unetr(config: SwinUnetrConfig, in_channels: int, out_channels: int) -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(
        in_channels=in_channels,
        out_channels=out_channels,
        feature_size=config.feature_size,
        depths=config.depths,
        num_heads=config.num_heads,
        window_size=config.window_size,
        drop_rate=config.drop_rate,
        attn_drop_rate=config.attn_drop_rate,
        dropout_path_rate=config.dropout_path_rate,
        use_v2=config.use_v2,
    )


def _unetr(config: UnetrConfig, in_channels: int, out_channels: int, patch: Triple) -> nn.Module:
    from monai.networks.nets import UNETR

    network = UNETR(
        in_channels=in_channels,
        out_channels=out_channels,
        img_size=patch,
        feature_size=config.feature_size,
        hidden_size=config.hidden_size,
        mlp_dim=config.mlp_dim,
        num_heads=config.num_heads,
        dropout_rate=config.dropout_rate,
    )
    # MONAI's transformer block carries cross-attention parameters that its ViT never uses. They stay, so that
    # state-dict keys are MONAI's, but without a gradient: DDP stops at a parameter that never receives one.
    for name, parameter in network.named_parameters():
        if "cross_attn" in name:
            parameter.requires_grad_(False)
    return network
