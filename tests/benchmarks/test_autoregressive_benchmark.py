"""Tests of the autoregressive baseline, saved batch by batch, and of the demo's story prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.adapted import autoregressive
from benchmarks.adapted.stories import stories
from learner.model.autoregressive.source import AutoregressiveCheckpoint, open_source
from rewards import Split, SumsConfig, make_task
from rollout.autoregressive.generator import ModelResponse, TransformersGenerator
from tests.learner.model.autoregressive.tiny_autoregressive import write_source

TASK = SumsConfig()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> AutoregressiveCheckpoint:
    directory = tmp_path_factory.mktemp("source")
    write_source(directory)
    return open_source(str(directory))


def test_an_interrupted_score_resumes_and_counts_every_problem_once(
    source: AutoregressiveCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(out: str) -> dict[str, object]:
        found = autoregressive.scored(source, TASK, tmp_path / out, count=7, max_new_tokens=4, batch_size=3)
        return {name: value for name, value in found.items() if name != "worker_seconds"}

    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = score("whole")
    assert whole["num_problems"] == 7
    calls, generate = [0], TransformersGenerator.generate

    def dies_at_the_third(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return generate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(TransformersGenerator, "generate", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        score("stopped")
    assert score("stopped") == whole
    assert calls[0] == 4


def test_an_answer_is_graded_up_to_its_end_of_turn(
    source: AutoregressiveCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [problem] = make_task(TASK).problems(Split.HELDOUT, 1, seed=0)
    ids = source.tokenizer()(problem.reference_completion)["input_ids"]
    monkeypatch.setattr(
        TransformersGenerator, "generate", lambda *_: [ModelResponse(token_ids=tuple(ids), is_ended=True)]
    )
    found = autoregressive.scored(source, TASK, tmp_path, count=1, max_new_tokens=64, batch_size=1)
    assert (found["num_correct"], found["mean_tokens"], found["truncated"]) == (1, len(ids) + 1, 0)


def test_story_prompts_are_fixed_and_distinct() -> None:
    some = stories(1980)
    assert len(set(some)) == 1980
    assert some[:2] == [
        "Write a two-sentence story about a hedgehog who builds a boat.",
        "Tell me a story in two sentences about a princess who repairs a broken clock.",
    ]
    assert stories(5) == some[:5]
    with pytest.raises(ValueError, match="3000 prompts are asked for; there are 1980"):
        stories(3000)
