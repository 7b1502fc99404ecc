"""`d1 doctor` really starts the embedded registry."""

from __future__ import annotations

import pytest

from deploy import doctor
from deploy.doctor import CheckOutcome


def test_the_registry_starts_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert doctor._embedded_registry().outcome is CheckOutcome.OK
    assert capfd.readouterr() == ("", "")


def test_a_failed_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRY_REGISTRY", "raise RuntimeError('no such luck')")
    check = doctor._embedded_registry()
    assert check.outcome is CheckOutcome.FAILED
    assert check.found == "RuntimeError: no such luck"
