"""CUDA's rules on fake CPU tensors: each kind of rule, the way out, and byte parity with the real dispatcher.

The parity tests need a CUDA build of torch (`pip install torch==2.14.1`), not a GPU:
`PYTHONPATH=. python -m pytest tests/memory/test_autocast.py -n 0`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from medckpt.errors import ConfigError, MedckptError
from medckpt.memory.autocast import POLICY, autocast, cuda_rules
from medckpt.memory.measure import fake_copy
from medckpt.memory.operands import real_constants

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = ("32", "bf16-mixed", "16-mixed")
DTYPES = {"bf16-mixed": BF16, "16-mixed": FP16}
cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch is a CPU build: CUDA's dispatcher, the truth here, is not in it"
)
Saved = list[tuple[tuple[int, ...], torch.dtype]]


@contextmanager
def tracing(precision: str = "bf16-mixed", **kwargs: Any) -> Iterator[None]:
    with cuda_rules(precision, **kwargs), FakeTensorMode(), autocast(precision):
        yield


def saved(function: Callable[[], Any], owned: frozenset[int] = frozenset()) -> tuple[Any, Saved, int]:
    """Returns what `function` returns, shape and dtype of each storage it saves, and their bytes."""
    storages: dict[int, torch.UntypedStorage] = {}
    listed: Saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in owned and key not in storages:
            storages[key] = tensor.untyped_storage()
            listed.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    return out, listed, sum(storage.nbytes() for storage in storages.values())


def leaf(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)


# --- the rules, one kind each


def test_float32_list_casts_and_saves_the_cast() -> None:
    with tracing():
        out, kept, _ = saved(lambda: F.layer_norm(leaf(2, 8, dtype=BF16), (8,)))
    assert out.dtype == FP32
    assert kept == [((2, 8), FP32), ((2, 1), FP32), ((2, 1), FP32)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_softmax_is_asked_for_float32_and_its_input_is_not_kept(precision: str) -> None:
    with tracing(precision):
        x = leaf(2, 8, dtype=DTYPES[precision])
        for call in (lambda: x.softmax(-1), lambda: F.softmax(x, -1, dtype=FP32), lambda: x.log_softmax(-1)):
            out, kept, _ = saved(call)
            assert out.dtype == FP32
            assert kept == [((2, 8), FP32)]
        assert x.softmax(-1, dtype=torch.float64).dtype == torch.float64
        assert x.sum().dtype == x.norm().dtype == x.norm(dim=-1, keepdim=True).dtype == x.prod().dtype == FP32


def test_a_weight_is_cast_once_for_operators_of_both_origins() -> None:
    with tracing():
        x, weight = leaf(2, 8, dtype=BF16), nn.Parameter(torch.empty(8, 8))
        # linear is torch's own kernel, einsum ours: both look into autocast's cache.
        out, kept, _ = saved(lambda: torch.einsum("ij,jk->ik", F.linear(F.linear(x, weight), weight), weight))
    assert out.dtype == BF16
    assert [shape for shape, _ in kept].count((8, 8)) + [shape for shape, _ in kept].count((1, 8, 8)) == 1
    assert {dtype for _, dtype in kept} == {BF16}


def test_cross_entropy_sums_up_in_float32() -> None:
    with tracing():
        target = torch.zeros(2, 4, dtype=torch.int64)
        out, kept, _ = saved(lambda: F.cross_entropy(leaf(2, 3, 4, dtype=BF16), target))
    assert out.dtype == FP32
    # cross_entropy_loss asks log_softmax for the dtype of its input; nll_loss2d, on the list, is what casts.
    assert kept[:2] == [((2, 3, 4), BF16), ((2, 3, 1, 4), FP32)]


def test_operators_that_only_the_cpu_casts_pass_through() -> None:
    with tracing():
        x = leaf(1, 2, 4, 4, 4, dtype=BF16)
        assert F.max_pool3d(x, 2).dtype == F.adaptive_avg_pool3d(x, 1).dtype == BF16
        assert torch.cat([x, x]).dtype == BF16
        assert F.grid_sample(x, torch.empty(1, 2, 2, 2, 3), align_corners=False).dtype == FP32  # promotes


def test_what_cuda_refuses_or_nobody_knows_is_refused() -> None:
    with tracing():
        with pytest.raises(MedckptError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(leaf(2), torch.empty(2))
        with pytest.raises(MedckptError, match="cuDNN's recurrent networks"):
            nn.LSTM(4, 4)(leaf(3, 1, 4))


def test_autocast_of_cuda_within_a_model_is_heeded() -> None:
    with tracing():
        with torch.autocast("cuda", enabled=False):
            assert F.linear(leaf(2, 8), leaf(8, 8)).dtype == FP32
        with torch.autocast("cuda"):
            assert F.linear(leaf(2, 8), leaf(8, 8)).dtype == FP16
        assert F.linear(leaf(2, 8), leaf(8, 8)).dtype == BF16


def test_recompute_follows_the_rules() -> None:
    seen: list[torch.dtype] = []

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(F.linear(x, weight), (8,))
        seen.append(normed.dtype)
        return F.dropout(F.gelu(normed), 0.1)

    with cuda_rules("bf16-mixed"), FakeTensorMode():
        x, weight = leaf(2, 8), leaf(8, 8)
        with autocast("bf16-mixed"):
            loss = checkpoint(block, x, weight, use_reentrant=False).sum()
        loss.backward()
        assert seen == [FP32, FP32]
        assert weight.grad is not None
        assert weight.grad.dtype == FP32


def test_dice_loss_lists_its_axes() -> None:
    losses = pytest.importorskip("monai.losses")
    loss = losses.DiceCELoss(to_onehot_y=True, softmax=True)
    with tracing(), real_constants():
        out = loss(leaf(1, 3, 4, 4, 4), torch.zeros(1, 1, 4, 4, 4, dtype=torch.int64))
        assert isinstance(out, FakeTensor)
        assert out.dtype == FP32
        axes = torch.arange(2, 5)
        assert axes.tolist() == [2, 3, 4]
        axes += 1
        assert axes.tolist() == [3, 4, 5]


# --- the way in and out


def probe() -> list[Any]:
    """Returns dtypes that tell one rule from the other: of results, of a mask, of statistics."""
    with FakeTensorMode(), torch.autocast("cpu", dtype=BF16):
        x = torch.empty(1, 2, 4, 4, 4, dtype=BF16)
        outs = [F.layer_norm(x, (4,)), x.softmax(-1), F.max_pool3d(x, 2), x.exp()]
        _, mask, _ = saved(lambda: F.dropout(leaf(4), 0.1))
        _, norm, _ = saved(lambda: F.batch_norm(leaf(2, 4, dtype=BF16), None, None, training=True))
        return [*(out.dtype for out in outs), mask, norm]


def tables() -> dict[str, str]:
    names = {
        name
        for key in ("AutocastCPU", "AutocastCUDA")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    } | {f"aten::{name}" for name in ("dropout", "_batch_norm_impl_index", "rms_norm", "softmax.int", "lstm.input")}
    return {name: torch._C._dispatch_dump_table(name) for name in names}


def test_everything_is_as_before_afterwards() -> None:
    before = probe(), tables(), dict(decomposition_table), FakeTensorMode.cache, torch.autocast.__init__
    with cuda_rules("bf16-mixed"):
        assert probe() != before[0]
        assert tables() != before[1]
    assert before == (probe(), tables(), dict(decomposition_table), FakeTensorMode.cache, torch.autocast.__init__)
    with pytest.raises(ZeroDivisionError), cuda_rules("16-mixed"):
        _ = 1 / 0
    assert before[1] == tables()
    assert before[3] is FakeTensorMode.cache


def test_a_second_thread_waits_to_enter() -> None:
    order: list[str] = []

    def elsewhere() -> None:
        with cuda_rules("32"):
            order.append("second")

    with cuda_rules("bf16-mixed"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()  # waits for its turn
        order.append("first")
        with pytest.raises(MedckptError, match="entered twice"), cuda_rules("32"):
            pass
    thread.join()
    assert order == ["first", "second"]
    with pytest.raises(ConfigError, match="Did you mean 'bf16-mixed'"), cuda_rules("bf16-mix"):  # type: ignore[arg-type]
        pass


def test_real_tensors_and_fake_ones_of_other_threads_keep_the_cpus_rules() -> None:
    found: list[Any] = []
    before, real = probe(), real_step()

    def elsewhere() -> None:
        found.extend([probe(), real_step()])

    with cuda_rules("bf16-mixed"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        ruled = probe()
        assert real_step() == real  # in this thread as well
        assert probe() == ruled
    assert found == [before, real]
    assert ruled != before


class Operators(nn.Module):
    """Every operator with a kernel of ours that training calls on a CPU: both cast lists, and the choices by device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.layer = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.LayerNorm(8)
        self.rms, self.recurrent = nn.RMSNorm(8), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.batch(self.conv(x)), 0.2)
        x = self.rms(self.layer(x)) + self.recurrent(x.float())[0]
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1)[:, 0]
        x = F.max_pool1d(x, 3, 1, 1) + F.interpolate(x, scale_factor=1.0, mode="linear")
        weight = self.layer.weight.diag()
        x = torch.einsum("bij,jk->bik", x, weight) @ weight + torch.cat([x, x], 1)[:, ::2].exp().softmax(-1)
        return F.log_softmax(x, -1).prod(-1).sum() + F.logsigmoid(x).norm() + x.cumsum(-1).pow(2).mean()


def real_step() -> list[float]:
    """Returns loss and gradients of a step of real tensors under CPU autocast, and of one without."""
    found: list[float] = []
    for enabled in (True, False):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            net, x = Operators(), torch.randn(2, 4, 8)
            with torch.autocast("cpu", dtype=BF16, enabled=enabled):
                loss = net(x)
            loss.backward()
        found += [loss.item(), *(p.grad.double().abs().sum().item() for p in net.parameters() if p.grad is not None)]
    return found


# --- against torch itself


def test_the_lists_are_those_of_the_header() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch comes without its headers")
    macros = {
        "LOWER_PRECISION_FP": "lower",
        "FP32": "float32",
        "FP32_SET_OPT_DTYPE": "float32_dtype",
        "PROMOTE": "promote",
    }
    text = header.read_text().replace("\\\n", "")
    for macro, policy in macros.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*)", text)
        assert body
        names = [".".join(part.split(", ")) for part in re.findall(r"_\(([\w, ]+)\)", body[1])]
        assert len(names) > 5
        assert {name: POLICY.get(name) for name in names} == dict.fromkeys(names, policy)
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    unknown = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} - set(POLICY)
    assert unknown <= {"binary_cross_entropy", "_cudnn_rnn"}


@contextmanager
def cuda_autocast(precision: str) -> Iterator[None]:
    """`torch.autocast("cuda")` without the check that switches it off where there is no GPU."""
    if precision == "32":
        yield
        return
    torch.set_autocast_dtype("cuda", DTYPES[precision])
    torch.set_autocast_enabled("cuda", True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def on_device(model: nn.Module, mode: FakeTensorMode, device: str) -> nn.Module:
    net = fake_copy(model, mode)
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with mode:
                    moved = parameter.detach().to(device)
                module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for table in (module._buffers, module.__dict__):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    with mode:
                        table[name] = value.to(device)
    return net


def step_bytes(model: nn.Module, loss: Callable[..., torch.Tensor], precision: str, device: str) -> tuple[int, Saved]:
    """Returns the bytes that forward and loss save beyond parameters and buffers, by real rules or by ours."""
    mode = FakeTensorMode()
    net = on_device(model, mode, device)
    owned = frozenset(tensor.untyped_storage()._cdata for tensor in (*net.parameters(), *net.buffers()))
    rules, cast = (
        (cuda_rules(precision), autocast(precision)) if device == "cpu" else (nullcontext(), cuda_autocast(precision))
    )
    with rules, mode, real_constants(), cast:
        image = torch.empty(1, 1, 96, 96, 96, device=device)
        label = torch.zeros(1, 1, 96, 96, 96, device=device, dtype=torch.int64)
        _, listed, size = saved(lambda: loss(net(image), label), owned)
    return size, listed


NETS: dict[str, Callable[[Any], nn.Module]] = {
    "SwinUNETR-48": lambda n: n.SwinUNETR(1, 5, feature_size=48),
    "SwinUNETR-48 use_checkpoint": lambda n: n.SwinUNETR(1, 5, feature_size=48, use_checkpoint=True),
    "UNETR": lambda n: n.UNETR(1, 5, (96,) * 3),
    "SegResNet": lambda n: n.SegResNet(3, 32, 1, 5),
    "SegResNet batch dropout": lambda n: n.SegResNet(3, 32, 1, 5, norm="batch", dropout_prob=0.2),
    "DynUNet": lambda n: n.DynUNet(3, 1, 5, [3] * 5, [1, 2, 2, 2, 2], [2] * 4),
    "ViT-L/16": lambda n: n.ViT(
        1, (96,) * 3, (16,) * 3, hidden_size=1024, mlp_dim=4096, num_layers=24, num_heads=16, dropout_rate=0.1
    ),
    "MaskedAutoEncoderViT": lambda n: n.MaskedAutoEncoderViT(1, (96,) * 3, (16,) * 3),
}


@cuda_build
@pytest.mark.parametrize("name", NETS)
def test_saved_bytes_equal_those_of_the_cuda_dispatcher(name: str) -> None:
    nets, losses = pytest.importorskip("monai.networks.nets"), pytest.importorskip("monai.losses")
    dice = losses.DiceCELoss(to_onehot_y=True, softmax=True)

    def loss(out: Any, label: torch.Tensor) -> torch.Tensor:
        first = out[0] if isinstance(out, (tuple, list)) else out
        return dice(first, label) if first.dim() == 5 else first.square().mean()

    model = NETS[name](nets)
    for precision in PRECISIONS:
        cuda, ours = (step_bytes(model, loss, precision, device) for device in ("cuda", "cpu"))
        assert ours == cuda, (name, precision)


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "conv same": lambda x, w: F.conv2d(x, w[None, None, :3, :3].expand(4, 16, -1, -1), padding="same"),
    "einsum": lambda x, w: torch.einsum("abcd,ed->abce", x, w) + F.linear(x, w),
    "mv": lambda x, w: torch.addmv(w[0], w, w[0]) + torch.mv(w, w[0]),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([w, w, w]),
    "layer_norm": lambda x, w: F.layer_norm(x, (64,), w[0], w[1]),
    "group_norm": lambda x, w: F.group_norm(x, 4),
    "rms_norm": lambda x, w: F.rms_norm(x, (64,), w[0]),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[0, :16], w[1, :16], True),
    "batch_norm float": lambda x, w: F.batch_norm(x, None, None, w[0, :16].float(), w[1, :16].float(), True),
    "batch_norm eval": lambda x, w: F.batch_norm(x, w[0, :16].detach().float(), w[1, :16].detach().float()),
    "instance_norm": lambda x, w: F.instance_norm(x),
    "cross_entropy": lambda x, w: F.cross_entropy(x, x.detach().argmax(1), label_smoothing=0.1),
    "bce": lambda x, w: F.binary_cross_entropy_with_logits(x, x.detach()),
    "losses": lambda x, w: F.l1_loss(x, x.detach()) + F.mse_loss(x, x.detach()) + F.smooth_l1_loss(x, x.detach()),
    "norms": lambda x, w: x.norm() + x.norm(dim=-1, keepdim=True) + torch.linalg.vector_norm(x) + x.norm(1, -1, True),
    "cosine": lambda x, w: F.cosine_similarity(x, x) + F.normalize(x, dim=1).sum(1),
    "sums": lambda x, w: x.sum(-1) + x.prod(-1) + x.mean(-1) + x.logsumexp(-1) + x.cumsum(-1)[..., 0] + x.var(-1),
    "powers": lambda x, w: x**2 + 2.0**x + x.pow(x) + x.rsqrt() + x.exp() + x.log1p() + 1 / x,
    "activations": lambda x, w: F.gelu(x) + F.silu(x) + F.softplus(x) + F.logsigmoid(x) + F.prelu(x, w[0, :1]),
    "dropouts": lambda x, w: (
        F.dropout(x, 0.1) + F.dropout(x, 1.0) + F.dropout2d(x, 0.1) + F.alpha_dropout(x, 0.1, True)
    ),
    "pools": lambda x, w: F.max_pool3d(x, 2).sum() + F.avg_pool3d(x, 2).sum() + F.adaptive_avg_pool3d(x, 3).sum(),
    "resize": lambda x, w: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "pad": lambda x, w: F.pad(F.pad(x, (1,) * 4, mode="reflect"), (1,) * 6, mode="replicate"),
    "cat": lambda x, w: torch.cat([x, F.linear(x, w)]) + torch.stack([x, x]).flatten(0, 1),
    "promote": lambda x, w: torch.addcmul(x, x, F.linear(x, w)) + torch.atan2(x, F.linear(x, w)),
    "index_put": lambda x, w: x.index_put((torch.zeros(1, dtype=torch.int64, device=x.device),), F.linear(x, w)[:1]),
    "attention": lambda x, w: F.multi_head_attention_forward(
        x[0], x[0], x[0], 64, 4, w.repeat(3, 1), None, None, None, False, 0.1, w, None
    )[0],
}


@cuda_build
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_save_what_the_cuda_dispatcher_saves(name: str, precision: str) -> None:
    dtypes = (FP32, BF16, FP16) if precision == "32" else (FP32, DTYPES[precision])
    for dtype in dtypes:
        answers = []
        for device in ("cuda", "cpu"):
            rules, cast = (
                (cuda_rules(precision), autocast(precision))
                if device == "cpu"
                else (nullcontext(), cuda_autocast(precision))
            )
            with rules, FakeTensorMode(), cast:
                x, weight = leaf(2, 16, 32, 64, dtype=dtype, device=device), leaf(64, 64, dtype=dtype, device=device)
                out, kept, size = saved(lambda x=x, weight=weight: OPERATORS[name](x, weight))
                answers.append((out.dtype, out.shape, kept, size))
        assert answers[0] == answers[1], (name, dtype)
