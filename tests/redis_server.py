"""Debian's redis-server as a child process, for tests that need it instead of the embedded server."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import redis

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


class DebianRedis:
    """A redis-server on loopback. The test skips where it is not installed."""

    def __init__(self, port: int, password: str, directory: Path | None = None, host: str = "127.0.0.1") -> None:
        """Start it and wait until it answers. Data persists in `directory`, if given. The test fails if it does not
        start."""
        binary = shutil.which("redis-server", path="/usr/bin:/usr/local/bin")
        if binary is None:
            pytest.skip("needs redis-server: `make tools` installs it on Debian, as root")
        self.port, self.url = port, f"redis://:{password}@{host}:{port}/0"
        keep = "appendonly no" if directory is None else f"appendonly yes\ndir {directory}"
        config = f'bind {host}\nport {port}\nrequirepass {password}\nsave ""\n{keep}\nloglevel warning\n'
        self.process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self.process.stdin is not None
        self.process.stdin.write(config.encode())
        self.process.stdin.close()
        client = redis.Redis.from_url(self.url, socket_timeout=0.5, retry=None)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert self.process.poll() is None, f"redis-server ended with status {self.process.returncode}"
                assert time.monotonic() < deadline, f"redis-server did not start in {_START_TIMEOUT_S:.0f} s"
                time.sleep(0.05)
        client.close()

    def stop(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.wait(_STOP_TIMEOUT_S)
