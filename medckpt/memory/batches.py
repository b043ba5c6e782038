"""Steps of other batch sizes, without tracing them again.

As long as a model does the same at every batch size, each number of its step (bytes, FLOPs, sides of a tensor) is a
straight line over the batch size. Two traces give the line. A batch of one is no use for it: torch leaves out copies
and takes other kernels where a dimension has one element.
"""

from __future__ import annotations

from typing import Any

from medckpt.memory.graph import Op, StepGraph, Storage, TensorSpec


def extrapolate(graphs: tuple[StepGraph, StepGraph], batches: tuple[int, int], batch: int) -> StepGraph | None:
    """Returns the step of `batch` from the steps of two other `batches`; None if those two do not do the same.

    Exact for every model whose operators do not depend on the batch size; two batches above one are needed.
    """
    first, second = graphs
    if not _alike(first, second):
        return None
    line = _Line(batches, batch)
    return StepGraph(
        ops=[line.op(a, b) for a, b in zip(first.ops, second.ops, strict=True)],
        storages=[line.storage(a, b) for a, b in zip(first.storages, second.storages, strict=True)],
        events=first.events,
        rules=first.rules,
        repeats=first.repeats,
        notes=first.notes,
    )


def _alike(first: StepGraph, second: StepGraph) -> bool:
    def words(graph: StepGraph) -> list[tuple[str, str, str]]:
        return [(op.name, op.region, op.phase) for op in graph.ops]

    return (
        first.events == second.events
        and len(first.storages) == len(second.storages)
        and words(first) == words(second)
        and all(a.kind == b.kind for a, b in zip(first.storages, second.storages, strict=True))
        and all(_linear(a.call, b.call) for a, b in zip(first.ops, second.ops, strict=True))
    )


def _linear(first: Any, second: Any) -> bool:
    """Whether two calls have arguments of one form, and no tensor has two sides that follow the batch size."""
    if isinstance(first, TensorSpec):
        if not isinstance(second, TensorSpec) or len(first.shape) != len(second.shape) or first.dtype != second.dtype:
            return False
        return sum(a != b for a, b in zip(first.shape, second.shape, strict=True)) < 2
    if isinstance(first, tuple):
        return isinstance(second, tuple) and len(first) == len(second) and all(map(_linear, first, second))
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(map(_linear, first.values(), second.values()))
        )
    return type(first) is type(second)


class _Line:
    """The value at `batch` of the straight line through the values at two batch sizes."""

    def __init__(self, batches: tuple[int, int], batch: int) -> None:
        self.start, self.width = batches[0], batches[1] - batches[0]
        self.batch = batch

    def __call__(self, first: int, second: int) -> int:
        return first + (second - first) * (self.batch - self.start) // self.width

    def op(self, first: Op, second: Op) -> Op:
        return Op(
            name=first.name,
            region=first.region,
            phase=first.phase,
            call=self.value(first.call, second.call),
            flops=self(first.flops, second.flops),
            bytes_moved=self(first.bytes_moved, second.bytes_moved),
            reads=first.reads,
        )

    def storage(self, first: Storage, second: Storage) -> Storage:
        nbytes = self(first.nbytes, second.nbytes)
        return Storage(nbytes, first.kind, first.born, first.region, first.phase, first.died)

    def value(self, first: Any, second: Any) -> Any:
        if first == second:
            return first
        if isinstance(first, TensorSpec):
            shape = tuple(map(self, first.shape, second.shape))
            return TensorSpec(shape, tuple(map(self, first.stride, second.stride)), first.dtype)
        if isinstance(first, tuple):
            return tuple(self.value(a, b) for a, b in zip(first, second, strict=True))
        if isinstance(first, dict):
            return {key: self.value(first[key], second[key]) for key in first}
        if isinstance(first, int) and isinstance(second, int) and not isinstance(first, bool):
            return self(first, second)
        return first
