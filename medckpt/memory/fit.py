"""Plans a step under a budget: traces each option once, solves, and lets the exact simulation judge what was found."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from medckpt.errors import ConfigError, InfeasibleBudget
from medckpt.memory.additive import AdditiveModel
from medckpt.memory.baselines import baseline, with_own_flag
from medckpt.memory.graph import StepGraph
from medckpt.memory.options import OPTIONS, lay_on, lean_modules, options_for, twin, without_recompute
from medckpt.memory.plan import MemoryPlan, RegionPlan, model_key, shapes_of
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.regions import find_regions
from medckpt.memory.segments import cuts
from medckpt.memory.simulate import Simulation, simulate
from medckpt.memory.solve import GAP, fastest, leanest
from medckpt.memory.step import Loss, Step, StepRunner
from medckpt.memory.target_loss import TargetLoss
from medckpt.memory.timing import RegionTimes, measure_times, recomputed, take_times
from medckpt.memory.trace import trace_step
from medckpt.memory.ways import BoundModel, Way, exact_ways, real_tensors, refuse_impossible, ways_to_try

log = logging.getLogger("medckpt")

_ROUNDS = 4
"""How often a budget is tightened where the exact simulation finds more than the additive model did."""
_NOMINAL_GB_S, _NOMINAL_TFLOPS = 15.0, 0.1
"""Of some cores of a CPU: to choose by where nothing is known, and not to be told as times (`MemoryPlan.times`)."""
_SHORT_MS = 20_000
"""A plain step up to here (by the nominal rates) is timed on the CPU at hand if its profile has no rates."""
_MODEL = "model."
"""Prefix of module names inside of `BoundModel`."""


class Planner:
    """Finds policies for one model, one step and one device. Traces are made when they are first needed, and kept."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        step: Step,
        profile: MemoryProfile,
        *,
        loss: Loss | None = None,
        target_loss: TargetLoss | None = None,
        target: Any = None,
        regions: Sequence[str] | None = None,
        lean: bool = True,
        offload: bool = False,
        micro_batches: int | None = None,
        tail: bool | None = None,
        measure: bool | None = False,
        advance: Callable[[str], None] = lambda done: None,
    ) -> None:
        """`loss` is of the output alone; with `target_loss` (of output and target) the step may also run by samples.

        `micro_batches`, `tail`: None leaves the choice to the planner. `measure` takes the times of real steps on this
        machine instead of the profile's roofline; None: if the profile is of a CPU without rates, and a plain step is
        short and fits. `advance` is told of each trace and each timed step.
        """
        self.model = model
        self.inputs = inputs
        self.step = step
        self.profile = _with_rates(profile)
        self.loss = loss
        self.target_loss = target_loss
        self.target = target
        self.regions = tuple(find_regions(model, "all") if regions is None else regions)
        self.options = options_for(model, self.regions, lean=lean, offload=offload)
        self._lean = lean
        self._simplest = {region: _alike(model, region, self.options) for region in self.regions}
        self.fixed_micro_batches = micro_batches
        self.fixed_tail = tail
        self._measure = measure
        self._rated = self.profile is profile
        self.advance = advance
        self._models: dict[Way, AdditiveModel] = {}
        self._found: list[MemoryPlan] = []
        self._judgements: dict[tuple[Way, tuple[tuple[str, str], ...]], Simulation] = {}
        if offload and profile.device == "cpu":
            raise ConfigError("offload: a CPU has no memory beside its own to keep tensors in. Leave it out.")
        refuse_impossible(model, target_loss, target, self.samples, micro_batches, tail)

    @property
    def samples(self) -> int:
        """Samples per step."""
        return next((int(t.shape[0]) for t in tree_leaves(self.inputs) if isinstance(t, Tensor) and t.dim()), 1)

    @cached_property
    def measure(self) -> bool:
        """Whether times are those of real steps on this machine."""
        if self._measure is not None:
            return self._measure
        room, ms = self.profile.capacity_bytes, self.plain.step_ms
        fits = room is None or 2 * self.plain.peak_bytes <= room
        return not self._rated and self.profile.device == "cpu" and fits and ms is not None and ms <= _SHORT_MS

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """How the step may run, in the order in which it is tried: those that are exact for this model.

        Raises:
            ConfigError: what was asked for (`micro_batches`, `tail`) is not possible or not exact here.
        """
        wanted = ways_to_try(
            self.model,
            self.samples,
            by_samples=self.target_loss is not None,
            micro_batches=self.fixed_micro_batches,
            tail=self.fixed_tail,
        )
        if self.target_loss is None:
            return tuple(wanted)
        step = self.model, self.target_loss, self.inputs, self.target
        return exact_ways(wanted, *step, run=self.measure, record=lambda: self._plain_graph)

    def _stands(self, way: Way) -> bool:
        """Whether a way that nobody asked for can be traced."""
        try:
            self._model(way)
        except ConfigError as error:
            if way == Way() or len(self.ways) == 1:
                raise
            log.info("%s is left out: %s", way, error)
            self.ways = tuple(other for other in self.ways if other != way)
            return False
        return True

    @cached_property
    def _plain_graph(self) -> StepGraph:
        return self.trace({}, Way())

    @cached_property
    def plain(self) -> Simulation:
        """The step of the model as it is."""
        return self._simulated(self._plain_graph)

    def plan(self, budget_bytes: int) -> MemoryPlan:
        """Returns the fastest plan whose exactly simulated peak is within the budget.

        Raises:
            InfeasibleBudget: there is none; it carries the smallest peak that was found.
        """
        # What a smaller budget gave is allowed under a larger one: so time never rises with the budget.
        best = min(
            (plan for plan in self._found if plan.predicted_peak_bytes <= budget_bytes),
            key=lambda plan: plan.predicted_step_ms,
            default=None,
        )
        for way in self.ways:
            if (best is not None and self._cannot_beat(way, best)) or not self._stands(way):
                continue
            for found in (self._within(way, budget_bytes), *self._offloaded(way, budget_bytes)):
                if found is not None and (best is None or found.predicted_step_ms < best.predicted_step_ms):
                    best = found
        if best is not None:
            return self._remembered(best, budget_bytes)
        smallest = self.smallest()
        if smallest.predicted_peak_bytes <= budget_bytes:
            return self._remembered(smallest, budget_bytes)
        raise InfeasibleBudget(budget_bytes, smallest.predicted_peak_bytes)

    def within(self, peak_bytes: int | None, device_bytes: int | None) -> MemoryPlan:
        """Returns the fastest plan whose peak is within `peak_bytes`, or that fits on a device; else the smallest.

        Raises:
            InfeasibleBudget: there is none.
        """
        if peak_bytes is not None:
            return self.plan(peak_bytes)
        return self.smallest() if device_bytes is None else self.plan_on(device_bytes)

    def plan_on(self, device_bytes: int) -> MemoryPlan:
        """Returns the fastest plan that surely fits on a device, with all that the allocator may waste.

        Where none surely fits, the smallest is returned if it may.

        Raises:
            InfeasibleBudget: not even the smallest may fit.
        """
        budget = device_bytes
        for _ in range(_ROUNDS):
            try:
                plan = self.plan(budget)
            except InfeasibleBudget:
                break
            low, high = self.simulation(plan).reserved_bytes
            if high <= device_bytes:
                return self._remembered(plan, device_bytes)
            budget = min(budget, plan.predicted_peak_bytes) - (high - device_bytes)
        smallest = self.smallest()
        low, _ = self.simulation(smallest).reserved_bytes
        if low > device_bytes:
            raise InfeasibleBudget(device_bytes, low)
        return self._remembered(smallest, device_bytes)

    def simulation(self, plan: MemoryPlan) -> Simulation:
        """Returns the exact simulation of a plan of this planner."""
        return self._simulate(Way(plan.tail, plan.micro_batches), plan.choices)

    def smallest(self) -> MemoryPlan:
        """Returns the plan with the smallest peak."""
        plans = []
        for way in filter(self._stands, self.ways):
            model = self._model(way)
            choices = leanest(model)
            plans.append(self._judged(way, self._own(choices), model.peak_bytes(choices)))
        best = min(plans, key=lambda plan: (plan.predicted_peak_bytes, plan.predicted_step_ms))
        return self._remembered(best, best.predicted_peak_bytes)

    def uniform(self, option: str, way: Way | None = None) -> MemoryPlan:
        """Returns the plan that treats every region alike."""
        return self.of(dict.fromkeys(self.regions, option), way)

    def of(self, choices: dict[str, str], way: Way | None = None) -> MemoryPlan:
        """Returns the plan of given choices, judged by the exact simulation."""
        return self._judged(way or Way(), choices, 0)

    def baseline(self, name: str) -> MemoryPlan:
        """Returns what a baseline takes, judged by the exact simulation."""
        return self.of(baseline(self.model, name))

    def own_flag(self) -> Simulation | None:
        """Returns what the step takes with the network's own recompute on; None if it has none."""
        net = with_own_flag(self.model)
        return None if net is None else self._simulated(self._trace(net, Way()))

    def trace(self, choices: dict[str, str], way: Way) -> StepGraph:
        """Returns the record of the step under a policy."""
        kinds = set(choices.values())
        self.advance(kinds.pop() if len(kinds) == 1 else "policy" if kinds else "plain")
        return self._trace(lay_on(twin(self.model), choices, lean=self._lean), way)

    def _trace(self, net: nn.Module, way: Way) -> StepGraph:
        if self.target_loss is None:
            return trace_step(net, self.inputs, self.step, self.loss)
        bound = BoundModel(net, self.target_loss, way)
        return trace_step(bound, (self.inputs, self.target), self.step, lambda value: value)

    def _cannot_beat(self, way: Way, best: MemoryPlan) -> bool:
        """Whether a way is not worth its traces: the best so far does no more than the fastest options take."""
        model = self._models.get(Way())
        if model is None or way == Way():
            return False
        free = sum(min(cut.segments[i].ms for cut in model.cuts.values()) for i in range(model.count))
        return best.predicted_step_ms <= free * (1 + GAP)

    def _model(self, way: Way) -> AdditiveModel:
        if way not in self._models:
            graphs = {option: self.trace(dict.fromkeys(self.regions, option), way) for option in self.options}
            regions = tuple(self._prefix + region for region in self.regions)
            low, high = self.profile.context_bytes
            fixed = self.profile.library_workspace_bytes + (low + high) // 2
            found = cuts(graphs, regions, self.profile)
            if self.measure:
                take_times(found, self._times(way, regions))
            self._models[way] = AdditiveModel(found, regions, fixed)
        return self._models[way]

    def _times(self, way: Way, regions: Sequence[str]) -> dict[str, RegionTimes]:
        """Returns what each option takes in real steps, on copies of the model.

        What runs again needs no steps of its own: it takes one more forward pass.
        """
        inputs, target = real_tensors(self.inputs), real_tensors(self.target)
        runners = {}
        for option in self.options:
            if OPTIONS[option].recompute:
                continue
            net = lay_on(copy.deepcopy(self.model), dict.fromkeys(self.regions, option), lean=self._lean)
            if self.target_loss is None:
                runners[option] = StepRunner(net, inputs, self.loss, self.step)
            else:
                bound = BoundModel(net, self.target_loss, way)
                runners[option] = StepRunner(bound, (inputs, target), lambda value: value, self.step)
        found = measure_times(runners, regions, advance=self.advance)
        return {
            option: recomputed(found[without_recompute(option)]) if OPTIONS[option].recompute else found[option]
            for option in self.options
        }

    def _within(self, way: Way, budget_bytes: int) -> MemoryPlan | None:
        model = self._model(way)
        limit = budget_bytes
        for _ in range(_ROUNDS):
            choices = fastest(model, limit)
            if choices is None:
                return None
            plan = self._judged(way, self._own(choices), budget_bytes)
            if plan.predicted_peak_bytes <= budget_bytes:
                return plan
            limit -= max(plan.predicted_peak_bytes - budget_bytes, 1)
        return None

    def _offloaded(self, way: Way, budget_bytes: int) -> list[MemoryPlan]:
        """Returns the plans that offload every region, if they fit.

        What comes back early for the region before is no part of a sum over regions, so the programme may miss them.
        """
        plans = [self.uniform(option, way) for option in self.options if OPTIONS[option].offload]
        return [plan for plan in plans if plan.predicted_peak_bytes <= budget_bytes]

    def _judged(self, way: Way, choices: dict[str, str], budget_bytes: int) -> MemoryPlan:
        """Returns the plan of given choices, simulated exactly."""
        choices = {name: self._simplest.get(name, {}).get(option, option) for name, option in choices.items()}
        found = self._simulate(way, choices)
        model, named = self._model(way), self._named(choices)
        plain = self._models.get(Way(), model)
        return MemoryPlan(
            regions=tuple(
                RegionPlan(
                    name=name,
                    option=option,
                    ms=_region_ms(model, self._prefix + name, option),
                    plain_ms=_region_ms(plain, self._prefix + name, "keep"),
                )
                for name, option in choices.items()
            ),
            tail=way.tail,
            micro_batches=way.micro_batches,
            predicted_peak_bytes=found.peak_bytes,
            predicted_step_ms=model.step_ms(named) if self.measure else found.step_ms or math.nan,
            plain_peak_bytes=self.plain.peak_bytes,
            plain_step_ms=self.plain_ms(),
            budget_bytes=budget_bytes,
            memory=self.profile.name,
            samples=self.samples,
            inputs=shapes_of(self.inputs),
            precision=self.step.precision,
            times="measured" if self.measure else "profile" if self._rated else "nominal",
            key=model_key(self.model),
        )

    def plain_ms(self) -> float:
        """Returns the milliseconds of the plain step."""
        if not self.measure:
            return self.plain.step_ms or math.nan
        return self._model(Way()).step_ms({})

    @property
    def _prefix(self) -> str:
        """What stands before the model's own names in a trace."""
        return "" if self.target_loss is None else _MODEL

    def _named(self, choices: dict[str, str]) -> dict[str, str]:
        return {self._prefix + name: option for name, option in choices.items()}

    def _own(self, choices: dict[str, str]) -> dict[str, str]:
        return {name[len(self._prefix) :]: option for name, option in choices.items()}

    def _remembered(self, plan: MemoryPlan, budget_bytes: int) -> MemoryPlan:
        plan = dataclasses.replace(plan, budget_bytes=budget_bytes)
        self._found.append(plan)
        return plan

    def _simulate(self, way: Way, choices: dict[str, str]) -> Simulation:
        kind = (way, tuple(sorted(choices.items())))
        if kind not in self._judgements:
            self._judgements[kind] = self._simulated(self.trace(choices, way))
        return self._judgements[kind]

    def _simulated(self, graph: StepGraph) -> Simulation:
        return simulate(graph, self.profile, measure=self.profile.device == "cpu")


def _alike(model: nn.Module, region: str, options: Sequence[str]) -> dict[str, str]:
    """Returns, for options that do the same with a region as an earlier one, that one: a plan says the simplest."""
    first: dict[Any, str] = {}
    found = {}
    for option in options:
        what = OPTIONS[option]
        does = what.recompute, what.offload, tuple(lean_modules(model, {region: option}).items())
        found[option] = first.setdefault(does, option)
    return found


def _with_rates(profile: MemoryProfile) -> MemoryProfile:
    """Returns a profile with nominal rates where it has none: what is faster than what can then be said, no more."""
    if profile.has_rates:
        return profile
    return dataclasses.replace(profile, bandwidth_gb_s=_NOMINAL_GB_S, fp32_tflops=_NOMINAL_TFLOPS)


def _region_ms(model: AdditiveModel, region: str, option: str) -> float:
    if option not in model.cuts or region not in model.regions:
        return math.nan  # a baseline's own
    return model.region_ms(region, option)
