"""`medckpt.forecast`, as its users call it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import medckpt
from medckpt.errors import ConfigError, MedckptError
from medckpt.forecasting import Forecast, fits_in, forecast, size
from medckpt.memory.explain import KINDS
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions

MIB = 2**20
CARD = MemoryProfile(
    name="card", title="a card", device="cuda", capacity_bytes=2**35, bandwidth_gb_s=1000.0, fp32_tflops=20.0,
    bf16_tflops=200.0, fp16_tflops=200.0, context_bytes=(400 * MIB, 500 * MIB), library_workspace_bytes=16 * MIB,
    conv_workspace=(0.0, 0.25, 1.0), reserve_slack=(0.0, 0.1),
)  # fmt: skip


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(channels, channels, 3, padding=1), nn.InstanceNorm3d(channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 8, 1), nn.Sequential(Block(8), Block(8)), nn.Dropout(0.1), nn.Conv3d(8, 2, 1))


def of(**settings: Any) -> Forecast:
    return forecast(
        settings.pop("model", None) or small(), torch.empty(2, 1, 16, 16, 16), **{"memory": CARD, **settings}
    )


def consistent(found: Forecast) -> None:
    assert sum(found.parts.values()) == found.peak_bytes
    assert max(moment.nbytes for moment in found.timeline) == found.peak_bytes
    low, high = found.peak_interval
    assert low <= found.peak_bytes <= high
    assert found.reserved_bytes[0] <= found.reserved_bytes[1]
    assert sum(nbytes for _, nbytes in found.explanation.holders) == found.peak_bytes


def test_it_is_exported() -> None:
    assert medckpt.forecast is forecast


def test_what_it_says_of_a_small_network() -> None:
    found = of()
    consistent(found)
    assert tuple(found.parts) == (
        "parameters", "gradients", "optimizer", "averages", "inputs", "weight_casts", "saved", "transient", "workspace",
        "context",
    )  # fmt: skip
    assert found.parts["context"] == 450 * MIB
    assert found.allocated_bytes == found.peak_bytes - 450 * MIB
    assert found.step_ms is not None
    assert found.step_ms == pytest.approx(found.timeline[-1].ms)
    assert found.where.phase in ("forward", "loss", "backward")
    assert "convolution" in found.unmodelled
    assert found.fits == "yes"
    assert found.profile is CARD


@pytest.mark.parametrize("memory", ["cpu", CARD])
def test_two_forecasts_are_equal(memory: Any) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1))
    first, second = (forecast(net, torch.empty(8, 64), memory=memory, clip_norm=1.0) for _ in range(2))
    assert first.simulation == second.simulation
    assert first.explanation == second.explanation


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", None])
def test_every_precision_and_optimizer(precision: Any, optimizer: Any) -> None:
    found = of(precision=precision, optimizer=optimizer)
    consistent(found)
    states = {"adamw": 2, "sgd": 1, None: 0}[optimizer]
    assert found.parts["optimizer"] >= states * found.parts["parameters"]
    assert (found.parts["optimizer"] > 0) == (optimizer is not None)
    if precision == "32":
        assert found.parts["weight_casts"] == 0


def dense(**settings: Any) -> Forecast:
    """A network without convolutions on this CPU: nothing has to be measured."""
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return forecast(net, torch.empty(8, 64), **{"memory": "cpu", "precision": "32", **settings})


def test_settings_that_cost_memory_cost_it() -> None:
    plain = dense().peak_bytes
    weights = 4 * 2 * (64 * 64 + 64)
    assert dense(averages=True).peak_bytes == plain + weights
    assert dense(optimizer="sgd").peak_bytes <= plain - weights
    # The gradients of the first pass stay while the second makes its own.
    once, twice = dense(optimizer=None).peak_bytes, dense(optimizer=None, accumulate=2).peak_bytes
    assert once < twice <= once + weights + 64


def test_policy_is_a_level_or_names_or_what_the_model_has() -> None:
    model = small()
    plain, every = of(policy=None), of(policy="all")
    consistent(every)
    assert every.peak_bytes < plain.peak_bytes
    assert of(policy="none").simulation == plain.simulation
    assert of(policy=find_regions(model, "all")).simulation == every.simulation
    assert of(model=medckpt.apply_recompute(model, find_regions(model, "all"))).simulation == every.simulation
    assert of(policy=()).simulation == plain.simulation


def test_a_loss_of_the_users() -> None:
    label = torch.zeros(2, 16, 16, 16, dtype=torch.long)
    found = of(loss=lambda logits: nn.functional.cross_entropy(logits, label))
    consistent(found)
    assert found.parts["inputs"] >= label.nbytes


def test_cpu_means_this_machine() -> None:
    found = of(memory="cpu", precision="32")
    consistent(found)
    assert found.parts["context"] == 0
    assert found.profile.device == "cpu"
    assert found.profile.capacity_bytes is not None
    assert found.peak_interval == (found.peak_bytes, found.peak_bytes), "measured, not estimated"
    assert found.unmodelled == {}
    assert found.step_ms is None


@pytest.mark.parametrize("name", ["a100_40gb", "h100_80gb", "v100_16gb", "t4_16gb"])
def test_shipped_profiles(name: str) -> None:
    found = of(memory=name, optimizer=None)
    consistent(found)
    assert found.profile.name == name
    assert found.step_ms is not None


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndevice: cuda\ncapacity_bytes: 1048576\n")
    found = of(memory=path)
    assert (found.profile.name, found.fits) == ("mine", "no")
    assert "does not fit in the 1.0 MiB of mine" in str(found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, r"precision: 'fp8' is not known\. Known: 16-mixed, 32, bf16-mixed"),
        ({"optimizer": "adam"}, r"optimizer: 'adam' is not known\. Did you mean 'adamw'"),
        ({"memory": "a100"}, r"memory=a100: .*Did you mean 'a100_80gb'.*Known: a100_40gb"),
        ({"memory": "a100_40bg"}, r"Did you mean 'a100_40gb'"),
        ({"memory": "cpu", "precision": "16-mixed"}, r"precision=16-mixed: .*GPU"),
        ({"policy": "blocks"}, r"'blocks' is not a level\. Did you mean 'block'"),
        ({"policy": ["nope"]}, r"no module 'nope'"),
        ({"accumulate": 0}, r"accumulate: must be at least 1"),
        ({"loss": lambda logits: logits}, r"loss: must return one number to minimise, not a tensor of shape"),
        ({"loss": lambda logits: 3}, r"loss: must return one number to minimise, not int"),
        ({"loss": lambda logits: logits.mean() * logits.max().item()}, r"forecast: the loss reads values in"),
    ],
)
def test_what_is_wrong_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(**settings)


def with_capacity(capacity: int | None) -> MemoryProfile:
    return dataclasses.replace(CARD, capacity_bytes=capacity)


def test_fits_unless_what_is_estimated_decides() -> None:
    assert [fits_in(with_capacity(100), pair) for pair in ((90, 100), (90, 101), (100, 200), (101, 200))] == [
        "yes", "unsure", "unsure", "no",
    ]  # fmt: skip
    assert fits_in(with_capacity(None), (1, 2)) == "unknown"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(MIB // 2, "512.0 KiB"), (MIB, "1.0 MiB"), (2**30 - 1, "1024.0 MiB"), (2**30, "1.00 GiB")]
)
def test_bytes_as_people_read_them(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_it_goes_through_json() -> None:
    found = of()
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["peak_bytes"] == sum(plain["parts"].values()) == sum(part["bytes"] for part in plain["holders"])
    assert plain["memory"] == "card"
    assert plain["fits"] == "yes"
    assert plain["peak_interval"] == list(found.peak_interval)
    assert plain["reserved_bytes"] == list(found.reserved_bytes)
    assert plain["where"] == {"region": found.where.region, "op": found.where.op, "phase": found.where.phase}
    assert plain["unmodelled"] == found.unmodelled


def test_in_words() -> None:
    lines = str(of()).splitlines()
    assert lines[0].startswith("peak 4")
    assert any(line.split()[:2] == ["context", "450.0"] for line in lines)
    assert any("fits in the 32.00 GiB of a card" in line for line in lines)
    assert any(line.startswith("about ") and line.endswith("ms per step") for line in lines)
    assert any(line.startswith("not certain: convolution") for line in lines)


def test_in_pictures(tmp_path: Path) -> None:
    found = of(optimizer=None)
    figure = found.plot(tmp_path / "step.png")
    assert figure is not None
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    page = found._repr_html_()
    assert "data:image/png;base64," in page
    assert page.startswith("<pre>peak ")


def test_holders_are_parts_of_the_model_and_kinds() -> None:
    names = {name for name, _ in forecast(small(), torch.empty(8, 1, 48, 48, 48), memory=CARD).explanation.holders}
    assert {"context", "inputs"} <= names & set(KINDS)
    assert any(name.startswith("1.") for name in names), names


# Networks as they come: each must either be forecast, with all sums right, or refused in words of our own.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def monai_net(name: str, *args: Any, **settings: Any) -> nn.Module:
    return getattr(pytest.importorskip("monai.networks.nets"), name)(*args, **settings)


VIT = {"hidden_size": 24, "mlp_dim": 48, "num_layers": 2, "num_heads": 2}
ZOO: dict[str, Any] = {
    "UNet": (lambda: monai_net("UNet", 3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, norm="batch"), (16, 16, 16)),
    "AttentionUnet": (lambda: monai_net("AttentionUnet", 3, 1, 2, (4, 8), (2,)), (16, 16, 16)),
    "SegResNet": (lambda: monai_net("SegResNet", init_filters=8, out_channels=2, dropout_prob=0.1), (16, 16, 16)),
    "VNet": (lambda: monai_net("VNet", out_channels=2), (32, 32, 32)),
    "DynUNet": (
        lambda: monai_net(
            "DynUNet", 3, 1, 2, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=(4, 8, 8, 8), deep_supervision=True,
            deep_supr_num=2,
        ),
        (16, 16, 16),
    ),
    "ViTAutoEnc": (lambda: monai_net("ViTAutoEnc", 1, (32,) * 3, (16,) * 3, **VIT), (32, 32, 32)),
    "ViT classifier": (lambda: monai_net("ViT", 1, (16,) * 3, (8,) * 3, classification=True, **VIT), (16, 16, 16)),
    "MAE": (
        lambda: monai_net(
            "MaskedAutoEncoderViT", 1, (16,) * 3, (8,) * 3, **VIT, decoder_hidden_size=24, decoder_num_heads=2
        ),
        (16, 16, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_networks_of_monai(name: str) -> None:
    build, shape = ZOO[name]
    model = build()
    found = forecast(model, torch.empty(1, 1, *shape, device="meta"), memory=CARD, clip_norm=1.0)
    consistent(found)
    assert set(found.unmodelled) == {"convolution"}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert found.peak_bytes - found.parts["context"] > 3 * weights, "weights and both states at the least"


def test_recurrent_networks_are_refused_on_a_card_with_the_reason() -> None:
    with pytest.raises(MedckptError, match=r"lstm.*cuDNN's recurrent networks"):
        forecast(Recurrent(), torch.empty(2, 5, 8), memory=CARD)


def test_what_the_caller_has_switched_changes_nothing() -> None:
    """Gradients off, a device by default, an autocast around it: those are for the caller's own work."""
    network, image = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Conv3d(4, 2, 1)), torch.empty(2, 1, 16, 16, 16)
    expected = forecast(network, image, precision="32").peak_bytes
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        with context:
            assert forecast(network, image, precision="32").peak_bytes == expected
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_losses_that_hold_real_tensors() -> None:
    label = torch.zeros(2, 16, 16, 16, dtype=torch.long)
    criterion = nn.CrossEntropyLoss(weight=torch.ones(2))
    larger, weights = torch.zeros(2, 2, 32, 32, 32), torch.ones(3)
    for loss in (
        lambda logits: criterion(logits, label),
        lambda logits: nn.functional.mse_loss(logits, nn.functional.interpolate(larger, size=(16, 16, 16))),
        lambda logits: logits.square().mean() * (2 if min(weights) > 0 else 1),
    ):
        for precision in ("32", "bf16-mixed"):
            consistent(of(loss=loss, precision=precision))
