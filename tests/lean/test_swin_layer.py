"""Stages of Swin networks that hand out labels: MONAI's own results bit for bit, and no mask that is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medckpt.errors import ConfigError
from medckpt.lean.shift_masks import is_labels, mask_of, shift_labels, shift_masks
from medckpt.lean.swap import applied_lean, apply_lean, find_lean, undo_lean
from medckpt.lean.swin_layer import LeanSwinLayer
from medckpt.memory.apply import apply_recompute
from medckpt.memory.measure import fake_copy, saved_bytes
from medckpt.memory.options import OPTIONS, lay_on, take_off
from medckpt.memory.regions import find_regions
from medckpt.memory.segments import cuts
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step
from medckpt.profiles import load_profile

from .steps import assert_equal, both, distance, one_step, volume

swin = pytest.importorskip("monai.networks.nets.swin_unetr")

SIZES = [
    ((48, 48, 48), (7, 7, 7)),  # padded to 49
    ((14, 14, 14), (7, 7, 7)),
    ((5, 9, 16), (7, 7, 7)),  # a window larger than the volume along one side
    ((6, 6, 6), (7, 7, 7)),  # and along all
    ((7, 7, 7), (7, 7, 7)),
    ((14, 8, 3), (4, 2, 1)),
    ((20, 30), (7, 7)),
    ((5, 30), (7, 7)),
    ((9, 9), (2, 1)),
]


def monais(sides: tuple[int, ...], window: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """MONAI's mask of a volume, as its `BasicLayer` makes it, and the labels of the same windows."""
    size, shift = swin.get_window_size(sides, window, tuple(side // 2 for side in window))
    padded = [-(-side // each) * each for side, each in zip(sides, size, strict=True)]
    device = torch.device("cpu")
    return swin.compute_mask(padded, size, shift, device), shift_labels(padded, size, shift, device)


def layer(dims: int = 3, *, window: int = 4, downsample: Any = None, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    made = swin.BasicLayer(12, 2, 3, (window,) * dims, [0.0, 0.0], downsample=downsample, qkv_bias=True, **settings)
    for block in made.blocks:
        nn.init.normal_(block.attn.relative_position_bias_table)
    return made


def labelled(net: nn.Module) -> nn.Module:
    """The net with MONAI's own attention, handed labels."""
    names = {"BasicLayer": "swin_layer", "WindowAttention": "window_mask"}
    operators = {name: names.get(type(module).__name__) for name, module in net.named_modules()}
    return apply_lean(net, {name: operator for name, operator in operators.items() if operator is not None})


@pytest.mark.parametrize(("sides", "window"), SIZES, ids=str)
def test_labels_are_monais_mask(sides, window):
    mask, labels = monais(sides, window)
    assert labels.dtype == torch.uint8
    assert is_labels(labels)
    assert not is_labels(mask)
    made = mask_of(labels)
    assert made.dtype == mask.dtype
    assert torch.equal(made, mask)
    # What is told by the sizes, and what is read from a copy of unknown origin, is what is read from the mask.
    truth = shift_masks(mask, 8)
    for found in (shift_masks(labels, 8), shift_masks(labels.clone(), 8), shift_masks(labels.long(), 8)):
        assert torch.equal(found.distinct, truth.distinct)
        assert (found.which, found.empty, found.reach) == (truth.which, truth.empty, truth.reach)


def test_labels_that_were_changed_are_read_again():
    _, labels = monais((8, 8), (4, 4))
    labels[0, 0] = 7
    found = shift_masks(labels, 4)
    assert torch.equal(found.distinct[list(found.which)], mask_of(labels))


@pytest.mark.parametrize(
    ("dims", "sides", "downsample"),
    [
        (3, (8, 8, 8), swin.PatchMergingV2),
        (3, (6, 9, 3), swin.PatchMerging),
        (3, (3, 4, 2), None),
        (2, (8, 12), swin.PatchMergingV2),
        (2, (7, 3), None),
    ],
)
def test_with_monais_attention_it_is_the_layer_bit_for_bit(dims, sides, downsample):
    plain, x = layer(dims, downsample=downsample), volume(2, 12, *sides)
    found = one_step(labelled(copy.deepcopy(plain)), x)
    assert_equal(one_step(plain, x), found)
    with torch.no_grad():
        assert torch.equal(labelled(copy.deepcopy(plain))(x), plain(x))


@pytest.mark.parametrize("bf16", [False, True])
def test_with_lean_attention_labels_give_what_masks_give(bf16):
    plain, x = layer(), volume(2, 12, 6, 9, 8)
    attention = {f"blocks.{i}.attn": "window_attention" for i in range(2)}
    masks = one_step(apply_lean(copy.deepcopy(plain), attention), x, bf16=bf16)
    labels = one_step(apply_lean(copy.deepcopy(plain), {"": "swin_layer", **attention}), x, bf16=bf16)
    assert_equal(masks, labels)


def test_a_layer_with_all_operators_in_float64():
    plain, lean = both(layer(downsample=swin.PatchMergingV2).double(), volume(2, 12, 6, 9, 8, dtype=torch.float64))
    assert distance(lean, plain) < 1e-12


def test_a_layer_with_any_other_attention_makes_monais_mask():
    plain, x = layer(), volume(2, 12, 8, 8, 8)
    seen = []
    for operators in ({"blocks.1.attn": "window_mask"}, {f"blocks.{i}.attn": "window_mask" for i in range(2)}):
        net = apply_lean(copy.deepcopy(plain), {"": "swin_layer", **operators})
        net.blocks[1].attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(is_labels(kwargs["mask"])), with_kwargs=True
        )
        assert_equal(one_step(plain, x), one_step(net, x))
    assert seen == [False, True]
    patched = labelled(copy.deepcopy(plain))
    patched.blocks[0].attn.forward = lambda x, mask: x
    assert patched(x).shape == x.shape


def test_a_recomputed_block_keeps_no_mask():
    x = volume(1, 12, 16, 16, 16).requires_grad_()
    rows, windows, tokens = 16**3 * 12 * 4, 4**3, 4**3
    regions = ["blocks.0", "blocks.1"]
    plain = saved_bytes(apply_recompute(layer(), regions), x)
    operators = find_lean(layer())
    assert plain == 2 * rows + windows * tokens * tokens * 4
    net = apply_recompute(apply_lean(layer(), operators), regions)
    assert saved_bytes(net, x) == 2 * rows + windows * tokens
    assert_equal(one_step(apply_lean(layer(), operators), x), one_step(net, x))


def test_a_recompute_without_gradients_in_forward():
    """A reentrant checkpoint runs a block without gradients at first: its attention then is MONAI's own."""
    net, x = layer(), volume(1, 12, 8, 8, 8)
    lean = apply_lean(copy.deepcopy(net))
    expected = one_step(copy.deepcopy(lean), x)
    inner = lean.blocks[1].forward
    lean.blocks[1].forward = _Reentrant(lean.blocks[1], inner)
    assert distance(one_step(lean, x), expected) < 1e-5


class _Reentrant:
    def __init__(self, module: nn.Module, forward: Any) -> None:
        self.module, self.forward, self.inner = module, forward, None

    def __call__(self, *args: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=True)


def unetr(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return swin.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, window_size=4, **settings)


def test_a_whole_swin_unetr_under_every_option():
    model, x = unetr(depths=(2, 1, 1, 1)), volume(1, 1, 64, 32, 32)
    plain = one_step(model, x)
    for name, option in OPTIONS.items():
        net = lay_on(copy.deepcopy(model), dict.fromkeys(find_regions(model, "all"), name))
        layers = "swin_layer" in applied_lean(net).values()
        assert layers is (name not in ("recompute_plain", "offload_plain"))
        found = one_step(net, x)
        if option.operators:
            assert distance(found, plain) < 1e-4
        else:
            assert_equal(plain, found)
        assert applied_lean(take_off(net)) == {}
    assert applied_lean(lay_on(copy.deepcopy(model), {})) == {}
    alone = lay_on(copy.deepcopy(model), dict.fromkeys(find_regions(model, "all"), "keep"), lean=False)
    assert applied_lean(alone) == {}


def test_between_regions_every_option_does_the_same():
    """What memory as a sum over regions rests on: a stage makes labels, whether its blocks are kept or not."""
    model, x = unetr(depths=(2, 1, 1, 1)), torch.empty(1, 1, 64, 32, 32)
    regions = find_regions(model, "all")
    graphs = {
        name: trace_step(lay_on(copy.deepcopy(model), dict.fromkeys(regions, name)), x, Step(optimizer=None))
        for name in ("keep", "lean", "recompute_lean")
    }
    first, *others = cuts(graphs, regions, load_profile("a100_80gb")).values()
    operators = [
        [[op.name for op in graph.ops[s.first : s.last + 1]] for s in cut.segments if s.region == "(swinViT.layers1.0)"]
        for graph, cut in zip(graphs.values(), (first, *others), strict=True)
    ]
    assert operators[0][0]
    assert operators[0] == operators[1] == operators[2]
    assert all(cut.labels() == first.labels() for cut in others)


def test_the_forecast_knows_which_windows_are_alike():
    net = apply_lean(layer())
    x = volume(1, 12, 3, 8, 8).requires_grad_()
    graph = trace_step(net, x.detach(), Step(optimizer=None, precision="32"))
    kept = [s.nbytes for s in graph.storages if s.region == "blocks.1.attn" and graph.saved_for_backward(s)]
    # Not shifted along the first side: four kinds, not eight.
    assert 4 * 48 * 48 * 4 in kept
    assert fake_copy(net, torch._subclasses.fake_tensor.FakeTensorMode()).forward.operator == "swin_layer"


def test_operators_inside_of_a_layer():
    net = layer()
    found = find_lean(net)
    assert found[""] == "swin_layer"
    assert found["blocks.1.attn"] == "window_attention"
    assert applied_lean(apply_lean(net)) == found
    assert find_lean(net) == {}
    assert applied_lean(undo_lean(net)) == {}
    # One after the other, in either order.
    inside = {name: operator for name, operator in found.items() if name}
    for first, second in (({"": "swin_layer"}, inside), (inside, {"": "swin_layer"})):
        assert applied_lean(apply_lean(apply_lean(layer(), first), second)) == found
    with pytest.raises(ConfigError, match="has an operator already"):
        apply_lean(apply_lean(layer(), {"": "swin_layer"}), {"": "swin_layer"})


def test_refusals():
    refusal = LeanSwinLayer.refusal
    assert refusal(layer()) is None
    assert "no BasicLayer" in refusal(nn.Identity())
    hooked = layer()
    hooked.blocks[0].attn.register_forward_pre_hook(lambda *_: None)
    assert "has hooks" in refusal(hooked)
    other = layer()
    other.blocks[0] = nn.Identity()
    assert "a block is Identity" in refusal(other)
    other.use_hyena = True
    assert "no windows" in refusal(other)
