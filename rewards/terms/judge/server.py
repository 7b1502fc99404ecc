"""Lifecycle of a local vLLM server for the judge: start, wait until ready, stop."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from rewards.terms.term import RewardUnavailableError

_POLL_S = 0.5
_PROBE_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 20.0
_TAIL_BYTES = 20_000
# vLLM sends usage statistics to its authors unless this is set.
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class VllmConfig(BaseModel):
    """A vLLM server that runs as long as the run does. It needs `d1[vllm]`, or another vLLM installation on this
    machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    command: Annotated[tuple[str, ...], Field(min_length=1)] = ("vllm", "serve")
    """The command that starts it; the model, `--host` and `--port` are appended. For another installation:
    `[/opt/vllm/bin/vllm, serve]`."""
    arguments: tuple[str, ...] = ()
    """Additional arguments: `[--max-model-len, "4096"]`."""
    environment: dict[Annotated[str, Field(min_length=1)], str] = {}
    """Additional environment variables."""
    ready_timeout_s: PositiveFloat = 900.0
    """Timeout until it is ready, in seconds. It may have to download the model first."""

    def check(self, base_url: str) -> None:
        """Raise ValueError if there is no such command or the port is taken."""
        if shutil.which(self.command[0]) is None:
            raise ValueError(
                f"vllm.command begins with {self.command[0]}, which is no command here; "
                "pip install 'd1[vllm]' on a machine with a GPU, or name one with its path"
            )
        host, port = _address(base_url)
        if _answers(host, port):
            raise ValueError(f"{host}:{port} is taken already; take another port in base_url, or leave out vllm")


@contextmanager
def vllm_server(config: VllmConfig, *, model: str, base_url: str, log: Path) -> Iterator[None]:
    """Serve `model` at `base_url`, which is on this machine, until the block ends.

    Its output is appended to the file `log`. Raises RewardUnavailableError if it exits or is not ready in time.
    """
    host, port = _address(base_url)
    command = [*config.command, model, "--host", host, "--port", str(port), *config.arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - the command that the recipe names, without a shell
            command,
            env={**os.environ, **_QUIET, **config.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its engine is a separate process, which has to end with it, and only d1 should handle Ctrl-C.
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, host, port, config.ready_timeout_s, log)
        yield
    finally:
        _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], host: str, port: int, timeout_s: float, log: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not _is_healthy(host, port):
        if (status := process.poll()) is not None:
            raise RewardUnavailableError(
                f"vLLM ended with status {status} before it answered: {_last_line(log)} (all of it: {log})"
            )
        if time.monotonic() > deadline:
            raise RewardUnavailableError(
                f"vLLM did not answer on {host}:{port} within {timeout_s:.0f} s (what it says: {log})"
            )
        time.sleep(_POLL_S)


def _is_healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and all of its processes."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ending)
        except ProcessLookupError:
            break
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue


def _last_line(log: Path) -> str:
    """Return the last line of a log that names an error, or else the last line."""
    lines = [line.strip() for line in log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").splitlines()]
    told = [line for line in lines if "Error" in line] or [line for line in lines if line]
    return told[-1][:300] if told else "it said nothing"


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _address(base_url: str) -> tuple[str, int]:
    """Return host and port of a URL that JudgeConfig has validated."""
    parts = urlsplit(base_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
