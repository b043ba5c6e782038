"""CUDA's dispatch rules laid over fake CPU tensors, so that a step traced without a GPU keeps what CUDA would keep.

Fake CPU tensors are the only ones that run a whole training step on every build of PyTorch: fake "cuda" tensors abort
on CPU builds, and their backward pass fails where there is no GPU. What a step saves differs between both devices by
four things, each laid over here:

* the lists of operators that autocast casts (`aten/src/ATen/autocast_mode.{h,cpp}`): kernels at AutocastCPU;
* the choices that composite operators make by device (`attention.cpp`, `sdp_utils.cpp`, `Dropout.cpp`,
  `Normalization.cpp`, `SoftMax.cpp`, `layer_norm.cpp`): kernels at AutogradCPU, above autograd's own;
* float32 statistics of half precision inputs in normalizations: wrappers around torch's fake kernels
  (`fake_kernels.py`);
* `torch.autocast("cuda")` inside of a model: read as "cpu", where the tensors are.

Operators with the same rule on both devices keep torch's own kernels and with them the cache of weight casts. The
dispatcher belongs to the whole process: for other threads, and for real tensors, each kernel laid over calls the one
that was there before.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from medckpt.errors import ConfigError, MedckptError, suggest
from medckpt.memory.choices import Rule, choices
from medckpt.memory.fake_kernels import cuda_answers

Precision = Literal["32", "bf16-mixed", "16-mixed"]

Kernel = Callable[..., Any]
"""Takes the set of dispatch keys, then the arguments."""

aten = torch.ops.aten

# CUDA's lists of operators by cast policy.
_LISTS = {
    "lower": (
        "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
        "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm "
        "baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell "
        "rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention "
        "cudnn_convolution cudnn_convolution_transpose"
    ),
    "float32": (
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
        "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
        "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
        "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
        "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
        "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp linalg_matrix_sqrth upsample_nearest1d "
        "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa"
    ),
    "float32_dtype": (
        "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord sum sum.dim_IntList"
    ),
    "append_dtype": "norm.Scalar norm.ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}
POLICY = {name: policy for policy, names in _LISTS.items() for name in names.split()}
# On both lists, but not under the same policy.
_OTHER_POLICY = frozenset({"prod", "prod.dim_int", "grid_sampler", "binary_cross_entropy"})
# Called for tensors on CUDA only, from within recurrent networks.
_ON_CUDA_TENSORS = frozenset({"_cudnn_rnn"})
# Its kernel at AutocastCPU is lent out, see `_cached_cast`.
_LENT = "_addmm_activation"

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_HALF = (torch.bfloat16, torch.float16)
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)


def autocast(
    precision: Precision, *, device: str = "cpu", weight_cache: bool = True
) -> torch.autocast | nullcontext[None]:
    """Returns the context for forward and loss: autocast in the dtype of `precision`, nothing for "32".

    Args:
        precision: "32", "bf16-mixed" or "16-mixed".
        device: type of the device that the tensors are on.
        weight_cache: whether a weight is cast once per forward pass, or at each use.
    """
    if precision == "32":
        return nullcontext()
    return torch.autocast(device, dtype=_DTYPES[precision], cache_enabled=weight_cache)


@contextmanager
def cuda_rules(precision: Precision, *, capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
    """Inside, operators on fake CPU tensors follow the rules of CUDA's dispatcher.

    Enter it around the whole step (forward, loss, backward, optimizer) and `autocast(precision)` within it around
    forward and loss. Recompute in `torch.utils.checkpoint` enters CPU autocast by itself. The rules hold for this
    thread and for fake tensors: other threads, and real tensors, have the CPU's own. A second thread waits to enter.

    Args:
        precision: "32", "bf16-mixed" or "16-mixed".
        capability: compute capability of the device, (8, 0) being an A100's. It decides which attention kernel runs.

    Raises:
        ConfigError: `precision` is not one of the three.
        MedckptError: the rules are active in this thread already; or inside: CUDA autocast refuses the operator, or
            what it keeps is not known (cuDNN's recurrent networks).
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision: '{precision}' is not known. {suggest(str(precision), get_args(Precision))}")
    if _ACTIVE.owner == threading.get_ident():
        raise MedckptError("CUDA's rules are active already: cuda_rules() cannot be entered twice, leave it first.")
    with _LOCK:
        _ACTIVE.owner = threading.get_ident()
        overlay = _Overlay()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*(other operators may also be|previously registered kernel)")
                if precision != "32":
                    _lay_casts(overlay)
                for name, rule in choices(capability).items():
                    overlay.register(name, rule, "AutogradCPU")
                overlay.fuse_rms_norm()
            with cuda_answers(precision, _ours), _cuda_autocast_read_as_cpu():
                yield
        finally:
            overlay.remove()
            _ACTIVE.owner = None


@dataclass(slots=True)
class _Active:
    """The rules in force: the thread that entered them, and whether its `_cached_cast` is under way."""

    owner: int | None = None
    lending: bool = False
    retired: list[Any] = field(default_factory=list)
    """Kernels of the last overlay: another thread may have looked one up, and stand before its first line."""


_LOCK = threading.Lock()
_ACTIVE = _Active()


def _ours() -> bool:
    """Whether this thread is the one that entered the rules."""
    return threading.get_ident() == _ACTIVE.owner


def _applies(args: object, kwargs: dict[str, Any]) -> bool:
    """Whether a call is the trace's: from its thread, and not on real tensors alone."""
    if not _ours():
        return False
    floating = list(_floating([args, kwargs]))
    return not floating or any(isinstance(tensor, FakeTensor) for tensor in floating)


def _floating(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floating(item)


def _eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_floating_point() and tensor.dtype != torch.float64


def _map(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value) if _eligible(value) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, cast) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, cast) for key, item in value.items()}
    return value


def _cached_cast(tensor: torch.Tensor) -> torch.Tensor:
    """Casts to the lower precision as `at::autocast::cached_cast` does, in its own cache of weights.

    The cache is not open to Python. So an operator of CPU's list that training never calls lends its kernel there: it
    casts its first argument through the cache and hands it to `_lend`, which returns it.
    """
    _ACTIVE.lending = True
    try:
        return getattr(aten, _LENT).default(tensor, tensor, tensor)
    finally:
        _ACTIVE.lending = False


def _lend(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if not _ACTIVE.lending:
        raise MedckptError(f"{op} is not modelled under CUDA's rules: it is for inference only.")
    return args[0]


def _overload(name: str) -> OpOverload | None:
    """Returns the operator of aten, None if this version of torch has none of that name."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


class _Overlay:
    """Kernels laid over those that are there: for calls of the trace. All others go to what was there."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._laid: list[tuple[OpOverload, str]] = []

    def register(self, name: str, rule: Rule, key: str) -> None:
        """Makes `rule` the kernel of aten::`name` at `key`."""
        op = _overload(name)
        if op is not None:
            self._lay(op, key, lambda keyset, *args, **kwargs: rule(op, args, kwargs))

    def pass_through(self, name: str) -> None:
        """For operators that only CPU autocast casts: as if it had no kernel, it stays on for what they call."""
        op = _overload(name)
        if op is not None:
            self._lay(op, "AutocastCPU", _below(op, "AutocastCPU"))

    def fuse_rms_norm(self) -> None:
        """Lets autograd see RMS norm as one operator, as on CUDA: by a CPU kernel that fake tensors do not reach."""
        op = _overload("_fused_rms_norm")
        if op is None:
            return
        of_parts = _kernel(op, "AutogradCPU")
        self._lay(op, "CPU", lambda keyset, *args, **kwargs: _refuse(op, args, kwargs))
        self._lay(op, "AutogradCPU", _kernel(op, "AutogradCPU"), of_parts)

    def remove(self) -> None:
        """Brings back what was there."""
        _ACTIVE.retired = [torch.library.get_kernel(op, key) for op, key in self._laid]
        self._library._destroy()

    def _lay(self, op: OpOverload, key: str, ours: Kernel, others: Kernel | None = None) -> None:
        before = others or _kernel(op, key)

        def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            return (ours if _applies(args, kwargs) else before)(keyset, *args, **kwargs)

        self._library.impl(op._name.removeprefix("aten::"), kernel, key, with_keyset=True)
        self._laid.append((op, key))


def _kernel(op: OpOverload, key: str) -> Kernel:
    """Returns what runs at `key` now."""
    if key == "AutocastCPU" and not torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key):
        return _below(op, key)
    kernel: Kernel = torch.library.get_kernel(op, key).call_boxed
    return kernel


def _below(op: OpOverload, key: str) -> Kernel:
    """Returns the kernel that leaves `key` out."""
    left_out = DispatchKey.__members__[key]
    return lambda keyset, *args, **kwargs: op.redispatch(keyset.remove(left_out), *args, **kwargs)


def _lay_casts(overlay: _Overlay) -> None:
    """Registers CUDA's cast policy of every operator whose treatment by CPU autocast is another one."""
    registered = {
        key: {
            name.removeprefix("aten::")
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
            if name.startswith("aten::")
        }
        for key in ("AutocastCPU", "AutocastCUDA")
    }
    cpu, cuda = registered["AutocastCPU"], registered["AutocastCUDA"] - _ON_CUDA_TENSORS
    rules = {
        "lower": _lower,
        "float32": _float32,
        "float32_dtype": _float32_dtype,
        "append_dtype": _append_dtype,
        "promote": _promote,
    }
    for name in sorted((cuda - cpu) | (cuda & _OTHER_POLICY)):
        overlay.register(name, rules.get(POLICY.get(name, ""), _refuse), "AutocastCPU")
    for name in sorted(cpu - cuda - {_LENT}):
        overlay.pass_through(name)
    overlay.register(_LENT, _lend, "AutogradCPU")


def _call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `op` as C++ wrappers call theirs: what it calls is not seen by autocast again."""
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


def _lower(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call(op, _map(args, _cached_cast), _map(kwargs, _cached_cast))


def _float32(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call(op, _map(args, _to_float32), _map(kwargs, _to_float32))


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32)


def _float32_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asks for a float32 result where no dtype was asked for; the input is not cast."""
    place = [argument.name for argument in op._schema.arguments].index("dtype")
    if not _eligible(args[0]) or kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None):
        return _call(op, args, kwargs)
    if op._schema.arguments[place].kwarg_only:
        return _call(op, args, {**kwargs, "dtype": torch.float32})
    return _call(op, (*args[:place], torch.float32), kwargs)


def _append_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the overload with a dtype; by position, as both differ in their defaults."""
    given = [*args, *(kwargs.get(a.name, a.default_value) for a in op._schema.arguments[len(args) :])]
    other = aten.norm.ScalarOpt_dtype if op is aten.norm.Scalar else aten.norm.ScalarOpt_dim_dtype
    return _call(other, tuple(given), {"dtype": torch.float32 if _eligible(args[0]) else args[0].dtype})


def _promote(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lower = torch.get_autocast_dtype("cpu")
    found = {tensor.dtype for tensor in _floating([args, kwargs]) if _eligible(tensor)}
    if found - {lower, torch.float32}:
        raise MedckptError(f"{op}: CUDA autocast in {lower} refuses tensors of {found - {lower, torch.float32}}.")
    widest = torch.float32 if torch.float32 in found else lower

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(widest)

    return _call(op, _map(args, cast), _map(kwargs, cast))


def _refuse(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op is aten.binary_cross_entropy.default:
        raise MedckptError(
            "binary_cross_entropy (BCELoss) is refused by CUDA autocast. Leave the sigmoid away and take "
            "binary_cross_entropy_with_logits (BCEWithLogitsLoss)."
        )
    raise MedckptError(f"{op}: torch {torch.__version__} has a CUDA autocast rule for it that medckpt does not know.")


@contextmanager
def _cuda_autocast_read_as_cpu() -> Iterator[None]:
    """Parts of a model that switch `torch.autocast("cuda")` off or on mean the device of its tensors."""
    original = torch.autocast.__init__

    @functools.wraps(original)
    def init(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda" and _ours():
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        original(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
