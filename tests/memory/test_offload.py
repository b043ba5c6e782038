"""Offload is exact: every comparison here is bit for bit, against the same step without it."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import medckpt
from medckpt.errors import ConfigError
from medckpt.lean.swap import apply_lean, undo_lean
from medckpt.memory import offload_copies
from medckpt.memory.apply import applied, apply_recompute, undo
from medckpt.memory.host_memory import HostPool, Link, Span
from medckpt.memory.offload import apply_offload, offloaded, undo_offload
from medckpt.memory.offload_copies import Lane
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step
from tests.memory.test_apply import Net, assert_same, net, one_step, swin_unetr, unetr, volume

MIB = 2**20


@pytest.fixture(autouse=True)
def one_thread():
    """With several, accumulating `index_put` (Swin's bias table) adds in any order: no step repeats bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def offload(model: nn.Module, regions=("",), limit: int | None = None, floor: int = 1) -> nn.Module:
    return apply_offload(model, regions, host_limit_bytes=limit, floor_bytes=floor)


def lane(model: nn.Module):
    """What keeps track of the copies, shared by all regions."""
    (found,) = model.get_submodule(offloaded(model)[0]).__dict__["forward"].offloader._lanes.values()
    return found


def on_host(model: nn.Module) -> int:
    """Bytes of the storages that are on the host now."""
    return sum(one.nbytes for one in lane(model)._live.values() if one.spans is not None)


def compare(
    model: nn.Module, regions, *inputs: object, limit: int | None = None, steps: int = 3, **kwargs
) -> nn.Module:
    """Runs some steps of a copy without offload and of `model` with it, and asserts that they are the same."""
    plain = copy.deepcopy(model)
    offload(model, regions, limit)
    for _ in range(steps):
        assert_same(one_step(model, *inputs, **kwargs), one_step(plain, *inputs, **kwargs))
    if limit is None:
        assert lane(model).link.pool.total_bytes, "nothing was offloaded"
    return model


# ---------------------------------------------------------------------------------------------- whole networks


def vit() -> tuple[nn.Module, torch.Tensor]:
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.ViT(
        1, (16, 16, 16), (4, 4, 4), hidden_size=24, mlp_dim=48, num_layers=3, num_heads=4, dropout_rate=0.1
    )
    model.register_forward_hook(first_of)
    return model, volume(2, 1, 16, 16, 16)


def first_of(module: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0]


def batch_unet() -> tuple[nn.Module, torch.Tensor]:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=2, norm="batch"), volume(2, 1, 16, 16, 16)


def dropout_everywhere() -> tuple[nn.Module, torch.Tensor]:
    parts = [nn.Conv3d(2, 2, 3, padding=1), nn.Dropout(0.3), nn.RReLU(), nn.Dropout3d(0.3), nn.AlphaDropout(0.2)]
    return nn.Sequential(*parts, *net().blocks), volume()


def shares_weights() -> tuple[nn.Module, torch.Tensor]:
    block = net().blocks[0]
    model = Net(block, net().blocks[1], block)
    model.blocks[1].conv.weight = block.conv.weight
    return model, volume()


def in_place() -> tuple[nn.Module, torch.Tensor]:
    acts = (nn.ReLU(True), nn.LeakyReLU(0.1, True), nn.ELU(inplace=True), nn.Dropout(0.3, True), nn.SiLU(True))
    blocks = [nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.InstanceNorm3d(2), act) for act in acts[:4]]
    return Net(*blocks, nn.Sequential(nn.BatchNorm3d(2), acts[4])), volume()


NETWORKS = [swin_unetr, unetr, vit, batch_unet, dropout_everywhere, shares_weights, in_place]


def in_float32(module: nn.Module) -> None:
    """oneDNN's bf16 gradient of a Conv3d weight is not repeatable (and wrong) where a side has two voxels or fewer."""
    kind = type(module)

    class Float32(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    module.__class__ = Float32


@pytest.mark.parametrize("build", NETWORKS)
def test_training_step_is_bit_identical(build):
    torch.manual_seed(0)
    model, x = build()
    keys = list(model.state_dict())
    regions = {
        shares_weights: ("blocks.0", "blocks.1"),
        dropout_everywhere: ("0", "1", "2", "3", "5"),
        in_place: ("blocks.0", "blocks.1", "blocks.3"),
    }.get(build) or find_regions(model, "all")
    compare(model, regions, x, steps=2)
    assert offloaded(model) == regions
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("build", NETWORKS[1:])
def test_training_step_under_autocast_and_a_limit_is_bit_identical(build):
    torch.manual_seed(0)
    model, x = build()
    for name in ("encoder10", "model.1.submodule.1.submodule"):
        if name in dict(model.named_modules()):
            in_float32(model.get_submodule(name))
    compare(model, ("",), x, limit=20_000, steps=1 if build is unetr else 2, bf16=True)
    assert 0 < lane(model).link.pool.total_bytes <= 20_000


def test_a_region_that_is_called_many_times_per_step():
    torch.manual_seed(0)
    block = net().blocks[0]
    compare(Net(block, block, nn.Sequential(block, block)), ("blocks.0",), volume(), steps=4)


# ---------------------------------------------------------------------------------------------- what leaves the device


class Chain(nn.Module):
    """`depth` times sin: each saves its input, of as many bytes as the model's input."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[weakref.ref] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for _ in range(self.depth):
            if len(self.seen) < self.depth:
                self.seen.append(weakref.ref(x.untyped_storage()))
            x = x.sin()
        return x


def alive(model: Chain) -> list[bool]:
    return [storage() is not None for storage in model.seen]


def test_the_device_s_tensors_are_freed_between_forward_and_backward():
    plain, model = Net(Chain(5)), offload(Net(Chain(5)), ["blocks.0"])
    x = volume(100, 10)
    held = plain(x), model(x)
    assert alive(plain.blocks[0]) == [True] * 5
    assert alive(model.blocks[0]) == [False] * 5
    assert on_host(model) == 6 * 4000, "five inputs of sin, and that of the product"
    held[1].sum().backward()
    assert on_host(model) == 0
    pool = lane(model).link.pool
    model(x)  # spans come back at the next use
    assert pool.total_bytes == 64 * MIB, "the second step takes what the first has left"


def test_what_finds_no_room_stays():
    model = offload(Net(Chain(5)), ["blocks.0"], limit=2 * 4096)
    out = model(volume(1024, 1))
    assert alive(model.blocks[0]) == [False, True, True, True, True], "the product's input was first"
    out.sum().backward()
    assert not any(alive(model.blocks[0]))


def test_what_is_below_the_floor_stays():
    model = offload(Net(Chain(3)), ["blocks.0"], floor=4001)
    out = model(volume(100, 10))
    assert alive(model.blocks[0]) == [True] * 3
    assert out.requires_grad
    undo_offload(model)
    model.blocks[0].seen.clear()
    offload(model, ["blocks.0"], floor=4000)
    out = model(volume(100, 10))
    assert alive(model.blocks[0]) == [False] * 3


def test_at_most_four_are_back_at_a_time():
    """Two in use and two ahead, on a device that copies in the background."""
    graph = trace_step(offload(Net(Chain(12)), ["blocks.0"]), torch.empty(8 * MIB, 4), Step(precision="32"))
    back = [i for i, s in enumerate(graph.storages) if s.born >= 0 and "from_host" in graph.ops[s.born].name]
    assert len(back) == 10, "two of twelve had not left yet; the input was there"
    now = highest = 0
    for _, storage, change in graph.events:
        now += change * (storage in back)
        highest = max(highest, now)
    assert highest <= 4


class Views(nn.Module):
    """Saves views of one storage: chunks, transposed, expanded, of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        z = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
        row = y[:1].expand(4, -1, -1)
        return (z * z.conj() * z.conj()).abs().sum(-1) + (row[:1] * row[1:2]).sum(-1) + y[..., 1::2].sin().sum(-1)


def test_views_keep_strides_and_offsets_and_share_a_copy():
    torch.manual_seed(0)
    model = compare(Net(Views()), ("blocks.0",), volume(2, 5, 8))
    out = model(volume(2, 5, 8))
    sizes = [one.nbytes for one in lane(model)._live.values()]
    assert sizes.count(2 * 5 * 24 * 4) == 1, "query, key and value as one"
    assert out.requires_grad


def test_parameters_buffers_and_weight_casts_stay():
    torch.manual_seed(0)
    model = offload(Net(nn.Linear(64, 32), nn.BatchNorm1d(32)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(volume(4, 64).requires_grad_())
    sizes = sorted(one.nbytes for one in lane(model)._live.values())
    cast_input, batch = 4 * 64 * 2, 4 * 32 * 2
    assert set(sizes) <= {cast_input, batch, 32 * 4}, "32 * 64 weights of two bytes, or four, would be more"
    assert cast_input in sizes
    assert batch in sizes
    assert out.requires_grad
    frozen = Net(nn.Linear(64, 32)).requires_grad_(False)
    offload(frozen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = frozen(volume(4, 64).requires_grad_())
    assert [one.nbytes for one in lane(frozen)._live.values()] == [64 * 32 * 2], (
        "of a frozen weight each use has a cast"
    )


def test_what_others_keep_is_not_copied_again_after_the_first_step():
    torch.manual_seed(0)
    model = offload(Net(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)), ["blocks.0"])
    x = volume(16, 8)
    twin = undo_offload(copy.deepcopy(model))
    lent = []
    for _ in range(3):
        out = model(x)
        lent.append(on_host(model))
        one = torch.autograd.grad(out.sum(), list(model.parameters()))
        assert all(map(torch.equal, one, torch.autograd.grad(twin(x).sum(), list(twin.parameters()))))
    size = 16 * 8 * 4
    assert lent == [2 * size, 0, 0], "the input is the caller's, and the next layer saves tanh's result"


def test_what_others_keep_no_longer_is_copied_again():
    torch.manual_seed(0)
    model = offload(Net(Chain(3), nn.Tanh()), ["blocks.0"])
    x = volume(16, 8)
    kept = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    lent = []
    for step in range(4):
        out = model(x if step == 0 else x.clone())
        lent.append(on_host(model))
        if step:
            kept.clear()
        out.sum().backward()
    size = 16 * 8 * 4
    assert lent == [4 * size, 3 * size, 4 * size, 4 * size]


# ---------------------------------------------------------------------------------------------- changes in place


class Changes(nn.Module):
    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        y = x.exp()  # saves its result
        z = y.sin()
        with torch.no_grad():
            if how == "tensor":
                y.add_(1)
            elif how == "view":
                y[0].zero_()
            elif how == "base":
                z = z[1:].cos()
                z._base.mul_(2)
        return z.sum() + y.sum()


@pytest.mark.parametrize("kwargs", [{}, {"floor": MIB}, {"limit": 0}], ids=["offloaded", "small", "no room"])
@pytest.mark.parametrize("how", ["tensor", "view", "none"])
def test_in_place_change_after_saving_is_an_error_as_in_torch(how, kwargs):
    plain, model = Changes(), offload(Changes(), **kwargs)
    for one in (plain, model):
        x = volume(3, 4).requires_grad_()
        out = one(x, how)
        if how == "none":
            out.backward()
        else:
            with pytest.raises(
                RuntimeError, match=r"modified by an inplace operation.* is at version 1; expected version 0"
            ):
                out.backward()


def test_in_place_change_outside_of_the_region_is_an_error():
    model = offload(Net(Chain(2)), ["blocks.0"])
    x = volume(100, 10)
    out = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class SavesTwice(nn.Module):
    """Saves a tensor before and after a change, and needs the second state only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        unused, other = y.sin(), x.exp()
        y.mul_(2)
        out = y.cos().sum() + other.sum()
        del unused
        return out


def test_each_state_of_a_tensor_has_a_copy():
    compare(SavesTwice(), ("",), volume(3, 4).requires_grad_())


# ---------------------------------------------------------------------------------------------- backward in other ways


def gradients(model: nn.Module, x: torch.Tensor, how: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    parameters = list(model.parameters())
    if how == "retained":
        loss = model(x).square().mean()
        once = torch.autograd.grad(loss, parameters, retain_graph=True)
        return [*once, *torch.autograd.grad(loss, parameters)]
    if how == "second order":
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().mean(), parameters))
    if how == "two forwards":
        first, second = model(x), model(2 * x)
        return [*torch.autograd.grad(first.sum(), parameters), *torch.autograd.grad(second.sum(), parameters)]
    if how == "in parts":
        loss = model(x)
        one = torch.autograd.grad(loss[0].square().sum(), parameters, retain_graph=True)
        return [*one, *torch.autograd.grad(loss[1].square().sum(), parameters)]
    if how == "saved on cpu":
        with save_on_cpu():
            return list(torch.autograd.grad(model(x).square().mean(), parameters))
    model(x)  # "dropped": a graph that is never used
    return list(torch.autograd.grad(model(x).square().mean(), parameters))


@pytest.mark.parametrize("regions", [("",), ("blocks.0",)], ids=["whole", "one block"])
@pytest.mark.parametrize("how", ["retained", "second order", "two forwards", "in parts", "saved on cpu", "dropped"])
def test_backward_in_other_ways(how, regions):
    plain = net()
    model = offload(copy.deepcopy(plain), regions)
    for _ in range(2):
        found = gradients(model, volume(), how)
        assert all(map(torch.equal, found, gradients(plain, volume(), how)))
    gc.collect()
    assert on_host(model) == 0


class LateLink(Link):
    """Copies as late as a stream may: when somebody waits for them, in order. Both sides must still be there then."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(pool)
        self.queue: deque[tuple[int, Callable[[], None]]] = deque()
        self.events = 0

    def send(self, flat: torch.Tensor, spans: Sequence[Span]) -> int:
        return self.later(self._send, flat, spans)

    def fetch(self, numel, dtype, device, spans: Sequence[Span]) -> tuple[torch.Tensor, int]:
        flat = torch.zeros(numel, dtype=dtype)
        return flat, self.later(self._fetch, flat, spans)

    def later(self, copies: Callable[..., None], flat: torch.Tensor, spans: Sequence[Span]) -> int:
        storage, dtype = weakref.ref(flat.untyped_storage()), flat.dtype

        def run() -> None:
            assert storage() is not None, "the device's memory was freed before a copy was done"
            copies(torch.empty(0, dtype=dtype).set_(storage()), spans, blocking=True)

        self.events += 1
        self.queue.append((self.events, run))
        return self.events

    def finished(self, event: int) -> bool:
        return not self.queue or self.queue[0][0] > event

    def use(self, flat: torch.Tensor, event: int) -> None:
        self.release(event)

    def release(self, event: int) -> None:
        while not self.finished(event):
            self.queue.popleft()[1]()


@pytest.mark.parametrize("limit", [None, 4096])
@pytest.mark.parametrize("how", ["retained", "second order", "two forwards", "in parts", "dropped"])
def test_copies_that_are_late_change_nothing(how, limit, monkeypatch):
    monkeypatch.setattr(offload_copies, "_AHEAD_BYTES", 0)  # two of any size
    plain = net(lambda: nn.BatchNorm3d(2))
    model = offload(copy.deepcopy(plain), ["blocks.0", "blocks.1"])
    link = LateLink(HostPool(limit))
    model.blocks[0].__dict__["forward"].offloader._lanes[torch.device("cpu"), None] = Lane(link)
    for _ in range(3):
        found = gradients(model, volume(), how)
        assert all(map(torch.equal, found, gradients(plain, volume(), how)))
    assert link.events > (40 if limit is None else 10)
    gc.collect()
    assert on_host(model) == 0


def test_without_gradients_it_runs_as_before():
    model = offload(net().eval())
    with torch.no_grad():
        out = model(volume())
    with torch.inference_mode():
        assert torch.equal(out, model(volume()))
    assert not model.__dict__["forward"].offloader._lanes
    assert torch.equal(out, undo_offload(model)(volume()))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpoint_elsewhere_and_inside():
    for regions in (("blocks.1",), ("blocks.0",)):
        torch.manual_seed(0)
        model = Net(Checkpointed(net()), net(), Checkpointed(net()))
        compare(model, regions, volume())


def test_recompute_elsewhere_and_inside():
    for regions in (("blocks.2", "blocks.1"), ("blocks.0",)):
        torch.manual_seed(0)
        model = Net(net(), net(), net())
        plain = copy.deepcopy(model)
        apply_recompute(model, ["blocks.0.blocks.1"])
        offload(model, regions)
        assert applied(model).regions == ("blocks.0.blocks.1",)
        for _ in range(2):
            assert_same(one_step(model, volume()), one_step(plain, volume()))


def test_hooks_of_the_user_inside_a_region_are_his():
    class OnCpu(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                return super().forward(x)

    compare(Net(OnCpu(*net().blocks), net()), ("blocks.0", "blocks.1"), volume())


# ---------------------------------------------------------------------------------------------- the module stays itself


def test_lean_operators_inside():
    torch.manual_seed(0)
    model, x = vit()
    lean = apply_lean(copy.deepcopy(model))
    expected = one_step(lean, x)
    regions = find_regions(model, "all")
    for order in ((apply_lean, offload), (offload, apply_lean)):
        both = copy.deepcopy(model)
        for apply in order:
            apply(both, regions) if apply is offload else apply(both)
        assert_same(one_step(both, x), expected)
        assert_same(one_step(undo_offload(copy.deepcopy(both)), x), expected)
        assert_same(one_step(undo_lean(copy.deepcopy(both)), x), one_step(model, x))


def test_copies_and_pickles_keep_it():
    model = net()
    plain = one_step(copy.deepcopy(model), volume())
    calls = []
    offload(model, ["blocks.0", "blocks.1"], limit=10_000)
    one_step(model, volume())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert offloaded(twin) == ("blocks.0", "blocks.1")
        assert_same(one_step(twin, volume()), plain)
        first, second = (block.__dict__["forward"] for block in twin.blocks)
        assert first.offloader is second.offloader
        assert first.module is twin.blocks[0]
        assert lane(twin) is not lane(model)
        assert lane(twin).link.pool.total_bytes <= 10_000
    model.blocks[0].register_forward_hook(lambda *args: calls.append(1))
    one_step(model, volume())
    assert calls == [1]


def test_a_model_that_keeps_its_output_is_freed():
    model = offload(net(), ["blocks.0"])
    model.output = model(volume())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def ddp_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for kind in ("plain", "offloaded"):
        model = net(lambda: nn.BatchNorm3d(2))
        if kind == "offloaded":
            offload(model, ["blocks.0", "blocks.1"])
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            parallel(torch.randn(2, 2, 4, 4, 4)).square().mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{folder}/{kind}{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ddp_is_bit_identical(tmp_path):
    mp.spawn(ddp_worker, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        plain, other = (torch.load(tmp_path / f"{kind}{rank}.pt") for kind in ("plain", "offloaded"))
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_compiling_around_it_runs_it_as_it_is():
    torch.manual_seed(0)
    model = Net(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8), nn.Tanh()))
    plain = one_step(copy.deepcopy(model), volume(4, 8))
    compiled = torch.compile(offload(model, ["blocks.1"]), backend="eager")
    compiled(volume(4, 8)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.gradients[name])


# ---------------------------------------------------------------------------------------------- the forecast


def device(**changes: object) -> MemoryProfile:
    facts = {
        "name": "card",
        "device": "cuda",
        "capacity_bytes": 2**36,
        "bandwidth_gb_s": 1000.0,
        "fp32_tflops": 10.0,
        "host_link_gb_s": 20.0,
    }
    return MemoryProfile(**(facts | changes))  # type: ignore[arg-type]


def forecast(model: nn.Module, **changes: object) -> medckpt.Forecast:
    x = torch.empty(8 * MIB, 4, device="meta")  # 128 MiB
    return medckpt.forecast(model, x, precision="32", optimizer=None, memory=device(**changes))


def test_forecast_shows_a_lower_peak_and_the_time_of_the_copies():
    plain, less = forecast(Net(Chain(10))), forecast(offload(Net(Chain(10)), ["blocks.0"]))
    one = 128 * MIB
    assert plain.parts["saved"] >= 10 * one
    assert less.parts["saved"] < 3.1 * one, "two that had not left, and the output"
    assert plain.peak_bytes - less.peak_bytes >= 4 * one
    # There: input, and ten that sin saves. Back: all but the input, which the caller has, and two that had not left.
    extra = (11 + 8) * one / 20e9 * 1e3
    assert less.step_ms - plain.step_ms == pytest.approx(extra, rel=0.01)
    assert less.unmodelled == plain.unmodelled
    assert forecast(offload(Net(Chain(10)), ["blocks.0"]), host_link_gb_s=None).step_ms is None
    assert forecast(Net(Chain(10)), host_link_gb_s=None).step_ms == plain.step_ms


def test_forecast_knows_the_limit():
    peaks = [
        forecast(offload(Net(Chain(10)), ["blocks.0"], limit=128 * MIB * count)).peak_bytes for count in (0, 3, 6, 9)
    ]
    assert peaks[0] == forecast(Net(Chain(10))).peak_bytes
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] - peaks[2] == 3 * 128 * MIB


def test_forecast_of_a_network_on_a_card():
    model, _ = vit()
    x = torch.empty(512, 1, 16, 16, 16, device="meta")
    kwargs = {"precision": "bf16-mixed", "optimizer": None, "memory": device()}
    plain = medckpt.forecast(model, x, **kwargs)
    less = medckpt.forecast(apply_offload(model, find_regions(model, "all")), x, **kwargs)
    assert less.parts["saved"] < plain.parts["saved"] / 2
    assert less.peak_bytes < 0.7 * plain.peak_bytes


def test_forecast_on_a_cpu_saves_nothing():
    """There the host's memory is the device's."""
    profile = MemoryProfile(name="here", device="cpu")
    kwargs = {"precision": "32", "optimizer": None, "memory": profile}
    x = torch.empty(4 * MIB, 4, device="meta")
    plain = medckpt.forecast(Net(Chain(4)), x, **kwargs)
    copies = medckpt.forecast(offload(Net(Chain(4)), ["blocks.0"]), x, **kwargs)
    assert copies.peak_bytes >= plain.peak_bytes


# ---------------------------------------------------------------------------------------------- host memory


def test_pool_lends_in_pieces_and_keeps_to_its_limit():
    pool = HostPool(200 * MIB, virtual=True)
    loans = [pool.take(30 * MIB) for _ in range(6)]
    assert all(loan is not None for loan in loans)
    assert pool.take(30 * MIB) is None
    assert pool.total_bytes <= 200 * MIB
    for loan in loans[::2]:
        pool.give(loan)
    wide = pool.take(90 * MIB)
    assert len(wide) > 1
    assert sum(span.stop - span.start for span in wide) == 90 * MIB
    taken = sorted([*wide, *(span for loan in loans[1::2] for span in loan)])
    assert all(a.slab != b.slab or a.stop <= b.start for a, b in itertools.pairwise(taken)), "no overlap"
    for loan in (wide, *loans[1::2]):
        pool.give(loan)
    assert pool.free_bytes == pool.total_bytes
    assert len(pool._free) == len(pool._slabs), "neighbours are one again"


def test_pool_returns_the_bytes_that_were_put_in():
    pool = HostPool(None)
    spans = pool.take(64 * MIB + 5)
    assert len(spans) == 2
    values = torch.randint(0, 255, (64 * MIB + 5,), dtype=torch.uint8)
    for piece, first, end in pool.pieces(spans, values.numel()):
        piece.copy_(values[first:end])
    back = torch.cat([piece for piece, _, _ in pool.pieces(spans, values.numel())])
    assert torch.equal(back, values)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ("blocks.0", "not the text 'blocks.0'"),
        (["block.0"], r"no module 'block.0'. Did you mean 'blocks.0'\?"),
        (["blocks.0", "blocks.0"], "are the same module. Name it once"),
        (["blocks.0", "blocks.0.conv"], "'blocks.0.conv' lies inside region 'blocks.0'"),
        (["blocks"], "a container is never called"),
    ],
)
def test_regions_that_are_refused(regions, message):
    model = net()
    with pytest.raises(ConfigError, match=f"Offload.*{message}"):
        apply_offload(model, regions)
    assert offloaded(model) == ()


def test_second_application_is_refused():
    model = offload(net(), ["blocks.0"])
    with pytest.raises(ConfigError, match=r"applied to this model already \(blocks.0\). Call undo_offload"):
        offload(model, ["blocks.1"])


@pytest.mark.parametrize("kwargs", [{"host_limit_bytes": -1}, {"floor_bytes": 1.5}])
def test_numbers_out_of_range_are_refused(kwargs):
    with pytest.raises(ConfigError, match="must be a number of bytes"):
        apply_offload(net(), ["blocks.0"], **kwargs)


@pytest.mark.parametrize("region", ["blocks.0", "blocks.0.blocks.1", "blocks.0.blocks.1.conv"])
def test_what_is_recomputed_is_refused(region):
    model = apply_recompute(Net(net(), net()), ["blocks.0"])
    with pytest.raises(
        ConfigError, match=rf"Offload of '{region}'.*module 'blocks.0' \(Net\) recomputes it.*one of the two"
    ):
        offload(model, [region])


def test_recompute_around_it_that_comes_later_is_refused():
    model = offload(Net(net(), net()), ["blocks.0.blocks.1"])
    with pytest.raises(ConfigError, match=r"runs inside of a recomputed region.*undo_offload\(model\)"):
        apply_recompute(model, ["blocks.0"])(volume())
    undo(model)
    compare(undo_offload(model), ("blocks.0",), volume())
    model = offload(Net(Checkpointed(net())), ["blocks.0.inner.blocks.1"])
    with pytest.raises(ConfigError, match="runs inside of a recomputed region"):
        model(volume())


def test_checkpointing_of_the_network_s_own_is_refused_around_and_not_inside():
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.SwinUNETR(1, 2, feature_size=12, use_checkpoint=True)
    with pytest.raises(ConfigError, match=r"\(BasicLayer\) recomputes it"):
        offload(model, ["swinViT.layers1.0.blocks.0.attn"])
    assert offloaded(offload(model, ["swinViT.layers1.0"])) == ("swinViT.layers1.0",)


def test_compiled_parallel_and_scripted_modules_are_refused():
    with pytest.raises(ConfigError, match="is compiled"):
        offload(Net(torch.compile(net().blocks[0], backend="eager")), ["blocks.0"])
    with pytest.raises(ConfigError, match="TorchScript"):
        offload(Net(torch.jit.script(nn.Linear(2, 2))), ["blocks.0"])
    with pytest.raises(ConfigError, match="data-parallel wrapper"):
        offload(Net(nn.DataParallel(nn.Linear(2, 2))), ["blocks.0"])


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_peak_falls_and_nothing_else_changes():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Dropout(0.1)) for _ in range(12))).cuda()
    x = torch.randn(32 * 1024, 1024, device="cuda")
    peaks, found = [], []
    for regions in ((), [str(i) for i in range(12)]):
        apply_offload(model, regions)
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(1)
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            peaks.append(torch.cuda.max_memory_allocated())
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert peaks[-1] < 0.6 * peaks[0]
