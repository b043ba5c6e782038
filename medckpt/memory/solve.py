"""Finds the fastest policy under a budget: one mixed-integer linear programme over the additive model, by HiGHS.

One binary per region and option; a constraint at every segment of the step and, inside, at every stretch between two
releases of shared tensors. A shared tensor's presence is the maximum of its holders' choices, one continuous variable
for each set of holders.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from medckpt.memory.additive import AdditiveModel
from medckpt.memory.segments import Key

_MIB = 2**20
GAP = 1e-4
"""Relative distance from the best possible time at which the search ends."""
_PEAK_GAP = 1e-6
"""The same of the smallest peak: much of it is there under every policy."""
_SLACKS = (0, 16, 256, 4096)
"""Bytes that a budget is tightened by where the solver's own tolerance (some bytes) let a policy exceed it."""


def fastest(model: AdditiveModel, budget_bytes: int, *, seconds: float = 20.0) -> dict[str, str] | None:
    """Returns region -> option of the fastest policy whose peak is within the budget; None if there is none.

    `seconds` limits the search; what is found by then is returned.
    """
    programme = _Programme(model)
    for slack in _SLACKS:
        policy = programme.solve(programme.times, budget_bytes - slack, seconds, GAP)
        if policy is None:
            return None
        if model.peak_bytes(policy) <= budget_bytes:
            return _given_back(model, policy, budget_bytes)
    return None


def _given_back(model: AdditiveModel, policy: dict[str, str], budget_bytes: int) -> dict[str, str]:
    """Returns a policy that leaves regions as they are whose options save neither time nor memory that is needed."""

    def as_it_is(region: str) -> float:
        return model.region_ms(region, model.reference)

    idle = [region for region, option in policy.items() if model.region_ms(region, option) >= as_it_is(region)]
    for regions in (idle, *([region] for region in idle)):
        plainer = policy | dict.fromkeys(regions, model.reference)
        if plainer != policy and model.peak_bytes(plainer) <= budget_bytes:
            policy = plainer
    return policy


def leanest(model: AdditiveModel, *, seconds: float = 20.0) -> dict[str, str]:
    """Returns region -> option of the policy with the smallest peak; among equals a fast one."""
    programme = _Programme(model)
    peak = programme.solve(programme.times * 1e-6, None, seconds, _PEAK_GAP)
    assert peak is not None, "without a budget every policy is allowed"
    return fastest(model, model.peak_bytes(peak), seconds=seconds) or peak


Term = dict[int, float]
"""Column to coefficient."""


@dataclass
class _Programme:
    """The columns (choices, presences, the peak) and rows of the programme."""

    model: AdditiveModel
    columns: dict[tuple[str, str], int] = field(default_factory=dict)
    presences: dict[frozenset[tuple[str, frozenset[str]]], int] = field(default_factory=dict)
    rows: list[tuple[Term, float]] = field(default_factory=list)
    """(terms, bytes that are there anyway): their sum is at most the budget."""
    links: list[Term] = field(default_factory=list)
    """Sums that are at most 0."""

    def __post_init__(self) -> None:
        for region in self.model.regions:
            for option in self.model.cuts:
                self.columns[region, option] = len(self.columns)
        for segment in range(self.model.count):
            self.rows += self._rows(segment)

    @property
    def times(self) -> np.ndarray:
        """Milliseconds per column."""
        costs = np.zeros(len(self.columns))
        for option, cut in self.model.cuts.items():
            for segment in cut.segments:
                if (segment.region, option) in self.columns:
                    costs[self.columns[segment.region, option]] += segment.ms
        return costs

    def solve(self, costs: np.ndarray, budget_bytes: int | None, seconds: float, gap: float) -> dict[str, str] | None:
        """Minimises `costs` (one per choice) under the budget, or the peak itself if there is none."""
        choices, width = len(self.columns), len(self.columns) + len(self.presences) + 1
        peak = width - 1
        objective = np.zeros(width)
        objective[:choices] = costs
        objective[peak] = 1.0 if budget_bytes is None else 0.0
        limit = np.inf if budget_bytes is None else budget_bytes / _MIB
        over = [
            ({column: value / _MIB for column, value in terms.items()} | {peak: -1.0}, -fixed / _MIB)
            for terms, fixed in self.rows
        ]
        over += [(terms, 0.0) for terms in self.links]
        options = self.model.cuts
        one = [({self.columns[region, option]: 1.0 for option in options}, 1.0) for region in self.model.regions]
        with _without_words():
            result = milp(
                objective,
                integrality=np.array([1] * choices + [0] * (width - choices)),
                bounds=Bounds(0, np.array([1.0] * (width - 1) + [limit])),
                constraints=[_constraint(over, width, equal=False), _constraint(one, width, equal=True)],
                options={"time_limit": seconds, "mip_rel_gap": gap},
            )
        if result.x is None:
            return None
        return {
            region: max(self.model.cuts, key=lambda option: result.x[self.columns[region, option]])
            for region in self.model.regions
        }

    def _rows(self, segment: int) -> Iterator[tuple[Term, float]]:
        """Yields what is held in each stretch of a segment, for each option of its region."""
        model = self.model
        base: Term = {}
        fixed = float(model.before[segment])
        for earlier in range(segment):
            for option in self._options(earlier):
                items = model.cuts[option].segments[earlier].carried
                fixed += self._add(base, earlier, option, sum(n for n, until in items if until >= segment))
        held = {key: self._presence(key, segment) for key in model.keys if key[0] < segment}
        for key, presence in held.items():
            if presence is not None:
                fixed += _add(base, presence, model.sizes[key])
        for option in self._options(segment):
            for nbytes, own in model.cuts[option].segments[segment].pieces:
                terms, extra = dict(base), fixed
                extra += self._add(terms, segment, option, nbytes)
                for key in own:
                    before, now = held.get(key), self._presence(key, segment, own=option)
                    if before != now and now is not None:
                        extra += _add(terms, now, model.sizes[key])
                        if before is not None:
                            _add(terms, before, -model.sizes[key])
                yield terms, extra

    def _options(self, segment: int) -> tuple[str, ...]:
        region = self.model.cuts[self.model.reference].segments[segment].region
        return tuple(self.model.cuts) if region in self.model.regions else (self.model.reference,)

    def _region(self, segment: int) -> str:
        return self.model.cuts[self.model.reference].segments[segment].region

    def _add(self, terms: Term, segment: int, option: str, nbytes: float) -> float:
        """Adds bytes that are there if `segment` runs under `option`; returns those that are there anyway."""
        column = self.columns.get((self._region(segment), option))
        return _add(terms, _ALWAYS if column is None else column, nbytes)

    def _presence(self, key: Key, segment: int, own: str | None = None) -> int | None:
        """Returns the column that says whether a shared tensor is there, `_ALWAYS`, or None if it cannot be.

        `own`: the segment itself holds it if its region runs under this option.
        """
        if self.model.held_by_python(key, segment):
            return _ALWAYS
        holders: set[tuple[str, frozenset[str]]] = set()
        for holder in self.model.needed_by(key, segment):
            region, options = self._region(holder), self.model.may_hold[key][holder]
            if region not in self.model.regions or len(options) == len(self.model.cuts):
                return _ALWAYS
            holders.add((region, options))
        if own is not None:
            if (self._region(segment), own) not in self.columns:
                return _ALWAYS
            holders.add((self._region(segment), frozenset({own})))
        return self._maximum(frozenset(holders)) if holders else None

    def _maximum(self, holders: frozenset[tuple[str, frozenset[str]]]) -> int:
        """Returns the column that is at least each holder's choice: a single choice is its own."""
        if len(holders) == 1:
            region, options = next(iter(holders))
            if len(options) == 1:
                return self.columns[region, next(iter(options))]
        if holders not in self.presences:
            column = self.presences[holders] = len(self.columns) + len(self.presences)
            for region, options in holders:
                self.links.append({column: -1.0} | {self.columns[region, option]: 1.0 for option in options})
        return self.presences[holders]


_ALWAYS = -1


def _add(terms: Term, column: int, nbytes: float) -> float:
    if column == _ALWAYS:
        return nbytes
    if nbytes:
        terms[column] = terms.get(column, 0.0) + nbytes
    return 0.0


def _constraint(rows: list[tuple[Term, float]], width: int, *, equal: bool) -> LinearConstraint:
    """Returns sums that are at most, or equal to, their limits."""
    entries = [(row, column, value) for row, (terms, _) in enumerate(rows) for column, value in terms.items()]
    indices = (np.array([row for row, _, _ in entries]), np.array([column for _, column, _ in entries]))
    matrix = coo_array((np.array([value for _, _, value in entries]), indices), shape=(len(rows), width)).tocsr()
    limits = np.array([limit for _, limit in rows])
    return LinearConstraint(matrix, limits if equal else -np.inf, limits)


@contextmanager
def _without_words() -> Iterator[None]:
    """Keeps what HiGHS prints at times, whatever it is told, out of standard output, where programs read JSON."""
    try:
        kept = os.dup(1)
    except OSError:  # no standard output
        yield
        return
    away = os.open(os.devnull, os.O_WRONLY)
    flush = getattr(ctypes.CDLL(None), "fflush", None) if os.name == "posix" else None
    try:
        if flush:
            flush(None)
        os.dup2(away, 1)
        yield
    finally:
        if flush:
            flush(None)  # of C's own buffer, which would be written later
        os.dup2(kept, 1)
        os.close(kept)
        os.close(away)
