"""What can be done with a region; laid on all or nothing, and taken off."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from monai.networks.blocks.unetr_block import UnetrBasicBlock
from torch import nn

from medckpt.errors import ConfigError
from medckpt.lean.swap import applied_lean
from medckpt.memory.apply import applied
from medckpt.memory.offload import offloaded
from medckpt.memory.options import OPTIONS, lay_on, lean_modules, options_for, take_off, twin
from medckpt.memory.regions import find_regions
from tests.memory.nets import Plain, Residual, image, make


def untouched(net: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in net.modules())


def test_each_option_does_what_it_says() -> None:
    regions = find_regions(make("mini"), "all")
    assert regions == ("blocks.0", "blocks.1", "encoder1", "decoder2", "out")
    for name, option in OPTIONS.items():
        net = lay_on(make("mini"), dict.fromkeys(regions, name))
        assert applied(net).regions == (regions if option.recompute else ())
        assert offloaded(net) == (regions if option.offload else ())
        assert set(applied_lean(net).values()) <= set(option.operators)
        assert untouched(take_off(net))
    assert applied_lean(lay_on(make("mini"), dict.fromkeys(regions, "lean_attention"))) == {
        "blocks.0.attn": "self_attention",
        "blocks.1.attn": "self_attention",
    }
    assert untouched(lay_on(make("mini"), dict.fromkeys(regions, "keep")))


def test_options_mix_and_come_off() -> None:
    net = make("mini")
    lay_on(net, {"blocks.0": "recompute_lean", "encoder1": "lean", "decoder2": "recompute_plain", "out": "keep"})
    assert applied(net).regions == ("blocks.0", "decoder2")
    assert applied_lean(net)
    assert all(name.startswith(("blocks.0", "encoder1")) for name in applied_lean(net))
    assert untouched(take_off(net))


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ({"blocks.0": "keep", "encoder1": "lena"}, r"'lena' \(of 'encoder1'\) is no option. Did you mean 'lean'\?"),
        (
            {"blocks.0": "lean", "encoder2": "lean"},
            r"the model has no module 'encoder2'. Did you mean 'encoder1'\? Known: \w",
        ),
        ({"blocks.0": "recompute", "blocks.0.mlp": "recompute_plain"}, "inside"),
        ({"encoder1": "lean", "": "recompute_plain"}, "root|whole|itself"),
    ],
)
def test_nothing_is_laid_on_if_one_region_is_wrong(choices: dict[str, str], match: str) -> None:
    net = make("mini")
    with pytest.raises(ConfigError, match=match):
        lay_on(net, choices)
    assert untouched(net)


def test_a_second_policy_is_refused_and_leaves_nothing_half_done() -> None:
    net = lay_on(make("mini"), {"blocks.0": "recompute_plain"})
    with pytest.raises(ConfigError, match="applied to this model already"):
        lay_on(net, {"blocks.1": "recompute_plain"})


def test_the_outermost_operator_of_a_region_is_taken_once() -> None:
    net = make("mini")
    assert lean_modules(net, {"blocks.0": "lean"}) == {"blocks.0": "transformer_block"}
    twice = Plain([Residual(), Residual()], [0, 0])
    assert lean_modules(twice, {"blocks.0": "lean", "blocks.1": "recompute_plain"}).keys() <= {"blocks.0"}


def test_options_that_make_a_difference() -> None:
    def of(name: str, lean: bool = True) -> tuple[str, ...]:
        net = make(name)
        return options_for(net, find_regions(net, "all"), lean=lean)

    assert of("mini") == ("keep", "lean_attention", "lean", "recompute", "recompute_lean")
    assert of("mini", lean=False) == ("keep", "recompute_plain")
    block = functools.partial(
        UnetrBasicBlock, spatial_dims=3, in_channels=2, out_channels=2, kernel_size=3, stride=1, norm_name="instance"
    )
    convolutions = Plain([block(res_block=True), block(res_block=True)], [0, 0])
    regions = find_regions(convolutions, "all")
    assert options_for(convolutions, regions, lean=True) == ("keep", "lean", "recompute_lean")
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3)])
    assert options_for(plain, find_regions(plain, "all"), lean=True) == ("keep", "recompute_plain")


def test_a_twin_shares_every_tensor_and_no_module() -> None:
    net = make("unet")
    other = lay_on(twin(net), dict.fromkeys(find_regions(net, "all"), "recompute_plain"))
    assert untouched(net)
    assert all(a is b for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(net.buffers(), other.buffers(), strict=True))
    assert not set(net.modules()) & set(other.modules())


def test_copies_and_pickles_keep_what_is_laid_on() -> None:
    net = make("mini")
    keys = list(net.state_dict())
    lay_on(net, {"blocks.0": "recompute_lean", "encoder1": "lean", "decoder2": "recompute_plain"})
    assert list(net.state_dict()) == keys
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    again = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)]
    for other in again:
        assert applied(other) == applied(net)
        assert applied_lean(other) == applied_lean(net)
        assert torch.equal(other(image("mini")), net(image("mini")))
        assert not set(other.modules()) & {
            m.__dict__["forward"].module for m in net.modules() if "forward" in m.__dict__
        }
