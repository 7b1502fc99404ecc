"""Parts of the machine that a run gets for itself: a small disk, and a cluster whose GCS can be restarted."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from actors.registry.server import free_port
from benchmarks.processes.run_processes import MARK, Role, RunProcesses

_BALLAST = ".ballast"
_CHUNK = bytes(1 << 16)
_START_TIMEOUT_S = 120.0


class SmallDisk:
    """A small file system in memory, so that filling it affects nothing else."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        """Mount it at a new directory. Raises OSError if that is not allowed."""
        self.directory = directory
        directory.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "d1-chaos", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        if done.returncode:
            raise OSError(done.stderr.strip())

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.directory / _BALLAST).open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(_CHUNK)

    def empty(self) -> None:
        """Delete what `fill` wrote."""
        (self.directory / _BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it and drop its files."""
        subprocess.run(["umount", "--lazy", str(self.directory)], check=False, timeout=20, capture_output=True)


class Cluster:
    """A Ray head with its state in its own Redis, so that a killed GCS can be restarted."""

    def __init__(self, processes: RunProcesses) -> None:
        """Start Redis and the head. The caller must call `close`. Raises OSError if they do not start."""
        self._processes = processes
        # The paths of Ray's sockets lie below it, and are limited to 107 characters.
        self._directory = Path(tempfile.mkdtemp(prefix="d1c-", dir="/tmp"))
        self._gcs: subprocess.Popen[bytes] | None = None
        self._gcs_command: tuple[list[str], dict[str, str]] | None = None
        password, redis_port, port = secrets.token_hex(16), free_port(), free_port()
        self.environment = {
            MARK: processes.mark,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}",
            "RAY_external_storage_namespace": f"d1-{processes.mark}",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
        }
        self._redis = self._start_redis(redis_port, password)
        try:
            self._start_head(port, password)
        except BaseException:
            self.close()
            raise
        self.environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"

    @staticmethod
    def is_possible() -> bool:
        """Whether redis-server is installed."""
        return shutil.which("redis-server") is not None

    def save_gcs_command(self) -> None:
        """Record how the GCS was started, before it is killed."""
        (gcs,) = self._processes.of_role(Role.GCS)
        words = Path(f"/proc/{gcs.pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        pairs = Path(f"/proc/{gcs.pid}/environ").read_bytes().decode(errors="replace").split("\0")
        self._gcs_command = words, dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def restart_gcs(self) -> None:
        """Start the recorded GCS again, unless it is running."""
        assert self._gcs_command is not None, "save_gcs_command comes first"
        if self._processes.of_role(Role.GCS):
            return
        words, environment = self._gcs_command
        with (self._directory / "gcs.log").open("ab") as log:
            self._gcs = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)

    def close(self) -> None:
        """Kill all processes of the cluster and delete its files."""
        self._processes.kill()
        # Redis overwrites its environment, and so the mark.
        for process in filter(None, (self._gcs, self._redis)):
            process.kill()
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start_redis(self, port: int, password: str) -> subprocess.Popen[bytes]:
        config = f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\nloglevel warning\n'
        process = subprocess.Popen(
            ["redis-server", "-"],
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
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_START_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"Ray's head did not start within {_START_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise OSError(f"Ray's head did not start: {done.stderr.strip().splitlines()[-1:]}")
