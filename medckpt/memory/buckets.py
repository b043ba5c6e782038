"""The buckets of DistributedDataParallel: a second copy of the gradients, through which devices average them.

Lightning's strategy "ddp" takes torch's defaults: buckets of 25 MiB, the first of 1 MiB, and gradients that are copied
into them and back (`gradient_as_bucket_view=False`). They are there from before the step to the end of the training.
"""

from __future__ import annotations

from collections.abc import Iterable

from medckpt.memory.graph import StepGraph, Storage

MIB = 2**20
LIMITS = (MIB, 25 * MIB)
"""Bytes at which a bucket is full: the first, and each after it."""


def bucket_sizes(gradients: Iterable[int], limits: tuple[int, int] = LIMITS) -> list[int]:
    """Returns the bytes of each bucket for gradients of these bytes, in the order in which backward makes them.

    The rule is that of `compute_bucket_assignment_by_size` in torch's reducer: a bucket takes gradients until it has
    reached its limit. All of one dtype.
    """
    sizes: list[int] = []
    now = 0
    for nbytes in gradients:
        now += nbytes
        if now >= limits[min(len(sizes), 1)]:
            sizes.append(now)
            now = 0
    return [*sizes, now] if now else sizes


def add_buckets(graph: StepGraph, parameters: Iterable[int]) -> None:
    """Adds the buckets of a model to a step of one of its devices.

    Args:
        graph: the step as one device alone would train it.
        parameters: bytes of each parameter that is trained, in the order of `model.parameters()`. The backward pass
            takes about the reverse; their sum, which counts, does not depend on it.
    """
    graph.storages += [Storage(nbytes, "buckets", born=-1) for nbytes in bucket_sizes(reversed(list(parameters)))]
    if graph.rules == "cuda":
        graph.notes["NCCL"] = "what it allocates for itself, outside of the allocator, is not foreseen"
