"""Lean operators in whole networks: found, applied, taken away, and together with everything else that is applied."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import medckpt
from medckpt.errors import ConfigError
from medckpt.lean.forward import LeanForward
from medckpt.lean.swap import OPERATORS, applied_lean, apply_lean, find_lean, undo_lean
from medckpt.memory.apply import applied, apply_recompute, undo
from medckpt.memory.measure import fake_copy, saved_bytes

from .steps import assert_equal, both, distance, one_step, volume

nets = pytest.importorskip("monai.networks.nets")
TransformerBlock = pytest.importorskip("monai.networks.blocks").TransformerBlock


def vit(**kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"hidden_size": 12, "mlp_dim": 20, "num_layers": 2, "num_heads": 3, "qkv_bias": True}
    return nets.ViT(1, (8, 8, 8), (4, 4, 4), **{**settings, **kwargs})


class First(nn.Module):
    """A network that returns one of the things that its inner one returns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


def small() -> First:
    return First(vit())


SEPARATE = {"net.blocks.0.attn": "self_attention", "net.blocks.0.mlp": "mlp", "net.blocks.1.mlp": "mlp"}


def test_the_table_names_operators_by_themselves():
    assert all(kind.operator == name and issubclass(kind, LeanForward) for name, kind in OPERATORS.items())


def test_what_is_found_is_the_outermost_that_fits():
    assert find_lean(small()) == {f"net.blocks.{i}": "transformer_block" for i in range(2)}
    # A block that hands out its scores cannot be taken over, its MLP can.
    assert find_lean(First(vit(save_attn=True))) == {f"net.blocks.{i}.mlp": "mlp" for i in range(2)}
    assert find_lean(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_vit_with_blocks_and_with_single_operators(dtype):
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    model, x = small().to(dtype), volume(2, 1, 8, 8, 8, dtype=dtype)
    plain, lean = both(model, x)
    assert distance(lean, plain) < limit
    assert distance(one_step(apply_lean(copy.deepcopy(model), SEPARATE), x), plain) < limit


def test_a_vit_in_bf16_is_as_near_to_float64_as_monai():
    model, x = small(), volume(2, 1, 8, 8, 8)
    plain, lean = both(model, x, bf16=True)
    truth = one_step(copy.deepcopy(model).double(), x.double())
    assert distance(lean, truth) <= 1.5 * distance(plain, truth)


def test_a_unetr_with_all_operators_in_float64():
    torch.manual_seed(0)
    model = nets.UNETR(1, 2, (16,) * 3, feature_size=2, hidden_size=12, mlp_dim=16, num_heads=3).double()
    kinds = set(find_lean(model).values())
    assert kinds == {"transformer_block", "norm_act"}
    plain, lean = both(model, volume(1, 1, 16, 16, 16, dtype=torch.float64))
    assert distance(lean, plain) < 1e-10


def test_a_swin_unetr_with_all_operators():
    torch.manual_seed(0)
    model = nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(2, 1, 1, 1))
    assert set(find_lean(model).values()) == {"swin_layer", "window_attention", "mlp", "norm_act"}
    plain, lean = both(model, volume(1, 1, 64, 32, 32))
    assert distance(lean, plain) < 1e-4


def test_dropout_in_a_whole_block_repeats_itself_under_recompute():
    torch.manual_seed(0)
    block = nn.Sequential(TransformerBlock(12, 20, 3, dropout_rate=0.3))
    x = volume(2, 9, 12)
    first = one_step(apply_lean(copy.deepcopy(block)), x)
    assert_equal(first, one_step(apply_recompute(apply_lean(copy.deepcopy(block)), ["0"]), x))
    assert not torch.equal(first.out, one_step(apply_lean(copy.deepcopy(block)).eval(), x).out)


def test_a_block_keeps_its_residual_inputs_and_what_lies_between():
    block, x = TransformerBlock(12, 20, 3), volume(2, 9, 12).requires_grad_()
    rows = 2 * 9 * 4
    assert saved_bytes(apply_lean(copy.deepcopy(block)), x) == rows * (12 + 36 + 12 + 12 + 20) + 3 * rows
    assert saved_bytes(block, x) > 1.5 * rows * (12 + 36 + 12 + 12 + 20)


def test_state_dict_classes_and_hooks_stay():
    model = small()
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    calls: list[int] = []
    model.net.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    assert apply_lean(model) is model
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    model(volume(1, 1, 8, 8, 8))
    assert calls == [1]


def test_it_is_taken_away_again():
    model, x = small(), volume(2, 1, 8, 8, 8)
    plain = one_step(model, x)
    found = applied_lean(apply_lean(model))
    assert found == find_lean(small())
    assert find_lean(model) == {}, "what has an operator is not found again"
    assert undo_lean(model) is model
    assert applied_lean(model) == {}
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert_equal(one_step(model, x), plain)


@pytest.mark.parametrize("region", ["net.blocks.0", "net.blocks"])
@pytest.mark.parametrize("lean_first", [True, False])
def test_with_recompute_in_either_order(lean_first, region):
    model, x = small(), volume(2, 1, 8, 8, 8)
    regions = [region] if region == "net.blocks.0" else ["net.blocks.0", "net.blocks.1"]
    operators = {"net.blocks.0": "transformer_block", "net.blocks.1.attn": "self_attention"}
    lean = one_step(apply_lean(copy.deepcopy(model), operators), x)
    if lean_first:
        apply_recompute(apply_lean(model, operators), regions)
    else:
        apply_lean(apply_recompute(model, regions), operators)
    assert applied(model).regions == tuple(regions)
    assert applied_lean(model) == operators
    assert_equal(one_step(model, x), lean)
    kept = saved_bytes(model, x)
    assert kept < saved_bytes(apply_lean(small(), operators), x)
    copied = copy.deepcopy(model)
    undo_lean(model)
    assert applied_lean(model) == {}
    assert applied(model).regions == tuple(regions)
    undo(copied)
    assert applied_lean(copied) == operators
    assert applied(copied).regions == ()
    assert_equal(one_step(copied, x), lean)
    undo_lean(copied)
    assert not any("forward" in m.__dict__ for m in copied.modules())


def test_copies_and_files_have_operators_of_their_own():
    model, x = apply_lean(small()), volume(2, 1, 8, 8, 8)
    expected = one_step(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert applied_lean(other) == applied_lean(model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)  # of another model's weights nothing is seen
        assert_equal(one_step(other, x), expected)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1)


def test_a_fake_copy_keeps_less_as_the_real_one_does():
    model, x = apply_lean(small()), volume(2, 1, 8, 8, 8)
    with FakeTensorMode() as mode:
        fake = torch.empty(x.shape)
    assert applied_lean(fake_copy(model, mode)) == applied_lean(model)
    assert saved_bytes(model, fake) == saved_bytes(model, x)


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
def test_a_forecast_sees_it(precision):
    model = First(vit(hidden_size=48, num_layers=3))
    x = torch.empty(1).expand(4, 1, 8, 8, 8)
    plain = medckpt.forecast(model, x, precision=precision, memory="a100_80gb", optimizer=None)
    lean = medckpt.forecast(apply_lean(model), x, precision=precision, memory="a100_80gb", optimizer=None)
    assert lean.parts["saved"] < 0.75 * plain.parts["saved"]
    assert lean.allocated_bytes < plain.allocated_bytes


def test_dropout_can_be_forecast_on_both_devices():
    model, x = apply_lean(First(vit(dropout_rate=0.1))), torch.empty(1).expand(2, 1, 8, 8, 8)
    for memory in ("a100_80gb", "cpu"):
        assert medckpt.forecast(model, x, precision="32", memory=memory, optimizer=None).parts["saved"] > 0


def test_what_does_not_fit_is_refused_and_nothing_is_applied():
    model = small()
    cases = [
        ({"net.blocks.7": "mlp"}, r"no module 'net.blocks.7'. Did you mean 'net.blocks.[01]'"),
        ({"net.blocks.0.mlp": "mpl"}, r"'mpl' for 'net.blocks.0.mlp' is no operator. Did you mean 'mlp'"),
        ({"net.blocks.0.mlp": "self_attention"}, r"cannot stand in .*no SABlock.*'mlp' fits it"),
        ({"net.blocks.0.norm1": "mlp"}, r"cannot stand in .*no MLPBlock.*Leave it out"),
        ({"net.blocks.0": "transformer_block", "net.blocks.0.mlp": "mlp"}, "one lies inside the other"),
    ]
    for operators, words in cases:
        with pytest.raises(ConfigError, match=words):
            apply_lean(model, {"net.blocks.1": "transformer_block", **operators})
        assert applied_lean(model) == {}
    apply_lean(model, {"net.blocks.0": "transformer_block"})
    with pytest.raises(ConfigError, match="has an operator already"):
        apply_lean(model, {"net.blocks.0": "transformer_block"})
    with pytest.raises(ConfigError, match="one lies inside the other"):
        apply_lean(model, {"net.blocks.0.mlp": "mlp"})


def test_a_patched_forward_is_never_passed_over():
    model = small()
    block = model.net.blocks[0]
    block.forward = lambda x: x * 2
    assert "net.blocks.0" not in find_lean(model)
    with pytest.raises(ConfigError, match="forward of its own"):
        apply_lean(model, {"net.blocks.0": "transformer_block"})


def test_ddp_reduces_every_gradient(tmp_path):
    x = volume(2, 1, 8, 8, 8)
    expected = one_step(apply_lean(small()), x).gradients
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(apply_lean(small()), find_unused_parameters=True)

        def doubled(_, bucket):  # without annotations, which DDP would compare with its own
            done = torch.futures.Future()
            done.set_result(bucket.buffer() * 2)
            return done

        model.register_comm_hook(None, doubled)
        found = one_step(model, x).gradients
    finally:
        torch.distributed.destroy_process_group()
    for name, gradient in expected.items():
        if gradient is not None and name != "input":
            assert torch.equal(found[f"module.{name}"], 2 * gradient), name
