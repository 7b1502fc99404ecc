"""End-to-end runs through the command line, on a Ray cluster of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.checkpoints.selection import read_position
from actors.coordination.reporting.timeline import TIMELINE, num_rounds, read_trace
from actors.run_log import read_events
from actors.weights.tensors import make_manifest
from benchmarks.processes.run_processes import MARK, Role, RunProcesses
from deploy.offline.evaluation.evaluate import ComputeSettings, find_subject, prepare
from deploy.offline.evaluation.options import EvaluationOptions
from deploy.offline.pool import PoolSettings
from deploy.offline.worker import Worker, WorkerConfig
from learner.model.checkpoint import load_policy
from tests.simulated import stuck_rank

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

D1 = str(Path(sys.executable).with_name("d1"))
# One learner worker: the run of tests/deploy/test_cluster_on_ray.py has two, as has the nightly one with LoRA.
RECIPE = """
task: {name: sums}
num_train_problems: 100
model: {d_model: 32, num_layers: 2, num_heads: 2, mlp_hidden_size: 48}
sft: {num_labels: 20, num_steps: 5, batch_size: 16, lr: 0.003, num_eval: 10, eval_every_steps: 2}
rollout:
  batch_size: 16
  max_prompt_tokens: 12
  sampling: {gen_length: 6, block_length: 3, num_denoise_steps: 4, temperature: 1.0}
learner: {num_workers: 1, num_rounds: 4, groups_per_round: 8, group_size: 4, inner_updates: 2, lr: 0.001}
evaluation: {num_problems: 50, every_rounds: 2}
control: {num_steps: 3}
checkpoint_every_rounds: 1
# A policy that has hardly learned solves no sum, and equal rewards have no gradient.
reward: {terms: {letters: {kind: function, path: "letters:share", directory: FOLDER}}}
"""
LETTERS = "def share(completion, **rest):\n    return sum(map(str.isalpha, completion)) / 10\n"
# For tests of other matters: starting processes takes most of a small run's time.
SMALL = ("rollout.num_samplers=1",)
IS_QUANTIZED = find_spec("bitsandbytes") is not None
REPEATABLE = ("sft_data", "sft_eval", "round", "evaluation", "checkpoint", "phase_end")
# Values that depend on the clock or on the process that wrote them.
UNREPEATABLE = {
    "time_s",
    "tokens_per_s",
    "flop_per_s",
    "peak_memory_bytes",
    "sampling_s",
    "training_s",
    "publish_s",
    "seconds",
    "name",
    "began_at",
    "num_retries",
    "pools",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _with_recipe(tmp_path_factory.mktemp("runs"))


def _with_recipe(folder: Path) -> Path:
    """Write the recipe and its reward into a folder, and return the folder."""
    (folder / "letters.py").write_text(LETTERS)
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


def _d1(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([D1, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False)


def _train(
    environment: dict[str, str], folder: Path, name: str, *more: str, command: str = "train"
) -> list[dict[str, Any]]:
    done = _d1(environment, command, str(folder / "recipe.yaml"), f"name={name}", f"runs_dir={folder}", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_events(folder / name)


def _repeatable(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics without timings. SFT logs progress by the clock, so only the last event of a phase is
    compared."""
    kept = [event for event in events if event["event"] in REPEATABLE]
    return [{name: value for name, value in event.items() if name not in UNREPEATABLE} for event in kept]


@pytest.fixture(scope="module")
def first_run(cluster: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    return _train(cluster, folder, "first")


def test_a_run_writes_events_samples_and_checkpoints(
    cluster: dict[str, str], folder: Path, first_run: list[dict[str, Any]]
) -> None:
    run_dir = folder / "first"
    labels = [event["label"] for event in first_run if event["event"] == "evaluation"]
    assert labels == ["untrained", "sft", "round", "rl", "control"]
    losses = [(event["phase"], event["step"]) for event in first_run if event["event"] == "sft_eval"]
    assert losses == [("sft", 0), ("sft", 2), ("sft", 4), ("sft", 5), ("control", 0), ("control", 2), ("control", 3)]
    rounds = [event for event in first_run if event["event"] == "round"]
    assert [event["policy_version"] for event in rounds] == [2, 3, 4, 5]
    assert all(event["num_completions"] == 32 and event["num_failed_groups"] == 0 for event in rounds)
    assert all(event["flop_per_s"] > 0 and event["peak_memory_bytes"] > 10e6 for event in rounds)
    assert all(event["estimator_variance"] > 0 and event["grad_norm"] > 0 for event in rounds)
    assert not [event for event in rounds if "mfu" in event], "no rate of a CPU is known"
    assert not [event for event in first_run if event["event"] == "failure"]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    # The completions of round r were sampled with the version that round r - 1 published.
    assert all(sample["policy_version"] == sample["round"] + 1 for sample in samples)
    assert all(sample["prompt"] and len(sample["step_map"]) in (3, 6) for sample in samples)
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert not list(run_dir.glob("**/*.pkl")), "nothing is pickled to disk"
    for checkpoint in (run_dir / "checkpoints").iterdir():
        # Computed as a resumed learner computes it when it announces the version.
        weights = dict(load_policy(checkpoint).named_parameters())
        assert read_position(checkpoint).manifest_digest == make_manifest(0, weights).digest
    shown = _d1(cluster, "status", str(run_dir))
    assert "SFT + RL" in shown.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("first_run")
def test_evaluation_on_the_cluster_equals_that_of_one_worker(cluster: dict[str, str], folder: Path) -> None:
    words = ("--samples", "2", "--temperature", "1", "--schedules", "0.5", "--workers", "2")
    done = _d1(cluster, "eval", str(folder / "first"), *words, "--out", str(folder / "answers"))
    assert done.returncode == 0, done.stderr
    subject = find_subject(str(folder / "first"), folder)
    options = EvaluationOptions(schedules=("0.5",), num_samples=2, temperature=1.0)
    computing = ComputeSettings(num_slots=None, dtype="float32", pool=PoolSettings(num_workers=None, device=None))
    # Everything is already answered: check what is stored, and the options of the evaluation.
    (ready,) = prepare(subject, options, computing, folder / "answers", [].append)
    recorded = ready.record.recorded.batches
    assert recorded.keys() == {batch.index for batch in ready.batches}
    engine = computing.engine(subject.run)
    worker = Worker(WorkerConfig(checkpoint=subject.directory, engine=engine, device="cpu", num_threads=1))
    for batch in ready.batches:
        assert worker.answer(batch).answers == recorded[batch.index].answers


@pytest.mark.nightly
def test_the_timeline_shows_sampling_and_training_overlap_only_off_policy(
    cluster: dict[str, str], folder: Path, first_run: list[dict[str, Any]]
) -> None:
    # With eight work units a round, one sampler works on the next round long after the learner has begun one.
    exact = (
        "learner.estimator={name: trajectory, steps_per_segment: 1, law: sampler}",
        "learner.objective.old=sampler",
    )
    ahead = (
        "learner.max_staleness=1",
        "rollout.batch_size=4",
        "control.enabled=false",
        "learner.inner_updates=4",
        *exact,
    )
    _train(cluster, folder, "ahead", *ahead, *SMALL)
    overlapping: dict[str, list[tuple[int, int]]] = {}
    for name in ("first", "ahead"):
        spans = read_trace(folder / name / TIMELINE)
        assert num_rounds(spans) == 4
        for track in {span.track for span in spans}:
            own = sorted((span for span in spans if span.track == track), key=lambda span: span.began)
            # Start times and durations are rounded to microseconds.
            assert all(before.ended <= after.began + 2e-6 for before, after in pairwise(own)), track
        trainings = [span for span in spans if span.name.endswith(": training")]
        sampled = [span for span in spans if span.track.startswith("sampler") and span.args["round"] >= 0]
        assert [span.args["round"] for span in trainings] == [0, 1, 2, 3]
        assert {span.args["round"] for span in sampled} == {0, 1, 2, 3}
        overlapping[name] = [
            (training.args["round"], work_unit.args["round"])
            for training in trainings
            for work_unit in sampled
            if work_unit.began < training.ended and training.began < work_unit.ended
        ]
    assert overlapping["first"] == [], "with a staleness of 0 samplers wait for the learner, and it for them"
    assert overlapping["ahead"]
    assert all(work_unit > training for training, work_unit in overlapping["ahead"]), "what is trained on is complete"
    said = _d1(cluster, "status", str(folder / "ahead"))
    assert said.stdout.startswith("ahead: finished, ")
    assert "RL, 4 of 4 rounds done" in said.stdout


@pytest.mark.nightly
def test_a_lora_run_resumes_from_the_newest_complete_checkpoint(cluster: dict[str, str], folder: Path) -> None:
    # Enough SFT that some completions are rewarded: without a gradient all resumed runs would be equal.
    lora = ("model.lora.rank=16", "model.lora.alpha=32", "sft.num_steps=40", "sft.lr=0.02", "learner.num_workers=2")
    if IS_QUANTIZED:
        lora += ("model.lora.base_weights=nf4",)
    first = _train(cluster, folder, "adapter", *lora)
    rounds = [event for event in first if event["event"] == "round"]
    assert [event["policy_version"] for event in rounds] == [2, 3, 4, 5]
    assert all(event["sampling/sampling_logp_difference/max"] < 1e-3 for event in rounds)
    checkpoints = shutil.copytree(folder / "adapter", folder / "torn") / "checkpoints"
    for name in ("rl-000004", "control"):
        shutil.rmtree(checkpoints / name)
    torn = checkpoints / "rl-000003" / "learner.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    events = _train(cluster, folder, "torn", "--resume", *lora)[len(first) :]
    said = [event["what"] for event in events if event["event"] == "failure"]
    assert said == [f"{torn} is damaged: it is not what manifest.json lists; going on with checkpoint rl-000002"]
    resumed = _repeatable(events)
    assert [event["round"] for event in events if event["event"] == "round"] == [2, 3]
    assert resumed == [event for event in _repeatable(first) if event in resumed]
    assert resumed[-1] == _repeatable(first)[-1]
    assert all(event["kl"] > 0 and event["grad_norm"] > 0 for event in events if event["event"] == "round")
    for name in ("rl-000004", "control"):
        ours, theirs = (
            load_file(folder / run / "checkpoints" / name / "lora.safetensors") for run in ("torn", "adapter")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    assert load_file(checkpoints / "rl-000004" / "learner.safetensors").keys() == {
        f"optimizer/{name}/{key}"
        for name in load_file(checkpoints / "rl-000004" / "lora.safetensors")
        for key in ("exp_avg", "exp_avg_sq", "step")
    }


@pytest.mark.nightly
def test_a_finished_run_resumes_for_more_rounds(
    cluster: dict[str, str], folder: Path, first_run: list[dict[str, Any]]
) -> None:
    shutil.copytree(folder / "first", folder / "longer")
    events = _train(cluster, folder, "longer", "--resume", "learner.num_rounds=5")[len(first_run) :]
    (more,) = [event for event in events if event["event"] == "round"]
    assert (more["round"], more["policy_version"]) == (4, 6)
    # The control's checkpoint is newer than the last round's, and another policy: rounds must resume from the latter.
    last = [event for event in first_run if event["event"] == "round"][-1]
    assert more["token_logp"] == pytest.approx(last["token_logp"], abs=0.1)
    refused = _d1(
        cluster, "train", str(folder / "recipe.yaml"), "name=longer", f"runs_dir={folder}", "--resume", "seed=1"
    )
    assert refused.returncode == 2
    assert "seed is 1 and the run in" in refused.stderr
    assert "began with 0" in refused.stderr


@pytest.mark.nightly
def test_sft_alone_gives_the_weights_of_sft_in_a_whole_run(
    cluster: dict[str, str], folder: Path, first_run: list[dict[str, Any]]
) -> None:
    alone = _train(cluster, folder, "alone", "rollout.num_samplers=1", command="sft")
    assert [event["label"] for event in alone if event["event"] == "evaluation"] == ["untrained", "sft"]
    weights = [(folder / run / "checkpoints" / "sft" / "model.safetensors").read_bytes() for run in ("first", "alone")]
    assert weights[0] == weights[1], "the same seed gives the same weights"


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_metrics(
    cluster: dict[str, str], folder: Path, first_run: list[dict[str, Any]]
) -> None:
    assert _repeatable(_train(cluster, folder, "again")) == _repeatable(first_run)


@pytest.mark.nightly
def test_a_slow_disk_and_the_coordinators_death_change_no_result(
    cluster: dict[str, str], folder: Path, first_run: list[dict[str, Any]]
) -> None:
    recipe = [str(folder / "recipe.yaml"), "name=slow", f"runs_dir={folder}"]
    command = [sys.executable, "-m", "tests.simulated.slow_disk", "train", *recipe]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(folder / "slow")
    failures = [event["what"] for event in events if event["event"] == "failure"]
    assert any(what.startswith("the coordinator died and was restarted") for what in failures)
    assert any(what.startswith("the disk of the run directory is slow") for what in failures)
    assert _repeatable(events) == _repeatable(first_run)


@pytest.mark.nightly
def test_rl_alone_gives_the_rewards_of_a_whole_run(
    cluster: dict[str, str], folder: Path, first_run: list[dict[str, Any]]
) -> None:
    checkpoint = folder / "first" / "checkpoints" / "sft"
    events = _train(cluster, folder, "rounds", "--from", str(checkpoint), "rollout.num_samplers=1")
    assert [event["label"] for event in events if event["event"] == "evaluation"] == ["start", "round", "rl"]
    rewards = [event["reward"] for event in events if event["event"] == "round"]
    assert rewards == [event["reward"] for event in first_run if event["event"] == "round"]


@pytest.mark.nightly
def test_a_run_with_a_stuck_rank_names_it_and_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """A rank that loops before an all-reduce sends heartbeats; one that is stopped does not."""
    _with_recipe(tmp_path)
    events: dict[str, list[dict[str, Any]]] = {}
    for how in ("", "loops", "is stopped"):
        name = how.replace(" ", "-") or "undisturbed"
        environment = os.environ | stuck_rank.environment_of(tmp_path / f"{name}-site", how)
        environment.pop("RAY_ADDRESS", None)
        events[how] = _train(environment, tmp_path, name, "learner.num_workers=2", "control.enabled=false", *SMALL)
    for how, expected in (
        (
            "loops",
            r"learner rank 1 on \S+ made no progress for \d+ s, \d+ s are allowed: round 2: training, forward",
        ),
        ("is stopped", r"learner rank 1 on \S+, last heard of in round \d: .*, was silent for \d+ s and is replaced"),
    ):
        said = [event["what"] for event in events[how] if event["event"] == "failure"]
        assert re.match(expected, said[0]), said
        assert any(what.startswith("the learner group restarted from checkpoint rl-000002") for what in said), said
        rounds = {str(event["round"]): event for event in _repeatable(events[how]) if event["event"] == "round"}
        assert rounds == {
            str(event["round"]): event for event in _repeatable(events[""]) if event["event"] == "round"
        }, "the last of each round"
        for name in ("sft", "rl-000004"):
            ours, theirs = (
                (tmp_path / run / "checkpoints" / name / "model.safetensors").read_bytes()
                for run in (how.replace(" ", "-"), "undisturbed")
            )
            assert ours == theirs, name


@pytest.mark.nightly
def test_a_failed_run_prints_one_sentence(cluster: dict[str, str], folder: Path) -> None:
    arguments = (
        str(folder / "recipe.yaml"),
        "name=failing",
        f"runs_dir={folder}",
        "learner.lr=1e30",
        "learner.max_skipped_rounds=0",
        *SMALL,
    )
    done = _d1(cluster, "train", *arguments)
    assert done.returncode == 1
    # Leave out the progress lines about slow imports on a busy machine.
    (sentence,) = [line for line in done.stderr.splitlines() if re.match(r"d1: (?!.+: \d+ s$)", line)]
    assert "the run failed: FloatingPointError: round 0: the gradient's norm is nan" in sentence
    assert "Traceback" not in done.stderr
    failures = [event["what"] for event in read_events(folder / "failing") if event["event"] == "failure"]
    assert any("a learner worker failed: FloatingPointError" in what for what in failures)
    restarts = [what for what in failures if "the learner group restarted from checkpoint sft" in what]
    assert len(restarts) == 1, "a third group would raise what two have"


def _mark(run: str) -> str:
    """Mark a run's processes, to tell them from those of another test suite on this machine."""
    return f"{run}-{os.getpid()}"


def _stopped_by(
    sent: signal.Signals,
    folder: Path,
    run: str,
    *more: str,
    after: int = 1,
    may_stop: Callable[[], bool] = lambda: True,
) -> tuple[str, int]:
    """Send a signal to a run (SIGINT to its process group) after `after` more rounds; return output and exit status."""
    recipe = str(folder / "recipe.yaml")
    arguments = ["train", recipe, f"name={run}", f"runs_dir={folder}", "learner.num_rounds=5000", *more]
    # Processes started in the background of a script inherit an ignored SIGINT.
    command = ["env", "--default-signal=INT", D1, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", MARK: _mark(run)}
    # Shortens the printed command.
    environment["PATH"] = f"{Path(D1).parent}:{environment['PATH']}"
    wanted, output = len(_rounds(folder / run)) + after, ""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output += line
                if "rounds  reward" in line and len(_rounds(folder / run)) >= wanted and may_stop():
                    break
            interrupted = time.monotonic()
            if sent is signal.SIGINT:
                os.killpg(process.pid, sent)
            else:
                process.send_signal(sent)
            output += process.stdout.read()
            status = process.wait(timeout=20)
            assert time.monotonic() - interrupted < 40
        finally:
            # Otherwise a failing test would wait for all rounds.
            process.kill()
    assert f"stopped; resume with: d1 train {recipe} name={run}" in output
    assert "Traceback" not in output
    assert not _processes_that_mention(str(folder / run)), "no actor is left"
    return output, status


def _rounds(run_dir: Path) -> list[dict[str, Any]]:
    events = read_events(run_dir) if run_dir.is_dir() else []
    return [event for event in events if event["event"] == "round"]


def test_a_resumed_run_survives_killed_samplers_and_keeps_every_round_on_ctrl_c(
    folder: Path, first_run: list[dict[str, Any]]
) -> None:
    """A single run, since a start takes half a minute. It is resumed after round two, its samplers are killed after
    round three, and it is stopped after round four."""
    resumed = folder / "resumed"
    shutil.copytree(folder / "first", resumed)
    for name in ("rl-000003", "rl-000004", "control"):
        shutil.rmtree(resumed / "checkpoints" / name)
    # On a busy machine more rounds may pass before Ctrl-C takes effect.
    more = ("--resume", "num_checkpoints_kept=1000")
    processes, killed, is_over = RunProcesses(_mark("resumed")), list[int](), threading.Event()

    def kill() -> None:
        while not killed and not is_over.wait(0.01):
            if len(_rounds(resumed)) > len(_rounds(folder / "first")):
                for sampler in processes.of_role(Role.SAMPLER):
                    sampler.signal(signal.SIGKILL)
                    killed.append(sampler.pid)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        output, status = _stopped_by(
            signal.SIGINT, folder, "resumed", *more, after=2, may_stop=lambda: len(killed) == 2
        )
    finally:
        is_over.set()
        killer.join()
    assert status == 130, output
    assert len(killed) == 2
    events = read_events(resumed)[len(first_run) :]
    rounds = [event for event in _repeatable(events) if event["event"] == "round"]
    assert [event["round"] for event in rounds] == list(range(2, 2 + len(rounds)))
    assert rounds[:2] == [event for event in _repeatable(first_run) if event["event"] == "round"][2:]
    for name in ("rl-000003", "rl-000004"):
        # Whole at the end of a stage, and within it a part from each worker.
        weights = [load_policy(folder / run / "checkpoints" / name).state_dict() for run in ("first", "resumed")]
        assert weights[0].keys() == weights[1].keys(), name
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0]), name
    (stopped,) = [event for event in events if event["event"] == "stopped"]
    assert stopped["round"] == 2 + len(rounds), "what was trained on is kept"
    assert events[-1] == stopped, "work that the stop cut short is no failure"
    assert f"stopped after {stopped['round']} round" in output
    assert (resumed / "checkpoints" / f"rl-{stopped['round']:06d}").is_dir()


@pytest.mark.nightly
def test_a_run_resumed_after_sigint_or_sigterm_repeats_no_round(folder: Path) -> None:
    more = ("checkpoint_every_rounds=0", "control.enabled=false", "--resume-or-start")
    _stopped_by(signal.SIGINT, folder, "stopped", *SMALL, *more)
    before = [event["round"] for event in _rounds(folder / "stopped")]
    again, status = _stopped_by(signal.SIGTERM, folder, "stopped", *SMALL, *more)
    assert status == 143, again
    assert f"going on from checkpoint rl-{len(before):06d}; nothing is repeated" in again
    after = [event["round"] for event in _rounds(folder / "stopped")]
    assert len(after) > len(before)
    assert after == list(range(len(after))), "no round is done twice, or left out"


@contextmanager
def _under_way(folder: Path, run: str) -> Iterator[tuple[subprocess.Popen[str], list[str], str]]:
    """Start a training run on its own Ray. Yields its process, its output, and an environment setting that its
    processes inherit."""
    mark = f"D1_TEST_MARK={_mark(run)}"
    arguments = [D1, "train", str(folder / "recipe.yaml"), f"name={run}", f"runs_dir={folder}", *SMALL]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= dict([mark.split("=")])
    printed = []
    with subprocess.Popen(
        [*arguments, "learner.num_rounds=5000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                printed.append(line)
                if "held-out accuracy before training" in line:
                    break
            yield driver, printed, mark
        finally:
            # Otherwise a failing test would wait for all rounds.
            driver.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("process", "name"), [("raylet/raylet", "Ray's raylet"), ("gcs_server", "Ray's GCS")])
def test_death_of_a_ray_process_is_reported_in_one_sentence(
    process: str, name: str, sent: signal.Signals, folder: Path
) -> None:
    run = f"without-{process[:3]}-{sent.name}"
    with _under_way(folder, run) as (driver, printed, mark):
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        (victim,) = [pid for pid in children if process in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]]
        os.kill(int(victim), sent)
        rest, errors = driver.communicate(timeout=60)
    assert driver.returncode == 1
    # On a busy machine the first lines are progress messages.
    (sentence,) = [line for line in errors.splitlines() if "the run failed" in line]
    causes = {f"{name} died": "its logs are in /"}
    if sent is signal.SIGTERM:
        # A raylet that receives SIGTERM says goodbye to the driver, whose native code may exit before our handler.
        causes["its driver was killed, or ended by native code"] = "Ray's output is in /"
    (cause,) = [cause for cause, more in causes.items() if sentence.startswith(f"d1: the run failed: {cause}; {more}")]
    assert errors.endswith(f"{sentence}\n")
    assert sentence.endswith("; --resume goes on from the newest checkpoint")
    said_before = [line for line in errors.splitlines() if line != sentence]
    assert all(re.fullmatch(r"d1: [a-z' ,]+: \d+ s", line) for line in said_before), errors
    assert "state-dump" not in "".join(printed) + rest
    assert read_events(folder / run)[-1]["what"] == cause
    left = _processes_with(mark)
    assert not left, left


@pytest.mark.nightly
def test_a_killed_driver_leaves_a_message_and_no_process(folder: Path) -> None:
    with _under_way(folder, "killed") as (driver, _, mark):
        driver.kill()
        # Wait until no process holds its standard error.
        _, errors = driver.communicate(timeout=60)
    # On a busy machine the first lines are progress messages.
    assert errors.endswith(
        "d1: the run failed: its driver was killed, or ended by native code; "
        f"Ray's output is in {folder / 'killed'}/driver.log; --resume goes on from the newest checkpoint\n"
    )
    deadline = time.monotonic() + 30
    while left := _processes_with(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _processes_that_mention(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text in (path.parent / "cmdline").read_text().replace("\0", " "):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def _processes_with(variable: str) -> list[str]:
    """Return the command lines of the processes with this setting in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"\0{variable}\0" in path.read_text(errors="replace"):
                found.append((path.parent / "cmdline").read_text().replace("\0", " ")[:80])
    return found
