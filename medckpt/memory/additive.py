"""Memory and time of any policy, from one trace per option: sums over regions, exact at every segment of a step.

Each option (keep, lean, recompute) is traced once, laid on all regions. What a policy that mixes them takes at a
segment is then a sum: what is there anyway; the segment's own memory under its region's option; what earlier segments
made and is still there; and *shared* tensors, which are there as long as one region needs them, under whatever option.
A shared tensor is never charged to a region, so nothing is counted twice (B1 of the frontier study).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from medckpt.errors import MedckptError
from medckpt.memory.segments import Cut, Key, Segment

Assignment = Mapping[str, str]
"""Region to option."""


@dataclass(frozen=True)
class AdditiveModel:
    """The cuts of one model under each option."""

    cuts: Mapping[str, Cut]
    """By option; the first is taken for what lies between regions."""
    regions: tuple[str, ...]
    fixed_bytes: int
    """Libraries' workspaces and the device's context."""

    def __post_init__(self) -> None:
        first, *others = self.cuts.values()
        for other in others:
            if other.labels() != first.labels():
                raise MedckptError("the options of this model run its regions in different orders: no sum is exact.")

    @property
    def reference(self) -> str:
        return next(iter(self.cuts))

    def option(self, segment: int, policy: Assignment) -> str:
        """Returns the option that `segment` runs under."""
        return policy.get(self.cuts[self.reference].segments[segment].region, self.reference)

    def segment(self, segment: int, policy: Assignment) -> Segment:
        """Returns what `segment` takes under a policy."""
        return self.cuts[self.option(segment, policy)].segments[segment]

    @cached_property
    def count(self) -> int:
        return len(self.cuts[self.reference].segments)

    @cached_property
    def last_forward(self) -> dict[Key, int]:
        """The last forward segment during which Python holds a shared tensor, as far as any option shows it."""
        found = {}
        for key in self.keys:
            seen = [cut.shared[key] for cut in self.cuts.values() if key in cut.shared]
            freed = [shared.freed for shared in seen if shared.freed is not None]
            found[key] = max(freed) if freed else max(shared.last_read for shared in seen)
        return found

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        return tuple(sorted({key for cut in self.cuts.values() for key in cut.shared}))

    @cached_property
    def sizes(self) -> dict[Key, int]:
        cuts = self.cuts.values()
        return {key: max(cut.shared[key].nbytes for cut in cuts if key in cut.shared) for key in self.keys}

    @cached_property
    def before(self) -> list[int]:
        """Per segment: bytes that were there before the step began, and still are."""
        items = self.cuts[self.reference].before
        return [self.fixed_bytes + sum(n for n, until in items if until >= segment) for segment in range(self.count)]

    @cached_property
    def may_hold(self) -> dict[Key, dict[int, frozenset[str]]]:
        """Per shared tensor: backward segment -> the options under which it holds the tensor until then."""
        found: dict[Key, dict[int, set[str]]] = {key: {} for key in self.keys}
        for option, cut in self.cuts.items():
            for key, shared in cut.shared.items():
                for holder in shared.holders:
                    if option == self.reference or self._decided(holder):
                        found[key].setdefault(holder, set()).add(option)
        return {key: {h: frozenset(options) for h, options in holders.items()} for key, holders in found.items()}

    def _decided(self, segment: int) -> bool:
        return self.cuts[self.reference].segments[segment].region in self._wanted

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset(self.regions)

    def needed_by(self, key: Key, segment: int) -> list[int]:
        """Returns which holders keep a shared tensor alive at a segment that is not its own user."""
        mates = self.cuts[self.reference].mates
        return [h for h in self.may_hold[key] if mates.get(h, 0) <= segment < h]

    def held_by_python(self, key: Key, segment: int) -> bool:
        return segment <= self.last_forward[key]

    def peak_bytes(self, policy: Assignment) -> int:
        """Returns the peak of a policy, in bytes."""
        return max(self.at(segment, policy) for segment in range(self.count))

    def step_ms(self, policy: Assignment) -> float:
        """Returns the milliseconds of a step under a policy."""
        return sum(self.segment(segment, policy).ms for segment in range(self.count))

    def region_ms(self, region: str, option: str) -> float:
        """Returns the milliseconds of a region in a step under an option."""
        return sum(segment.ms for segment in self.cuts[option].segments if segment.region == region)

    def at(self, segment: int, policy: Assignment) -> int:
        """Returns the most memory held during a segment."""
        base = self.before[segment]
        for earlier in range(segment):
            base += sum(nbytes for nbytes, until in self.segment(earlier, policy).carried if until >= segment)
        held = {key for key in self.keys if key[0] < segment and self._held(key, segment, policy)}
        base += sum(self.sizes[key] for key in held)
        return base + max(
            nbytes + sum(self.sizes[key] for key in own - held) for nbytes, own in self.segment(segment, policy).pieces
        )

    def _held(self, key: Key, segment: int, policy: Assignment) -> bool:
        if self.held_by_python(key, segment):
            return True
        return any(self.option(h, policy) in self.may_hold[key][h] for h in self.needed_by(key, segment))
