"""Tests of the managed judge server, with a fake program in place of vLLM."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from rewards import RewardUnavailableError
from rewards.terms.judge.config import JudgeConfig
from rewards.terms.judge.server import VllmConfig, vllm_server
from tests.processes import is_running

# Starts a second process, as vLLM does for its engine, and answers /health after a delay.
_HEALTHY = """
import http.server, json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"arguments": sys.argv[1:], "child": child.pid, "quiet": os.environ["VLLM_NO_USAGE_STATS"],
                  "more": os.environ["MORE"]}), flush=True)
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _program(directory: Path, source: str) -> str:
    path = directory / "vllm"
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o755)
    return str(path)


def test_the_server_is_started_awaited_and_stopped_with_its_children(tmp_path: Path, port: int) -> None:
    import json

    log = tmp_path / "judge.log"
    config = VllmConfig(
        command=(_program(tmp_path, _HEALTHY), "serve"), arguments=("--seed", "1"), environment={"MORE": "m"}
    )
    with vllm_server(config, model="org/m", base_url=f"http://127.0.0.1:{port}/v1", log=log):
        said = json.loads(log.read_text().splitlines()[0])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{port} is taken already; take another port"):
            config.check(f"http://127.0.0.1:{port}/v1")
        assert is_running(said["child"])
    assert said["arguments"] == ["serve", "org/m", "--host", "127.0.0.1", "--port", str(port), "--seed", "1"]
    assert (said["quiet"], said["more"]) == ("1", "m")
    deadline = time.monotonic() + 10
    while is_running(said["child"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(said["child"])
    config.check(f"http://127.0.0.1:{port}/v1")


def test_a_server_that_ends_says_why(tmp_path: Path, port: int) -> None:
    source = "print('INFO hello')\nprint('ValueError: no such model')\nprint('[rank0] bye')\nraise SystemExit(3)"
    config, log = VllmConfig(command=(_program(tmp_path, source),)), tmp_path / "judge.log"
    with (
        pytest.raises(RewardUnavailableError, match=r"^vLLM ended with status 3 .*: ValueError: no such model \("),
        vllm_server(config, model="m", base_url=f"http://127.0.0.1:{port}/v1", log=log),
    ):
        pytest.fail("it is not there")


def test_a_silent_server_times_out_and_is_stopped(tmp_path: Path, port: int) -> None:
    source = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    config = VllmConfig(command=(_program(tmp_path, source),), ready_timeout_s=1.0)
    log = tmp_path / "judge.log"
    with (
        pytest.raises(RewardUnavailableError, match=rf"did not answer on 127\.0\.0\.1:{port} within 1 s"),
        vllm_server(config, model="m", base_url=f"http://127.0.0.1:{port}/v1", log=log),
    ):
        pytest.fail("it is not there")
    assert not is_running(int(log.read_text()))


def test_a_missing_vllm_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    judge = JudgeConfig.model_validate(
        {"base_url": "http://127.0.0.1:8001/v1", "model": "m", "criteria": "c", "vllm": {}}
    )
    with pytest.raises(
        ValueError, match=r"^vllm\.command begins with vllm, which is no command here; pip install 'd1\[vllm\]'"
    ):
        judge.check()
    assert os.environ["PATH"] == str(tmp_path)
