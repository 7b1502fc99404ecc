"""Node watch: the death of a node process (raylet, GCS) is reported at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from deploy.job.node_watch import NodeProcess, watching


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started = {name: subprocess.Popen(words, stdin=subprocess.PIPE) for name in ("raylet", "gcs")}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def test_a_process_that_dies_is_named_at_once(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    told, died = [], threading.Event()

    def on_death(name: str) -> None:
        told.append(name)
        died.set()

    with watching({name: NodeProcess(process.pid) for name, process in processes.items()}, on_death):
        processes["gcs"].send_signal(signal.SIGKILL)
        assert died.wait(60)
    assert told == ["gcs"]


def test_a_death_after_the_block_is_not_reported(
    processes: dict[str, subprocess.Popen[bytes]],
) -> None:
    told: list[str] = []
    with watching({name: NodeProcess(process.pid) for name, process in processes.items()}, told.append):
        pass
    processes["raylet"].kill()
    processes["raylet"].wait()
    assert told == []


def test_a_process_that_is_dead_already_is_named(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    processes["raylet"].kill()
    processes["raylet"].communicate()
    told: list[str] = []
    with watching({"raylet": NodeProcess(processes["raylet"].pid)}, told.append):
        pass
    assert told == ["raylet"]


def test_only_the_first_of_several_deaths_is_reported(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    watched = {name: NodeProcess(process.pid) for name, process in processes.items()}
    for dead in (["raylet"], ["raylet", "gcs"]):
        for name in dead:
            processes[name].kill()
            processes[name].communicate()
        told: list[str] = []
        with watching(watched, told.append):
            processes["gcs"].kill()
            processes["gcs"].wait()
            time.sleep(0.05)
        assert told == ["raylet"]


def test_a_process_that_has_closed_its_port_counts_as_dead(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    told, died = [], threading.Event()

    def on_death(name: str) -> None:
        told.append(name)
        died.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        watched = {"gcs": NodeProcess(processes["gcs"].pid, server.getsockname()), "raylet": NodeProcess(os.getpid())}
        with watching(watched, on_death):
            assert not died.wait(2.5), "its port is open, though it does not answer"
            server.close()
            assert died.wait(60)
    assert told == ["gcs"]
