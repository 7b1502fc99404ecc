"""`d1 policy`: an operator's settings of a run's service, written to the run directory."""

import time

import pytest

from actors.registry.files import read_admin, write_admin
from actors.registry.records import DEFAULT_ADMIN_STATE, AdminState


@pytest.fixture
def run(make_run, events):
    """A run of twelve rounds, whose checkpoints are gone."""
    return make_run("sums", events)


def test_a_version_is_pinned_and_unpinned_with_a_reason(run, d1):
    ended = d1("policy", "pin", "sums", "2", "--why", "it adds well")
    assert ended.status == 0, ended.err
    assert "sums: pinned to policy version 2, not paused; its service follows within seconds\n" in ended.out
    assert "note: version 2 has no checkpoint" in ended.out
    state = read_admin(run)
    assert (state, state.why) == (AdminState(pinned=2, is_paused=False), "it adds well")
    assert abs(state.changed_at - time.time()) < 60
    assert d1("policy", "unpin", "sums").out.startswith("sums: not pinned, not paused;")
    assert (read_admin(run), read_admin(run).why) == (DEFAULT_ADMIN_STATE, "")


def test_a_pause_keeps_the_pin(run, d1):
    for words in (("pin", "sums", "2"), ("pause", "sums")):
        assert d1("policy", *words).status == 0
    assert read_admin(run) == AdminState(pinned=2, is_paused=True)
    assert d1("policy", "resume", "sums").status == 0
    assert read_admin(run) == AdminState(pinned=2, is_paused=False)


def test_a_change_is_newer_than_the_last_one_whatever_the_clocks_say(run, d1):
    ahead = time.time() + 3600
    write_admin(run, AdminState(pinned=2, is_paused=False, changed_at=ahead))
    assert d1("policy", "unpin", "sums").status == 0
    assert read_admin(run).changed_at > ahead


def test_what_cannot_be_pinned_is_refused_and_nothing_is_written(run, d1):
    d1("policy", "pin", "sums", "99").assert_refused("the run sums has no policy version 99")
    d1("policy", "pin", "summs", "2").assert_refused("there is no run summs", "did you mean sums?")
    assert not (run / "admin.json").exists()


def test_a_damaged_file_is_replaced(run, d1):
    (run / "admin.json").write_text("{")
    assert d1("policy", "pause", "sums").status == 0
    assert read_admin(run) == AdminState(pinned=None, is_paused=True)
