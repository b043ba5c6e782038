"""Recompute leaves the model itself alone, can be taken away, and refuses what it cannot do exactly."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from medckpt.errors import ConfigError
from medckpt.memory.apply import Applied, applied, apply_recompute, recomputing, undo
from medckpt.memory.regions import find_regions
from tests.memory.test_apply import Block, Net, assert_same, net, one_step, volume

# ---------------------------------------------------------------------------------------------- the model stays itself


def test_classes_parameters_and_hooks_are_untouched():
    model = net()
    before = [(name, type(m), [id(p) for p in m.parameters()]) for name, m in model.named_modules()]
    calls: list[tuple[str, bool]] = []
    region, child = model.blocks[0], model.blocks[0].conv
    region.register_forward_pre_hook(lambda *_: calls.append(("pre", recomputing())))
    region.register_forward_hook(lambda *_: calls.append(("post", recomputing())))
    region.register_full_backward_hook(lambda *_: calls.append(("backward", recomputing())))
    child.register_forward_hook(lambda *_: calls.append(("child", recomputing())))
    apply_recompute(model, ["blocks.0"])
    assert [(name, type(m), [id(p) for p in m.parameters()]) for name, m in model.named_modules()] == before
    one_step(model, volume())
    assert calls.count(("pre", False)) == calls.count(("post", False)) == calls.count(("backward", False)) == 1
    assert [call for call in calls if call[0] == "child"] == [("child", False), ("child", True)]
    assert not recomputing()
    assert len(calls) == 5


def test_deepcopy_is_independent():
    model = apply_recompute(net(lambda: nn.BatchNorm3d(2)), ["blocks.0"])
    clone = copy.deepcopy(model)
    assert applied(clone) == applied(model)
    with torch.no_grad():
        clone.blocks[0].conv.weight.mul_(2)
    plain = undo(copy.deepcopy(clone))
    assert applied(clone).regions == ("blocks.0",)
    assert_same(one_step(clone, volume()), one_step(plain, volume()))
    assert all(p.grad is None for p in model.parameters())


def test_whole_model_save_and_load():
    model = apply_recompute(net(), ["blocks.0", "blocks.1"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert applied(loaded) == applied(model)
    assert loaded.blocks[0].__dict__["forward"].module is loaded.blocks[0]
    assert_same(one_step(loaded, volume()), one_step(undo(model), volume()))


def test_undo_restores():
    model = net()
    before = [sorted(m.__dict__) for m in model.modules()]
    assert undo(apply_recompute(model, ["blocks.0", "blocks.1"])) is model
    assert [sorted(m.__dict__) for m in model.modules()] == before
    assert applied(model) == Applied(regions=())
    apply_recompute(model, ["blocks.1"])
    assert applied(model).regions == ("blocks.1",)


def test_instance_forward_is_wrapped_and_given_back():
    model = net()
    block = model.blocks[0]
    original = block.forward
    patched = block.__dict__["forward"] = lambda x: original(x).sin()
    assert_same(one_step(apply_recompute(model, ["blocks.0"]), volume()), one_step(undo(model), volume()))
    assert block.__dict__["forward"] is patched


def test_compile_after_apply():
    model = net(lambda: nn.BatchNorm3d(2))
    for block in model.blocks:
        block.drop = nn.Identity()
    twin = copy.deepcopy(model)
    apply_recompute(model, ["blocks.0", "blocks.1"])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for each in (compiled, twin):
        each(volume()).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, c, msg=name)


# ---------------------------------------------------------------------------------------------- refusals


def wrapped_block() -> nn.Module:
    # Imported here, as it brings FSDP in and the two processes below import this file too.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(Block())


class Flagged(Block):
    use_checkpoint = True


def with_compiled_method() -> Net:
    model = net()
    model.blocks[0].conv.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("build", "regions", "message"),
    [
        (net, ["blocks.7"], r"no module 'blocks.7'. Did you mean 'blocks.[01]'"),
        (net, ["zzz"], r"no module 'zzz'. Known: blocks.0, blocks.1"),
        (net, "blocks.0", "must be a sequence of module names"),
        (net, [""], "whole model as one region"),
        (net, ["blocks"], "container is never called"),
        (net, ["blocks.0", "blocks.0"], "same module"),
        (net, ["blocks.0", "blocks.0.conv"], "'blocks.0.conv' lies inside region 'blocks.0'"),
        (net, ["blocks.1.norm", "blocks.1"], "'blocks.1.norm' lies inside region 'blocks.1'"),
        (lambda: Net(Flagged(), Block()), ["blocks.0"], "own activation checkpointing"),
        (lambda: Net(Net(Flagged())), ["blocks.0"], "'blocks.0.blocks.0'.*own activation checkpointing"),
        (lambda: Net(Flagged()), ["blocks.0.conv"], "module 'blocks.0'.*own activation checkpointing"),
        (lambda: Net(wrapped_block()), ["blocks.0"], "CheckpointWrapper"),
        (lambda: Net(Net(wrapped_block())), ["blocks.0"], "CheckpointWrapper"),
        (lambda: Net(Net(torch.compile(Block()))), ["blocks.0"], "'blocks.0.blocks.0' is compiled"),
        (lambda: torch.compile(net()), ["_orig_mod.blocks.0"], "the model is compiled"),
        (with_compiled_method, ["blocks.0"], "'blocks.0.conv' is compiled"),
        (lambda: Net(nn.DataParallel(Block())), ["blocks.0"], "data-parallel wrapper"),
    ],
)
def test_refusals_say_why_and_change_nothing(build, regions, message):
    model = build()
    with pytest.raises(ConfigError, match=message):
        apply_recompute(model, regions)
    assert applied(model).regions == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_as_a_region_and_welcome_inside_one():
    model = Net(torch.jit.script(Block()), Block(), Block(norm=torch.jit.script(nn.InstanceNorm3d(2))))
    assert find_regions(model, "all") == ("blocks.1", "blocks.2")
    with pytest.raises(ConfigError, match=r"'blocks.0' .*TorchScript"):
        apply_recompute(model, ["blocks.0"])
    plain = one_step(model, volume())
    assert_same(one_step(apply_recompute(model, ["blocks.2"]), volume()), plain)


def test_one_bad_region_leaves_the_good_ones_alone():
    model = Net(Block(), Flagged())
    with pytest.raises(ConfigError, match=r"'blocks.1' \(Flagged\)"):
        apply_recompute(model, ["blocks.0", "blocks.1"])
    assert applied(model).regions == ()


def test_applying_twice_is_refused():
    model = apply_recompute(net(), ["blocks.0"])
    for again in (["blocks.0"], ["blocks.1"], ["blocks.0.conv"]):
        with pytest.raises(ConfigError, match=r"applied to this model already \(blocks.0\)"):
            apply_recompute(model, again)
    assert applied(model).regions == ("blocks.0",)


def test_monai_use_checkpoint_is_refused():
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, use_checkpoint=True)
    with pytest.raises(ConfigError, match="use_checkpoint=False"):
        apply_recompute(model, find_regions(model, "block"))
    with pytest.raises(ConfigError, match=r"'swinViT.layers1.0.blocks.0.mlp' \(MLPBlock\): module 'swinViT.layers1.0'"):
        apply_recompute(model, ["swinViT.layers1.0.blocks.0.mlp"])
    convs = [name for name in find_regions(model, "block") if not name.startswith("swinViT")]
    assert applied(apply_recompute(model, convs)).regions == tuple(convs)
