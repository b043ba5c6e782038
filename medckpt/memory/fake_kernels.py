"""What torch's fake CPU kernels answer while a step is traced for a CUDA device: what its fake CUDA kernels would."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)
_ANSWERS: dict[str, dict[Any, Any]] = {}


@contextmanager
def cuda_answers(precision: str, ours: Callable[[], bool]) -> Iterator[None]:
    """Inside, fake CPU kernels answer as fake CUDA kernels do, where those differ; in threads where `ours()` only."""
    patches: list[tuple[dict[Any, Any], OpOverload, Callable[..., Any]]] = [
        (decomposition_table, aten.native_batch_norm.default, _float32_statistics),
        (decomposition_table, aten.log_sigmoid_forward.default, _no_buffer),
        (op_implementations_dict, aten.native_layer_norm.default, _float32_statistics),
    ]
    patches = [patch for patch in patches if patch[1] in patch[0]]
    before = [table[op] for table, op, _ in patches]
    for table, op, wrap in patches:
        table[op] = wrap(table[op], ours)
    # Torch keeps what fake kernels answered, by their arguments and for the process. Under rules they answer something
    # else, so each precision has answers of its own; kept, as a trace with them takes a quarter of the time.
    answers: Any = FakeTensorMode.cache
    FakeTensorMode.cache = _Answers(_ANSWERS.setdefault(precision, {}), answers, ours)  # type: ignore[assignment]
    try:
        yield
    finally:
        FakeTensorMode.cache = answers
        for (table, op, _), original in zip(patches, before, strict=True):
            table[op] = original


class _Answers(MutableMapping[Any, Any]):
    """The answers of fake kernels: those under rules for the thread that has them, the process's for the others."""

    def __init__(self, under_rules: dict[Any, Any], others: Any, ours: Callable[[], bool]) -> None:
        self._under_rules, self._others, self._ours = under_rules, others, ours

    def _now(self) -> Any:
        return self._under_rules if self._ours() else self._others

    def __getitem__(self, key: Any) -> Any:
        return self._now()[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self._now().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._now()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._now()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._now()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


# Both keep the name and module of the original: torch prefers a decomposition over its own kernel by them.
def _float32_statistics(original: Callable[..., Any], ours: Callable[[], bool]) -> Callable[..., Any]:
    """On CUDA a norm of half precision keeps mean and deviation in float32, and keeps them in eval mode too."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        out, mean, deviation = original(*args, **kwargs)
        if not ours() or (out.dtype not in _HALF and mean.numel()):
            return out, mean, deviation
        shape = mean.shape if mean.numel() else out.shape[1:2]
        return out, *(out.new_empty(shape, dtype=torch.float32) for _ in range(2))

    return run


def _no_buffer(original: Callable[..., Any], ours: Callable[[], bool]) -> Callable[..., Any]:
    """On CUDA the sigmoid within log_sigmoid is not kept, it is computed anew."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        out, buffer = original(*args, **kwargs)
        return out, out.new_empty((0,)) if ours() else buffer

    return run
