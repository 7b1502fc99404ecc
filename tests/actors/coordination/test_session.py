"""Coordinator state that survives a restart, and when a learner group is not started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from actors.coordination.session import SESSION, Session, SessionFile
from actors.files.atomic_file import write_atomically


def test_a_session_belongs_to_one_driver(tmp_path: Path) -> None:
    names = {"sampler": ["sampler 0", "sampler 2"], "grader": ["grader 0"]}
    file = SessionFile(tmp_path, Session.read(tmp_path, "one"), write_atomically)
    file.change(num_coordinator_starts=2, is_stopping=True, pools=names, leaving=["sampler 1"])
    kept = file.current
    assert kept == Session(driver="one", num_coordinator_starts=2, is_stopping=True, pools=names, leaving=["sampler 1"])
    assert Session.read(tmp_path, "one") == kept
    assert Session.read(tmp_path, "two") == Session(driver="two"), "a resumed run begins anew, and does not stop again"
    (tmp_path / SESSION).write_text('{"driver": "one", "num_cooo')
    assert Session.read(tmp_path, "one") == Session(driver="one")


def _starts(session: Session, *num_checkpoints: int, error: str = "") -> list[bool]:
    """Return for each start of the learner group, after so many checkpoints, whether the session gives up."""
    is_too_many = []
    for count in num_checkpoints:
        session = replace(session.with_learner_start(f"group {len(is_too_many)}", count), error=error)
        is_too_many.append(bool(session.gave_up))
    return is_too_many


def test_a_repeated_error_ends_the_run_and_is_named() -> None:
    session = Session(driver="one")
    assert _starts(session, 0, 0, 0, 0, error="ValueError: bad") == [False, False, False, True]
    for group in range(4):
        session = replace(session.with_learner_start(str(group), 0), error="ValueError: bad")
        assert session.with_learner_start(str(group), 0) == session, "asked twice"
    assert session.gave_up == "ValueError: bad"


def test_deaths_may_have_external_causes_and_end_the_run_later() -> None:
    assert _starts(Session(driver="one"), *[0] * 12) == [False] * 11 + [True]


def test_a_new_checkpoint_counts_as_progress() -> None:
    assert not any(_starts(Session(driver="one"), *range(100)))
    assert not any(_starts(Session(driver="one"), 0, 0, 0, 1, 1, 1, 2, 2, 2, error="ValueError: bad"))


def test_a_start_with_smaller_micro_batches_is_no_repetition() -> None:
    session = Session(driver="one")
    for group in range(9):
        session = session.with_learner_start(str(group), 0)
        assert not session.gave_up
        session = session.with_micro_batches("learner", 1000 - group, "out of memory")
    assert session.micro_batch_tokens == {"learner": 992}
    assert _starts(session, 0, 0, 0, 0, error="ValueError: bad") == [False, False, False, True], "others still are"
