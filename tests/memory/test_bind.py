"""Steps by samples: equal to the plain step, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.losses import DiceCELoss, DiceLoss
from torch import Tensor, nn

from medckpt.blocks import LossConfig
from medckpt.errors import ConfigError
from medckpt.memory.bind import BoundStep, bind, find_tail
from medckpt.memory.options import lay_on
from medckpt.training.losses import DiceCrossEntropy
from tests.memory import two_processes
from tests.memory.nets import DICE_CE, UNETR, Merge, Plain, Residual, Unread, image, label, make, swin

LEVERS: list[dict[str, Any]] = [{"tail": True}, {"micro_batches": 3}]


def net(**settings: Any) -> UNETR:
    torch.manual_seed(0)
    return UNETR(**settings).double()


def data(samples: int = 3) -> tuple[Tensor, Tensor]:
    return image("mini", samples).double(), label("mini", samples)


def gradients(model: nn.Module, step: Callable[[Any, Any], Tensor], *, factor: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    loss = step(*data())
    (loss * factor).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


def close(found: dict[str, Tensor], plain: dict[str, Tensor], share: float = 1e-10) -> None:
    assert found.keys() == plain.keys()
    largest = max(float(g.abs().max()) for name, g in plain.items() if name != "loss")
    assert float(found["loss"] - plain["loss"]) == pytest.approx(0, abs=1e-12)
    for name, gradient in plain.items():
        assert float((found[name] - gradient).abs().max()) <= share * largest, name


@pytest.mark.parametrize("levers", LEVERS)
def test_a_step_by_samples_is_the_plain_step(levers: dict[str, Any]) -> None:
    model = net()
    close(gradients(model, bind(model, DICE_CE, **levers)), gradients(model, bind(model, DICE_CE)))


@pytest.mark.parametrize("levers", LEVERS)
def test_what_comes_in_from_outside_multiplies_the_gradients(levers: dict[str, Any]) -> None:
    """Accumulation over steps, and the factor of a GradScaler, which goes in early and is taken out again."""
    model = net()
    plain = gradients(model, bind(model, DICE_CE), factor=0.25)
    close(gradients(model, bind(model, DICE_CE, **levers), factor=0.25), plain)
    step = bind(model, DICE_CE, **levers, scale=lambda: 1024.0)
    scaled = gradients(model, step, factor=0.25 * 1024)
    close({name: g if name == "loss" else g / 1024 for name, g in scaled.items()}, plain)


def test_the_loss_scale_keeps_small_gradients_alive_inside_of_the_tail() -> None:
    """Under float16 the features' gradients would be zero before the scaler could multiply them."""
    torch.manual_seed(0)
    model = UNETR().half()
    pixels, target = image("mini").half(), label("mini")

    def tiny(output: Tensor, target: Tensor) -> Tensor:
        return output.float().square().mean() * 1e-7

    def found(scale: float) -> Tensor:
        model.zero_grad()
        loss = bind(model, tiny, tail=True, scale=lambda: scale)(pixels, target)
        (loss * scale).backward()
        assert model.embed.weight.grad is not None
        return model.embed.weight.grad.abs().sum()

    assert found(1.0) == 0
    assert found(2.0**16) > 0


@pytest.mark.parametrize("levers", LEVERS)
def test_a_real_grad_scaler_gives_the_same_step(levers: dict[str, Any]) -> None:
    def trained(**how: Any) -> dict[str, Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        step = bind(model, DICE_CE, **how, scale=scaler.get_scale)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(step(*data())).backward()
            scaler.step(optimizer)
            scaler.update()
        return model.state_dict()

    for (name, one), other in zip(trained().items(), trained(**levers).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("levers", LEVERS)
@pytest.mark.parametrize("frozen", ["embed", "encoder1", "decoder2", "encoder1 decoder2 out"])
def test_frozen_parameters_have_no_gradient_and_change_no_other(levers: dict[str, Any], frozen: str) -> None:
    model = net()
    for name in frozen.split():
        model.get_submodule(name).requires_grad_(False)
    close(gradients(model, bind(model, DICE_CE, **levers)), gradients(model, bind(model, DICE_CE)))


def test_under_autocast_the_tail_is_as_close_as_bfloat16_is() -> None:
    model = net().float()

    def step(**levers: Any) -> dict[str, Tensor]:
        model.zero_grad()
        bound = bind(model, DICE_CE, **levers)
        with torch.autocast("cpu", torch.bfloat16):
            loss = bound(data()[0].float(), data()[1])
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain, tail = step(), step(tail=True)
    largest = max(float(g.abs().max()) for g in plain.values())
    assert all(float((tail[name] - g).abs().max()) < 0.02 * largest for name, g in plain.items())


@pytest.mark.parametrize("levers", LEVERS)
def test_with_gradients_off_it_is_the_plain_loss(levers: dict[str, Any]) -> None:
    model = net()
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    step = bind(model, DICE_CE, **levers)
    with torch.no_grad():
        assert torch.equal(step(*data()), DICE_CE(model(data()[0]), data()[1]))
    assert calls == [3, 3]
    model.eval()
    close(gradients(model, step), gradients(model, bind(model, DICE_CE)))


@pytest.mark.parametrize("levers", LEVERS)
def test_a_second_backward_pass_is_refused(levers: dict[str, Any]) -> None:
    model = net()
    loss = bind(model, DICE_CE, **levers)(*data())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forwards_come_back_after_an_error_in_the_body() -> None:
    model = net()
    lay_on(model, {"encoder1": "recompute_plain"})
    before = [m.__dict__.get("forward") for m in model.modules()]
    step = bind(model, DICE_CE, tail=True)
    for wrong in (torch.zeros(3, 1, 7, 8, 8).double(), torch.zeros(3, 2, 8, 8, 8).double()):
        with pytest.raises(RuntimeError):
            step(wrong, data()[1])
        assert [m.__dict__.get("forward") for m in model.modules()] == before
    close(gradients(model, step), gradients(model, bind(model, DICE_CE)))


def test_policies_and_the_tail_go_together() -> None:
    model = net()
    plain = gradients(model, bind(model, DICE_CE))
    choices = {"encoder1": "recompute_lean", "decoder2": "lean", "blocks.0": "recompute", "out": "keep"}
    treated = lay_on(copy.deepcopy(model), choices)
    close(gradients(treated, bind(treated, DICE_CE, tail=True)), plain)


class Twice(UNETR):
    """Two inputs in a mapping, and an output that is one."""

    def forward(self, one: Tensor, two: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(one + two)}


def test_micro_batches_take_tuples_and_mappings() -> None:
    torch.manual_seed(0)
    model = Twice().double()
    pixels, target = data()

    def loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
        return DICE_CE(output["logits"], target["label"])

    for given in ((pixels, pixels), {"two": pixels, "one": pixels}):
        found = {}
        for count in (1, 3):
            model.zero_grad()
            bind(model, loss, micro_batches=count)(given, {"label": target}).backward()
            found[count] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for one, other in zip(found[1], found[3], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


# ---------------------------------------------------------------------------------------------- refusals


def refused(match: str, make_step: Callable[[], BoundStep], run: bool = False) -> None:
    step = None if run is False else make_step()
    with pytest.raises(ConfigError, match=match):
        make_step() if step is None else step(*data())


class Weighted(nn.Module):
    """The part of DiceCE that is no mean over samples where classes have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.1, 1.0, 5.0]).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target[:, 0].long(), weight=self.weight.to(output))


OTHER_MEANS: list[Callable[..., Tensor]] = [
    DiceCELoss(to_onehot_y=True, softmax=True, batch=True),
    DiceLoss(to_onehot_y=True, softmax=True, batch=True),
    Weighted(),
    DiceLoss(to_onehot_y=True, softmax=True, reduction="sum"),
    lambda output, target: nn.functional.cross_entropy(output, target[:, 0].long(), reduction="sum"),
    lambda output, target: nn.functional.cross_entropy(output, target[:, 0].long(), ignore_index=1),
    lambda output, target: output.square().mean().sqrt(),
]


@pytest.mark.parametrize("loss", OTHER_MEANS)
@pytest.mark.parametrize(("levers", "background"), [(LEVERS[0], False), (LEVERS[0], True), (LEVERS[1], True)])
def test_a_loss_that_is_no_mean_over_samples_is_refused(
    levers: dict[str, Any], loss: Callable[..., Tensor], background: bool
) -> None:
    """Also where the first patch holds background alone, as a patch of a scan may."""
    model = net()
    pixels, target = data()
    with pytest.raises(ConfigError, match=r"loss: it is no mean over samples .*without the per-sample tail"):
        bind(model, loss, **levers)(pixels, target * 0 if background else target)


@pytest.mark.parametrize(
    "loss",
    [
        DICE_CE,
        DiceCELoss(to_onehot_y=True, softmax=True, include_background=False, squared_pred=True),
        lambda output, target: nn.functional.cross_entropy(output, target[:, 0].long()),
        lambda output, target: nn.functional.binary_cross_entropy_with_logits(output[:, :1], (target > 0).double()),
        lambda output, target: nn.functional.mse_loss(output, target.to(output.dtype).expand_as(output)),
    ],
)
def test_means_over_samples_are_taken(loss: Callable[..., Tensor]) -> None:
    model = net()
    close(gradients(model, bind(model, loss, tail=True)), gradients(model, bind(model, loss)))


OVER_BATCH = DiceCrossEntropy(LossConfig(batch_dice=True, ce_weight=0.5))


@pytest.mark.parametrize("levers", [*LEVERS, {"tail": True, "scale": lambda: 1024.0}])
@pytest.mark.parametrize("include_background", [False, True])
def test_dice_over_the_batch_runs_by_samples_all_the_same(levers: dict[str, Any], include_background: bool) -> None:
    """Against MONAI's loss on the whole batch."""
    loss = DiceCrossEntropy(LossConfig(batch_dice=True, ce_weight=0.5, include_background=include_background))
    monai = DiceLoss(to_onehot_y=True, softmax=True, batch=True, include_background=include_background)
    pixels, target = data()

    def plain(inputs: Tensor, labels: Tensor) -> Tensor:
        output = model(inputs)
        entropy = nn.functional.cross_entropy(output, labels[:, 0].long())
        value: Tensor = monai(output, labels) + 0.5 * entropy
        return value

    model = lay_on(net(), {"encoder1": "recompute_lean", "blocks.0": "recompute_plain"})
    step = bind(model, loss, **levers)
    close(gradients(model, step), gradients(model, plain))
    assert torch.allclose(step(pixels, target).detach(), plain(pixels, target).detach(), rtol=1e-12)


def test_dice_over_the_batch_under_autocast_is_as_close_as_bfloat16_is() -> None:
    model = net().float()
    pixels, target = data()

    def gradient_of(levers: dict[str, Any], *, cast: bool) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            value = bind(model, OVER_BATCH, **levers)(pixels.float(), target)
        value.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    truth, plain = gradient_of({}, cast=False), gradient_of({}, cast=True)
    tail = gradient_of({"tail": True}, cast=True)
    largest = max(float(g.abs().max()) for g in truth.values())
    for name, true in truth.items():
        usual = float((plain[name] - true).abs().max())
        assert float((tail[name] - true).abs().max()) <= 2 * usual + 0.01 * largest, name


def test_a_loss_whose_sums_are_not_its_own_is_refused() -> None:
    class Wrong(DiceCrossEntropy):
        def of_statistics(self, statistics: Tensor) -> Tensor:
            return super().of_statistics(statistics) * 1.01

    model = net()
    with pytest.raises(ConfigError, match="loss: it is no mean over samples"):
        bind(model, Wrong(LossConfig(batch_dice=True)), tail=True)(*data())


def test_batch_statistics_are_refused() -> None:
    model = Plain([Residual(nn.BatchNorm3d), Residual()], [0, 0])
    refused(
        r"micro_batches: 'blocks.0.norm' \(BatchNorm3d\) takes statistics",
        lambda: bind(model, DICE_CE, micro_batches=2),
    )
    tracked = Plain([Residual(lambda c: nn.InstanceNorm3d(c, track_running_stats=True)), Residual()], [0, 0])
    refused("takes statistics", lambda: bind(tracked, DICE_CE, micro_batches=2))
    batch = net()
    batch.encoder1.layer.norm1 = nn.BatchNorm3d(4)
    refused(r"per-sample tail: 'encoder1.layer.norm1'", lambda: bind(batch, DICE_CE, tail=True))
    elsewhere = net()
    elsewhere.embed = nn.Sequential(elsewhere.embed, nn.BatchNorm3d(8))
    assert bind(elsewhere, DICE_CE, tail=True).tail is not None, "the body runs on the whole batch"


def test_dropout_is_refused_where_it_would_draw_part_by_part() -> None:
    model = net(dropout=0.1)
    refused(r"micro_batches: 'blocks.0.*' \(Dropout\) draws at random", lambda: bind(model, DICE_CE, micro_batches=3))
    bind(model, DICE_CE, tail=True)  # it is in the body
    bind(model.eval(), DICE_CE, micro_batches=3)


def test_a_network_without_a_tail_that_is_known_is_refused() -> None:
    refused(
        r"per-sample tail: Plain has no full-resolution end that is known .* Use micro_batches instead",
        lambda: bind(Plain([Residual(), Unread(), Merge()], [0, 0, 0]), DICE_CE, tail=True),
    )
    assert find_tail(nn.Linear(1, 1)) is None
    found = find_tail(swin())
    assert found is not None
    assert found.names == ("encoder1", "decoder1", "out")


def test_both_levers_at_once_are_refused() -> None:
    refused("not together with micro_batches", lambda: bind(net(), DICE_CE, tail=True, micro_batches=3))


def test_hooks_in_the_tail_are_refused() -> None:
    model = net()
    hook = model.decoder2.register_forward_hook(lambda module, args, output: None)
    refused("per-sample tail: 'decoder2' has hooks", lambda: bind(model, DICE_CE, tail=True))
    hook.remove()
    bind(model, DICE_CE, tail=True)


def test_parts_that_do_not_divide_are_refused() -> None:
    model = net()
    refused("micro_batches=2: does not divide the 3 samples", lambda: bind(model, DICE_CE, micro_batches=2), run=True)
    step = bind(Twice().double(), DICE_CE, micro_batches=3)
    with pytest.raises(ConfigError, match="every input must have the samples in its first dimension"):
        step((data()[0], data(2)[0]), data()[1])
    with pytest.raises(ConfigError, match="takes one tensor"):
        bind(model, DICE_CE, tail=True)((data()[0],), data()[1])


def test_a_compiled_model_is_bound_first() -> None:
    refused("bind the model first", lambda: bind(torch.compile(net()), DICE_CE, micro_batches=3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [pytest.param("swin", marks=pytest.mark.slow), "unetr"])
def test_the_tails_of_monais_own_networks(name: str) -> None:
    model = make(name)
    found = []
    for levers in ({}, {"tail": True}):
        model.zero_grad()
        bind(model, DICE_CE, **levers)(image(name), label(name)).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    largest = max(float(g.abs().max()) for g in found[0])
    assert all(float((a - b).abs().max()) <= 1e-4 * largest for a, b in zip(*found, strict=True))


# ---------------------------------------------------------------------------------------------- two processes


def test_ddp_averages_the_gradients_of_a_step_by_samples(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(two_processes.worker, args=(str(tmp_path),), nprocs=2)
    model = two_processes.net()
    for seed in range(4):
        pixels, target = two_processes.data(seed)
        (two_processes.cross_entropy(model(pixels), target) / 2).backward()
    truth = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in truth.values())
    for how in two_processes.LEVERS:
        for rank in range(2):
            found = torch.load(tmp_path / f"{how}-{rank}.pt")
            assert found.keys() == truth.keys()
            for name, gradient in found.items():
                assert float((gradient - truth[name]).abs().max()) <= 1e-10 * largest, (how, rank, name)
