"""Which faults a seed gives."""

from __future__ import annotations

from deploy.chaos.faults import Harm, Moment, Setting, Target
from deploy.chaos.schedule import schedule


def test_a_seed_gives_the_same_faults_every_time_and_another_one_others() -> None:
    assert schedule(40, 1) == schedule(40, 1)
    assert schedule(40, 1) != schedule(40, 2)
    assert [fault.number for fault in schedule(40, 1)] == list(range(1, 41))


def test_30_faults_reach_every_target_and_every_named_point() -> None:
    for seed in range(20):
        faults = schedule(30, seed)
        assert len(faults) == 30
        assert {fault.target for fault in faults} == set(Target)
        assert {fault.moment for fault in faults} == set(Moment)
        points = {(fault.target, fault.moment) for fault in faults if fault.harm is Harm.KILL}
        assert {
            (Target.LEARNER, Moment.COLLECTIVE),
            (Target.LEARNER, Moment.CHECKPOINT),
            (Target.LEARNER, Moment.PUBLISHED),
            (Target.COORDINATOR, Moment.PUBLISHED),
            (Target.DRIVER, Moment.CHECKPOINT),
        } <= points


def test_60_faults_send_every_signal_to_every_role() -> None:
    machine = {Target.DISK, Target.CLOCK, Target.BYTES, Target.POOL}
    for seed in range(20):
        sent = {(fault.target, fault.harm) for fault in schedule(60, seed) if fault.target not in machine}
        assert len(sent) == 3 * (len(Target) - len(machine))


def test_faults_that_need_the_same_setting_follow_each_other() -> None:
    settings = [fault.setting for fault in schedule(60, 3)]
    assert settings == sorted(settings, key=list(Setting).index)
    assert set(settings) == set(Setting)


def test_only_what_was_asked_for_is_hit() -> None:
    faults = schedule(25, 0, (Target.SAMPLER, Target.LEARNER))
    assert len(faults) == 25
    assert {fault.target for fault in faults} == {Target.SAMPLER, Target.LEARNER}


def test_what_nobody_can_replace_stands_still_for_seconds_and_not_for_ever() -> None:
    own = {Target.DRIVER, Target.RAYLET, Target.GCS, Target.REGISTRY, Target.GCS_ON_REDIS}
    stops = [fault for seed in range(20) for fault in schedule(80, seed) if fault.harm is Harm.STOP]
    assert any(fault.seconds is None for fault in stops)
    assert all(fault.seconds is not None and fault.seconds <= 10 for fault in stops if fault.target in own)
