"""The schedule of a seed's faults."""

from __future__ import annotations

from tests.chaos.faults import ON_MACHINES, FaultKind, Platform, Target, Trigger, schedule


def test_the_schedule_depends_on_the_seed_alone() -> None:
    assert schedule(40, 1) == schedule(40, 1)
    assert schedule(40, 1) != schedule(40, 2)
    assert [fault.number for fault in schedule(40, 1)] == list(range(1, 41))


def test_30_faults_reach_every_target_and_trigger() -> None:
    for seed in range(20):
        faults = schedule(30, seed)
        assert len(faults) == 30
        assert {fault.target for fault in faults} == set(Target)
        assert {fault.trigger for fault in faults} == set(Trigger)
        points = {(fault.target, fault.trigger) for fault in faults if fault.kind is FaultKind.KILL}
        assert {
            (Target.LEARNER, Trigger.COLLECTIVE),
            (Target.LEARNER, Trigger.CHECKPOINT),
            (Target.LEARNER, Trigger.PUBLISHED),
            (Target.COORDINATOR, Trigger.PUBLISHED),
            (Target.DRIVER, Trigger.CHECKPOINT),
        } <= points


def test_60_faults_send_every_signal_to_every_role() -> None:
    others = {Target.DISK, Target.CLOCK, Target.BYTES, Target.POOL, Target.MACHINE, Target.LINK}
    for seed in range(20):
        sent = {(fault.target, fault.kind) for fault in schedule(60, seed) if fault.target not in others}
        assert len(sent) == 3 * (len(Target) - len(others))


def test_faults_are_sorted_by_platform() -> None:
    platforms = [fault.platform for fault in schedule(60, 3)]
    assert platforms == sorted(platforms, key=list(Platform).index)
    assert set(platforms) == set(Platform)


def test_a_session_on_two_machines_has_no_other_platform() -> None:
    faults = schedule(40, 3, ON_MACHINES, on_machines=True)
    assert {fault.platform for fault in faults} == {Platform.TWO_MACHINES}
    assert {fault.target for fault in faults} == set(ON_MACHINES)


def test_only_the_requested_targets_are_hit() -> None:
    faults = schedule(25, 0, (Target.SAMPLER, Target.LEARNER))
    assert len(faults) == 25
    assert {fault.target for fault in faults} == {Target.SAMPLER, Target.LEARNER}


def test_processes_that_d1_does_not_replace_are_stopped_for_seconds_only() -> None:
    kept = {Target.DRIVER, Target.RAYLET, Target.GCS, Target.REGISTRY, Target.GCS_ON_REDIS}
    stops = [fault for seed in range(20) for fault in schedule(80, seed) if fault.kind is FaultKind.STOP]
    assert any(fault.seconds is None for fault in stops)
    assert all(fault.seconds is not None and fault.seconds <= 10 for fault in stops if fault.target in kept)
