"""Recompute is exact: every comparison here is bit for bit, against the same step without it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from medckpt.errors import ConfigError
from medckpt.memory.apply import Applied, ForwardState, applied, apply_recompute, undo
from medckpt.memory.regions import find_regions


@pytest.fixture(autouse=True)
def one_thread():
    """With several, accumulating `index_put` (Swin's bias table) adds in any order: no step repeats bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Step(NamedTuple):
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    rng: tuple[torch.Tensor, object, np.ndarray]


def one_step(model: nn.Module, *inputs: object, bf16: bool = False, between: Callable[[], object] = int) -> Step:
    """One training step from fixed seeds; `between` runs between forward and backward."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
        output = model(*inputs)
        loss = sum(o.float().square().mean() for o in (output if isinstance(output, tuple) else (output,)))
    between()
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    gradients |= {f"input {i}": x.grad.clone() for i, x in enumerate(inputs) if getattr(x, "grad", None) is not None}
    for x in inputs:
        if isinstance(x, torch.Tensor):
            x.grad = None
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Step(loss.detach(), gradients, buffers, (torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))


def assert_same(one: Step, other: Step) -> None:
    assert torch.equal(one.loss, other.loss)
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        twin = other.gradients[name]
        assert (gradient is None and twin is None) or torch.equal(gradient, twin), name
    assert one.buffers.keys() == other.buffers.keys()
    for name, buffer in one.buffers.items():
        assert torch.equal(buffer, other.buffers[name]), name
    assert torch.equal(one.rng[0], other.rng[0])
    assert hash(one.rng[1]) == hash(other.rng[1]), "Python's random state"
    assert np.array_equal(one.rng[2], other.rng[2])


class Net(nn.Module):
    """Two calls of one block class, and a head: what most of the small tests need."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """conv, norm, activation, dropout."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)
        self.norm = norm or nn.InstanceNorm3d(2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.nn.functional.gelu(self.norm(self.conv(x))))


def net(norm: Callable[[], nn.Module] = lambda: nn.InstanceNorm3d(2)) -> Net:
    torch.manual_seed(0)
    return Net(Block(norm()), Block(norm()))


def volume(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 2, 4, 4, 4)), generator=torch.Generator().manual_seed(1))


def compare(model: nn.Module, regions: tuple[str, ...], *inputs: object, **kwargs) -> nn.Module:
    """Runs a step of a copy without recompute and of `model` with it, and asserts that they are the same."""
    plain = one_step(copy.deepcopy(model), *inputs, **kwargs)
    assert_same(one_step(apply_recompute(model, regions), *inputs, **kwargs), plain)
    return model


# ---------------------------------------------------------------------------------------------- whole networks


def swin_unetr() -> tuple[nn.Module, torch.Tensor]:
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, drop_rate=0.1, attn_drop_rate=0.1, dropout_path_rate=0.2
    )
    return model, volume(1, 1, 64, 32, 32)


def unetr() -> tuple[nn.Module, torch.Tensor]:
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.UNETR(1, 2, (32, 32, 32), feature_size=8, hidden_size=48, num_heads=4, mlp_dim=96, dropout_rate=0.1)
    return model, volume(1, 1, 32, 32, 32)


def in_float32(module: nn.Module) -> None:
    """oneDNN's bf16 gradient of a Conv3d weight is not repeatable (and wrong) where a side has two voxels or fewer."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return type(module).forward(module, x.float())

    module.__dict__["forward"] = forward


@pytest.mark.parametrize(
    ("build", "bf16"),
    [
        pytest.param(swin_unetr, False, id="swin_unetr-fp32"),
        # A minute where the CPU has no bfloat16 arithmetic.
        pytest.param(swin_unetr, True, id="swin_unetr-bf16", marks=pytest.mark.slow),
        pytest.param(unetr, False, id="unetr-fp32"),
        pytest.param(unetr, True, id="unetr-bf16"),
    ],
)
def test_training_step_is_bit_identical(build, bf16):
    torch.manual_seed(0)
    model, x = build()
    keys = list(model.state_dict())
    if bf16 and hasattr(model, "encoder10"):
        in_float32(model.encoder10)
    plain = one_step(model, x, bf16=bf16)
    for level in ("block", "all"):
        regions = find_regions(model, level)
        apply_recompute(model, regions)
        assert applied(model) == Applied(regions=regions)
        assert list(model.state_dict()) == keys
        assert_same(one_step(model, x, bf16=bf16), plain)
        undo(model)


# ---------------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm3d(2),
        lambda: nn.BatchNorm3d(2, momentum=None),
        lambda: nn.InstanceNorm3d(2, track_running_stats=True),
        lambda: nn.BatchNorm3d(2, track_running_stats=False),
    ],
    ids=["batch", "batch-cumulative", "instance-tracked", "batch-untracked"],
)
def test_running_statistics_are_updated_once(norm, early_stop):
    model = net(norm)
    with set_checkpoint_early_stop(early_stop):
        compare(model, ("blocks.0", "blocks.1"), volume())
        compare(undo(model), ("blocks.0", "blocks.1"), volume())  # from statistics that are not the initial ones
    counts = [b.item() for n, b in model.named_buffers() if n.endswith("num_batches_tracked")]
    assert counts == ([2, 2] if isinstance(model.blocks[0].norm, nn.BatchNorm3d) and counts else counts)


def test_infinite_input_leaves_the_statistics_of_one_update():
    x = volume()
    x[0, 0, 0, 0, 0] = float("inf")
    plain, model = net(lambda: nn.BatchNorm3d(2)), net(lambda: nn.BatchNorm3d(2))
    apply_recompute(model, ["blocks.0"])
    for each in (plain, model):
        one_step(each, x)
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_spectral_norm_recomputes_from_the_vectors_the_forward_saw():
    torch.manual_seed(0)
    model = Net(Block(), Block())
    for block in model.blocks:
        block.conv = spectral_norm(block.conv)
    plain = one_step(model, volume())
    start = [0.5 * b for b in model.buffers()]
    for b, value in zip(model.buffers(), start, strict=True):
        b.copy_(value)
    plain = one_step(model, volume())
    for b, value in zip(model.buffers(), start, strict=True):
        b.copy_(value)
    assert_same(one_step(apply_recompute(model, ["blocks.0", "blocks.1"]), volume()), plain)


class Renorm(nn.BatchNorm3d):
    """Normalises by the running statistics in training, then changes the buffer or puts another in its place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(2, affine=False)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x - self.running_mean.view(1, -1, 1, 1, 1))
        mean = 0.5 * self.running_mean + 0.5 * x.detach().mean((0, 2, 3, 4))
        if self.in_place:
            self.running_mean.data.copy_(mean)
        else:
            self.running_mean = mean
        return y


@pytest.mark.parametrize("in_place", [True, False])
def test_statistics_that_enter_the_output(in_place):
    compare(net(lambda: Renorm(in_place)), ("blocks.0", "blocks.1"), volume())


class Counts(nn.Module):
    """Reads a tensor that each forward changes; `change` says how, `state` what it is."""

    def __init__(self, state: torch.Tensor | None, change: str) -> None:
        super().__init__()
        self.change = change
        if isinstance(state, nn.Parameter):
            self.state = nn.Parameter(state.detach().clone(), requires_grad=state.requires_grad)
        else:
            self.register_buffer("state", None if state is None else state.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.state is None:
                self.state = x.mean().reshape(1)
            elif self.change == "in place":
                self.state += 1
            elif self.change == "data":
                self.state.data.add_(1)
            elif self.change == "new object":
                state = self.state + 1
                self.state = nn.Parameter(state, requires_grad=False) if isinstance(self.state, nn.Parameter) else state
        return torch.sin(x * (1 + self.state.flatten()[0].float()))


def frozen(n: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(n), requires_grad=False)


@pytest.mark.parametrize("change", ["in place", "data", "new object"])
@pytest.mark.parametrize(
    "state",
    [torch.zeros(8, dtype=torch.long), torch.zeros(5000, dtype=torch.long), frozen(4), frozen(5000)],
    ids=["integers", "many integers", "frozen", "large frozen"],
)
def test_integers_and_frozen_parameters_that_the_forward_changes(state, change):
    model = net(lambda: Counts(state, change))
    plain = copy.deepcopy(model)
    apply_recompute(model, ["blocks.0", "blocks.1"])
    for _ in range(3):  # the first call finds out what changes, the later ones rely on it
        assert_same(one_step(model, volume()), one_step(plain, volume()))
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    assert plain.blocks[0].norm.state[0] == 3


def test_buffer_that_the_first_forward_fills():
    compare(net(lambda: Counts(None, "")), ("blocks.0", "blocks.1"), volume())


def test_codebook_of_monai_is_updated_once():
    """It is a frozen parameter, and MONAI writes to it through `.data`, which no version counter sees."""
    from monai.networks.layers.vector_quantizer import EMAQuantizer

    torch.manual_seed(0)
    model = Net(EMAQuantizer(3, 3000, 2))
    plain = copy.deepcopy(model)
    for block in (*plain.blocks, *model.blocks):
        block.register_forward_hook(lambda module, args, output: output[0] + output[1])
    apply_recompute(model, ["blocks.0"])
    for _ in range(2):
        x, y = volume().requires_grad_(), volume().requires_grad_()
        assert_same(one_step(model, x), one_step(plain, y))
        assert torch.equal(model.blocks[0].embedding.weight, plain.blocks[0].embedding.weight)


def test_constants_are_not_copied_after_the_first_call():
    table = torch.zeros(5000, dtype=torch.long)
    model = apply_recompute(net(lambda: Counts(table, "")), ["blocks.0"])
    one_step(model, volume())
    norm = model.blocks[0].norm
    state = ForwardState(model.blocks[0], model.blocks[0].__dict__["forward"].changing[True])
    assert not any(owner is norm._buffers for owner, _, _ in state.kept)
    assert any(entry.tensor is norm.state for entry in state.watched)


@pytest.mark.parametrize("change", ["in place", "new object"])
@pytest.mark.parametrize("state", [torch.zeros(5000, dtype=torch.long), frozen(5000)], ids=["integers", "frozen"])
def test_constant_that_changes_later_is_an_error(state, change):
    model = apply_recompute(net(lambda: Counts(state, "")), ["blocks.0"])
    one_step(model, volume())
    model.blocks[0].norm.change = change
    with pytest.raises(ConfigError, match=r"region changed norm\.state, .* Leave the region out"):
        one_step(model, volume())


@pytest.mark.parametrize("change", ["in place", "data"])
def test_trainable_parameter_that_the_forward_changes_is_an_error(change):
    model = apply_recompute(net(lambda: Counts(nn.Parameter(torch.zeros(2)), change)), ["blocks.0"])
    with pytest.raises(ConfigError, match=r"region changed norm\.state"):
        one_step(model, volume())


def test_buffer_objects_survive_the_step():
    model = apply_recompute(net(lambda: nn.BatchNorm3d(2)), ["blocks.0"])
    before = [id(b) for b in model.buffers()]
    one_step(model, volume())
    assert [id(b) for b in model.buffers()] == before


# ---------------------------------------------------------------------------------------------- random states, modes


class Draws(nn.Module):
    """Values and a branch from Python's and NumPy's global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The draws enter what is saved for backward (tanh saves its output), not only the values.
        layer = self.fc if random.random() < 0.5 else self.other
        return torch.tanh(layer(x) * random.uniform(0.5, 2) * np.random.uniform(0.5, 2)) + torch.rand(4) * x


def test_python_and_numpy_draws_are_repeated():
    torch.manual_seed(0)
    compare(Net(Draws(), Draws(), Draws()), ("blocks.0", "blocks.1", "blocks.2"), volume(3, 4))


def test_draws_between_forward_and_backward_are_kept():
    def draw() -> None:
        torch.rand(3), random.random(), np.random.rand(3)

    torch.manual_seed(0)
    compare(Net(Draws(), Draws()), ("blocks.0", "blocks.1"), volume(3, 4), between=draw)


def test_eval_between_forward_and_backward():
    model = net(lambda: nn.BatchNorm3d(2))
    twin = copy.deepcopy(model)
    apply_recompute(model, ["blocks.0", "blocks.1"])
    assert_same(one_step(model, volume(), between=model.eval), one_step(twin, volume(), between=twin.eval))
    assert not any(m.training for m in model.modules())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_device_random_state_without_a_tensor_input():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.ones(64))

        def forward(self, x: None) -> torch.Tensor:
            return nn.functional.dropout(self.token * self.token, 0.5).exp()

    compare(Net(Tokens()).cuda(), ("blocks.0",), None)


# ---------------------------------------------------------------------------------------------- arguments


class Mixed(nn.Module):
    """Takes everything a forward can take, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, scale, mask=None, *, extra, pair, mode="sin"):
        y = torch.sin(self.fc(x)) * scale if mode == "sin" else self.fc(x)
        if mask is not None:
            y = y * mask
        return (y * extra.exp(), {"sum": y + pair[0], "none": None}, pair[1])


class UsesMixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = Mixed()

    def forward(self, x, extra, in_place=False):
        held = extra * 2
        first, rest, text = self.mixed(x, 3.0, extra=held, pair=(x * x, "text"))
        second, _, _ = self.mixed(first, 2, x > 0, mode="cos", extra=extra, pair=[rest["sum"], None])
        assert text == "text"
        assert rest["none"] is None
        if in_place:
            held.add_(1)
        return first, second


def test_keywords_none_numbers_and_structures():
    torch.manual_seed(0)
    x, extra = volume(3, 4).requires_grad_(), volume(1, 4).requires_grad_()
    compare(UsesMixed(), ("mixed",), x, extra)
    assert len(one_step(UsesMixed(), x, extra).gradients) == 4, "the inputs' gradients are compared too"


def test_keyword_tensor_changed_in_place_is_an_error_and_not_a_wrong_gradient():
    model = apply_recompute(UsesMixed(), ["mixed"])
    first, _ = model(volume(3, 4), volume(1, 4).requires_grad_(), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_nothing_is_kept_without_gradients():
    model = apply_recompute(net(), ["blocks.0"])
    model.eval()
    with torch.no_grad():
        assert not model(volume()).requires_grad
    with torch.inference_mode():
        assert torch.equal(model(volume()), undo(model)(volume()))


def test_retained_graph_recomputes_again():
    model = apply_recompute(net(lambda: Renorm(True)), ["blocks.0", "blocks.1"])
    loss = model(volume()).square().mean()
    mean = model.blocks[0].norm.running_mean.clone()
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert torch.equal(model.blocks[0].norm.running_mean, mean)


def test_works_with_the_debug_mode_of_torch():
    with set_checkpoint_debug_enabled(True):
        compare(net(lambda: nn.BatchNorm3d(2)), ("blocks.0",), volume())


# ---------------------------------------------------------------------------------------------- two processes


def ddp_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = net()
    apply_recompute(model, find_regions(model, "block"))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        parallel(torch.randn(2, 2, 4, 4, 4)).square().mean().backward()
        optimizer.step()
    torch.save([p.detach() for p in model.parameters()], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ddp_equals_averaged_gradients(tmp_path):
    mp.spawn(ddp_worker, args=(str(tmp_path),), nprocs=2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(2, 2, 4, 4, 4)).square().mean() / 2).backward()
        optimizer.step()
    for rank in range(2):
        for trained, p in zip(torch.load(tmp_path / f"{rank}.pt"), model.parameters(), strict=True):
            torch.testing.assert_close(trained, p.detach(), rtol=1e-6, atol=1e-7)
