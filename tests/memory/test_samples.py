"""Steps by samples: what makes samples depend on one another, or a gradient go astray, is refused or right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medckpt.errors import ConfigError
from medckpt.memory.bind import bind
from medckpt.memory.options import lay_on, take_off
from medckpt.memory.samples import find_tail
from tests.memory.nets import UNETR

TAIL: dict[str, Any] = {"tail": True}
MICRO: dict[str, Any] = {"micro_batches": 2}


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target[:, 0].long())


def data(samples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 1, 8, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(3, (samples, 1, 8, 8, 8), generator=generator)


def gradients(net: nn.Module, step: Callable[[Tensor, Tensor], Tensor], *, factor: float = 1.0) -> dict[str, Tensor]:
    net.zero_grad()
    (factor * step(*data())).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(1, 3, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class TwoBiases(Conv):
    """Both have one and the same gradient: autograd gives one tensor for two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(3, 1, 1, 1, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.a + self.b)


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("pieces", [2, 4])
def test_two_parameters_with_one_gradient(pieces: int, factor: float) -> None:
    net = TwoBiases()
    plain = gradients(net, lambda x, y: entropy(net(x), y), factor=factor)
    found = gradients(net, bind(net, entropy, micro_batches=pieces), factor=factor)
    assert all(torch.allclose(found[name], plain[name], rtol=1e-10, atol=1e-14) for name in plain)


def test_two_parameters_of_the_tail_with_one_gradient_in_a_batch_of_one() -> None:
    net = UNETR().double()
    net.out = TwoHeads().double()  # type: ignore[assignment]
    pixels, target = data(1)

    def of(step: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        net.zero_grad()
        (3 * step(pixels, target)).backward()
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

    plain, found = of(lambda x, y: entropy(net(x), y)), of(bind(net, entropy, tail=True))
    assert all(torch.allclose(found[name], plain[name], rtol=1e-9, atol=1e-12) for name in plain)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.LazyConv3d(3, 1)
        self.a, self.b = (nn.Parameter(torch.zeros(3, 1, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + (self.a + self.b)


class Scaled(UNETR):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x).tanh()


def test_a_subclass_with_a_forward_of_its_own_has_no_tail_that_is_known() -> None:
    assert find_tail(UNETR()) is not None
    assert find_tail(Scaled()) is None
    with pytest.raises(ConfigError, match="Scaled has no full-resolution end that is known"):
        bind(Scaled(), entropy, tail=True)
    patched = UNETR()
    patched.__dict__["forward"] = lambda x: UNETR.forward(patched, x) / 2
    assert find_tail(patched) is None


@pytest.mark.parametrize("where", ["", "out", "encoder1"])
@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_and_the_tail_do_not_go_together(where: str, register: str) -> None:
    net = UNETR().double()
    getattr(net.get_submodule(where), register)(lambda *_: None)
    with pytest.raises(ConfigError, match=r"per-sample tail: (the network|'\w+') has hooks, which would see"):
        bind(net, entropy, tail=True)


@pytest.mark.parametrize("lever", [TAIL, MICRO])
def test_hooks_of_parameters_would_run_too_often(lever: dict[str, Any]) -> None:
    net = UNETR().double()
    step = bind(net, entropy, **lever)
    next(net.out.parameters()).register_hook(lambda g: g / 2)
    with pytest.raises(ConfigError, match=r"the parameter 'out[\w.]+' has a hook, which would run for every part"):
        step(*data())


def test_hooks_after_accumulation_run_once() -> None:
    net = Conv()
    calls: list[int] = []
    net.conv.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    bind(net, entropy, micro_batches=4)(*data()).backward()
    assert len(calls) == 1


IGNORING: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda o, t: nn.functional.cross_entropy(o, t[:, 0].long(), ignore_index=255),
    lambda o, t: nn.functional.cross_entropy(o, t[:, 0].long(), ignore_index=-1),
]


@pytest.mark.parametrize("lever", [TAIL, MICRO])
@pytest.mark.parametrize(("loss", "value"), zip(IGNORING, (255, -1), strict=True))
def test_a_loss_that_ignores_voxels_is_no_mean(loss: Any, value: int, lever: dict[str, Any]) -> None:
    """The first sample has none of them."""
    pixels, target = data()
    target[1:, :, :3] = value
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        bind(UNETR().double(), loss, **lever)(pixels, target)


def test_a_masked_loss_of_real_numbers_is_no_mean() -> None:
    pixels, _ = data()
    target = torch.randn(4, 3, 8, 8, 8, dtype=torch.float64)
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        bind(Conv(), lambda o, t: ((o - t).abs() * (t > 0)).sum() / (t > 0).sum(), micro_batches=2)(pixels, target)


class Centred(Conv):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean())


class Counting(Conv):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Spectral(Conv):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.conv)


@pytest.mark.parametrize(
    ("net", "match"),
    [
        (Centred, "micro_batches: what Centred gives for a sample depends on the other samples"),
        (Counting, "micro_batches: a forward pass changes the buffer 'calls'"),
        (Spectral, "micro_batches: a forward pass changes the buffer 'conv.parametrizations.weight.0._[uv]'"),
    ],
)
def test_samples_that_depend_on_others_and_buffers_that_count(net: type[nn.Module], match: str) -> None:
    model = net()
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(ConfigError, match=match):
        bind(model, entropy, micro_batches=2)(*data())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())


def test_a_tail_whose_samples_depend_on_others() -> None:
    net = UNETR().double()

    class Head(nn.Module):
        def __init__(self, conv: nn.Module) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x - x[-1:] / 2)

    net.out = Head(net.out)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="per-sample tail: what UNETR gives for a sample depends on the other"):
        bind(net, entropy, tail=True)(*data())


@pytest.mark.parametrize("lever", [TAIL, MICRO])
def test_inputs_that_require_a_gradient_are_refused(lever: dict[str, Any]) -> None:
    pixels, target = data()
    with pytest.raises(ConfigError, match="an input requires a gradient, which would not come back"):
        bind(UNETR().double(), entropy, **lever)(pixels.requires_grad_(), target)


@pytest.mark.parametrize("lever", [TAIL, MICRO])
def test_targets_have_the_samples_of_the_inputs(lever: dict[str, Any]) -> None:
    pixels, target = data()
    step = bind(UNETR().double(), lambda o, t: entropy(o, t["y"]), **lever)
    with pytest.raises(ConfigError, match=r"every tensor of the target must have the samples in its first .* \[2, 4\]"):
        step(pixels, {"y": target, "weights": torch.ones(2)})
    with pytest.raises(ConfigError, match="the inputs have 4 samples, the target has 3"):
        step(pixels, {"y": target[:3]})


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda o, t: (entropy(o, t), 1), "tuple"),
        (lambda o, t: 1.5, "float"),
        (lambda o, t: o.mean((1, 2, 3, 4)), r"a tensor of shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("lever", [TAIL, MICRO])
def test_a_loss_that_gives_no_number(loss: Any, what: str, lever: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"loss: must give one number .*; it gives {what}"):
        bind(UNETR().double(), loss, **lever)(*data())


@pytest.mark.parametrize("lever", [TAIL, MICRO])
def test_a_frozen_network_gives_its_loss(lever: dict[str, Any]) -> None:
    net = UNETR().double().requires_grad_(False)
    assert torch.equal(bind(net, entropy, **lever)(*data()), entropy(net(data()[0]), data()[1]))


def test_another_default_device_changes_nothing() -> None:
    net = Conv()
    plain = gradients(net, lambda x, y: entropy(net(x), y))
    step = bind(net, entropy, micro_batches=2)
    pixels, target = data()
    torch.set_default_device("meta")
    try:
        loss = step(pixels, target)
    finally:
        torch.set_default_device(None)
    net.zero_grad()
    loss.backward()
    assert torch.allclose(net.conv.weight.grad, plain["conv.weight"], rtol=1e-10)  # type: ignore[arg-type]


def test_what_is_applied_stays_if_it_is_applied_again() -> None:
    net = lay_on(UNETR(), {"encoder1": "recompute_lean", "out": "lean"})
    before = {name: module.__dict__.get("forward") for name, module in net.named_modules()}
    with pytest.raises(ConfigError, match=r"policy: something is applied to this model already \(encoder1.*remove"):
        lay_on(net, {"encoder1": "recompute_plain"})
    assert {name: module.__dict__.get("forward") for name, module in net.named_modules()} == before
    assert not any("forward" in module.__dict__ for module in take_off(net).modules())


def test_buffers_that_a_forward_pass_reads_are_left_alone() -> None:
    """The trial comes between forward and backward of the network's body, which has saved some of them."""

    net = UNETR().double()
    net.embed = nn.Sequential(net.embed, Shuffled(torch.randperm(64)))  # type: ignore[assignment]
    plain = gradients(net, lambda x, y: entropy(net(x), y))
    found = gradients(net, bind(net, entropy, tail=True))
    assert all(torch.allclose(found[name], plain[name], rtol=1e-9, atol=1e-12) for name in plain)


class Shuffled(nn.Module):
    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2)[:, :, self.order].view(x.shape)
