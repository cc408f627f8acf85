"""Cuts a model so that its branches, which do not read one another, run on different ranks.

    layers             a stem, two decoders d and e that read it, a loss that reads both
    order they run in  stem d1 d2 d3 e1 e2 e3 loss

    (1) decomposition  series( stem, parallel( series(d1 d2 d3), series(e1 e2 e3) ), loss )
    (2) ranks          rank 0: stem d1 d2 d3 loss          rank 1: e1 e2 e3
    (3) stages         rank 0: [stem]  [d1 d2 d3]  [loss]  rank 1: [e1 e2 e3]
    (4) line           stem | d1 d2 d3 | e1 e2 e3 | loss   the stages 0 1 2 3, on ranks 0 0 1 0

    rank 0 │stem│ d1 d2 d3 │loss│      A chain of two stages has to wait at its only cut:
    rank 1 │    │ e1 e2 e3 │           stem d1 d2 d3 | e1 e2 e3 loss.

(1) `_decomposed`: a layer that all others lead to or follow from splits its part in series; what
    then hangs together in no way is parallel. A part without such a layer that hangs together all
    the same (four branches that exchange what they made) is split behind its largest beginning in
    which no branches have met yet.
(2) `_Search`: every assignment of the pieces to ranks where there are few; else the ranks of a
    pipeline's sections are halved, and with them the branches, and pieces move while that helps.
    An assignment is judged by the critical path of one microbatch, messages included, and by the
    busiest rank for each microbatch more.
(3) `_stages`: a rank's pieces in the order in which it runs them, split after what another rank
    waits for and ahead of what waits for another rank, and nowhere else.
(4) Stages are intervals of the layers in a new order (`graph.reorder`), so that all that knows
    stages as intervals (memory, retention, execution) knows these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, pairwise, product
from math import inf

from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.planning.partition import places
from pathoseg.parallel.schedule.costs import Link

# A part of a model that takes less than such a share of its time is not taken apart.
_PIECES = 100
_EXACT = 4096  # assignments of pieces to ranks up to which all are looked at
_BISECTED = 12  # branches up to which all ways to halve them are looked at
_JUDGED = 1000  # assignments that are looked at otherwise
_ROOM = 0.8  # share of a rank's memory that pieces may fill; the rest is left to workspace
_KEPT = 3  # different cuts that are returned


@dataclass(frozen=True, slots=True)
class BranchCut:
    """Stages that are sets of layers, and the ranks that hold them.

    Attributes:
        line: Positions of the layers, in the order in which they are to run.
        bounds: Of each stage, the place in `line` of its first layer; and the number of layers.
        home: The rank of each stage.
    """

    line: tuple[int, ...]
    bounds: tuple[int, ...]
    home: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A part of a model: a piece that is never parted, or other parts, in series or in parallel.

    Attributes:
        parts: What it is made of, in a topological order; nothing for a piece.
        parallel: Whether no part of it reads another.
        nodes: What is inside of it, as a set of bits: of a decomposition the nodes of its graph,
            of `Branches.whole` the numbers of pieces.
    """

    parts: tuple[Part, ...]
    parallel: bool
    nodes: int

    def walk(self) -> Iterator[Part]:
        """Yield this part and all that are inside of it."""
        yield self
        for part in self.parts:
            yield from part.walk()


class _Decomposition:
    """Takes a directed acyclic graph apart (1).

    Args:
        before: By node, those that it reads; their numbers are lower.
        times: By node.
        grain: Time up to which nodes stay together.
    """

    def __init__(self, before: Sequence[set[int]], times: Sequence[float], grain: float) -> None:
        size = len(before)
        self._times, self._grain = times, grain
        self._before = [sum(1 << node for node in own) for own in before]
        self._beside = [*self._before]  # neighbours, either way
        self._related = [0] * size  # all that lead to a node or follow from it
        for node in range(size):
            for source in before[node]:
                self._related[node] |= self._related[source] | 1 << source
                self._beside[source] |= 1 << node
        below = [0] * size
        for node in reversed(range(size)):
            for source in before[node]:
                below[source] |= below[node] | 1 << node
        self._related = [up | down for up, down in zip(self._related, below, strict=True)]

    def part(self, nodes: int) -> Part:
        """Take apart a set of nodes that no path leaves and enters again."""
        if nodes.bit_count() == 1 or self._time(nodes) <= self._grain:
            return Part((), False, nodes)
        islands = self._islands(nodes)
        if len(islands) > 1:
            return Part(tuple(map(self.part, islands)), True, nodes)
        return self._series(nodes)

    def _time(self, nodes: int) -> float:
        return sum(self._times[node] for node in bits(nodes))

    def _islands(self, nodes: int) -> list[int]:
        """The sets of nodes that hang together, by their lowest node."""
        found = []
        while nodes:
            island, edge = 0, nodes & -nodes
            while edge:
                island |= edge
                reached = 0
                for node in bits(edge):
                    reached |= self._beside[node]
                edge = reached & nodes & ~island
            found.append(island)
            nodes &= ~island
        return found

    def _series(self, nodes: int) -> Part:
        """Parts in series; small neighbours are one piece."""
        others = nodes.bit_count() - 1
        spine = [n for n in bits(nodes) if (self._related[n] & nodes).bit_count() == others]
        sections: list[int] = []
        if spine:
            rest = nodes
            for node in spine:
                ahead = self._related[node] & rest & ((1 << node) - 1)
                sections += [ahead, 1 << node]
                rest &= ~(ahead | 1 << node)
            sections.append(rest)
        else:
            beginning = self._unmet(nodes)
            sections += [beginning, nodes & ~beginning]
        parts: list[Part] = []
        for section in filter(None, sections):
            part = self.part(section)
            for each in part.parts if part.parts and not part.parallel else (part,):
                if parts and not (parts[-1].parts or each.parts):
                    both = parts[-1].nodes | each.nodes
                    if self._time(both) <= self._grain:
                        parts[-1] = Part((), False, both)
                        continue
                parts.append(each)
        return Part(tuple(parts), False, nodes) if len(parts) > 1 else parts[0]

    def _unmet(self, nodes: int) -> int:
        """The largest beginning in which no node reads two branches."""
        branch: dict[int, int] = {}
        taken = 0
        for node in bits(nodes):
            sources = self._before[node] & nodes
            met = {branch[source] for source in bits(sources & taken)}
            if sources & ~taken == 0 and len(met) <= 1:
                branch[node] = met.pop() if met else node
                taken |= 1 << node
        return taken


def _of_pieces(part: Part, piece_of: Mapping[int, int]) -> Part:
    """The same part, its nodes being pieces."""
    pieces = {piece_of[node] for node in bits(part.nodes)}
    parts = tuple(_of_pieces(each, piece_of) for each in part.parts)
    return Part(parts, part.parallel, sum(1 << piece for piece in pieces))


def bits(nodes: int) -> Iterator[int]:
    """Yield the numbers in a set of bits, ascending."""
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest


@dataclass(frozen=True)
class _Pieces:
    """Times, bytes and edges of a model's pieces, by number; the numbers are a topological order.

    Attributes:
        layers: Positions of its layers, ascending.
        forward: Time of its forward.
        backward: Time of its backward.
        weights: Bytes of parameters, gradients and optimizer state.
        saved: Bytes that one microbatch keeps for the backward.
        before: The pieces that it reads, each with the time of the message between ranks.
        after: The pieces that read it, likewise.
        read: The pieces that it reads, each with the bytes.
    """

    layers: list[list[int]]
    forward: list[float]
    backward: list[float]
    weights: list[int]
    saved: list[int]
    before: list[list[tuple[int, float]]]
    after: list[list[tuple[int, float]]]
    read: list[list[tuple[int, int]]]

    def __len__(self) -> int:
        return len(self.layers)

    def seconds(self, piece: int) -> float:
        return self.forward[piece] + self.backward[piece]


class Branches:
    """A model's branches, and the cuts that run them on several ranks at once.

    Args:
        graph: The layers.
        forwards: Time of each layer's forward.
        backwards: Time of each layer's backward.
        link: Takes messages between ranks.
        slots: Tensors of its size that a step keeps beside a parameter that is trained.
        visit: Time that a rank takes for each forward or backward of a stage beside its layers.

    Attributes:
        whole: The decomposition (1).
        longest: Share of the time of all layers that the longest chain of pieces takes; where it
            is 1, nothing can run beside it.
    """

    def __init__(
        self,
        graph: LayerGraph,
        forwards: Sequence[float],
        backwards: Sequence[float],
        link: Link,
        slots: int = 3,
        visit: float = 0,
    ) -> None:
        self._visit = visit
        blocks = [range(*ends) for ends in pairwise(places(graph))]
        reads = _reads(graph, [number for number, block in enumerate(blocks) for _ in block])
        before: list[set[int]] = [set() for _ in blocks]
        for source, target in reads:
            before[target].add(source)
        times = [sum(forwards[at] + backwards[at] for at in block) for block in blocks]
        found = _Decomposition(before, times, sum(times) / _PIECES).part((1 << len(blocks)) - 1)
        own = [[*bits(part.nodes)] for part in found.walk() if not part.parts]
        of = {block: piece for piece, inside in enumerate(own) for block in inside}
        self.whole = _of_pieces(found, of)
        sizes: Counter[tuple[int, int]] = Counter()
        for (source, target), size in reads.items():
            if of[source] != of[target]:
                sizes[of[source], of[target]] += size
        entering: list[list[tuple[int, float]]] = [[] for _ in own]
        leaving: list[list[tuple[int, float]]] = [[] for _ in own]
        read: list[list[tuple[int, int]]] = [[] for _ in own]
        for (source, target), size in sorted(sizes.items()):
            read[target].append((source, size))
            delay = link.latency(0, 1) + link.transfer(0, 1, size)
            entering[target].append((source, delay))
            leaving[source].append((target, delay))
        layers = [sorted(at for block in inside for at in blocks[block]) for inside in own]
        self._pieces = _Pieces(
            layers,
            forward=[sum(forwards[at] for at in inside) for inside in layers],
            backward=[sum(backwards[at] for at in inside) for inside in layers],
            weights=[_weights(graph, inside, slots) for inside in layers],
            saved=[_saved(graph, inside) for inside in layers],
            before=entering,
            after=leaving,
            read=read,
        )
        chain = [0.0] * len(layers)
        for piece, sources in enumerate(entering):
            before_it = max((chain[source] for source, _ in sources), default=0.0)
            chain[piece] = before_it + self._pieces.seconds(piece)
        self.longest = max(chain) / (sum(times) or 1.0)

    def cuts(self, ranks: int, microbatches: int, memory: float = inf) -> list[BranchCut]:
        """Find cuts for so many ranks, the shortest step first.

        Args:
            ranks: Of one group.
            microbatches: That are in flight together.
            memory: Bytes of a rank, beyond which a cut counts as slower.

        Returns:
            Nothing where it is best to leave ranks without work.
        """
        search = _Search(self._pieces, ranks, microbatches, memory, self._visit)
        search.look(self.whole)
        found = dict.fromkeys(
            _stages(self._pieces, search.order, homes)
            for _, homes in sorted(search.found)
            if len(set(homes)) == ranks
        )
        return list(found)[:_KEPT]


def _reads(graph: LayerGraph, block_of: Sequence[int]) -> Counter[tuple[int, int]]:
    """By pair of blocks, the bytes that one makes and the other reads.

    The model's caller, and with it the loss, is where the last layer is, so that this is where
    outputs are read. What nobody reads ends there, too, so that no stage comes after the last.
    """
    last = len(block_of)
    found: Counter[tuple[int, int]] = Counter()
    for position, layer in enumerate(graph.layers):
        own, size = block_of[position], graph.bytes_of(layer.name)
        readers = graph.readers.get(layer.name, ())
        for target in {block_of[min(reader, last - 1)] for reader in readers} - {own}:
            found[own, target] += size
    reading = {source for source, _ in found}
    for block in set(block_of) - reading - {block_of[-1]}:
        found[block, block_of[-1]] = 0
    return found


def _weights(graph: LayerGraph, layers: Sequence[int], slots: int) -> int:
    used = {name for at in layers for name in graph.layers[at].parameters}
    known = [graph.parameters[name] for name in used]
    return sum(each.bytes * (1 + slots * each.trained) for each in known)


def _saved(graph: LayerGraph, layers: Sequence[int]) -> int:
    kept = {storage for at in layers for storage in graph.layers[at].saved}
    return sum(graph.storages[storage].bytes for storage in kept)


class _Search:
    """Assigns pieces to ranks (2).

    Attributes:
        order: The pieces in the order in which a rank takes its own, a topological one: those with
            the longest way to the end first.
        found: Assignments, as the rank of each piece, with their estimated times.
    """

    def __init__(
        self, pieces: _Pieces, ranks: int, microbatches: int, memory: float, visit: float
    ) -> None:
        self._pieces, self._ranks, self._visit = pieces, ranks, visit
        self._microbatches, self._memory = microbatches, _ROOM * memory
        self._in_flight = min(microbatches, ranks)
        self._tight = sum(pieces.weights) + self._in_flight * sum(pieces.saved) > self._memory
        self._left = _JUDGED
        self.found: list[tuple[float, tuple[int, ...]]] = []
        ahead = [0.0] * len(pieces)
        for piece in reversed(range(len(pieces))):
            longest = max((ahead[target] for target, _ in pieces.after[piece]), default=0.0)
            ahead[piece] = pieces.forward[piece] + longest
        self.order = sorted(range(len(pieces)), key=lambda piece: (-ahead[piece], piece))

    def look(self, whole: Part) -> None:
        """Find good assignments of the pieces of a decomposition."""
        size, ranks = len(self._pieces), self._ranks
        if size == 1:
            return
        if ranks ** (size - 1) <= _EXACT:
            every = product(range(ranks), repeat=size - 1)
            self.found = [(self.seconds((0, *homes)), (0, *homes)) for homes in every]
            return
        moves = [
            ([*bits(part.nodes)], rank)
            for part in sorted(whole.walk(), key=lambda part: -part.nodes.bit_count())
            if part is not whole
            for rank in range(ranks)
        ]
        for sections in (count for count in range(1, ranks + 1) if ranks % count == 0):
            self._left = _JUDGED
            homes = [0] * size
            width = ranks // sections
            for number, parts in enumerate(self._sections(whole, sections)):
                for part in parts:
                    own = range(number * width, (number + 1) * width)
                    self._place(part, own, homes)
            self._climb(homes, moves)

    def seconds(self, homes: Sequence[int]) -> float:
        """Estimate the time of a step of an assignment.

        It is that of one microbatch, by list scheduling with messages, and for each one more that
        of the busiest rank. A piece that reads what another rank made begins a stage.
        """
        pieces, load = self._pieces, [0.0] * self._ranks
        way = self._way(self.order, homes, pieces.forward, pieces.before, load)
        way += self._way(self.order[::-1], homes, pieces.backward, pieces.after, load)
        excess = max(0.0, self._held(homes) / self._memory - 1) if self._tight else 0.0
        return (way + (self._microbatches - 1) * max(load)) * (1 + 10 * excess)

    def _held(self, homes: Sequence[int]) -> int:
        """About the most bytes of a rank: what one rank makes for another is on both."""
        pieces, held = self._pieces, [0] * self._ranks
        received: dict[tuple[int, int], int] = {}
        for piece, rank in enumerate(homes):
            held[rank] += pieces.weights[piece] + self._in_flight * pieces.saved[piece]
            for source, size in pieces.read[piece]:
                if homes[source] != rank:
                    received[source, rank] = max(size, received.get((source, rank), 0))
        for (_, rank), size in received.items():
            held[rank] += self._in_flight * size
        return max(held)

    def _way(
        self,
        order: Sequence[int],
        homes: Sequence[int],
        times: Sequence[float],
        before: Sequence[Sequence[tuple[int, float]]],
        load: list[float],
    ) -> float:
        """Return the time at which the last piece ends in this order; add the work to `load`."""
        free, ends = [0.0] * self._ranks, [0.0] * len(times)
        for piece in order:
            rank = homes[piece]
            start = free[rank]
            begins = 0.0
            for source, delay in before[piece]:
                there = ends[source]
                if homes[source] != rank:
                    there += delay
                    begins = self._visit
                if there > start:
                    start = there
            work = begins + times[piece]
            load[rank] += work
            free[rank] = ends[piece] = start + work
        return max(free)

    def _sections(self, whole: Part, count: int) -> list[list[Part]]:
        """The parts in series, as sections of a pipeline of about the same time."""
        parts = whole.parts if whole.parts and not whole.parallel else (whole,)
        times = [*map(self._time, parts)]
        sections: list[list[Part]] = [[] for _ in range(count)]
        done, total = 0.0, sum(times) or 1.0
        for part, time in zip(parts, times, strict=True):
            sections[min(count - 1, int((done + time / 2) / total * count))].append(part)
            done += time
        return sections

    def _time(self, part: Part) -> float:
        return sum(map(self._pieces.seconds, bits(part.nodes)))

    def _place(self, part: Part, ranks: range, homes: list[int]) -> None:
        """Put a part on ranks: those of branches are halved, and the branches with them."""
        if len(ranks) == 1 or not part.parts:
            for piece in bits(part.nodes):
                homes[piece] = ranks[0]
        elif not part.parallel:
            for each in part.parts:
                self._place(each, ranks, homes)
        else:
            middle = (len(ranks) + 1) // 2
            first, second = ranks[:middle], ranks[middle:]
            times = [*map(self._time, part.parts)]
            chosen = _halved(times, len(first), len(second))
            for own, where in ((chosen, first), ({*range(len(times))} - chosen, second)):
                nodes = sum(part.parts[each].nodes for each in own)
                branches = tuple(part.parts[each] for each in sorted(own))
                if len(branches) == 1:
                    self._place(branches[0], where, homes)
                elif branches:
                    self._place(Part(branches, True, nodes), where, homes)

    def _climb(self, homes: list[int], moves: Sequence[tuple[list[int], int]]) -> None:
        """Move parts to other ranks while that makes the step shorter."""
        best = self.seconds(homes)
        improved = True
        while improved:
            improved = False
            for own, rank in moves:
                if self._left == 0:
                    break
                if all(homes[piece] == rank for piece in own):
                    continue
                moved = [*homes]
                for piece in own:
                    moved[piece] = rank
                self._left -= 1
                time = self.seconds(moved)
                if time < best * (1 - 1e-9):
                    best, homes, improved = time, moved, True
        self.found.append((best, tuple(homes)))


def _halved(times: Sequence[float], first: int, second: int) -> set[int]:
    """Choose branches for the first of two sets of ranks, so that both take about as long.

    Args:
        times: Of the branches.
        first: How many ranks there are for those that are chosen.
        second: How many for the others.
    """
    total, everything = sum(times), range(len(times))

    def worse(own: float) -> float:
        return max(own / first, (total - own) / second)

    if len(times) <= _BISECTED:
        subsets = (
            chosen for count in range(1, len(times)) for chosen in combinations(everything, count)
        )
        return set(min(subsets, key=lambda chosen: worse(sum(times[each] for each in chosen))))
    chosen, taken = set[int](), [0.0, 0.0]
    for each in sorted(everything, key=lambda each: (-times[each], each)):
        ends = [(taken[0] + times[each]) / first, (taken[1] + times[each]) / second]
        side = ends.index(min(ends))
        taken[side] += times[each]
        if side == 0:
            chosen.add(each)
    return chosen


def _stages(pieces: _Pieces, order: Sequence[int], homes: Sequence[int]) -> BranchCut:
    """Join pieces of one rank to stages (3), and lay them out as a line (4).

    A stage is handed all that it reads from other ranks ahead of its first piece, and hands out
    what they read after its last one. So pieces are joined where no message would be sent later
    for it, nor awaited earlier: messages between stages follow the order in time, and no stages
    can wait for each other.
    """

    def others(piece: int, links: Sequence[Sequence[tuple[int, float]]]) -> set[int]:
        return {other for other, _ in links[piece] if homes[other] != homes[piece]}

    stage_of: dict[int, int] = {}
    stages: list[list[int]] = []
    current: dict[int, tuple[int, set[int], set[int]]] = {}  # by rank: stage, received, waiting
    for piece in order:
        rank = homes[piece]
        received, waiting = others(piece, pieces.before), others(piece, pieces.after)
        stage, known, owed = current.get(rank, (-1, set[int](), set[int]()))
        if stage < 0 or not received <= known or not owed <= waiting:
            stage, known = len(stages), received
            stages.append([])
        stages[stage].append(piece)
        stage_of[piece] = stage
        current[rank] = stage, known, waiting
    # The line: by the first piece of each, as far as what they read allows.
    needs: list[set[int]] = [set() for _ in stages]
    for piece, stage in stage_of.items():
        needs[stage] |= {stage_of[source] for source, _ in pieces.before[piece]} - {stage}
    sequence = list(_sorted(needs))
    layers = [
        sorted(at for piece in stages[each] for at in pieces.layers[piece]) for each in sequence
    ]
    return BranchCut(
        tuple(at for own in layers for at in own),
        tuple(accumulate(map(len, layers), initial=0)),
        tuple(homes[stages[each][0]] for each in sequence),
    )


def _sorted(needs: Sequence[set[int]]) -> Iterator[int]:
    """Topological order, the lowest number first."""
    readers: list[list[int]] = [[] for _ in needs]
    missing = [len(own) for own in needs]
    for number, own in enumerate(needs):
        for source in own:
            readers[source].append(number)
    free = [number for number, count in enumerate(missing) if not count]
    heapify(free)
    while free:
        number = heappop(free)
        yield number
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(free, reader)
