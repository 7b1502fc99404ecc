"""A terminal has what d1 says, and Ray's words stay in Ray's logs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import worker

from deploy.ray_session import ray_session


def test_what_ray_notes_of_a_dead_worker_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: SimpleNamespace(dashboard_url=""))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(worker, "_worker_logs_enabled", True)
    note: dict[str, Any] = {"lines": ["A worker died or was killed"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(dict(note), ignore_prefix=False)
    assert "A worker died" in capsys.readouterr().out, "as Ray's thread would"
    with ray_session(dashboard=False):
        worker.print_to_stdstream(note | {"lines": ["A worker died again"]}, ignore_prefix=False)
    assert capsys.readouterr() == ("", "")
