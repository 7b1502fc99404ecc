"""The follower against a registry that is a list, and one that fails."""

import time

import pytest

from actors.registry import MalformedEntryError
from deploy.service.follower import VersionFollower
from rollout.sampler import Sampler


class ListedRegistry:
    """Announcements in a list; an exception in it is raised in its turn."""

    def __init__(self, *entries):
        self.entries = list(entries)

    def follow(self, last_id, block_ms):
        assert 0 <= block_ms <= 2000
        rest = self.entries[int(last_id) :]
        if rest and isinstance(rest[0], Exception):
            raise rest[0]
        time.sleep(0.01)
        return [(str(index), policy) for index, policy in enumerate(rest, int(last_id) + 1)]


@pytest.fixture
def loaded():
    return []


@pytest.fixture
def follow(versions, make_sampler, loaded):
    def load(policy):
        loaded.append(policy.version)
        return make_sampler(policy.version)

    versions._load = load
    return lambda *entries: VersionFollower(ListedRegistry(*entries), versions)


def test_only_the_last_announcement_is_loaded(versions, follow, loaded, make_policy):
    assert follow(make_policy(2), make_policy(3), make_policy(4)).follow_once(0)
    assert (versions.policy.version, loaded) == (4, [4])


def test_a_score_is_taken_over_without_loading(versions, follow, loaded, make_policy):
    follower = follow(make_policy(2))
    follower.follow_once(0)
    follower._registry.entries.append(make_policy(2, num_correct=1, num_problems=2))
    follower.follow_once(0)
    assert (versions.policy.num_correct, loaded, versions.num_swaps) == (1, [2], 1)


def test_what_is_served_already_is_not_loaded_again(versions, follow, loaded, make_policy):
    follow(make_policy(1, weight_store="gone")).follow_once(0)
    assert (versions.policy.version, loaded) == (1, [])


def test_a_resumed_run_may_go_back_to_an_earlier_version(versions, follow, make_policy):
    follower = follow(make_policy(5, manifest_digest="a"))
    follower.follow_once(0)
    follower._registry.entries.append(make_policy(3))
    follower.follow_once(0)
    assert versions.policy.version == 3


def test_weights_that_are_gone_are_counted_and_not_asked_for_again(versions, follow, make_policy):
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


def test_a_version_that_is_refused_is_counted_and_not_asked_for_again(versions, follow, make_policy):
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
    follower._registry.entries.append(make_policy(3))
    versions._load = make_sampler_of(versions)
    assert follower.follow_once(0)
    assert versions.policy.version == 3


def make_sampler_of(versions):
    """The served weights, under any number."""
    return lambda policy: Sampler(versions._current.sampler.model, policy.version)


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


def test_a_registry_out_of_reach_is_seen_and_so_is_its_return(versions, follow, make_policy):
    follower = follow(ConnectionError("away"))
    assert not follower.follow_once(0)
    assert not follower.status.registry_reachable
    follower._registry.entries = [make_policy(2)]
    assert follower.follow_once(0)
    assert follower.status.registry_reachable
    assert (versions.policy.version, follower.status.num_errors) == (2, 1)


def test_a_malformed_entry_is_counted_once_and_passed(versions, follow, make_policy):
    follower = follow(MalformedEntryError("1", "garbage"), make_policy(2))
    assert not follower.follow_once(0)
    assert follower.follow_once(0)
    assert (versions.policy.version, follower.status.num_errors) == (2, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_follows_and_a_dead_one_is_replaced(versions, follow, make_policy):
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
