"""Version follower: with a registry, with a failing one, and with followers of other engines."""

import time
from contextlib import closing

import pytest
import redis

from actors.registry.files import write_admin
from actors.registry.records import DEFAULT_ADMIN_STATE, AdminState, EventKind
from actors.registry.registry import Registry
from deploy.service.checkpoints import Checkpoints, latest_checkpoint
from deploy.service.engine.follower import VersionFollower
from deploy.service.engine.loading import VersionLoader
from deploy.service.engine.versions import Versions
from deploy.service.source import Source
from rollout.config import EngineConfig
from rollout.sampler import Sampler
from tests.announced import latest


class FlakyRegistry(Registry):
    """Registry that is unreachable while `is_away`."""

    is_away = False

    def _explained(self):
        if self.is_away:
            raise ConnectionError("away")
        return super()._explained()


@pytest.fixture
def registry(registry_server, registry):
    flaky = FlakyRegistry(registry_server.url, registry._state.split(":")[1])
    yield flaky
    flaky.close()


@pytest.fixture
def loaded():
    return []


@pytest.fixture
def engine_of(run_dir, make_sampler, loaded):
    """Create the versions of another engine of the run."""

    def make():
        def load(policy):
            loaded.append(policy.version)
            return make_sampler(policy.version)

        policy = latest_checkpoint(run_dir)
        return Versions(make_sampler(policy.version), policy, load=load, locate=Checkpoints(run_dir).locate)

    return make


@pytest.fixture
def versions(engine_of):
    return engine_of()


@pytest.fixture
def follow(versions, registry, run_dir):
    """Create a follower of a registry to which some versions are announced."""

    def make(*policies):
        for policy in policies:
            registry.announce(policy)
        return VersionFollower(registry, versions, run_dir)

    return make


@pytest.fixture
def want(run_dir):
    """Write an operator's settings, as `d1 policy` does."""

    def write(pinned=None, is_paused=False):
        write_admin(run_dir, AdminState(pinned=pinned, is_paused=is_paused, changed_at=time.time()))

    return write


def kinds(registry):
    return [(event.kind, event.version) for event in registry.events("0")]


def test_only_the_latest_announcement_is_loaded(versions, follow, loaded, make_policy):
    assert follow(make_policy(2), make_policy(3), make_policy(4)).follow_once(0)
    assert (versions.policy.version, loaded) == (4, [4])


def test_a_score_is_recorded_without_loading(versions, follow, registry, loaded, make_policy):
    follower = follow(make_policy(2))
    follower.follow_once(0)
    registry.score(2, 1, 2)
    follower.follow_once(0)
    assert (versions.policy.num_correct, loaded, versions.num_swaps) == (1, [2], 1)


def test_the_serving_version_is_not_loaded_again(versions, follow, loaded, make_policy):
    follow(make_policy(1, weight_store="gone")).follow_once(0)
    assert (versions.policy.version, loaded) == (1, [])


def test_a_resumed_run_may_go_back_to_an_earlier_version(versions, follow, registry, make_policy):
    follower = follow(make_policy(5, manifest_digest="a"))
    follower.follow_once(0)
    registry.announce(make_policy(3))
    follower.follow_once(0)
    assert versions.policy.version == 3


def test_missing_weights_count_as_an_error_and_are_not_requested_again(versions, follow, make_policy):
    follower = follow(make_policy(2))
    attempts = []

    def gone(policy):
        attempts.append(policy.version)
        raise LookupError("the store moved on")

    follower._versions._load = gone
    assert not follower.follow_once(0)
    assert follower.follow_once(0)
    assert (versions.policy.version, attempts) == (1, [2])
    assert (follower.status.num_errors, follower.status.last_error) == (1, "the store moved on")
    assert follower.status.registry_reachable


def loads_checkpoints_alone(versions, otherwise):
    """Make loading raise `otherwise` for a version without a checkpoint."""
    load = versions._load

    def from_checkpoint(policy):
        if policy.checkpoint is None:
            raise otherwise
        return load(policy)

    versions._load = from_checkpoint


def test_missing_weights_are_requested_again_from_a_new_location(versions, follow, registry, make_policy):
    follower = follow(make_policy(2))
    loads_checkpoints_alone(versions, LookupError("the store moved on"))
    assert not follower.follow_once(0)
    registry.add_checkpoint(2, "/somewhere")
    assert follower.follow_once(0)
    assert versions.policy.version == 2


def test_unreachable_versions_are_not_refused_and_serve_once_they_have_a_checkpoint(
    engine_of, registry, run_dir, make_policy
):
    def engine():
        versions = engine_of()
        loads_checkpoints_alone(versions, LookupError("there is no weight store d1-weights-tiny on this cluster"))
        return versions, VersionFollower(registry, versions, run_dir)

    old, old_follower = engine()
    for version in (2, 3, 4):
        registry.announce(make_policy(version, weight_store="d1-weights-tiny"))
        assert not old_follower.follow_once(0)
    assert old.refused == ()
    assert registry.snapshot().refused == frozenset()
    assert EventKind.REFUSED not in dict(kinds(registry))
    registry.add_checkpoint(4, "/somewhere")
    # Before another engine has moved the alias.
    new, new_follower = engine()
    assert new_follower.follow_once(0)
    assert old_follower.follow_once(0)
    assert new.policy.version == old.policy.version == registry.snapshot().aliases["policy"] == 4


def test_a_version_with_a_wrong_checksum_is_refused(versions, follow, registry, run_dir, add_checkpoint, make_policy):
    directory = add_checkpoint(run_dir, 2)
    versions._load = lambda policy: VersionLoader(directory, EngineConfig()).load(policy)
    follower = follow(make_policy(2, checkpoint=str(directory), manifest_digest="dead" * 16))
    assert not follower.follow_once(0)
    assert versions.policy.version == 1
    assert registry.snapshot().refused == {2}
    assert "holds other weights than were announced" in versions.refused[0].why


def test_a_version_damaged_in_transfer_is_served_from_its_checkpoint(versions, follow, registry, make_policy):
    follower = follow(make_policy(2, weight_store="d1-weights-tiny"))
    loads_checkpoints_alone(versions, ValueError("the checksum differs"))
    assert not follower.follow_once(0)
    assert registry.snapshot().refused == {2}
    registry.add_checkpoint(2, "/somewhere")
    assert follower.follow_once(0)
    assert (versions.policy.version, versions.refused, registry.snapshot().refused) == (2, (), frozenset())


def test_a_refused_version_counts_as_an_error_and_is_not_requested_again(versions, follow, registry, make_policy):
    follower = follow(make_policy(2))

    def damaged(policy):
        raise ValueError("the checksum differs")

    versions._load = damaged
    assert not follower.follow_once(0)
    assert follower.follow_once(0)
    assert versions.policy.version == 1
    assert [(refused.version, refused.why) for refused in versions.refused] == [
        (2, "Policy version 2 is not served: the checksum differs")
    ]
    registry.announce(make_policy(3))
    versions._load = make_sampler_of(versions)
    assert follower.follow_once(0)
    assert versions.policy.version == 3


def make_sampler_of(versions):
    """Return the served weights under any version number."""
    return lambda policy: Sampler(versions._current.sampler.model, policy.version)


def test_a_version_that_was_announced_between_two_reads_is_found(registry_server, run_dir, add_checkpoint, make_policy):
    directory = add_checkpoint(run_dir, 2)
    source = Source(directory=str(run_dir), is_run=True, registry_url=registry_server.url)
    with closing(source.registry()) as registry:
        for version in (2, 3, 4):
            registry.announce(make_policy(version, weight_store="d1-weights-tiny"))
    locate = source.versions("cpu")._locate
    found = locate(2), locate(3)
    assert [policy.weight_store for policy in found] == ["d1-weights-tiny"] * 2
    assert [policy.checkpoint for policy in found] == [str(directory), None]
    assert (locate(9), locate("base").version) == (None, 1)


def test_other_failures_to_load_are_tried_again(versions, follow, make_policy, make_sampler):
    follower = follow(make_policy(2))
    outcomes = [TimeoutError("no answer"), make_sampler(2)]

    def load(_):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    follower._versions._load = load
    assert not follower.follow_once(0)
    assert follower.follow_once(0)
    assert (versions.policy.version, follower.status.num_errors) == (2, 1)


def test_the_status_shows_whether_the_registry_is_reachable(versions, follow, registry, make_policy):
    follower = follow(make_policy(2))
    registry.is_away = True
    assert not follower.follow_once(0)
    assert not follower.status.registry_reachable
    registry.is_away = False
    assert follower.follow_once(0)
    assert follower.status.registry_reachable
    assert (versions.policy.version, follower.status.num_errors) == (2, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_follower_thread_is_restarted_if_it_dies(versions, follow, make_policy):
    follower = follow(make_policy(2))
    read = follower._read

    def die(_):
        raise SystemExit

    follower._read = die
    follower.ensure_running()
    follower._thread.join(10)
    assert not follower._thread.is_alive()
    follower._read = read
    follower.ensure_running()
    assert follower.status.num_errors == 1
    deadline = time.monotonic() + 10
    while versions.policy.version != 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    follower.stop()
    assert not follower._thread.is_alive()


# Reports to the registry.


def test_an_empty_registry_is_filled_with_the_checkpoints_and_the_serving_version(versions, follow, registry):
    assert follow().follow_once(0)
    assert registry.snapshot().aliases == {"newest": 1, "base": 1, "policy": 1}
    assert kinds(registry) == [("rebuilt", 1), ("serving", 1)]


def test_a_registry_that_lost_its_data_is_filled_with_the_latest_announcement(
    versions, follow, registry, registry_server, make_policy
):
    newest = make_policy(7, weight_store="d1-weights-tiny", manifest_digest="abc")
    follower = follow(newest)
    assert follower.follow_once(0)
    with redis.Redis.from_url(registry_server.url) as client:
        client.flushall()
    follower.follow_once(0)
    assert follower.follow_once(0)
    assert latest(registry) == newest
    assert registry.snapshot().aliases == {"newest": 7, "base": 1, "policy": 7}
    assert (versions.policy.version, versions.num_swaps) == (7, 1)


def test_a_pin_returns_to_a_registry_that_lost_its_data(versions, follow, registry, registry_server, want, make_policy):
    want(pinned=1)
    follower = follow(make_policy(7, weight_store="d1-weights-tiny", manifest_digest="abc"))
    assert follower.follow_once(0)
    with redis.Redis.from_url(registry_server.url) as client:
        client.flushall()
    follower.follow_once(0)
    assert follower.follow_once(0)
    assert (registry.snapshot().admin.pinned, registry.snapshot().aliases["newest"], versions.policy.version) == (
        1,
        7,
        1,
    )


def test_a_pin_of_an_unknown_version_is_reported_and_the_service_continues(versions, follow, want, make_policy):
    want(pinned=99)
    follower = follow(make_policy(2))
    assert not follower.follow_once(0)
    assert follower.follow_once(0)
    assert (versions.policy.version, follower.status.num_errors) == (2, 1)
    assert "policy version 99 is not known, so it cannot be pinned" in follower.status.last_error


def test_a_damaged_admin_file_is_reported_and_the_service_continues(follow, registry, run_dir, versions):
    (run_dir / "admin.json").write_text("{")
    follower = follow()
    assert not follower.follow_once(0)
    assert "admin.json is damaged" in follower.status.last_error
    assert follower.follow_once(0)
    assert registry.snapshot().aliases["policy"] == 1


def test_several_engines_record_a_swap_and_a_refusal_once(engine_of, registry, run_dir, make_policy):
    followers = [VersionFollower(registry, engine_of(), run_dir) for _ in range(3)]
    registry.announce(make_policy(2))
    for follower in followers:
        assert follower.follow_once(0)

    def damaged(policy):
        raise ValueError("the checksum differs")

    registry.announce(make_policy(3))
    for follower in followers:
        load, follower._versions._load = follower._versions._load, damaged
        assert not follower.follow_once(0)
        follower._versions._load = load
    registry.announce(make_policy(4))
    for follower in [*followers, *followers]:
        assert follower.follow_once(0)
    told = [one for one in kinds(registry) if one[0] not in (EventKind.REBUILT, EventKind.PUBLISHED)]
    assert told == [("serving", 2), ("refused", 3), ("serving", 4), ("retired", 2)]
    refused = next(event for event in registry.events("0") if event.kind is EventKind.REFUSED)
    assert refused.why == "Policy version 3 is not served: the checksum differs"


def test_an_engine_behind_the_others_does_not_move_the_alias_back(engine_of, registry, run_dir, make_policy):
    ahead = VersionFollower(registry, engine_of(), run_dir)
    registry.announce(make_policy(2))
    slow_versions = engine_of()
    behind = VersionFollower(registry, slow_versions, run_dir)
    load = slow_versions._load

    def slowly(policy):
        if policy.version == 2:
            registry.announce(make_policy(3))
            assert ahead.follow_once(0)
        return load(policy)

    slow_versions._load = slowly
    behind.follow_once(0)
    assert (slow_versions.policy.version, registry.snapshot().aliases["policy"]) == (2, 3)
    behind.follow_once(0)
    assert slow_versions.policy.version == 3
    assert [one for one in kinds(registry) if one[0] == "serving"] == [("serving", 3)]


# Pins by an operator.


def test_a_pinned_version_serves_despite_newer_announcements(versions, follow, registry, want, make_policy):
    follower = follow(make_policy(2), make_policy(3))
    follower.follow_once(0)
    want(pinned=2)
    follower.follow_once(0)
    registry.announce(make_policy(4))
    follower.follow_once(0)
    assert (versions.policy.version, versions.announced.version) == (2, 4)
    assert follower.status.admin == AdminState(pinned=2, is_paused=False)
    assert registry.snapshot().aliases["policy"] == 2
    want()
    follower.follow_once(0)
    assert (versions.policy.version, registry.snapshot().aliases["policy"]) == (4, 4)


def test_a_paused_service_keeps_its_version_and_new_engines_load_it(
    versions, follow, registry, engine_of, run_dir, want, make_policy
):
    follower = follow(make_policy(2))
    follower.follow_once(0)
    want(is_paused=True)
    registry.announce(make_policy(3))
    follower.follow_once(0)
    assert (versions.policy.version, versions.announced.version) == (2, 3)
    new = engine_of()
    assert VersionFollower(registry, new, run_dir).follow_once(0)
    assert new.policy.version == 2
    want()
    follower.follow_once(0)
    assert versions.policy.version == 3


def test_new_weights_under_a_pinned_number_do_not_replace_the_serving_ones(
    versions, follow, registry, want, make_policy
):
    follower = follow(make_policy(2, manifest_digest="a"))
    follower.follow_once(0)
    want(is_paused=True)
    registry.announce(make_policy(2, manifest_digest="b"))
    follower.follow_once(0)
    assert versions.policy.manifest_digest == "a"
    want()
    follower.follow_once(0)
    assert versions.policy.manifest_digest == "b"


def test_a_new_run_of_the_same_name_is_followed_without_the_old_pin(
    versions, follow, registry, run_dir, want, make_policy
):
    follower = follow()
    registry.announce(make_policy(9, manifest_digest="old"), 1.0)
    want(pinned=9)
    assert follower.follow_once(0)
    assert versions.policy.version == 9
    # A new run has a new directory.
    (run_dir / "admin.json").unlink()
    registry.announce(make_policy(2, manifest_digest="new"), 2.0)
    assert follower.follow_once(0)
    assert (versions.policy.version, follower.status.num_errors) == (2, 0)
    assert registry.snapshot().aliases == {"newest": 2, "policy": 2}
    assert follower.status.admin == DEFAULT_ADMIN_STATE


def test_a_pin_survives_the_loss_of_the_registrys_data(versions, follow, registry, run_dir, add_checkpoint, want):
    add_checkpoint(run_dir, 2)
    want(pinned=1)
    follower = follow()
    assert follower.follow_once(0)
    assert (versions.policy.version, versions.announced.version) == (1, 2)
    assert registry.snapshot().admin.pinned == 1


def test_a_pinned_version_without_weights_is_tried_again_when_pinned_again(
    versions, follow, registry, engine_of, run_dir, want, make_policy
):
    follow(make_policy(2), make_policy(3)).follow_once(0)
    want(pinned=2)
    new = engine_of()
    load, lost = new._load, [2]

    def gone(policy):
        if policy.version in lost:
            raise LookupError("the store moved on")
        return load(policy)

    new._load = gone
    follower = VersionFollower(registry, new, run_dir)
    assert not follower.follow_once(0)
    assert new.policy.version == 3
    assert follower.follow_once(0)
    lost.clear()
    assert follower.follow_once(0)
    assert new.policy.version == 3
    want()
    assert follower.follow_once(0)
    want(pinned=2)
    assert follower.follow_once(0)
    assert new.policy.version == 2


def test_a_refused_version_is_tried_again_once_it_is_pinned(versions, follow, registry, want, make_policy):
    follower = follow(make_policy(2))
    load = versions._load

    def damaged(policy):
        raise ValueError("the checksum differs")

    versions._load = damaged
    assert not follower.follow_once(0)
    assert follower.follow_once(0)
    versions._load = load
    want(pinned=2)
    assert follower.follow_once(0)
    assert (versions.policy.version, versions.refused) == (2, ())


def test_several_engines_record_an_operators_change_once(engine_of, registry, run_dir, want):
    followers = [VersionFollower(registry, engine_of(), run_dir) for _ in range(3)]
    for pinned, is_paused in ((1, False), (1, True), (None, False)):
        want(pinned, is_paused)
        for follower in followers:
            assert follower.follow_once(0)
            assert follower.status.admin == AdminState(pinned=pinned, is_paused=is_paused)
    told = [one for one in kinds(registry) if one[0] not in (EventKind.REBUILT, EventKind.SERVING)]
    assert told == [("pinned", 1), ("paused", None), ("unpinned", 1), ("resumed", None)]


def test_a_new_engine_does_not_serve_a_refused_version(versions, follow, registry, engine_of, run_dir, make_policy):
    follower = follow(make_policy(2))
    follower.follow_once(0)

    def damaged(policy):
        raise ValueError("worse by 40 points")

    versions._load = damaged
    registry.announce(make_policy(3))
    follower.follow_once(0)
    new = engine_of()
    assert VersionFollower(registry, new, run_dir).follow_once(0)
    assert new.policy.version == 2
