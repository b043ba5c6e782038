"""Keeps a trace and the process around it apart: neither changes what the other does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_outer_autocast() -> Iterator[None]:
    """Switches a surrounding autocast off; one more `torch.autocast` would keep the casts of those inside it alive."""
    was_on = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", was_on)


@contextmanager
def others_casts_kept(weight_cache: bool) -> Iterator[None]:
    """Keeps what other threads have in autocast's cache, where the step itself has nothing there.

    The cache is the process's: who leaves the outermost autocast of his thread empties it for all, and a weight used
    twice in another thread would be cast twice, its gradient summed in another order.
    """
    if weight_cache:
        yield
        return
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's garbage collector out: it would free cycles at moments of its own, and takes half the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
