"""CUDA's dispatch rules laid over fake CPU tensors, so that a step traced without a GPU keeps what CUDA would keep.

Fake CPU tensors are the only ones that run a whole training step on every build of PyTorch: fake "cuda" tensors abort
on CPU builds, and their backward pass fails where there is no GPU. What a step saves differs between both devices by
four things, each laid over here:

* the lists of operators that autocast casts (`aten/src/ATen/autocast_mode.{h,cpp}`): kernels at AutocastCPU;
* the choices that composite operators make by device (`attention.cpp`, `sdp_utils.cpp`, `Dropout.cpp`,
  `Normalization.cpp`, `SoftMax.cpp`, `layer_norm.cpp`): kernels at AutogradCPU, above autograd's own;
* float32 statistics of half precision inputs in normalizations: wrappers around torch's fake kernels;
* `torch.autocast("cuda")` inside of a model: read as "cpu", where the tensors are.

Operators with the same rule on both devices keep torch's own kernels and with them the cache of weight casts.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from medckpt.errors import ConfigError, MedckptError, suggest
from medckpt.memory.choices import Rule, choices

Precision = Literal["32", "bf16-mixed", "16-mixed"]

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


def autocast(precision: Precision) -> torch.autocast | nullcontext[None]:
    """Returns the context for forward and loss: CPU autocast in the dtype of `precision`, nothing for "32"."""
    return nullcontext() if precision == "32" else torch.autocast("cpu", dtype=_DTYPES[precision])


@contextmanager
def cuda_rules(precision: Precision, *, capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
    """Inside, operators on fake CPU tensors follow the rules of CUDA's dispatcher.

    Enter it around the whole step (forward, loss, backward, optimizer) and `autocast(precision)` within it around
    forward and loss. Recompute in `torch.utils.checkpoint` enters CPU autocast by itself. The rules hold for the whole
    process: other threads wait to enter, and an operator with a rule of its own refuses to run for them.

    Args:
        precision: "32", "bf16-mixed" or "16-mixed".
        capability: compute capability of the device, (8, 0) being an A100's. It decides which attention kernel runs.

    Raises:
        ConfigError: `precision` is not one of the three.
        MedckptError: the rules are active in this thread already; or inside: an operator with a rule of its own was
            called from another thread or on real floating point tensors, CUDA autocast refuses the operator, or what
            it keeps is not known (cuDNN's recurrent networks).
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision: '{precision}' is not known. {suggest(str(precision), get_args(Precision))}")
    if _ACTIVE.owner == threading.get_ident():
        raise MedckptError("CUDA's rules are active already: cuda_rules() cannot be entered twice, leave it first.")
    with _LOCK:
        _ACTIVE.owner = threading.get_ident()
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*(other operators may also be|previously registered kernel)")
                if precision != "32":
                    _lay_casts(library)
                for name, rule in choices(capability).items():
                    _register(library, name, rule, "AutogradCPU")
            with _fake_kernels(library, precision), _cuda_autocast_read_as_cpu():
                yield
        finally:
            # The kernels that were there before come back.
            library._destroy()
            _ACTIVE.owner = None


class _Active:
    """The rules in force: the thread that entered them, and whether its `_cached_cast` is under way."""

    owner: int | None = None
    lending: bool = False


_LOCK = threading.Lock()
_ACTIVE = _Active()
_ANSWERS: dict[Precision, dict[Any, Any]] = {}


def _floating(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floating(item)


def _check(name: str, args: object, kwargs: dict[str, Any]) -> None:
    """Refuses what the rules were not made for; a wrong answer would look like a right one."""
    if threading.get_ident() != _ACTIVE.owner:
        raise MedckptError(
            f"aten::{name} was called from another thread while a forecast is traced under CUDA's rules, which hold "
            "for the whole process. Wait until the forecast is done, or make it in a process of its own."
        )
    for tensor in _floating([args, kwargs]):
        if not isinstance(tensor, FakeTensor):
            raise MedckptError(
                f"aten::{name} got a real tensor of shape {tuple(tensor.shape)} under CUDA's rules, which are for fake "
                "tensors. Make it under the FakeTensorMode of the trace, or pass the model through fake_copy()."
            )


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


def _register(library: torch.library.Library, name: str, rule: Rule, key: str) -> None:
    """Makes `rule` the kernel of aten::`name` at `key`."""
    op = _overload(name)
    if op is None:
        return

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _check(name, args, kwargs)
        return rule(op, args, kwargs)

    library.impl(name, kernel, key)


def _lay_casts(library: torch.library.Library) -> None:
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
        _register(library, name, rules.get(POLICY.get(name, ""), _refuse), "AutocastCPU")
    for name in sorted(cpu - cuda - {_LENT}):
        _pass_through(library, name)
    _register(library, _LENT, _lend, "AutogradCPU")


def _pass_through(library: torch.library.Library, name: str) -> None:
    """For operators that only CPU autocast casts: as if it had no kernel, autocast stays on for what they call."""
    op = _overload(name)
    if op is None:
        return

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        _check(name, args, kwargs)
        return op.redispatch(keyset.remove(DispatchKey.AutocastCPU), *args, **kwargs)

    library.impl(name, kernel, "AutocastCPU", with_keyset=True)


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
def _fake_kernels(library: torch.library.Library, precision: Precision) -> Iterator[None]:
    """Makes torch's fake CPU kernels answer as its fake CUDA kernels do, where those differ."""
    # With a kernel on the CPU (never run: fake tensors end above) autograd sees one operator, as on CUDA.
    _register(library, "_fused_rms_norm", _refuse, "CPU")
    patches: list[tuple[dict[Any, Any], OpOverload, Callable[..., Any]]] = [
        (decomposition_table, aten.native_batch_norm.default, _float32_statistics),
        (decomposition_table, aten.log_sigmoid_forward.default, _no_buffer),
        (op_implementations_dict, aten.native_layer_norm.default, _float32_statistics),
    ]
    patches = [patch for patch in patches if patch[1] in patch[0]]
    before = [table[op] for table, op, _ in patches]
    for table, op, wrap in patches:
        table[op] = wrap(table[op])
    # Torch keeps what fake kernels answered, by their arguments and for the process. Under rules they answer something
    # else, so each precision has answers of its own; kept, as a trace with them takes a quarter of the time.
    answers, FakeTensorMode.cache = FakeTensorMode.cache, _ANSWERS.setdefault(precision, {})
    try:
        yield
    finally:
        FakeTensorMode.cache = answers
        for (table, op, _), original in zip(patches, before, strict=True):
            table[op] = original


# Both keep the name and module of the original: torch prefers a decomposition over its own kernel by them.
def _float32_statistics(original: Callable[..., Any]) -> Callable[..., Any]:
    """On CUDA a norm of half precision keeps mean and deviation in float32, and keeps them in eval mode too."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        out, mean, deviation = original(*args, **kwargs)
        if threading.get_ident() != _ACTIVE.owner or (out.dtype not in _HALF and mean.numel()):
            return out, mean, deviation
        shape = mean.shape if mean.numel() else out.shape[1:2]
        return out, *(out.new_empty(shape, dtype=torch.float32) for _ in range(2))

    return run


def _no_buffer(original: Callable[..., Any]) -> Callable[..., Any]:
    """On CUDA the sigmoid within log_sigmoid is not kept, it is computed anew."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        out, buffer = original(*args, **kwargs)
        return out, buffer if threading.get_ident() != _ACTIVE.owner else out.new_empty((0,))

    return run


@contextmanager
def _cuda_autocast_read_as_cpu() -> Iterator[None]:
    """Parts of a model that switch `torch.autocast("cuda")` off or on mean the device of its tensors."""
    original = torch.autocast.__init__

    @functools.wraps(original)
    def init(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda" and threading.get_ident() == _ACTIVE.owner:
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        original(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


class _RealConstants(TorchFunctionMode):
    """Gives a fake `torch.arange` of numbers its values, as torch does for `torch.tensor`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.arange and isinstance(out, FakeTensor) and out.numel() <= 1024:
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                # `constant` is read wherever a fake tensor is asked for a value, and dropped when it is written to.
                out.constant = torch.arange(*args, **{**kwargs, "device": "cpu"})
        return out


def real_constants() -> TorchFunctionMode:
    """Returns a context in which a small fake `torch.arange(...)` knows its values: `.tolist()`, `.item()`, `int()`.

    MONAI's DiceLoss lists its axes by `torch.arange(2, n).tolist()`, which fake tensors refuse as data-dependent.
    """
    return _RealConstants()
