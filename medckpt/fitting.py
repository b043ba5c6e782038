"""`plan`, `apply`, `bind`, `verify`: the fastest exact way to run a training step within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from medckpt.allowance import read_budget
from medckpt.errors import ConfigError
from medckpt.memory import options
from medckpt.memory.bind import BoundStep
from medckpt.memory.bind import bind as bind_step
from medckpt.memory.fit import Planner
from medckpt.memory.plan import MemoryPlan, model_key
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.step import Loss, OptimizerName, Precision, Step
from medckpt.memory.target_loss import TargetLoss
from medckpt.memory.verify import Verification, verify_choices
from medckpt.profiles import load_profile


def plan(
    model: nn.Module,
    inputs: Any,
    *,
    budget: str | int,
    memory: str | Path | MemoryProfile = "a100_80gb",
    loss: TargetLoss | None = None,
    target: Any = None,
    output_loss: Loss | None = None,
    precision: Precision = "bf16-mixed",
    optimizer: OptimizerName | None = "adamw",
    micro_batches: int | Literal["auto"] = "auto",
    lean: bool = True,
    offload: bool = False,
    measure: bool | None = None,
    regions: Sequence[str] | None = None,
    advance: Callable[[str], None] = lambda done: None,
) -> MemoryPlan:
    """Returns the fastest exact plan for one training step of `model` within a budget; `model` is left as it is.

    Args:
        model: any `nn.Module`, in the mode of the training, without recompute or lean operators.
        inputs: the only argument, a tuple of arguments, or a mapping; tensors, real or on "meta".
        budget: bytes ("8GiB", or a number), counted as `Forecast.peak_bytes`; a profile's name or "auto" (`memory`):
            what surely fits on such a device, with what its allocator wastes; or "min".
        memory: the device: name or path of a memory profile, or a `MemoryProfile`.
        loss: of (output, target), together with `target` (real, or on "meta"): then the step may also run sample by
            sample (the per-sample tail, micro-batches), which needs a mean over samples. `bind` tries whether it is.
        output_loss: of the output alone, instead; None with no `loss`: the mean of squares.
        precision, optimizer: as in `forecast`.
        micro_batches: in how many parts a batch may run; "auto" tries all that divide it.
        lean: whether lean operators may be used: exact but for the order of sums.
        offload: whether a region may keep in host memory what it saves; copies are charged as if nothing ran meanwhile.
        measure: whether to time real steps on this machine; None: if a CPU's profile has no rates and steps are short.
        regions: names of modules to decide on; None finds them.
        advance: told of each trace and timed step.

    Raises:
        InfeasibleBudget: no exact plan fits; the error carries the smallest peak.
        ConfigError: a setting is wrong, or the model cannot be traced.
    """
    profile = load_profile(memory)
    allowed = read_budget(budget, profile)
    rules: Literal["cpu", "cuda"] = "cpu" if profile.device == "cpu" else "cuda"
    planner = Planner(
        model,
        inputs,
        Step(precision=precision, optimizer=optimizer, rules=rules),
        profile,
        loss=output_loss,
        target_loss=loss,
        target=target,
        regions=regions,
        lean=lean,
        offload=offload,
        micro_batches=None if micro_batches == "auto" else micro_batches,
        measure=measure,
        advance=advance,
    )
    return planner.within(allowed.peak_bytes, allowed.device_bytes)


def apply(model: nn.Module, plan: MemoryPlan) -> nn.Module:
    """Lays a plan's options on the regions of `model`, in place, and returns it; `remove` takes them off.

    Parameters, state-dict keys, hooks and pickling stay as they are. Wrap with DDP or FSDP afterwards. The levers that
    need the loss inside (per-sample tail, micro-batches) come with `bind`.

    Raises:
        ConfigError: the plan was made for another model or version of torch; something is applied already.
    """
    _refuse_stale(model, plan)
    return options.lay_on(model, plan.choices)


def remove(model: nn.Module) -> nn.Module:
    """Takes recompute and lean operators off `model`, in place, and returns it."""
    return options.take_off(model)


def bind(
    model: nn.Module, loss: TargetLoss, plan: MemoryPlan, *, scale: Callable[[], float] | None = None
) -> BoundStep:
    """Returns `step(inputs, target)`: the loss of a planned step, to call `backward()` on.

    Args:
        model: with `plan` applied. With DDP wrap a module whose forward calls the step: `DDP(Together(step))`.
        loss: of (output, target). Where the plan runs sample by sample the first step tries on random outputs whether
            it is a mean over samples, and refuses it if not.
        plan: its tail and micro-batches are what the step does.
        scale: the loss scaling factor of the moment, under float16 (`lambda: scaler.get_scale()`).

    Raises:
        ConfigError: the plan was made for another model, or its levers are not exact for it (batch statistics).
    """
    _refuse_stale(model, plan)
    return bind_step(model, loss, tail=plan.tail, micro_batches=plan.micro_batches, scale=scale)


def verify(
    model: nn.Module,
    plan: MemoryPlan,
    inputs: Any,
    *,
    loss: TargetLoss | None = None,
    target: Any = None,
    precision: Precision = "32",
) -> Verification:
    """Runs a plain and a planned step on copies of `model` and compares loss, gradients, buffers, random states.

    `inputs` are real and may be smaller than the plan's. Recompute must agree bit for bit; lean operators and steps by
    samples within 1e-6 (loss) and 1e-4 (gradients) in float32. Without a loss a plan that runs by samples is refused.
    """
    if loss is None and (plan.tail or plan.micro_batches > 1):
        raise ConfigError("verify: this plan runs the loss sample by sample. Give loss= and target=.")
    return verify_choices(
        model,
        inputs,
        plan.choices,
        loss=loss,
        target=target,
        tail=plan.tail,
        micro_batches=plan.micro_batches,
        precision=precision,
    )


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


def _refuse_stale(model: nn.Module, plan: MemoryPlan) -> None:
    if type(model).__name__ in _WRAPPERS:
        raise ConfigError(
            f"plan: this is a {type(model).__name__} around the model. Apply and bind the model inside of it, and wrap "
            "a module whose forward calls the bound step."
        )
    if plan.key != model_key(model):
        raise ConfigError(
            f"plan: it was made for another model, other settings of it, or another version of torch (plan {plan.key}, "
            f"model {model_key(model)}). Plan again."
        )
