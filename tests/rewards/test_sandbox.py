"""Tests of the sandbox against hostile programs: each attack really runs and is contained."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from rewards.sandbox import ExitReason, RunResult, Sandbox, SandboxConfig, bubblewrap, gvisor

_CONFIG = SandboxConfig(cpu_s=1, wall_s=60, num_processes=6, memory_bytes=256 * 2**20, file_bytes=2**20)


def _left() -> list[str]:
    """List the processes of this test's sandboxes, zombies included. Concurrent tests have their own."""
    said = subprocess.run(["ps", "-eo", "uid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in said.splitlines()[1:]]
    users = {str(bubblewrap.uid_for(slot)) for slot in range(64)}
    return [
        args
        for uid, parent, args in rows
        if uid in users or (parent in {"1", str(os.getpid())} and ("rewards.sandbox" in args or "bwrap" in args))
    ]


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    yield Sandbox(_CONFIG)
    assert _left() == []


def _said(ran: RunResult) -> str:
    assert ran.exit_reason is ExitReason.FINISHED, ran
    return ran.stdout.decode()


def test_a_program_runs_with_the_standard_library_and_its_own_files(sandbox: Sandbox) -> None:
    ran = sandbox.run(
        "import json, random, sys, tempfile\n"
        "with tempfile.TemporaryFile('w+') as file:\n"
        "    file.write('kept'); file.seek(0); print(file.read())\n"
        "print(json.dumps({'in': sys.stdin.read(), 'name': __name__}))\n",
        stdin=b"given",
    )
    assert _said(ran) == 'kept\n{"in": "given", "name": "__main__"}\n'
    assert ran.exit_status == 0
    assert sandbox.run("import sys; sys.exit(3)").exit_status == 3
    assert "ZeroDivisionError" in sandbox.run("1 / 0").last_error_line


def test_an_endless_loop_ends_at_the_cpu_limit(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass").exit_reason is ExitReason.CPU_LIMIT


def test_the_cpu_limit_cannot_be_caught(sandbox: Sandbox) -> None:
    ran = sandbox.run("import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass")
    assert ran.exit_reason is ExitReason.CPU_LIMIT


def test_a_waiting_program_ends_at_the_wall_limit() -> None:
    ran = _run_started(SandboxConfig(wall_s=3), "import time; time.sleep(1000)")
    assert ran.exit_reason is ExitReason.WALL_LIMIT
    assert 3 <= ran.seconds < 20


def _run_started(config: SandboxConfig, source: str) -> RunResult:
    """Run a program, retrying if it did not start in time, as can happen on a busy machine."""
    while (ran := Sandbox(config).run(source)).exit_reason is ExitReason.NOT_STARTED:
        pass
    return ran


def test_a_program_whose_sandbox_hangs_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(SandboxConfig(wall_s=0.001))
    monkeypatch.setattr(bubblewrap, "command", lambda *_: ["/bin/sh", "-c", "exec sleep 60"])
    assert sandbox.run("pass").exit_reason is ExitReason.NOT_STARTED


def test_a_fork_bomb_is_limited_and_leaves_no_process() -> None:
    source = (
        "import os, sys, time\n"
        "made = 0\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(1000)\n"
        "        made += 1\n"
        "    except OSError: break\n"
        "    if made > 200: break\n"
        "print(made, flush=True)\n"
        "time.sleep(1000)\n"
    )
    ran = _run_started(_CONFIG.model_copy(update={"wall_s": 6.0}), source)
    assert ran.exit_reason is ExitReason.WALL_LIMIT
    assert int(ran.stdout) == _CONFIG.num_processes - 1
    assert _left() == []


def test_a_fork_bomb_of_all_its_children_ends() -> None:
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    ran = _run_started(_CONFIG.model_copy(update={"wall_s": 3.0}), source)
    assert ran.exit_reason in (ExitReason.WALL_LIMIT, ExitReason.CPU_LIMIT)
    assert _left() == []


def test_threads_count_as_processes(sandbox: Sandbox) -> None:
    source = (
        "import threading\n"
        "waiting, made = threading.Event(), []\n"
        "try:\n"
        "    while len(made) < 200:\n"
        "        made.append(threading.Thread(target=waiting.wait)); made[-1].start()\n"
        "except RuntimeError: print(len(made) - 1)\n"
        "waiting.set()\n"
    )
    assert _said(sandbox.run(source)) == f"{_CONFIG.num_processes - 1}\n"


def test_a_memory_bomb_meets_a_memory_error(sandbox: Sandbox) -> None:
    ran = sandbox.run("kept = []\nwhile True: kept.append(bytearray(2**20))")
    assert ran.exit_status == 1
    assert "MemoryError" in ran.last_error_line


@pytest.mark.parametrize("call", ["shmget(0, 2**28, 0o1600)", "memfd_create(b'x', 0)", "msgget(0, 0o1600)"])
def test_memory_outside_the_limit_is_unavailable(sandbox: Sandbox, call: str) -> None:
    assert _said(sandbox.run(f"import ctypes\nprint(ctypes.CDLL(None).{call})")) == "-1\n"


@pytest.mark.parametrize("fd", [1, 2])
def test_excess_output_is_cut_and_the_program_killed(sandbox: Sandbox, fd: int) -> None:
    ran = sandbox.run(f"import os\nfor _ in range(1024): os.write({fd}, b'x' * 2**20)")
    assert ran.exit_reason is ExitReason.OUTPUT_LIMIT
    assert (len(ran.stdout), len(ran.last_error_line)) == ((_CONFIG.output_bytes, 0), (0, 300))[fd - 1]


def test_files_are_limited_individually_and_in_total(sandbox: Sandbox) -> None:
    one = f"with open('/tmp/x', 'wb') as file: file.write(b'x' * {_CONFIG.file_bytes + 9})"
    many = f"for i in range(8): open(f'/tmp/{{i}}', 'wb').write(b'x' * {_CONFIG.file_bytes // 4})"
    handles = "kept = [open('/dev/null') for _ in range(100)]"
    for source, complaint in ((one, "File too large"), (many, "No space left"), (handles, "Too many open files")):
        assert complaint in sandbox.run(source).last_error_line


def test_the_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    names = set(_said(sandbox.run("import os\nprint(*os.environ)")).split())
    assert names == {"LC_CTYPE", "LD_LIBRARY_PATH", "PWD", "PYTHONHASHSEED"}


def test_home_and_this_repository_are_not_visible(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    homes = [str(Path.home()), "/home", "/root", "/etc", "/proc", "/sys", "/var", "/run", "/usr/bin", str(tmp_path)]
    homes.append(str(Path(__file__).parents[2]))
    assert _said(sandbox.run(f"import os\nprint([p for p in {homes} if os.path.exists(p)])")) == "[]\n"


def test_other_processes_are_invisible(sandbox: Sandbox) -> None:
    # Inside the sandbox, process id 1 is the program itself. Outside, it may be the tests' parent.
    others = sorted({*range(2, 5000), os.getpid(), os.getppid()} - {1})
    source = (
        f"import os\nreached = []\nfor pid in [*{others}, os.getppid()]:\n"
        "    try:\n        if pid: os.kill(pid, 9); reached.append(pid)\n    except OSError: pass\n"
        "print(os.getpid(), reached)"
    )
    assert _said(sandbox.run(source)) == "1 []\n"


def test_killing_the_parent_kills_no_other_process(sandbox: Sandbox) -> None:
    sandbox.run("import os\nos.kill(-1, 9)")
    sandbox.run("import os\nos.killpg(0, 9)")
    assert _said(sandbox.run("print('alive')")) == "alive\n"


def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = (
            "import socket\n"
            "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_VSOCK, socket.AF_NETLINK):\n"
            "    try: socket.socket(family, socket.SOCK_STREAM); print(family)\n"
            "    except OSError: pass\n"
            f"try: socket.create_connection(('127.0.0.1', {port}), timeout=1); print('connected')\n"
            "except OSError: print('none')\n"
        )
        assert _said(sandbox.run(source)) == "none\n"


def test_abstract_sockets_of_this_machine_cannot_be_reached(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0d1-test")
        server.listen()
        source = "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0d1-test')"
        assert "ConnectionRefusedError" in sandbox.run(source).last_error_line


def test_only_tmp_is_writable_and_it_is_deleted(sandbox: Sandbox, tmp_path: Path) -> None:
    places = ["/x", "/python/x", "/usr/lib/x", "/d1/inside/wire.py", "/dev/x", str(tmp_path / "x"), "/tmp/d1-left"]
    source = (
        f"written = []\nfor place in {places}:\n"
        "    try: open(place, 'w').write('x'); written.append(place)\n    except OSError: pass\nprint(written)"
    )
    assert _said(sandbox.run(source)) == "['/tmp/d1-left']\n"
    assert not Path("/tmp/d1-left").exists()
    assert _said(sandbox.run("import os; print(os.listdir('/tmp'))")) == "[]\n"


@pytest.mark.parametrize(
    "call", ["unshare(0x10000000)", "ptrace(16, 2, 0, 0)", "mount(b'none', b'/tmp', b'tmpfs', 0, 0)", "setuid(0)"]
)
def test_privileges_cannot_be_regained(sandbox: Sandbox, call: str) -> None:
    source = f"import ctypes, os\nassert os.getuid() != 0\nprint(ctypes.CDLL(None).{call})"
    assert _said(sandbox.run(source)) == "-1\n"


def test_no_system_command_is_available(sandbox: Sandbox) -> None:
    assert (
        "FileNotFoundError"
        in sandbox.run("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])").last_error_line
    )


def test_the_order_of_sets_is_the_same_in_every_run(sandbox: Sandbox) -> None:
    source = "print(set('abcdefghij'))"
    assert len({sandbox.run(source).stdout for _ in range(4)}) == 1


def test_surrogates_in_a_program_are_accepted(sandbox: Sandbox) -> None:
    assert _said(sandbox.run("print(len('\ud800'))")) == "1\n"
    assert "SyntaxError" in sandbox.run("\x00").last_error_line or sandbox.run("\x00").exit_status == 1


def test_a_missing_sandbox_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for module, kind, advice in (
        (bubblewrap, "bubblewrap", "apt install bubblewrap"),
        (gvisor, "gvisor", "gvisor.dev"),
    ):
        (bubblewrap.bwrap if module is bubblewrap else gvisor.runsc).cache_clear()
        with pytest.raises(ValueError, match=advice) as refusal:
            Sandbox(SandboxConfig(kind=kind))  # type: ignore[arg-type]
        assert "\n" not in str(refusal.value)
        assert "sandbox.kind" in str(refusal.value)
    bubblewrap.bwrap.cache_clear()


def test_a_sandbox_that_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "bwrap", lambda: shutil.which("false"))
    with pytest.raises(ValueError, match="the sandbox bubblewrap does not start here"):
        Sandbox(SandboxConfig())


def test_an_old_bubblewrap_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    bubblewrap.bwrap.cache_clear()
    with pytest.raises(ValueError, match=r"'bubblewrap 0\.6\.1', and 0\.8\.0 is the oldest"):
        Sandbox(SandboxConfig())
    bubblewrap.bwrap.cache_clear()


def test_without_isolation_only_the_limits_hold() -> None:
    sandbox = Sandbox(_CONFIG.model_copy(update={"kind": "none"}))
    assert _said(sandbox.run("import os; print(os.path.exists('/usr/bin'))")) == "True\n"
    assert sandbox.run("while True: pass").exit_reason is ExitReason.CPU_LIMIT
    assert "MemoryError" in sandbox.run("kept = bytearray(2**30)").last_error_line


@pytest.mark.skipif(shutil.which("runsc") is None, reason="needs gVisor's runsc")
def test_gvisor_runs_a_program() -> None:
    assert _said(Sandbox(SandboxConfig(kind="gvisor")).run("print('up')")) == "up\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_unprivileged_user_has_the_same_sandbox() -> None:
    """Ordinary users need a user namespace. Root does not use one."""
    source = (
        "from rewards.sandbox import Sandbox, SandboxConfig\n"
        "ran = Sandbox(SandboxConfig(num_processes=3)).run('''import os, threading\n"
        "waiting, made = threading.Event(), 0\n"
        "try:\n"
        "    while made < 50: threading.Thread(target=waiting.wait).start(); made += 1\n"
        "except RuntimeError: print(os.getuid(), made)\n"
        "waiting.set()''')\n"
        "print(ran.stdout)"
    )
    python = shutil.which("python3", path="/usr/bin")
    if python is None or f"{sys.version_info[0]}.{sys.version_info[1]}" not in os.path.realpath(python):
        pytest.skip("the system's Python is another version, and ours is where only root can read")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    ran = subprocess.run(
        [python, "-B", "-c", source],
        env={"PYTHONPATH": f"{Path(__file__).parents[2]}:{packages}", "PATH": "/usr/bin"},
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    if "ModuleNotFoundError" in ran.stderr or "Permission denied" in ran.stderr:
        pytest.skip("the repository is where only root can read")
    assert ran.stdout == "b'65534 2\\n'\n", ran.stderr


@pytest.mark.parametrize("field", ["wall_s", "cpu_s", "memory_bytes", "num_processes", "file_bytes", "num_files"])
def test_negative_limits_are_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        SandboxConfig.model_validate({field: -1})
