"""Wait display: long waits report what they wait for, and for how long."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from deploy import wait_display as module
from deploy.wait_display import WaitDisplay, wait_display


class _File(io.StringIO):
    """A file that sets an event once enough lines with a word are written."""

    def __init__(self, num_lines: int, word: str = "") -> None:
        super().__init__()
        self._missing, self._word, self.has_lines = num_lines, word, threading.Event()

    def write(self, text: str) -> int:
        self._missing -= text.count("\n") if self._word in text else 0
        if self._missing <= 0:
            self.has_lines.set()
        return super().write(text)


def _waiting(file: _File, *, is_terminal: bool = False) -> WaitDisplay:
    return WaitDisplay(Console(file=file, force_terminal=is_terminal, width=80), "d1: ")


def test_a_log_has_a_line_per_interval_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    file = _File(3)
    wait = _waiting(file)
    wait.begin("starting [Ray]")
    assert file.has_lines.wait(60)
    wait.end()
    said = file.getvalue()
    assert all(re.fullmatch(r"d1: starting \[Ray\]: \d+ s", line) for line in said.splitlines())
    threads = [thread for thread in threading.enumerate() if thread.name == "d1-waiting"]
    for thread in threads:
        thread.join(60)
    assert file.getvalue() == said
    wait.end()


def test_quick_operations_are_silent_unless_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with wait_display("loading"):
        pass
    assert capsys.readouterr().err == ""
    with wait_display("loading", at_once=True):
        pass
    assert capsys.readouterr() == ("", "d1: loading\n")


def test_a_wait_can_change_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    file = _File(1, "port")
    wait = _waiting(file)
    wait.begin("starting the service", at_once=True)
    wait.change("waiting for port 8000")
    assert file.has_lines.wait(60)
    wait.end()
    first, *later = file.getvalue().splitlines()
    assert first == "d1: starting the service"
    # On a busy machine the first message may be repeated before the change.
    assert re.fullmatch(r"d1: waiting for port 8000: \d+ s", later[-1])


def test_a_postponed_line_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    file = _File(1)
    wait = _waiting(file)
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    wait.postpone()
    wait.begin("starting")
    assert not file.has_lines.wait(0.2)
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.02)
    assert file.has_lines.wait(60)
    wait.end()


def test_a_terminal_has_a_transient_spinner() -> None:
    file = _File(1)
    wait = _waiting(file, is_terminal=True)
    wait.begin("starting [Ray]")
    wait.end()
    said = file.getvalue()
    assert "starting [Ray]" in said
    assert said.endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K"))


def test_a_failure_ends_the_wait() -> None:
    with pytest.raises(ValueError, match="no"), wait_display("loading"):
        raise ValueError("no")
    assert not [thread for thread in threading.enumerate() if thread.name == "d1-waiting" and not thread.daemon]
