"""Which storages are on the device, on the host, or on their way, in the order in which they were saved."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from medckpt.memory.host_memory import Link, Span

_AHEAD, _AHEAD_BYTES = 2, 64 * 2**20
"""Copies that are on the device besides those in use, on their way to the host or from it: two of any size, or as many
as fit in these bytes."""
_USED = 2
"""Copies that stay on the device after a use, if the backward pass needs them again."""
_LOOK_BACK = 64
_OWN_USES = 2
"""Of a storage that one tensor holds, in C++'s count: the tensor, and the storage's Python object."""


class Kept(Protocol):
    """Whether others than a region keep one of the tensors on the device that it saves, as far as is known."""

    @property
    def known(self) -> bool:
        """Whether they were seen to."""

    def learn(self) -> None:
        """They do."""

    def forget(self) -> None:
        """They do not."""


class Counter:
    """Holds a tensor's version counter, and not its memory."""

    __slots__ = ("_holder", "kind", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        self.kind = f"{tensor.type()} {list(tensor.shape)}"
        self._holder: Tensor | None = None
        if not isinstance(tensor, FakeTensor):  # a trace has no values that could be wrong
            self._holder = tensor.detach()  # shares the counter, and keeps it when it gets other memory
            self._holder.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def still(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same storage has the values that were there."""
        return tensor._version == self.version and (self._holder is None or self._holder._version == self.version)

    def check(self) -> None:
        """Raises RuntimeError, in torch's words, if the tensor was changed in place."""
        if self._holder is not None and self._holder._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.kind}] is at version {self._holder._version}; expected version {self.version} instead."
            )


class Copy:
    """A storage that is offloaded. It is there as long as a saved tensor needs it."""

    __slots__ = (
        "__weakref__", "counter", "device", "dtype", "event", "flat", "kept", "lane", "left_alone", "mode", "nbytes",
        "number", "seen", "source", "spans",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, lane: Lane, kept: Kept, number: int) -> None:
        storage = tensor.untyped_storage()
        self.lane = lane
        self.kept = kept
        self.mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        self.number = number
        self.counter = Counter(tensor)
        self.nbytes = storage.nbytes()
        self.dtype = tensor.dtype
        self.device = tensor.device
        me = weakref.ref(self)
        self.source = weakref.ref(storage, lambda _: _left_alone(me()))
        self.left_alone: int | None = None
        """How many tensors backward had asked for when the last of the others let go of it, if it was in backward."""
        self.flat: Tensor | None = tensor.as_strided((self.nbytes // tensor.element_size(),), (1,), 0).detach()
        """The whole storage in 1-D, while it is held on the device."""
        self.spans: list[Span] | None = None
        """Where it is on the host; None: it stays on the device."""
        self.event: Any = None
        self.seen = False

    def leave(self) -> None:
        """Lets go of the device's memory."""
        if self.event is not None:
            self.lane.link.release(self.event)
        self.flat, self.event = None, None

    def unlearn(self) -> None:
        """Notes if it was left on the device because others keep it there, and they do not."""
        if self.kept.known and not self.seen and self.flat is not None:
            self.seen = True  # later they may have let go of it
            if torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata) <= _OWN_USES:
                self.kept.forget()

    def __del__(self) -> None:
        # May run at any moment, in the middle of what the lane does: the spans are taken back at the next use.
        if self.spans is not None:
            self.leave()
            self.lane.returned.append(self.spans)


class Lane:
    """What is offloaded from one device: in the order in which it was saved."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.returned: deque[list[Span]] = deque()
        self.asked = 0
        """How many tensors backward has asked for."""
        self._count = 0
        self._live: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()
        self._by_storage: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()
        self._ahead: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()
        self._used: deque[Callable[[], Copy | None]] = deque()
        self._node = -1
        self._pending: list[Callable[[], Copy | None]] = []
        """What the last operator saved."""
        self._lock = threading.RLock()  # backward passes run in threads of their own

    def put(self, tensor: Tensor, kept: Kept) -> Copy:
        """Returns the copy of the tensor's storage, which goes to the host if there is room.

        It goes when the next operator saves something, or with `flush`: an operator saves its inputs before it runs,
        and one of them may be filled by it (RReLU's noise).
        """
        with self._lock:
            node = torch._C._autograd._get_sequence_nr()  # changes with each operator that has a backward
            if node != self._node:
                self.flush()
                self._node = node
            storage = tensor.untyped_storage()
            known = self._by_storage.get(storage._cdata)
            if known is not None and known.source() is storage and known.counter.still(tensor):
                return known
            self._count += 1
            copy = Copy(tensor, self, kept, self._count)
            self._live[copy.number] = self._by_storage[storage._cdata] = copy
            if not kept.known:
                while self.returned:
                    self.link.pool.give(self.returned.popleft())
                copy.spans = self.link.pool.take(copy.nbytes)
            if copy.spans is not None:
                self._pending.append(weakref.ref(copy))
            return copy

    def flush(self) -> None:
        """Sends what the last operator saved, which must have run."""
        with self._lock:
            pending, self._pending = self._pending, []
            for reference in pending:
                copy = reference()
                if copy is not None and copy.flat is not None and copy.spans is not None:
                    copy.event = self.link.send(copy.flat, copy.spans)
                    self._ahead[copy.number] = copy
                    self._let_go()

    def get(self, copy: Copy) -> Tensor:
        """Returns the storage in 1-D, on its device; the caller's stream waits for it."""
        with self._lock:
            self.flush()
            if copy.flat is None:
                self._bring(copy)
            assert copy.flat is not None
            flat = copy.flat
            if copy.event is not None:
                self.link.use(flat, copy.event)
            if copy.spans is not None:
                self._ahead.pop(copy.number, None)
                self._keep_used(copy)
            self._look_ahead(copy.number)
            self.asked += 1
            return flat

    def _let_go(self) -> None:
        """Frees what has reached the host, and waits for the oldest where too much is on its way."""
        for copy in self._held():
            if copy.event is None or self.link.finished(copy.event) or not self._room():
                copy.leave()

    def _held(self) -> list[Copy]:
        return [copy for copy in self._ahead.values() if copy.flat is not None]

    def _room(self, more: int = 0) -> bool:
        held = self._held()
        return len(held) + (more > 0) <= _AHEAD or sum(copy.nbytes for copy in held) + more <= _AHEAD_BYTES

    def _keep_used(self, copy: Copy) -> None:
        if all(used() is not copy for used in self._used):
            self._used.append(weakref.ref(copy))
        while len(self._used) > _USED:
            oldest = self._used.popleft()()
            if oldest is not None:
                oldest.leave()

    def _look_ahead(self, number: int) -> None:
        """Brings what backward needs next, as far as there is room."""
        for earlier in range(number - 1, max(number - 1 - _LOOK_BACK, 0), -1):
            copy = self._live.get(earlier)
            if copy is None:
                continue
            if copy.spans is None:
                copy.unlearn()
            elif copy.flat is None:
                if not self._room(copy.nbytes):
                    return
                self._bring(copy)
                self._ahead[copy.number] = copy

    def _bring(self, copy: Copy) -> None:
        storage = copy.source()
        if storage is not None:  # somebody holds it
            copy.flat = _whole(storage, copy)
            copy.kept.learn()
            return
        if copy.left_alone is not None and self.asked - copy.left_alone <= _AHEAD:
            copy.kept.learn()
        assert copy.spans is not None
        copy.flat, copy.event = self.link.fetch(copy.nbytes // copy.dtype.itemsize, copy.dtype, copy.device, copy.spans)


def _left_alone(copy: Copy | None) -> None:
    if copy is not None and torch._C._current_graph_task_id() >= 0:
        copy.left_alone = copy.lane.asked


def _whole(storage: torch.UntypedStorage, copy: Copy) -> Tensor:
    """Returns a 1-D tensor on a storage that is there."""
    if copy.mode is None:
        return torch.empty(0, dtype=copy.dtype, device=copy.device).set_(storage)
    with _disable_current_modes(), copy.mode:  # a trace would hold what an operator is given
        return torch.empty(0, dtype=copy.dtype, device=copy.device).set_(storage)
