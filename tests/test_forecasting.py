"""`medckpt.forecast`, as its users call it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import medckpt
from medckpt.errors import ConfigError, MedckptError, size
from medckpt.forecasting import Forecast, fits_in, forecast
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
        "parameters", "gradients", "buckets", "optimizer", "averages", "inputs", "weight_casts", "saved", "transient",
        "workspace", "context",
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
        ({"policy": 3}, r"policy: must be a level .*not 3 \(int\)"),
        ({"policy": ["1", 3]}, r"policy: must be a level .*not \['1', 3\] \(list\)"),
        ({"model": "swin", "policy": "all"}, r"model: must be an nn.Module, not str"),
        (
            {"model": nn.Sequential(nn.LazyConv3d(4, 3)), "policy": "all"},
            r"model: '0' \(LazyConv3d\) has no shapes yet",
        ),
        ({"accumulate": 2.0}, r"accumulate: must be a whole number"),
        ({"clip_norm": "x"}, r"clip_norm: must be a number"),
        ({"optimizer": torch.optim.AdamW}, r"optimizer: must be a name or None"),
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
    for name, magic in {"step.pdf": b"%PDF", "step.SVG": b"<?xml"}.items():
        found.plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    for name in ("step", "step.jpeg", "step.pdf.tmp"):
        with pytest.raises(ConfigError, match=rf"{name}: .*suffix.*Known: \.png, \.pdf, \.svg"):
            found.plot(tmp_path / name)
        assert not (tmp_path / name).exists()
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


def test_of_many_passes_the_forecast_says_what_it_shows() -> None:
    one, two, eight = (of(accumulate=passes) for passes in (1, 2, 8))
    assert (one.notes, two.notes) == ((), ())
    assert eight.notes[0].startswith("timeline and picture show 2 of the 8 forward and backward passes of a step")
    assert f"note: {eight.notes[0]}" in str(eight).splitlines()
    assert eight.to_dict()["notes"] == list(eight.notes)
    assert eight.peak_bytes == two.peak_bytes
    assert eight.step_ms == pytest.approx(4 * two.step_ms)
    starts = [a.phase != "forward" == b.phase for a, b in itertools.pairwise(eight.timeline)]
    assert sum(starts) == 1, "a second forward pass, and no third"


def test_models_on_the_meta_device_and_empty_batches_are_forecast() -> None:
    with torch.device("meta"):
        network = small()
    assert of(model=network).peak_bytes == of().peak_bytes
    found = forecast(small(), torch.empty(0, 1, 16, 16, 16), memory=CARD)
    assert found.parts["inputs"] == found.parts["saved"] == 0


@pytest.mark.parametrize("memory", ["cpu", CARD])
def test_absurd_sizes_are_answered_without_being_allocated(memory: Any) -> None:
    found = forecast(small(), torch.empty(10**9, 1, 96, 96, 96, device="meta"), memory=memory)
    assert found.fits == "no"
    assert found.peak_bytes > 10**15
    if memory == "cpu":
        assert "too large to be run on this machine" in found.unmodelled["convolution.default"]


def dense_net() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    return nets.DenseNet121(3, 1, 2, init_features=4, growth_rate=2, block_config=(2, 2), bn_size=2)


def test_the_head_of_a_densenet_is_no_region_as_it_changes_its_input() -> None:
    plain, recomputed = dense_net(), dense_net()
    regions = find_regions(recomputed, "all")
    assert "features.denseblock1.denselayer1" in regions
    assert not any(name.startswith("class_layers") for name in regions)
    medckpt.apply_recompute(recomputed, regions)
    image = torch.randn(2, 1, 32, 32, 32)
    for enabled in (False, True):
        for network in (plain, recomputed):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                network(image).float().square().mean().backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for precision in ("32", "bf16-mixed"):
        consistent(forecast(dense_net(), image, policy="all", precision=precision, memory=CARD))  # type: ignore[arg-type]


def test_a_region_that_changes_its_input_is_refused_in_the_first_forward() -> None:
    network = medckpt.apply_recompute(dense_net(), ["class_layers"])
    with pytest.raises(ConfigError, match="Recompute of a Sequential: its forward changes its input in place"):
        network(torch.randn(2, 1, 32, 32, 32))
    with pytest.raises(ConfigError, match="changes its input in place"):
        forecast(dense_net(), torch.empty(2, 1, 32, 32, 32), policy=["class_layers"], memory=CARD)
