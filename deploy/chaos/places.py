"""What a run runs on: a small disk of its own, a cluster whose GCS can be restarted."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.registry.server import free_port
from deploy.chaos.faults import Target
from deploy.chaos.targets import MARK, Family

_BALLAST = ".ballast"
_CHUNK = bytes(1 << 16)
_START_TIMEOUT_S = 120.0


class SmallDisk:
    """A file system in memory, of its own, so that filling it starves nobody else."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        """Mount it. Raises OSError where that is not allowed."""
        self.directory = directory
        directory.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "d1-chaos", str(directory)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
        except FileNotFoundError as error:
            raise OSError("there is no mount here") from error
        if done.returncode:
            raise OSError(done.stderr.strip())

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.directory / _BALLAST).open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(_CHUNK)

    def empty(self) -> None:
        """Take away what `fill` wrote."""
        (self.directory / _BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it, with all that is on it."""
        command = ["umount", "--lazy", str(self.directory)]
        subprocess.run(command, check=False, timeout=20, capture_output=True)  # noqa: S603


class Cluster:
    """A Ray head of its own, with its state in a Redis of its own: a GCS that is killed can be started again."""

    def __init__(self, family: Family) -> None:
        """Start both. Whoever makes one calls `close`. Raises OSError when they do not start."""
        self._family = family
        # Short: the paths of Ray's sockets lie below it, and may have 107 characters.
        self._directory = Path(tempfile.mkdtemp(prefix="d1c-", dir="/tmp"))
        self._gcs: subprocess.Popen[bytes] | None = None
        self._command: tuple[list[str], dict[str, str]] | None = None
        password, redis_port, port = secrets.token_hex(16), free_port(), free_port()
        self.environment = {
            MARK: family.mark,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}",
            "RAY_external_storage_namespace": f"d1-{family.mark}",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
        }
        try:
            self._redis = self._start_redis(redis_port, password)
            self._start_head(port, password)
        except BaseException:
            self.close()
            raise
        self.environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"

    @staticmethod
    def is_possible() -> bool:
        """Whether there is a redis-server."""
        return shutil.which("redis-server") is not None

    def note_gcs(self) -> None:
        """Remember how the GCS was started, before it is killed."""
        (gcs,) = self._family.of_role(Target.GCS)
        words = Path(f"/proc/{gcs.pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        pairs = Path(f"/proc/{gcs.pid}/environ").read_bytes().decode(errors="replace").split("\0")
        self._command = words, dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def restart_gcs(self) -> None:
        """Start the one that was noted again, unless it lives."""
        assert self._command is not None, "note_gcs comes first"
        if self._family.of_role(Target.GCS):
            return
        words, environment = self._command
        with (self._directory / "gcs.log").open("ab") as log:
            self._gcs = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)  # noqa: S603

    def close(self) -> None:
        """End every process of it, and delete its files."""
        self._family.kill()
        for process in (self._gcs, getattr(self, "_redis", None)):
            if process is not None:
                # Redis writes over its environment, and so over the mark.
                process.kill()
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start_redis(self, port: int, password: str) -> subprocess.Popen[bytes]:
        config = f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\nloglevel warning\n'
        process = subprocess.Popen(
            ["redis-server", "-"],  # noqa: S607 - whichever the machine has
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | self.environment,
        )
        assert process.stdin is not None
        process.stdin.write(config.encode())
        process.stdin.close()
        return process

    def _start_head(self, port: int, password: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--head", f"--port={port}", f"--temp-dir={self._directory}", "--disable-usage-stats"]
        command += [f"--redis-password={password}", "--include-dashboard=false"]
        command += [f"--ray-client-server-port={free_port()}", f"--metrics-export-port={free_port()}"]
        command += [f"--dashboard-agent-listen-port={free_port()}"]
        environment = os.environ | self.environment
        environment.pop("RAY_ADDRESS", None)
        try:
            done = subprocess.run(  # noqa: S603 - Ray of our environment
                command, env=environment, capture_output=True, text=True, check=False, timeout=_START_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"Ray's head did not start within {_START_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise OSError(f"Ray's head did not start: {done.stderr.strip().splitlines()[-1:]}")


@contextmanager
def continued(family: Family) -> Iterator[None]:
    """Let no process of a family stand still after the block."""
    try:
        yield
    finally:
        for process in family.living():
            if process.state == "T":
                process.signal(signal.SIGCONT)
                time.sleep(0.01)
