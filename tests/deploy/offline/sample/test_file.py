"""`d1 sample` of a file of requests: its answers, their order, and interruption."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.text import Text

from deploy.offline.sample import batch
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer
from rollout.config import EngineConfig
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler
from tests.deploy.offline.sample.asking import SHORT, Screen
from tests.learner.model.on_disk.adapted import adapted


def test_answers_are_those_of_the_sampler_and_come_in_order_whatever_the_lengths(
    ask: Callable, checkpoints: Path
) -> None:
    asked = [
        {"prompt_ids": [5, 6, 7 + index], "gen_length": 8 * length, "block_length": 8, "steps": 4 * length}
        | {"temperature": 0.8, "seed": index}
        for index, length in enumerate([5, 1, 3, 1, 2])
    ]
    answers = ask(asked, "--slots", "2")
    params = [
        {"gen_length": r["gen_length"], "block_length": 8, "num_denoise_steps": r["steps"], "temperature": 0.8}
        for r in asked
    ]
    requests = [
        Request(prompt_ids=tuple(r["prompt_ids"]), params=SamplingParams(**p), seed=r["seed"])
        for r, p in zip(asked, params, strict=True)
    ]
    sampler = Sampler(load_policy(checkpoints / "with"), 7, EngineConfig(num_slots=2))
    tokenizer = ChatTokenizer(checkpoints / "with")
    assert answers.status == 0
    assert answers.err == ""
    assert [answer["index"] for answer in answers.lines] == [0, 1, 2, 3, 4]
    for answer, completion in zip(answers.lines, sampler.generate(requests), strict=True):
        end = completion.num_tokens
        assert list(answer) == [
            "index",
            "token_ids",
            "text",
            "num_tokens",
            "step_map",
            "commit_logp",
            "commit_logp_raw",
            "commit_entropy",
            "fallback",
            "tail",
            "num_forwards",
            "finish_reason",
            "exact",
            "logp_exact",
            "policy_version",
        ]
        assert answer["token_ids"] == completion.token_ids[:end].tolist()
        assert answer["text"] == tokenizer.decode(answer["token_ids"])
        assert answer["step_map"] == completion.step_map[:end].tolist()
        assert answer["fallback"] == completion.fallback[:end].tolist()
        for name in ("commit_logp", "commit_logp_raw", "commit_entropy"):
            as_float32 = torch.tensor(answer[name], dtype=torch.float32).tolist()
            assert as_float32 == getattr(completion, name)[:end].tolist()
        assert answer["num_forwards"] == completion.num_forwards
        assert answer["finish_reason"] == completion.finish_reason
        assert answer["policy_version"] == 7
        assert answer["exact"]
        assert answer["logp_exact"]


def test_an_answer_is_printed_as_soon_as_those_before_it_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    items = [SimpleNamespace(index=index, request=index != 2) for index in range(5)]
    for item in items:
        item.request = None if item.index == 2 else item.request
    answers = batch._OrderedPrinter(items, lambda item, completion: shown.append(item.index))  # type: ignore[arg-type]
    seen = []
    for index in (1, 3, 0, 4):
        answers.add(items[index], completion=object())  # type: ignore[arg-type]
        seen.append(list(shown))
    assert seen == [[], [], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_a_checkpoint_without_tokenizer_serves_token_ids(ask: Callable, d1: Callable, checkpoints: Path) -> None:
    answers = ask([{"prompt": "hi"}, {"prompt_ids": [5], **SHORT}], checkpoint="bare")
    assert answers.status == 2
    assert answers.lines[0]["error"].startswith("prompt is text, and ")
    assert answers.lines[0]["error"].endswith("has no tokenizer; give prompt_ids")
    assert answers.lines[1]["text"] is None
    assert answers.lines[1]["policy_version"] == 0
    d1("sample", str(checkpoints / "bare"), "hi").assert_refused("has no tokenizer; give token ids: --requests FILE")
    lines = d1("sample", str(checkpoints / "bare"), "--requests", "requests.jsonl").out.splitlines()
    assert lines[0] == "--- request 1 (line 2): 16 tokens, 8 forwards, 2.0 tokens a forward, length"
    assert lines[1] == " ".join(map(str, answers.lines[1]["token_ids"]))


def test_ctrl_c_prints_what_was_done(
    d1: Callable, checkpoints: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Sampler):
        """Sampler that is interrupted when a second request is done."""

        def generate(self, requests: Any, on_completion: Any = None) -> Any:
            done = super().generate(requests)
            on_completion(2, done[2])
            on_completion(0, done[0])
            raise KeyboardInterrupt

    monkeypatch.setattr("deploy.offline.policy.Sampler", Interrupted)
    (workdir / "r").write_text(f"{json.dumps({'prompt_ids': [5], **SHORT})}\n" * 4 + "nope\n")
    ended = d1("sample", str(checkpoints / "with"), "--requests", "r", "--json")
    assert ended.status == 130
    assert [json.loads(line)["index"] for line in ended.out.splitlines()] == [0, 2, 4]
    assert "stopped; 2 of 4 requests, 32 tokens" in ended.err
    assert "Traceback" not in ended.err


def test_a_closed_pipe_gives_no_traceback(checkpoints: Path, workdir: Path) -> None:
    (workdir / "r").write_text(f"{json.dumps({'prompt_ids': [5], **SHORT})}\n" * 200)
    # Silences the messages about slow imports on a busy machine.
    quiet = "import deploy.wait_display; deploy.wait_display.EVERY_S = 600; from deploy.cli import main; main()"
    command = [sys.executable, "-c", quiet, "sample", str(checkpoints / "with")]
    root = Path(__file__).parents[4]
    with subprocess.Popen(
        [*command, "--requests", str(workdir / "r"), "--json", "--slots", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=root,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert json.loads(running.stdout.readline())["index"] == 0
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


@pytest.mark.parametrize(("times", "expected"), [(1, ["whole"]), (2, [])])
def test_ctrl_c_waits_until_an_answer_is_printed_and_a_second_one_does_not(times: int, expected: list[str]) -> None:
    printed = []

    def print_one() -> None:
        with batch._delayed_interrupt():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            printed.append("whole")

    with pytest.raises(KeyboardInterrupt):
        print_one()
    assert printed == expected


def test_standard_input_can_be_the_file(
    d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable
) -> None:
    request = json.dumps({"prompt_ids": [5], **SHORT})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(request.encode())))
    ended = d1("sample", str(checkpoints / "with"), "--requests", "-", "--json")
    assert [json.loads(line) for line in ended.out.splitlines()] == ask([request]).lines


def test_the_progress_of_a_file_never_gets_into_what_is_piped(
    d1: Callable, checkpoints: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "r").write_text(f"{json.dumps({'prompt_ids': [5], **SHORT})}\n" * 3)
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", screen)
    ended = d1("sample", str(checkpoints / "with"), "--requests", "r", "--json")
    assert len([json.loads(line) for line in ended.out.splitlines()]) == 3
    shown = Text.from_ansi(screen.getvalue()).plain
    assert "3/3" in shown
    assert "tokens/s" in shown


@pytest.mark.parametrize("family", ["llada", "dream", "a2d-qwen2"])
def test_tokens_are_those_of_the_original_samplers(family: str, d1: Callable, shared: Path, workdir: Path) -> None:
    """Dream's also equal those of a bidirectional Qwen2 that predicts the next slot."""
    directory = shared / "fixtures" / ("llada-tiny" if family == "llada" else "dream-tiny")
    if family == "a2d-qwen2":
        directory = adapted(directory, workdir / "a2d", family, eos_token_id=509, right_shift_logits=True)
    cases = json.loads((directory / "expected_generations.json").read_text())
    keys = ("gen_length", "block_length", "steps", "cfg_scale")
    asked = [{"prompt_ids": ids} | {key: case[key] for key in keys} for case in cases for ids in case["prompt"]]
    (workdir / "r").write_text("\n".join(map(json.dumps, asked)))
    ended = d1("sample", str(directory), "--requests", "r", "--json", "stop_ids=[]")
    assert ended.status == 0
    outputs = [ids for case in cases for ids in case["output"]]
    assert [json.loads(line)["token_ids"] for line in ended.out.splitlines()] == outputs


@pytest.mark.filterwarnings("ignore:block_length .* is not the 4 slots")
@pytest.mark.parametrize("family", ["sdar", "a2d-qwen3"])
def test_tokens_and_steps_are_those_of_the_original_block_sampler(
    family: str, d1: Callable, shared: Path, workdir: Path
) -> None:
    """All settings in one file, with block lengths from 4 to 16: SDAR's, with a KV cache."""
    directory = shared / "fixtures" / "sdar-tiny"
    if family == "a2d-qwen3":
        directory = adapted(directory, workdir / "a2d", family)
    cases = json.loads((directory / "expected_generations.json").read_text())
    asked = [
        {
            "prompt_ids": ids,
            "gen_length": case["gen_length"],
            "block_length": case["block_length"],
            "steps_per_block": case["denoising_steps"],
            "temperature": 0.0,
            "stop_ids": case["stop_ids"],
            **({"schedule": "quota"} if case["threshold"] is None else {"threshold": case["threshold"]}),
        }
        for case in cases
        for ids in case["prompt"]
    ]
    (workdir / "r").write_text("\n".join(map(json.dumps, asked)))
    ended = d1("sample", str(directory), "--requests", "r", "--json")
    assert ended.status == 0
    answers = [json.loads(line) for line in ended.out.splitlines()]
    outputs = [ids for case in cases for ids in case["output"]]
    steps = [each for case in cases for each in case["step_map"]]
    assert [answer["token_ids"] + answer["tail"]["token_ids"] for answer in answers] == outputs
    assert [answer["step_map"] + answer["tail"]["step_map"] for answer in answers] == steps
    assert all(answer["exact"] for answer in answers)
    lengths = [min(case["gen_length"], len(ids)) for case in cases if not case["stop_ids"] for ids in case["output"]]
    assert [answer["num_tokens"] for answer in answers[: len(lengths)]] == lengths


@pytest.mark.filterwarnings("default:block_length .* is not the 32 slots")
def test_writes_are_those_of_the_original_editing_sampler(d1: Callable, shared: Path, workdir: Path) -> None:
    directory = shared / "fixtures" / "llada2-tiny"
    cases = json.loads((directory / "expected_generations.json").read_text())
    keys = ("gen_length", "block_length", "threshold", "editing_threshold", "max_post_steps", "temperature", "stop_ids")
    (case, *_) = [case for case in cases if case["loop"] == "llada2.1"]
    asked = [{"prompt_ids": ids, **{key: case[key] for key in keys}} for ids in case["prompt"]]
    (workdir / "r").write_text("\n".join(map(json.dumps, asked)))
    ended = d1("sample", str(directory), "--requests", "r", "--json")
    assert ended.status == 0
    for line, events, ids in zip(ended.out.splitlines(), case["events"], case["output"], strict=True):
        answer = json.loads(line)
        assert ended.err.count("d1: block_length 8 is not the 32 slots that the policy's config names: ") == 1
        writes = answer["writes"]
        found = zip(writes["steps"], writes["slots"], writes["token_ids"], strict=True)
        steps = [event for event in events if event]
        assert sorted(found) == sorted((step, *write) for step, event in enumerate(steps) for write in event)
        assert answer["token_ids"] + answer["tail"]["token_ids"] == ids
        assert len(writes["logp"]) == len(writes["logp_raw"]) == len(writes["steps"])
        assert all(logp < 0 for logp in writes["logp_raw"])


def test_the_bar_shows_answers_above_it_where_both_go_to_one_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    monkeypatch.setattr(sys, "stderr", Screen())
    bar = batch._RequestBar(3)
    assert not bar._progress.disable
    assert bar._progress.console is bar.stdout
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    elsewhere = batch._RequestBar(3)
    assert elsewhere._progress.console.stderr
    assert batch._RequestBar(0)._progress.disable
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert batch._RequestBar(3)._progress.disable


@pytest.mark.ray
def test_workers_on_ray_answer_in_order(ask: Callable) -> None:
    asked = [{"prompt_ids": [5, 6], **SHORT, "seed": seed, "temperature": 1} for seed in range(5)]
    asked[2] = {"prompt_ids": []}
    here, there = ask(asked), ask(asked, "--workers", "2", "--slots", "2")
    assert (there.status, there.err) == (2, here.err)
    assert [line.get("token_ids") for line in there.lines] == [line.get("token_ids") for line in here.lines]
    assert [line.get("policy_version") for line in there.lines] == [7, 7, None, 7, 7]
