"""Tests that run the examples of docs/rewards.md."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rewards import Grader, RewardConfig, SumsConfig
from tests.rewards.conftest import make_sample

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
RIGHT = "Please see: <answer>309</answer>"


def _recipes() -> list[dict[str, Any]]:
    return [yaml.safe_load(block)["reward"] for block in re.findall(r"```yaml\n(reward:.*?)```", PAGE, re.DOTALL)]


def _recipe(text: str) -> dict[str, Any]:
    return next(recipe for recipe in _recipes() if text in str(recipe))


def _code(name: str) -> str:
    (code,) = re.findall(rf"```python\n(# {name}\n.*?)```", PAGE, re.DOTALL)
    return code


def test_every_example_is_a_reward() -> None:
    assert len(_recipes()) == 4
    for recipe in _recipes():
        assert RewardConfig.model_validate(recipe).terms


def test_the_parts_of_the_first_example_add_up() -> None:
    grader = Grader(SumsConfig(), RewardConfig.model_validate(_recipe("length_penalty")))
    (grade,) = grader.grade([make_sample(RIGHT, num_tokens=96, max_tokens=128, num_forwards=32)])
    assert grade.parts == {"digits": 1.0, "overlong": -0.25, "fast": 0.06}


def test_the_function_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text(_code("own_rewards.py"))
    recipe = _recipe("own_rewards")
    recipe["terms"]["brevity"]["directory"] = tmp_path
    reward = RewardConfig.model_validate(recipe)
    reward.check(["digits"])
    long = "word " * 40 + "<answer>309</answer>"
    short, wordy, silent = Grader(SumsConfig(), reward).grade([make_sample(text) for text in (RIGHT, long, "")])
    assert short.parts == {"digits": 1.0, "brevity": 0.2}
    assert wordy.parts == {"digits": 1.0, "brevity": 0.1}
    assert silent.detail == "brevity: own_rewards:short_thought gave no value"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "endpoint.py"
    path.write_text(_code("endpoint.py"))
    with subprocess.Popen([sys.executable, path, str(port)], stderr=subprocess.DEVNULL) as process:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/grade"
        process.terminate()


def test_the_endpoint_of_the_page_runs(endpoint: str) -> None:
    recipe = _recipe("http")
    recipe["terms"]["polite"]["url"] = endpoint
    polite, rude = Grader(SumsConfig(), RewardConfig.model_validate(recipe)).grade(
        [make_sample(RIGHT), make_sample("")]
    )
    assert polite.parts == {"digits": 1.0, "polite": 0.2}
    assert rude.parts == {"digits": 0.0, "polite": 0.0}
