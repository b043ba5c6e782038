"""Cuts a traced step into what each region does in forward and in backward, and says who holds which tensor.

A *segment* is a run of operators of one region (or of what lies between regions) in one direction. Every policy runs
the same segments in the same order; they differ in what happens inside, and in what is held from one to another. That
is what makes memory additive over regions (`memory/additive.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from medckpt.memory.graph import Op, Phase, StepGraph
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.simulate import step_times, storage_sizes
from medckpt.memory.workspace import estimate, is_custom, measured_scratch

Key = tuple[int, int]
"""A shared tensor: the segment that makes it, and its number there: among those that others use if that is a region's
segment, among all if it lies between regions, where every policy does the same."""

_DIRECTION: dict[Phase, str] = {
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "recompute": "backward",
}


@dataclass(slots=True)
class Segment:
    """What one segment takes under one policy. All sizes are bytes as the device's allocator counts them."""

    region: str
    """The region it belongs to; of what lies between regions the module's name in brackets."""
    direction: str
    """forward, backward, or the phase that comes after."""
    first: int
    last: int
    """Operators `first` to `last` of the step, both included."""
    ms: float = 0.0
    pieces: list[tuple[int, frozenset[Key]]] = field(default_factory=list)
    """The highest of its own memory, and the shared tensors that it holds itself meanwhile, stretch by stretch: a
    stretch ends where it lets go of a shared tensor."""
    carried: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, segment): what it made and nobody else uses, by the last segment during which it is there whatever the
    other regions do. That segment counts it itself if it is the backward of the same region or a gradient's user."""


@dataclass(slots=True)
class Shared:
    """A tensor of the forward pass that other segments use than the one that made it and its backward."""

    nbytes: int
    last_read: int
    """The last forward segment that reads it."""
    freed: int | None
    """The forward segment in which it is freed: then it was Python alone that held it until then."""
    holders: set[int] = field(default_factory=set)
    """Backward segments before whose end somebody needs it: their regions hold it from forward on."""


@dataclass(slots=True)
class Cut:
    """A step under one policy, cut into segments."""

    segments: list[Segment]
    shared: dict[Key, Shared]
    before: list[tuple[int, int]]
    """(bytes, segment): what is there before the step begins, by the last segment during which it is there."""
    mates: dict[int, int]
    """Forward segment to the backward segment of the same call, and the other way round."""

    def labels(self) -> list[tuple[str, str]]:
        """Returns region and direction of each segment: equal for all policies of a model."""
        return [(segment.region, segment.direction) for segment in self.segments]


def cuts(graphs: Mapping[str, StepGraph], regions: Sequence[str], profile: MemoryProfile) -> dict[str, Cut]:
    """Returns the step of each option cut into the segments of `regions`."""
    cutters = {option: _Cutter(graph, regions, profile) for option, graph in graphs.items()}
    # What one option lets live from one segment to another counts as shared under all of them.
    shared = set().union(*(cutter.shared_keys() for cutter in cutters.values()))
    return {option: cutter.cut(shared) for option, cutter in cutters.items()}


class _Cutter:
    def __init__(self, graph: StepGraph, regions: Sequence[str], profile: MemoryProfile) -> None:
        self.graph = graph
        self.sizes = storage_sizes(graph, profile)
        self.scratch = [_scratch(op, profile) for op in graph.ops]
        self.times = step_times(graph.ops, profile) or [0.0] * len(graph.ops)
        self.segments, self.segment_of = _segments(graph, regions)
        self.mates = _mates(self.segments)
        self.births: dict[int, list[int]] = {}
        self.deaths: dict[int, list[int]] = {}
        for index, storage, change in graph.events:
            (self.births if change > 0 else self.deaths).setdefault(index, []).append(storage)
        self.last_read: dict[int, dict[int, int]] = {}
        """Storage to (segment to the last operator there that reads it)."""
        for index, op in enumerate(graph.ops):
            for storage in op.reads:
                self.last_read.setdefault(storage, {})[self.segment_of[index]] = index
        self.keys = self._named()

    def shared_keys(self) -> set[Key]:
        """Returns the tensors of the forward pass that others than their makers use or hold."""
        return {self.keys[index] for index in self.keys if self._is_shared(index)}

    def cut(self, shared_keys: set[Key]) -> Cut:
        names = {index: key for index, key in self.keys.items() if key in shared_keys}
        inside: dict[int, list[int]] = {index: [] for index in range(len(self.segments))}
        for index, storage in enumerate(self.graph.storages):
            if storage.born < 0:
                continue
            made, gone = self.segment_of[storage.born], self._gone(index)
            inside[made].append(index)
            if index in names or gone == made:
                continue
            if gone < len(self.segments) and (self._same_region(made, gone) or self._is_backward(made)):
                inside[gone].append(index)
                self.segments[made].carried.append((self.sizes[index], gone - 1))
            else:
                self.segments[made].carried.append((self.sizes[index], gone))
        releases = self._releases(names)
        for number, segment in enumerate(self.segments):
            segment.ms = sum(self.times[segment.first : segment.last + 1])
            segment.pieces = self._pieces(segment, inside[number], releases.get(number, {}))
        return Cut(
            segments=self.segments,
            shared={key: self._shared(index) for index, key in names.items()},
            before=[(self.sizes[i], self._gone(i)) for i, s in enumerate(self.graph.storages) if s.born < 0],
            mates=self.mates,
        )

    def _named(self) -> dict[int, Key]:
        """Returns the tensors of the forward pass that could be shared."""
        numbers: dict[int, int] = {}
        keys = {}
        for index, storage in enumerate(self.graph.storages):
            made = self.segment_of[storage.born] if storage.born >= 0 else -1
            if made < 0 or self.segments[made].direction != "forward":
                continue
            between = self.segments[made].region.startswith("(")
            if between or (self._read_elsewhere(index, made) and not self._private_cast(index, made)):
                keys[index] = (made, numbers.setdefault(made, 0))
                numbers[made] += 1
        return keys

    def _read_elsewhere(self, storage: int, made: int) -> bool:
        return any(reader not in (made, self.mates.get(made)) for reader in self.last_read.get(storage, {}))

    def _private_cast(self, storage: int, made: int) -> bool:
        """Whether it is autocast's cached copy of a weight that one region alone reads: not all options cast."""
        cast = self.graph.storages[storage].kind == "weight_casts"
        return cast and all(self._same_region(reader, made) for reader in self.last_read[storage])

    def _same_region(self, one: int, other: int) -> bool:
        return self.segments[one].region == self.segments[other].region

    def _is_shared(self, storage: int) -> bool:
        made = self.keys[storage][0]
        return self._read_elsewhere(storage, made) or self._gone(storage) not in (made, self.mates.get(made))

    def _is_backward(self, segment: int) -> bool:
        return self.segments[segment].direction == "backward"

    def _gone(self, storage: int) -> int:
        """Returns the segment in which a storage is freed; one past the last if it outlives the step."""
        died = self.graph.storages[storage].died
        return len(self.segments) if died is None else self.segment_of[died]

    def _shared(self, storage: int) -> Shared:
        readers, gone = self.last_read.get(storage, {}), self._gone(storage)
        last_read = max((reader for reader in readers if not self._is_backward(reader)), default=0)
        holders = {reader for reader in readers if self._is_backward(reader)}
        if gone < len(self.segments) and not self._is_backward(gone):
            return Shared(self.sizes[storage], last_read, gone, holders)
        return Shared(self.sizes[storage], last_read, None, holders | {min(gone, len(self.segments) - 1)})

    def _releases(self, names: dict[int, Key]) -> dict[int, dict[Key, int]]:
        """Returns, per segment, up to which operator it holds which shared tensor itself."""
        found: dict[int, dict[Key, int]] = {}
        for storage, key in names.items():
            died = self.graph.storages[storage].died
            for reader, last in self.last_read.get(storage, {}).items():
                if self._is_backward(reader):
                    # What a recompute reads are its region's inputs, which it lets go of all at once, at its end.
                    again = self.graph.ops[last].phase == "recompute"
                    found.setdefault(reader, {})[key] = self.segments[reader].last if again else last
            gone = self._gone(storage)
            if gone < len(self.segments) and self._is_backward(gone) and died is not None:
                found.setdefault(gone, {})[key] = died
        return found

    def _pieces(
        self, segment: Segment, inside: Sequence[int], releases: dict[Key, int]
    ) -> list[tuple[int, frozenset[Key]]]:
        """Returns the peak of a segment's own tensors and scratch memory, stretch by stretch."""
        counted = set(inside)
        number = self.segment_of[segment.first]
        own = {index for index in counted if self.segment_of[self.graph.storages[index].born] == number}
        now = sum(self.sizes[index] for index in counted - own)
        ends = sorted({min(max(end, segment.first), segment.last) for end in releases.values()} | {segment.last})
        pieces, start = [], segment.first
        for end in ends:
            highest = 0
            for index in range(start, end + 1):
                now += sum(self.sizes[s] for s in self.births.get(index, []) if s in own)
                highest = max(highest, now + self.scratch[index])
                now -= sum(self.sizes[s] for s in self.deaths.get(index, []) if s in counted)
            held = frozenset(key for key, until in releases.items() if until >= end)
            pieces.append((highest, held))
            start = end + 1
        return pieces


_WORTH_MEASURING = 2**22
"""Scratch bytes that an operator on a CPU could take from which on it is run to know."""


def _scratch(op: Op, profile: MemoryProfile) -> int:
    """Returns the scratch memory of an operator; on this CPU, where it counts, that of a run of it."""
    low, expected, high = estimate(op, profile)
    capacity = profile.capacity_bytes or 2**62
    if profile.device != "cpu" or low == high or high < _WORTH_MEASURING or is_custom(op):
        return expected
    if op.bytes_moved + high > capacity // 2:
        return expected
    try:
        return measured_scratch(op)
    except RuntimeError:  # no kernel for it alone
        return expected


def _segments(graph: StepGraph, regions: Sequence[str]) -> tuple[list[Segment], list[int]]:
    """Returns the runs of operators of one region and direction, and the segment of each operator."""
    known: dict[str, str] = {}
    wanted = set(regions)
    segments: list[Segment] = []
    segment_of = []
    for index, op in enumerate(graph.ops):
        region = known.setdefault(op.region, _owner(op.region, wanted))
        direction = _DIRECTION.get(op.phase, op.phase)
        if not segments or (segments[-1].region, segments[-1].direction) != (region, direction):
            segments.append(Segment(region, direction, index, index))
        segments[-1].last = index
        segment_of.append(len(segments) - 1)
    return segments, segment_of


def _owner(name: str, regions: set[str]) -> str:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in regions:
            return ".".join(parts[:count])
    return f"({name})"


def _mates(segments: Sequence[Segment]) -> dict[int, int]:
    """Returns forward segment <-> backward segment of the same call: the last call's backward runs first."""
    open_calls: dict[str, list[int]] = {}
    mates: dict[int, int] = {}
    for index, segment in enumerate(segments):
        if segment.direction == "forward":
            open_calls.setdefault(segment.region, []).append(index)
        elif segment.direction == "backward" and open_calls.get(segment.region):
            forward = open_calls[segment.region].pop()
            mates |= {forward: index, index: forward}
    return mates
