"""`d1 adapt`: the run that it makes, its refusals, and how it is resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.run_log import read_events
from deploy.adapt import responses
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.run_directory import check_resumable, create_run_dir, make_spec
from learner.model.autoregressive.source import AutoregressiveCheckpoint
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import load_config, verify_checkpoint
from learner.model.storage.references import REFERENCES
from learner.model.storage.weights import StoredWeights
from rollout.autoregressive.generator import Sampling
from tests.learner.model.autoregressive.tiny_autoregressive import (
    END,
    END_OF_TURN,
    RESERVED,
    TURN,
    write_gguf,
    write_source,
)
from tests.learner.model.on_disk.original import change_config, make_adapter

# About one token per byte: the task's prompts are long.
_SMALL = ("sft.max_tokens=64", "sft.num_steps=3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory `tiny` and a file `tiny.gguf` of the same model, and `chat.jsonl` to train on."""
    folder = tmp_path_factory.mktemp("sources")
    write_source(folder / "tiny")
    write_gguf(folder / "tiny.gguf", folder / "tiny")
    write_source(folder / "full", specials=(END, TURN, END_OF_TURN))
    rows = [
        [{"role": "user", "content": f"what is {number} + 4?"}, {"role": "assistant", "content": str(number + 4)}]
        for number in range(40)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return folder


@pytest.fixture
def here(sources: Path, workdir: Path) -> Path:
    return Path(shutil.copytree(sources, workdir, dirs_exist_ok=True))


class Job:
    """Fake job: makes the run directory, or checks that it is resumable, without training."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.stages: Stages | None = None

    def run(self, recipe: Recipe, *, stages: Stages, start_from: Any, resume: bool, serve: bool, **_: Any) -> None:
        assert not serve
        self.recipe, self.stages = recipe, stages
        if resume:
            check_resumable(recipe, make_spec(recipe, stages))
        else:
            create_run_dir(recipe, make_spec(recipe, stages), start_from).close()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job, module = Job(), types.ModuleType("deploy.job.job")
    module.run = job.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deploy.job.job", module)
    monkeypatch.setattr("deploy.job.job", module, raising=False)
    return job


def test_a_directory_becomes_a_run_whose_version_0_refers_to_its_weights(here: Path, d1: Callable, job: Job) -> None:
    ended = d1("adapt", "tiny", "runs/one", "--data", "chat.jsonl", "--block-length", "8", *_SMALL)
    assert ended.status == 0, ended.err
    assert f"d1: the mask token is {RESERVED} (id 3)\n" in ended.err
    assert "d1 sample runs/one 'Why is the sky blue?'" in ended.out
    assert "d1 train RECIPE --from runs/one" in ended.out
    initial = here / "runs" / "one" / "checkpoints" / "initial"
    verify_checkpoint(initial)
    config = load_config(initial)
    assert (config.family, config.block_length, config.predicts_next) == ("a2d-llama", 8, True)
    assert not (initial / "model.safetensors").exists()
    assert [path.name for path in (here / "runs").iterdir()] == ["one"]
    assert job.recipe is not None
    assert (job.recipe.rollout.sampling.block_length, job.recipe.rollout.sampling.steps_per_block) == (8, 2)
    assert (job.recipe.sft.data, job.recipe.sft.max_tokens) == (Path("chat.jsonl"), 64)


@pytest.mark.parametrize("data", ["notes", "notes/a.md", "text.txt"])
def test_plain_text_of_any_length_is_trained_on(data: str, here: Path, d1: Callable, job: Job) -> None:
    (here / "notes").mkdir()
    for path in ("notes/a.md", "notes/b.txt", "text.txt"):
        (here / path).write_text("the sky is blue because of light. " * 40)
    ended = d1("adapt", "tiny", "runs/one", "--data", data, *_SMALL)
    assert (ended.status, job.stages) == (0, Stages.SFT), ended.err


def test_rounds_of_distillation_come_after_sft_now_or_later(here: Path, d1: Callable, job: Job) -> None:
    words = ["adapt", "tiny", "runs/one", "--data", "chat.jsonl", "task.name=sums", "num_train_problems=30", *_SMALL]
    for more in ([], ["--distill-rounds", "2", "--resume"], ["--distill-rounds", "3", "--resume"]):
        ended = d1(*words, *more)
        assert ended.status == 0, ended.err
        assert job.stages == (Stages.ALL if more else Stages.SFT)
    assert job.recipe is not None
    learner = job.recipe.learner
    assert (learner.num_rounds, learner.algorithm, job.recipe.control.enabled) == (3, "opdlm", False)
    d1(*words, "--distill-rounds", "2", "--block-length", "8", "--resume").assert_refused("--block-length is 8")
    d1("adapt", "runs/one", "runs/two", "--data", "chat.jsonl").assert_refused(
        "runs/one is a run, and its policy a diff"
    )
    (here / "prompts.txt").write_text("what is 3 + 4?")
    for what in (
        ["--data", "chat.jsonl"],
        ["--prompts", "prompts.txt"],
        ["--data", "chat.jsonl", "task.max_number=50"],
    ):
        ended = d1("adapt", "tiny", "runs/two", *what, "--distill-rounds", "2")
        ended.assert_refused("no task is named: give --prompts TASK, or task.name=TASK; the tasks are countdown,")
    assert [path.name for path in (here / "runs").iterdir()] == ["one"]


def test_training_starts_from_the_newest_checkpoint_of_a_run_that_is_named(
    here: Path, d1: Callable, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert d1("adapt", "tiny", "runs/one", "--data", "chat.jsonl", *_SMALL).status == 0
    (here / "r.yaml").write_text(
        "{task: {name: sums}, num_train_problems: 20, sft: {num_labels: 4, num_steps: 2}, "
        "learner: {num_rounds: 1, num_workers: 1}, evaluation: {num_problems: 2}, rollout: {num_samplers: 1, "
        "sampling: {gen_length: 16, block_length: 16, num_denoise_steps: 4}}}"
    )
    initial = Path("runs", "one", "checkpoints", "initial")
    started: list[Any] = []
    monkeypatch.setattr(
        "deploy.job.job.run", lambda recipe, **more: started.append((recipe.model.checkpoint, more["start_from"]))
    )
    for words in (["train", "r.yaml", "--from", "runs/one"], ["sft", "r.yaml", "model.checkpoint=runs/one"]):
        ended = d1(*words)
        assert ended.status == 0, ended.err
    assert started == [(None, initial), (initial, None)]


def test_weights_of_a_gguf_file_are_copied_into_the_run(here: Path, d1: Callable, job: Job) -> None:
    ended = d1("adapt", "tiny.gguf", "runs/one", "--data", "chat.jsonl", "--mask-token", "<|hole|>", *_SMALL)
    assert ended.status == 0, ended.err
    assert "d1: the mask token is <|hole|> (id 300, a new row)\n" in ended.err
    (here / "tiny.gguf").unlink()
    initial = here / "runs" / "one" / "checkpoints" / "initial"
    assert not (initial / REFERENCES).exists()
    assert load_policy(initial).config.vocab_size == 301
    assert [path.name for path in (here / "runs").iterdir()] == ["one"]


def test_without_steps_only_the_policy_is_written(here: Path, d1: Callable, job: Job) -> None:
    ended = d1("adapt", "tiny.gguf", "runs/one", "sft.num_steps=0")
    assert ended.status == 0, ended.err
    assert "d1 sample runs/one 'Why is the sky blue?'" in ended.out
    assert job.recipe is None
    assert [path.name for path in (here / "runs").iterdir()] == ["one"]
    verify_checkpoint(here / "runs" / "one")
    asked = ("what is 3 + 4?", "gen_length=16", "--json")
    answers = [json.loads(d1("sample", "runs/one", *asked).out)["token_ids"]]
    adapter = here / "recipes" / "story"
    make_adapter(here / "runs" / "one", adapter, r=2, std=0.5, target_modules=["q_proj", "down_proj"])
    change_config(adapter, base_model_name_or_path="../../runs/one")
    answers.append(json.loads(d1("sample", "recipes/story", *asked).out)["token_ids"])
    assert answers[0] != answers[1]
    (adapter / "generation_config.json").write_text('{"max_new_tokens": 12}')
    (own,) = [json.loads(d1("sample", "recipes/story", *asked[:1], "stop_ids=[]", "--json").out)]
    assert (own["num_tokens"], own["num_forwards"]) == (12, 6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere", "runs/one", "--data", "chat.jsonl"], "nowhere is no directory"),
        (["full", "runs/one", "--data", "chat.jsonl"], "pass --mask-token NEW to append a row"),
        (["tiny", "runs/one"], "there is nothing to train on: give --data FILE, or --prompts TASK"),
        (["tiny", "runs/one", "--data", "chat.jsonl", "--prompts", "sums"], "--data and --prompts are alternatives"),
        (["tiny", "runs/one", "--data", "chat.jsonl", "name=two"], "name=... is set by MODEL and OUT"),
        (["tiny", "runs/one"], "for the untrained policy alone, sft.num_steps=0"),
        (["tiny", "runs/one", "--data", "chat.jsonl", "sft.num_steps=0"], "so nothing trains on the given data"),
        (["tiny", "runs/one", "--resume", "sft.num_steps=0"], "--resume is for training, and sft.num_steps is 0"),
        (["tiny", "tiny", "sft.num_steps=0"], "tiny already exists"),
        (["tiny", "runs/one", "--data", "none.jsonl"], "sft.data: none.jsonl"),
        (["tiny", "tiny", "--data", "chat.jsonl"], "tiny already exists; continue with --resume"),
        (["tiny", "chat.jsonl/one", "--data", "chat.jsonl"], "chat.jsonl is a file; take another OUT"),
        (["tiny", "/proc/one", "--data", "chat.jsonl"], "/proc/one cannot be made: /proc: "),
        (["tiny", "runs/one", "--data", "chat.jsonl", "--resume"], "there is no run to resume in runs/one"),
        (["tiny", "runs/one", "--data", "chat.jsonl", "sft.max_tokens=1000"], "takes canvases of 512 tokens"),
    ],
)
def test_an_impossible_adaptation_is_refused_in_one_sentence(
    words: list[str], sentence: str, here: Path, d1: Callable, job: Job
) -> None:
    ended = d1("adapt", *words)
    assert ended.status == 2
    assert sentence in ended.err
    assert ended.err.splitlines()[-1].startswith("d1: ")
    assert "Traceback" not in ended.err
    assert list((here / "runs").glob("*")) == []


def test_a_dry_run_leaves_nothing(here: Path, d1: Callable, job: Job) -> None:
    ended = d1("adapt", "tiny", "runs/one", "--data", "chat.jsonl", "--dry-run", *_SMALL)
    assert (ended.status, job.recipe) == (0, None), ended.err
    assert "CPUs" in ended.out
    assert not (here / "runs").exists()


def test_a_run_resumes_with_its_settings_wherever_it_is(here: Path, d1: Callable, job: Job) -> None:
    words = ("--data", "chat.jsonl", *_SMALL)
    assert d1("adapt", "tiny", "runs/one", *words).status == 0
    (here / "runs" / "one").rename(here / "runs" / "two")
    assert d1("adapt", "tiny", "runs/two", *words, "--resume").status == 0
    d1("adapt", "tiny", "runs/two", *words, "--resume", "--no-shift").assert_refused(
        "--shift is False", "began with True"
    )
    d1("adapt", "tiny", "runs/two", *words, "--resume", "sft.lr=1").assert_refused("sft.lr is 1.0")


def test_the_models_responses_are_trained_on_and_generation_resumes(
    here: Path, d1: Callable, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def write(
        source: AutoregressiveCheckpoint, prompts: Sequence[Any], path: Path, sampling: Sampling, say: Any
    ) -> str:
        asked.append((source.name, len(prompts), sampling.max_new_tokens))
        if len(asked) == 1:
            path.write_text("")
            raise KeyboardInterrupt
        shutil.copyfile(here / "chat.jsonl", path)
        return "40 responses"

    monkeypatch.setattr(responses, "write_responses", write)
    words = ["adapt", "tiny", "runs/one", "--prompts", "sums", "num_train_problems=30", "sft.max_tokens=96"]
    d1(*words, "--dry-run").assert_refused("--dry-run looks at what is trained on")
    ended = d1(*words)
    assert ended.status == 130
    assert ended.err.endswith(f"d1 {' '.join(words)} --resume\n")
    assert "Traceback" not in ended.err
    ended = d1(*words, "--resume")
    assert ended.status == 0, ended.err
    assert "d1: one.responses.jsonl: 40 responses\n" in ended.err
    assert asked == [("tiny", 30, 48)] * 2
    assert job.recipe is not None
    assert job.recipe.sft.data == here / "runs" / "one.responses.jsonl"
    assert job.recipe.task.name == "sums"


@pytest.mark.ray
@pytest.mark.nightly
def test_a_killed_adaptation_resumes(here: Path, cluster: dict[str, str]) -> None:
    d1, run = str(Path(sys.executable).with_name("d1")), here / "runs" / "one"
    words = ["adapt", "tiny.gguf", "runs/one", "--data", "chat.jsonl", "sft.num_steps=100", "sft.max_tokens=64"]
    words += ["checkpoint_every_s=0.5", "sft.eval_every_steps=0", "task.name=sums", "num_train_problems=50"]
    words += ["evaluation.num_problems=1", "rollout.sampling.gen_length=16", "learner.groups_per_round=4"]
    killed = subprocess.Popen([d1, *words], env=cluster, stdout=subprocess.DEVNULL)
    while not list((run / "checkpoints").glob("sft-*/manifest.json")):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    subprocess.run([d1, *words, "--distill-rounds", "2", "--resume"], env=cluster, check=True, timeout=600)
    events = read_events(run)
    phases = [event for event in events if event["event"] == "phase"]
    assert [phase["phase"] for phase in phases] == ["sft", "sft", "rl"]
    assert phases[1]["from_step"] > 0
    divergences = [event["teacher_divergence"] for event in events if event["event"] == "round"]
    assert (len(divergences), min(divergences) > 0) == (2, True)
    assert StoredWeights(run / "checkpoints" / "rl-000002").config.family == "a2d-llama"
    for more in (
        ["sample", "runs/one", "what is 3 + 4?", "gen_length=16"],
        ["eval", "runs/one", "--tasks", "sums", "--problems", "1", "--lengths", "16"],
    ):
        subprocess.run([d1, *more], env=cluster, check=True, timeout=300)
