"""This machine: threads, the C library's memory allocator, and what a run should record of both."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

# mallopt's numbers in glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 1_000_000_000

PACKAGES = ("medckpt", "torch", "monai", "lightning", "numpy", "nibabel", "pydicom", "SimpleITK", "hydra-core")


def rank() -> int:
    """Returns the number of this process in a DDP run on this machine; 0 outside of one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def cpu_count() -> int:
    """Returns the cores this process may use: its affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, round(int(limit) / int(period))))
    return cores


def available_bytes() -> int | None:
    """Returns the memory this process can still take: what the system says is free, cut by the container's limit and
    by the process's own (`ulimit -v`); None where the system does not say.
    """
    facts = _numbers(Path("/proc/meminfo"))
    if "MemAvailable" not in facts:
        return None
    free = [facts["MemAvailable"] * 1024]
    group = Path("/sys/fs/cgroup")
    limit = _text(group / "memory.max")
    if limit.isdecimal():
        # Cached file pages count as used there, and are given up on demand.
        cached = _numbers(group / "memory.stat").get("inactive_file", 0)
        free.append(int(limit) - int(_text(group / "memory.current") or 0) + cached)
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    if own != resource.RLIM_INFINITY:
        free.append(own - _numbers(Path("/proc/self/status"))["VmSize"] * 1024)
    return max(0, min(free))


def _numbers(file: Path) -> dict[str, int]:
    """Reads lines such as `MemFree: 12 kB` or `anon 12`; empty if the file is not there."""
    words = [line.replace(":", " ").split() for line in _text(file).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def load_of_others() -> float | None:
    """Returns how many processes ran or waited here in the last minute, by the system's count; None if it has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to keep freed memory instead of giving it back; returns whether it could.

    A training step frees and asks for the same hundreds of MB again and again. By default each large block comes
    fresh from the kernel, page by page; a Swin-UNETR step on two cores became 1.3 to 3 times faster without that.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def prepare_machine(device: str) -> dict[str, Any]:
    """Sets threads and, for CPU runs, the allocator; returns what was set, for environment.json."""
    import torch

    if device != "cpu":
        # TF32 keeps float32's range at ten bits of mantissa: the usual choice for training convolutions.
        torch.set_float32_matmul_precision("high")
        return {"device": torch.cuda.get_device_name(), "devices": torch.cuda.device_count()}
    torch.set_num_threads(cpu_count())
    return {"device": platform.processor() or platform.machine(), "threads": cpu_count(), "malloc": keep_freed_memory()}


def environment(machine: dict[str, Any]) -> dict[str, Any]:
    """Returns versions and machine facts, fit for JSON."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": versions, **machine}


def process_peak(device: str) -> dict[str, Any]:
    """Returns the highest memory use of this process so far, and what was measured, for memory.json."""
    if device == "cuda":
        import torch

        reserved = torch.cuda.max_memory_reserved()
        return {
            "process_peak_bytes": reserved,
            "process_measure": "torch.cuda.max_memory_reserved since the first step",
        }
    unit = 1 if sys.platform == "darwin" else 1024
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"process_peak_bytes": rss, "process_measure": "largest resident set of the process"}
