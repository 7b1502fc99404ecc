"""`d1 doctor` really starts the embedded registry."""

from __future__ import annotations

import pytest

from deploy import doctor
from deploy.doctor import CheckOutcome


def test_it_starts_and_leaves_the_terminal_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert doctor._embedded_registry().outcome is CheckOutcome.OK
    assert capfd.readouterr() == ("", "")


def test_one_that_does_not_start_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRY_REGISTRY", "raise RuntimeError('no such luck')")
    check = doctor._embedded_registry()
    assert check.outcome is CheckOutcome.FAILED
    assert check.found == "RuntimeError: no such luck"
