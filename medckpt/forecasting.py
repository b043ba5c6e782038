"""`forecast`: what one training step of any model takes on a device, without the device and without data."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from medckpt.errors import ConfigError, size, suggest
from medckpt.memory.explain import Explanation, explain
from medckpt.memory.graph import StepGraph
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import Level, find_regions
from medckpt.memory.simulate import Moment, Simulation, Where, simulate
from medckpt.memory.step import Loss, OptimizerName, Precision, Step
from medckpt.memory.trace import trace_step
from medckpt.profiles import load_profile

Fits = Literal["yes", "no", "unsure", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Forecast:
    """What a step takes: bytes, parts, place and time of the peak; in Jupyter, as a table and a picture."""

    simulation: Simulation
    explanation: Explanation
    profile: MemoryProfile
    notes: tuple[str, ...] = ()
    """What is to be known of the timeline and the times."""

    @property
    def peak_bytes(self) -> int:
        """All that the device holds at the worst instant: tensors, scratch memory, the runtime's own."""
        return self.simulation.peak_bytes

    @property
    def peak_interval(self) -> tuple[int, int]:
        """The peak with everything that is estimated at its lowest and at its highest."""
        return self.simulation.peak_interval

    @property
    def allocated_bytes(self) -> int:
        """The peak as `torch.cuda.max_memory_allocated` would give it."""
        return self.simulation.allocated_bytes

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """What the process takes from the device, lowest and highest: this is what must fit."""
        return self.simulation.reserved_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes per part at the peak; their sum is `peak_bytes`."""
        return self.simulation.parts

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of one step by a roofline; None if the profile has no rates."""
        return self.simulation.step_ms

    @property
    def where(self) -> Where:
        """Region, operator and phase of the peak."""
        return self.simulation.where

    @property
    def timeline(self) -> tuple[Moment, ...]:
        """Memory operator by operator; its maximum is `peak_bytes`. Of many micro-batches it has two, see `notes`."""
        return self.simulation.timeline

    @property
    def unmodelled(self) -> dict[str, str]:
        """What is not certain, and why; the intervals are as wide as that."""
        return self.simulation.unmodelled

    @property
    def fits(self) -> Fits:
        """Whether the device holds it: "unsure" if that depends on what is estimated."""
        return fits_in(self.profile, self.reserved_bytes)

    def plot(self, path: str | Path | None = None) -> Any:
        """Returns a matplotlib figure of memory over the step, and saves it if `path` is given.

        The suffix says in which format: .png, .pdf or .svg.

        Raises:
            ConfigError: another suffix.
            DataError: the file cannot be written.
        """
        from medckpt.report.memory_timeline import draw_memory_timeline

        return draw_memory_timeline(self.explanation, self.profile, path)

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts without the timeline, fit for JSON."""
        return {
            "memory": self.profile.name,
            "capacity_bytes": self.profile.capacity_bytes,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "peak_interval": list(self.peak_interval),
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": list(self.reserved_bytes),
            "parts": dict(self.parts),
            "step_ms": self.step_ms,
            "where": {"region": self.where.region, "op": self.where.op, "phase": self.where.phase},
            "holders": [{"region": name, "bytes": nbytes} for name, nbytes in self.explanation.holders],
            "unmodelled": self.unmodelled,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        low, high = self.reserved_bytes
        lines = [f"peak {size(self.peak_bytes)} in the {self.where}"]
        lines += [f"  {name:<13} {size(nbytes):>10}" for name, nbytes in self.parts.items() if nbytes]
        lines.append(
            f"the process takes {size(low)} to {size(high)} of the device (estimates at their lowest and highest, "
            f"with what the allocator wastes); {self._verdict()}"
        )
        if self.step_ms is not None:
            lines.append(f"about {milliseconds(self.step_ms)} per step")
        lines += [f"not certain: {name}: {why}" for name, why in self.unmodelled.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__  # a notebook that shows no HTML, a debugger: the record itself is a megabyte

    def _verdict(self) -> str:
        title = self.profile.title or self.profile.name
        if self.profile.capacity_bytes is None:
            return f"how much {title} holds is not known"
        words = {"yes": "fits", "no": "does not fit", "unsure": "may or may not fit"}[self.fits]
        return f"{words} in the {size(self.profile.capacity_bytes)} of {title}"

    def _repr_html_(self) -> str:
        import base64

        from medckpt.report.memory_timeline import timeline_png

        picture = base64.b64encode(timeline_png(self.explanation, self.profile)).decode()
        text = html.escape(str(self))
        return f'<pre>{text}</pre><img alt="memory over one step" src="data:image/png;base64,{picture}">'


def milliseconds(ms: float) -> str:
    """Returns a time as people read it."""
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2f} ms"


def fits_in(profile: MemoryProfile, reserved_bytes: tuple[int, int]) -> Fits:
    """Returns whether the device holds what a process takes: "unsure" if that depends on what is estimated."""
    if profile.capacity_bytes is None:
        return "unknown"
    low, high = reserved_bytes
    return "yes" if high <= profile.capacity_bytes else "no" if low > profile.capacity_bytes else "unsure"


def forecast(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Loss | None = None,
    precision: Precision = "bf16-mixed",
    optimizer: OptimizerName | None = "adamw",
    memory: str | Path | MemoryProfile = "a100_40gb",
    policy: Literal["none", "block", "all"] | Sequence[str] | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    averages: bool = False,
    weight_cache: bool = True,
) -> Forecast:
    """Returns what one training step of `model` takes on a device; seconds on a CPU, no memory, no data.

    The whole step is run on fake tensors: forward under autocast, loss, backward, clipping, optimizer. The model is
    left as it is; its forward and backward hooks run as in training, on fake tensors.

    Args:
        model: any `nn.Module`, in the mode (train or eval) of the training.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or the only argument; tensors (real,
            or fake) in nested containers. Only shapes and dtypes are read.
        loss: output -> scalar tensor; None: the mean of squares. A `nn.Module`'s tensors count as inputs.
        precision: "32", "bf16-mixed" or "16-mixed".
        optimizer: "adamw", "sgd" (with momentum), or None for forward and backward alone.
        memory: the name of a profile in configs/memory, the path of one, or a `MemoryProfile`. "cpu" is this
            machine's CPU: its allocator and autocast, and scratch memory of convolutions measured where it decides.
        policy: what is recomputed: a level of `find_regions`, or names of regions; None leaves the model as it is.
        clip_norm: if the gradients' norm is clipped.
        accumulate: forward and backward passes per optimizer step. Of more than two, two are run: the others take as
            much, and `step_ms` counts them.
        averages: whether averaged weights (EMA) lie on the device.
        weight_cache: whether autocast keeps its casts of weights through a forward pass. Lightning does not.

    Raises:
        ConfigError: a setting is not known; the model decides by values that only a real run has; model, inputs and
            loss do not go together.
        KeyboardInterrupt: Ctrl-C, at the next operator.
    """
    profile = load_profile(memory)
    rules: Literal["cpu", "cuda"] = "cpu" if profile.device == "cpu" else "cuda"
    step = Step(
        precision=str(precision),  # type: ignore[arg-type]  # 32 is the same as "32"
        optimizer=optimizer,
        clip_norm=clip_norm,
        accumulate=accumulate,
        averages=averages,
        weight_cache=weight_cache,
        rules=rules,
    )
    regions = _regions(model, policy)
    found = forecast_of(trace_step(model, inputs, step, loss, recompute=regions), profile)
    if regions or policy in (None, "none"):
        return found
    note = f"policy={policy!r}: the model has no block of that kind (`find_regions`), so nothing is recomputed"
    return dataclasses.replace(found, notes=(*found.notes, note))


def _regions(model: nn.Module, policy: Any) -> tuple[str, ...]:
    """Returns the regions that `policy` names."""
    if policy is None:
        return ()
    if isinstance(policy, str):
        if policy not in get_args(Level):
            raise ConfigError(f"policy: '{policy}' is not a level. {suggest(policy, get_args(Level))}")
        return find_regions(model, policy)  # type: ignore[arg-type]
    names = tuple(policy) if isinstance(policy, Iterable) else (policy,)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "policy: must be a level ('none', 'block', 'all'), names of regions (as find_regions returns them), or "
            f"None; not {policy!r:.60} ({type(policy).__name__})."
        )
    return names


def forecast_of(graph: StepGraph, profile: MemoryProfile) -> Forecast:
    """Returns the forecast of a traced step; on a CPU, with scratch memory measured where it decides."""
    simulation = simulate(graph, profile, measure=profile.device == "cpu")
    return Forecast(
        simulation=simulation,
        explanation=explain(graph, simulation, profile),
        profile=profile,
        notes=_notes(graph),
    )


def _notes(graph: StepGraph) -> tuple[str, ...]:
    phases = [op.phase for op in graph.ops]
    passes = sum(now == "forward" != before for before, now in itertools.pairwise(["", *phases]))
    if graph.repeats == 1:
        return ()
    return (
        f"timeline and picture show {passes} of the {round(passes * graph.repeats)} forward and backward passes of a "
        "step; the others take as much memory, and the time of the step counts them",
    )
