"""The `run` command: measures every cell of a suite, saves the record as it grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from bench import shapes as named
from bench.arm import Arm, LocalArm, Started, TensorStore
from bench.floor import work_of
from bench.inputs import NUM_DRAWS, Case, Draw
from bench.peers import CONTROL, make_peer
from bench.peers.client import ArmServer
from bench.progress import Progress
from bench.record import Cell
from bench.shapes import Shape
from bench.suites import Competitor, Effort, Suite
from bench.timing import median
from bench.turns import Measurement, interleave
from bench.verify import Reference


@dataclass(frozen=True, kw_only=True)
class Group:
    """The cells that are measured side by side."""

    shape: Shape
    dtype: str
    routing: str
    tokens: int

    def label(self) -> str:
        """A few words for the progress line."""
        routing = "" if self.routing == "uniform" else f" {self.routing}"
        return f"{self.shape.name} {self.dtype} T={self.tokens}{routing}"

    def case(self) -> Case:
        """The problem that all of them solve."""
        return Case(shape=self.shape, tokens=self.tokens, dtype=self.dtype, routing=self.routing)


def groups_of(suite: Suite) -> list[Group]:
    """Every group, those of one set of weights next to each other."""
    return [
        Group(shape=named.shape_from_text(shape), dtype=dtype, routing=routing, tokens=tokens)
        for shape in suite.shapes
        for dtype in suite.dtypes
        for routing in suite.routings
        for tokens in suite.tokens
    ]


def weight_of(group: Group, suite: Suite) -> float:
    """A guess of the seconds that a group takes, for the progress estimate alone."""
    flops = 6 * group.tokens * group.shape.top_k
    flops *= group.shape.hidden_size * group.shape.intermediate_size
    call_s = flops / 1e11 + group.shape.top_k * group.shape.expert_bytes(group.dtype) / 1e10
    runs = suite.effort.runs(call_s * 1e3)
    return len(suite.competitors) * (1.0 + (runs + 3) * call_s)


class Field(AbstractContextManager["Field"]):
    """The competitors of a suite, each in the process that can run it."""

    def __init__(
        self,
        competitors: Sequence[Competitor],
        *,
        store: TensorStore,
        flush: Callable[[], object],
        remote_pythons: dict[str, str],
        threads: int,
        cache_bytes: int,
    ) -> None:
        self._servers: dict[str, ArmServer] = {}
        self._store = store
        self._flush = flush
        self._threads = threads
        self._cache_bytes = cache_bytes
        self.arms = [self._arm(competitor, remote_pythons) for competitor in competitors]

    def _arm(self, competitor: Competitor, remote_pythons: dict[str, str]) -> Arm:
        library = competitor.impl.partition(":")[0]
        python = remote_pythons.get(library)
        if python is None:
            return LocalArm(competitor.impl, competitor.mode, store=self._store, flush=self._flush)
        if python not in self._servers:
            self._servers[python] = ArmServer(
                python, threads=self._threads, cache_bytes=self._cache_bytes
            )
        return self._servers[python].new_arm(competitor.impl, competitor.mode)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._servers.values():
            server.stop()


def warm_up(arm: Arm, case: Case, effort: Effort, reference: Reference) -> Measurement:
    """Starts a competitor, checks what it computes."""
    started = arm.begin(case)
    m = Measurement(arm=arm, started=started, error=started.error)
    if m.error is None:
        m.runs = effort.runs(started.call_ms)
        if started.impl != CONTROL:
            assert started.rows is not None
            m.relative_error, m.error = reference.fault(started.rows)
    return m


def cell_of(
    m: Measurement, group: Group, draws: Sequence[Draw], read_gbps: float | None = None
) -> Cell:
    """The cell that a finished measurement makes, its floors still open."""
    empty = Cell(
        shape=group.shape.name,
        tokens=group.tokens,
        dtype=group.dtype,
        routing=group.routing,
        impl=m.started.impl,
        mode=m.arm.mode,
        relative_error=m.relative_error,
        error=m.error or "not timed",
    )
    if m.error is not None or not m.samples:
        return empty
    timed = [draws[index % NUM_DRAWS] for index in range(min(len(m.samples), NUM_DRAWS))]
    works = [work_of(group.shape, group.dtype, draw.topk_ids) for draw in timed]
    typical = sorted(works, key=lambda work: work.active_experts)[len(works) // 2]
    done = dataclasses.replace(
        empty,
        error=None,
        ms_median=median(m.samples),
        ms_min=min(m.samples),
        ms_samples=tuple(round(ms, 6) for ms in m.samples),
        runs=len(m.samples),
        first_call_ms=m.started.first_call_ms,
        read_gbps=read_gbps,
    )
    if m.started.impl == CONTROL:
        return done
    return dataclasses.replace(done, **vars(typical))


def layouts_of(suite: Suite, shape: Shape, remote_pythons: dict[str, str]) -> int:
    """Copies of the weights that are in memory at once: ours, each process', each re-packing."""
    impls = {competitor.impl for competitor in suite.competitors}
    packed = sum(make_peer(impl).num_own_layouts(shape) for impl in impls)
    remote = {remote_pythons.get(impl.partition(":")[0]) for impl in impls} - {None}
    return 1 + len(remote) + packed


def run_suite(
    suite: Suite,
    *,
    threads: int,
    cache_bytes: int,
    flush: Callable[[], object],
    remote_pythons: dict[str, str],
    progress: Progress,
    keep: Callable[[list[Cell], dict[str, str]], None],
    read: Callable[[], float] | None = None,
) -> None:
    """Measures group after group; `keep` gets the cells, the versions of each finished group.

    read: see `interleave`.
    """
    store = TensorStore()
    with Field(
        suite.competitors,
        store=store,
        flush=flush,
        remote_pythons=remote_pythons,
        threads=threads,
        cache_bytes=cache_bytes,
    ) as competitors:
        opened: tuple[Shape, str] | None = None
        reasons: dict[int, str | None] = {}
        for group in groups_of(suite):
            progress.step(group.label())
            if opened != (group.shape, group.dtype):
                reasons = _open_all(competitors.arms, group)
                opened = (group.shape, group.dtype)
            measured = _warm_up_all(suite, competitors.arms, reasons, group, store, progress)
            rates = interleave(measured, suite.effort.turns, read)
            if rates and len(rates) != 2 * suite.effort.turns:
                progress.note(
                    f"the read rate kept moving: {len(rates) // 2} turns count, at "
                    f"{min(rates):.3g} to {max(rates):.3g} GB/s"
                )
            read_gbps = median(rates) if rates else None
            draws = store.draws(group.case())
            cells = [cell_of(m, group, draws, read_gbps) for m in measured]
            versions = {m.started.impl: m.started.version for m in measured if m.started.version}
            keep(cells, versions)
            progress.done()


def _open_all(arms: Sequence[Arm], group: Group) -> dict[int, str | None]:
    for arm in arms:
        arm.close()
    return {
        index: arm.open(group.shape, group.dtype, group.case().seed)
        for index, arm in enumerate(arms)
    }


def _warm_up_all(
    suite: Suite,
    arms: Sequence[Arm],
    reasons: dict[int, str | None],
    group: Group,
    store: TensorStore,
    progress: Progress,
) -> list[Measurement]:
    case = group.case()
    weights = store.weights(group.shape, group.dtype, case.seed)
    reference = Reference(group.shape, weights, store.draws(case)[0])
    measurements = []
    for index, (arm, competitor) in enumerate(zip(arms, suite.competitors, strict=True)):
        if competitor.tokens is not None and group.tokens not in competitor.tokens:
            continue
        reason = reasons[index]
        if reason is not None:
            measurements.append(Measurement(arm=arm, started=Started(impl=arm.impl), error=reason))
            continue
        m = warm_up(arm, case, suite.effort, reference)
        if m.error is not None:
            progress.note(f"{m.started.impl} {arm.mode}: {m.error}")
        measurements.append(m)
    return measurements
