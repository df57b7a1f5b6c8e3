"""The verdict on every cell that two versions have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.arm import Arm, TensorStore
from bench.inputs import Case
from bench.pairs import Paired, PairEffort, measure_pairs
from bench.peers import CONTROL
from bench.peers.client import ArmServer
from bench.progress import Progress
from bench.record import Cell, Record
from bench.run import Group
from bench.suites import Competitor
from bench.tables import column_of, ms_text, table
from bench.timing import median
from bench.verdict import Outcome, Verdict, confirm, judge, with_control
from bench.verify import Reference

MORE_SESSIONS = 3
"""How often at most a cell that differs is measured again, until two sessions agree."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell compared."""

    label: str
    impl: str
    a_ms: float | None = None
    b_ms: float | None = None
    verdict: Verdict | None = None
    control: Verdict | None = None
    error: str | None = None


class _CannotCompare(Exception):
    """An arm refused, failed, or computed something wrong."""


def compare_groups(
    groups: Sequence[Group],
    competitors: Sequence[Competitor],
    *,
    start: Callable[[], tuple[ArmServer, ArmServer]],
    effort: PairEffort,
    threshold: float,
    progress: Progress,
) -> list[Row]:
    """Compares every group; a difference is measured again in fresh processes."""
    cells = [(group, competitor) for group in groups for competitor in competitors]
    rows = _one_session(cells, start=start, effort=effort, threshold=threshold, progress=progress)
    verdicts = [[] if row.verdict is None else [row.verdict] for row in rows]
    doubtful = [i for i, seen in enumerate(verdicts) if seen and seen[0].outcome != Outcome.SAME]
    for _ in range(MORE_SESSIONS):
        if not doubtful:
            break
        progress.note(f"{len(doubtful)} cells differ: measured again in fresh processes")
        again = _one_session(
            [cells[i] for i in doubtful],
            start=start,
            effort=effort,
            threshold=threshold,
            progress=None,
        )
        for i, row in zip(doubtful, again, strict=True):
            if row.verdict is None:
                rows[i] = row
                continue
            rows[i] = dataclasses.replace(row, verdict=confirm(verdicts[i], row.verdict))
            verdicts[i].append(row.verdict)
        doubtful = [i for i in doubtful if _is_open(rows[i])]
    return rows


def _is_open(row: Row) -> bool:
    """Whether the sessions so far do not agree."""
    return row.verdict is not None and row.verdict.outcome == Outcome.NOISY


def _one_session(
    cells: Sequence[tuple[Group, Competitor]],
    *,
    start: Callable[[], tuple[ArmServer, ArmServer]],
    effort: PairEffort,
    threshold: float,
    progress: Progress | None,
) -> list[Row]:
    a, b = start()
    try:
        rows = []
        store = TensorStore()
        for group, competitor in cells:
            if progress is not None:
                progress.step(f"{group.label()} {competitor.impl} {competitor.mode}")
            rows.append(_row(a, b, group, competitor, store, effort, threshold))
            if progress is not None:
                progress.done()
        return rows
    finally:
        a.stop()
        b.stop()


def _row(
    a: ArmServer,
    b: ArmServer,
    group: Group,
    competitor: Competitor,
    store: TensorStore,
    effort: PairEffort,
    threshold: float,
) -> Row:
    impl = column_of(
        Cell(shape="", tokens=0, dtype="", impl=competitor.impl, mode=competitor.mode, error="")
    )
    try:
        case = group.case()
        weights = store.weights(group.shape, group.dtype, case.seed)
        reference = Reference(group.shape, weights, store.draws(case)[0])
        once = dataclasses.replace(effort, max_rounds=effort.rounds)
        control = _pair(a, b, Competitor(impl=CONTROL), group, None, once, threshold)
        paired = _pair(a, b, competitor, group, reference, effort, threshold)
    except _CannotCompare as error:
        return Row(label=group.label(), impl=impl, error=str(error))
    return Row(
        label=group.label(),
        impl=impl,
        a_ms=median(paired.a_ms),
        b_ms=median(paired.b_ms),
        verdict=with_control(paired.verdict, control.verdict, threshold=threshold),
        control=control.verdict,
    )


def _pair(
    a: ArmServer,
    b: ArmServer,
    competitor: Competitor,
    group: Group,
    reference: Reference | None,
    effort: PairEffort,
    threshold: float,
) -> Paired:
    arms = [server.new_arm(competitor.impl, competitor.mode) for server in (a, b)]
    try:
        times = [
            _begin(side, arm, group.case(), reference) for side, arm in zip("AB", arms, strict=True)
        ]
        return measure_pairs(
            arms[0], arms[1], call_ms=max(times), effort=effort, threshold=threshold
        )
    finally:
        for arm in arms:
            arm.close()


def _begin(side: str, arm: Arm, case: Case, reference: Reference | None) -> float:
    reason = arm.open(case.shape, case.dtype, case.seed)
    if reason is not None:
        raise _CannotCompare(f"{side}: {reason}")
    started = arm.begin(case)
    error = started.error
    if error is None and reference is not None:
        assert started.rows is not None
        error = reference.fault(started.rows)[1]
    if error is not None:
        raise _CannotCompare(f"{side}: {error}")
    return started.call_ms


def compare_records(a: Record, b: Record, *, threshold: float) -> list[Row]:
    """Compares the cells that both records timed, by the control's ratio where both have one."""
    before = {cell.key(): cell for cell in a.cells if cell.ms_samples}
    rows = []
    controls: dict[str, Verdict] = {}
    shared = [cell for cell in b.cells if cell.ms_samples and cell.key() in before]
    for cell in sorted(shared, key=lambda cell: cell.impl != CONTROL):
        label = f"{cell.shape} {cell.dtype} T={cell.tokens} {cell.routing}"
        control = controls.get(label)
        drift = 1.0 if control is None else control.ratio
        pairs = zip(before[cell.key()].ms_samples, cell.ms_samples, strict=False)
        verdict = judge([after / earlier / drift for earlier, after in pairs], threshold=threshold)
        if cell.impl == CONTROL:
            controls[label] = verdict
            continue
        rows.append(
            Row(
                label=label,
                impl=column_of(cell),
                a_ms=before[cell.key()].ms_median,
                b_ms=cell.ms_median,
                verdict=verdict,
                control=control,
            )
        )
    if not rows:
        raise ValueError("the two records have no timed cell in common")
    return rows


def rows_text(rows: Sequence[Row]) -> str:
    """The table of a comparison."""
    header = ["case", "impl", "A ms", "B ms", "B / A", "95 % interval", "verdict", "control B / A"]
    lines = []
    for row in rows:
        if row.verdict is None:
            lines.append([row.label, row.impl, "-", "-", "-", "-", row.error or "", "-"])
            continue
        verdict = row.verdict
        lines.append(
            [
                row.label,
                row.impl,
                ms_text(row.a_ms or 0.0),
                ms_text(row.b_ms or 0.0),
                f"{verdict.ratio:.3f}",
                f"{verdict.low:.3f} to {verdict.high:.3f}",
                verdict.outcome.value,
                "-" if row.control is None else f"{row.control.ratio:.3f}",
            ]
        )
    return table(header, lines)


def has_slowdown(rows: Sequence[Row]) -> bool:
    """Whether any cell is really slower."""
    return any(row.verdict is not None and row.verdict.outcome == Outcome.SLOWER for row in rows)
