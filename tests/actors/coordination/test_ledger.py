"""The ledger's state machine, property-tested over random orders of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordination.ledger import Ledger
from actors.messages import WorkUnitKey


def _ledger(max_staleness: int = 0, num_rounds: int = 3, work_units: int = 2, max_attempts: int = 2) -> Ledger:
    return Ledger(
        num_rounds=num_rounds,
        work_units_per_round=work_units,
        max_staleness=max_staleness,
        max_attempts=max_attempts,
        next_round=0,
        version=10,
    )


def _start_all(ledger: Ledger) -> list[tuple[WorkUnitKey, int]]:
    started = []
    while (item := ledger.start_next()) is not None:
        started.append(item)
    return started


def test_synchronous_rounds_are_sampled_by_the_newest_version_only() -> None:
    ledger = _ledger()
    for round_index in range(3):
        started = _start_all(ledger)
        assert [(key.round, key.index, version) for key, version in started] == [
            (round_index, 0, 10 + round_index),
            (round_index, 1, 10 + round_index),
        ]
        for key, _ in started:
            assert ledger.finish(key)
        assert ledger.is_complete(round_index)
        ledger.publish(round_index, 11 + round_index)
    assert _start_all(ledger) == []


def test_staleness_bounds_what_is_in_flight() -> None:
    ledger = _ledger(max_staleness=1)
    assert [key.round for key, _ in _start_all(ledger)] == [0, 0, 1, 1]
    for index in range(2):
        ledger.finish(WorkUnitKey(round=0, index=index))
    assert _start_all(ledger) == [], "ready but untrained groups still hold their slots"
    ledger.publish(0, 11)
    assert [(key.round, version) for key, version in _start_all(ledger)] == [(2, 11), (2, 11)]


def test_a_retry_uses_the_version_of_the_first_attempt() -> None:
    ledger = _ledger(max_staleness=1)
    started = dict(_start_all(ledger))
    lost = WorkUnitKey(round=1, index=0)
    for index in range(2):
        ledger.finish(WorkUnitKey(round=0, index=index))
    ledger.publish(0, 11)
    assert ledger.fail(lost) == 1
    assert (lost, started[lost]) == ledger.start_next()
    assert ledger.num_retries == 1


def test_a_work_unit_that_fails_too_often_is_counted_and_the_round_continues() -> None:
    ledger = _ledger()
    first, second = (key for key, _ in _start_all(ledger))
    ledger.finish(second)
    assert ledger.fail(first) == 1
    assert ledger.start_next() == (first, 10)
    assert ledger.fail(first) == 2
    assert ledger.start_next() is None
    assert ledger.is_complete(0)
    assert ledger.ready(0) == [second]


def test_a_late_result_is_ignored() -> None:
    ledger = _ledger()
    key, _ = _start_all(ledger)[0]
    assert ledger.finish(key)
    assert not ledger.finish(key)
    assert ledger.fail(key) is None


def test_a_lost_version_costs_no_attempt_and_the_next_attempt_uses_the_newest() -> None:
    ledger = _ledger(max_staleness=1)
    (first, _), *_ = _start_all(ledger)
    later = WorkUnitKey(round=1, index=0)
    for _ in range(5):
        ledger.release(later)
        assert _start_all(ledger) == [(later, 10)]
    for index in range(2):
        ledger.finish(WorkUnitKey(round=0, index=index))
    ledger.publish(0, 11)
    ledger.release(later)
    assert (later, 11) in _start_all(ledger), "not of the lost version"
    ledger.release(first)
    assert ledger.counts()["waiting"] == 0, "nothing waits for it any more"


def test_lost_results_are_redone_and_running_work_units_continue() -> None:
    ledger = _ledger()
    started = dict(_start_all(ledger))
    done, running = started
    ledger.finish(done)
    assert ledger.unfinished(0) == [running]
    ledger.redo(0)
    assert ledger.ready(0) == []
    assert _start_all(ledger) == [(done, 10)]
    assert ledger.counts() == {"waiting": 0, "running": 2, "ready": 0, "failed": 0}


def test_rounds_publish_in_order() -> None:
    with pytest.raises(ValueError, match="round 1 published, but round 0 is next"):
        _ledger().publish(1, 11)


@given(st.data(), st.integers(0, 2), st.integers(1, 3))
@settings(max_examples=200)
def test_every_work_unit_ends_once_and_staleness_is_bounded(
    data: st.DataObject, staleness: int, work_units: int
) -> None:
    """With slow workers, actor deaths and lost versions."""
    ledger = _ledger(max_staleness=staleness, num_rounds=4, work_units=work_units)
    running: list[tuple[WorkUnitKey, int]] = []
    ended: list[WorkUnitKey] = []
    for round_index in range(4):
        while not ledger.is_complete(round_index):
            running += _start_all(ledger)
            assert all(round_index - staleness <= version - 10 <= round_index for _, version in running if _)
            assert len(running) + len(ended) <= (round_index + staleness + 1) * work_units
            key, version = running.pop(data.draw(st.integers(0, len(running) - 1)))
            assert key.round - (version - 10) <= staleness, "older than the bound"
            if data.draw(st.booleans()):
                assert ledger.finish(key)
                ended.append(key)
            elif data.draw(st.booleans()):
                ledger.release(key)
            elif ledger.fail(key) == 2:
                ended.append(key)
        ledger.publish(round_index, 11 + round_index)
    assert sorted(ended, key=lambda k: (k.round, k.index)) == [
        WorkUnitKey(round=r, index=i) for r in range(4) for i in range(work_units)
    ]


def test_an_extended_round_is_complete_with_all_its_work_units() -> None:
    ledger = _ledger(max_staleness=1)
    first, second, *later = (key for key, _ in _start_all(ledger))
    ledger.finish(first)
    ledger.extend(0, 3)
    ledger.extend(0, 1)
    ledger.finish(second)
    assert not ledger.is_complete(0)
    third = WorkUnitKey(round=0, index=2)
    assert _start_all(ledger) == [(third, 10)]
    for key in later:
        ledger.finish(key)
    assert ledger.is_complete(1), "each round has its own"
    ledger.finish(third)
    assert ledger.is_complete(0)
    ledger.publish(0, 11)
    assert [key for key, _ in _start_all(ledger)] == [WorkUnitKey(round=2, index=index) for index in range(2)]


@given(st.integers(0), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=300)
def test_no_completion_exceeds_the_staleness_bound(seed: int, staleness: int, work_units: int) -> None:
    """Including late results, failures, lost versions, repeated and added work units, and restarts."""
    draw, ledger, round_index = random.Random(seed), _ledger(staleness, 6, work_units), 0
    versions, running = dict[WorkUnitKey, int](), list[WorkUnitKey]()
    kinds = ["finish"] * 6 + ["fail", "release", "redo", "extend", "restart"]
    while round_index < 6:
        started = _start_all(ledger)
        versions.update(started)
        running += [key for key, _ in started]
        what = draw.choice(kinds)
        if what == "restart":
            # Resume from a checkpoint: the learner publishes the versions of later rounds again.
            round_index, running = draw.randint(max(0, round_index - 1), round_index), []
            ledger = Ledger(
                num_rounds=6,
                work_units_per_round=work_units,
                max_staleness=staleness,
                max_attempts=2,
                next_round=round_index,
                version=10 + round_index,
            )
        elif what == "redo":
            ledger.redo(round_index)
        elif what == "extend":
            ledger.extend(round_index, work_units + draw.randrange(3))
        elif running:
            getattr(ledger, what)(running.pop(draw.randrange(len(running))))
        if ledger.is_complete(round_index):
            ages = [round_index - (versions[key] - 10) for key in ledger.ready(round_index)]
            assert all(0 <= age <= staleness for age in ages), ages
            round_index += 1
            ledger.publish(round_index - 1, 10 + round_index)
