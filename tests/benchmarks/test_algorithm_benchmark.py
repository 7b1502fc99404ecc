"""Tests of the algorithm comparison: trials, saved results and tables."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from actors.spec import sampler_facts
from benchmarks.algorithms import teacher
from benchmarks.algorithms.__main__ import TASKS, main
from benchmarks.algorithms.gains import gains
from benchmarks.algorithms.local_run import LocalControl, LocalRun, make_sft_checkpoint
from benchmarks.algorithms.report import Budget, Result, markdown, write_columns
from benchmarks.algorithms.trial import CONTROL_ROW, RECIPE_ROW, Trial, base_recipe, begin, recipe_of, start, try_row
from deploy.recipe.recipe import Stages
from deploy.runs.run_directory import make_spec
from learner.algorithms import ALGORITHMS
from learner.config import LearnerConfig
from learner.model.checkpoint import load_policy
from learner.model.lora import adaptable_layers
from learner.objectives import SandwichConfig

ROOT = Path(__file__).parents[2]
BUDGET = Budget(num_completions=24, cpu_s=0.0, of_round=12)
BUDGETS = {"sudoku": BUDGET}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of `make train`, shrunk until it learns nothing."""
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
    recipe["model"] |= {"d_model": 32, "num_layers": 1, "num_heads": 2, "mlp_hidden_size": 64}
    recipe["sft"] |= {"num_steps": 2, "batch_size": 4, "num_labels": 4}
    recipe["num_train_problems"] = 40
    recipe["learner"]["groups_per_round"] = 2
    recipe["evaluation"] = {"num_problems": 4, "schedules": [{"num_denoise_steps": 2}, {"threshold": 0.9}]}
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("row", [RECIPE_ROW, *ALGORITHMS])
def test_every_rows_learner_is_compatible_with_its_sampler(row: str, task: str, tmp_path: Path) -> None:
    trial = Trial(task=task, recipe=str(ROOT / TASKS[task]), row=row, seed=0, out=str(tmp_path))
    base = base_recipe(trial)
    recipe = recipe_of(trial, base, Budget(num_completions=1, cpu_s=1, of_round=512))
    learner = make_spec(recipe, Stages.RL).learner
    assert learner.incompatibility(sampler_facts(recipe.rollout.params[0])) is None
    assert 480 <= learner.groups_per_round * learner.group_size <= 544, "as many completions as the others"
    if row != RECIPE_ROW:
        own = ALGORITHMS[row]
        assert learner.estimator.name == own["estimator"]["name"]
        # The recipes have three, five and six denoise steps, of which each of its updates takes two.
        num_updates = (
            {"sudoku": 2, "countdown": 3, "smollm2": 3}[task]
            if row.startswith("egspo")
            else own.get("inner_updates", 12)
        )
        assert learner.inner_updates == num_updates
        assert learner.lr == pytest.approx(
            base.learner.lr / (learner.inner_updates * own.get("num_minibatches", 1)) ** 0.5
        )


def test_changes_to_the_learner_are_made_to_the_rows_own_method(tmp_path: Path) -> None:
    changes = ("learner.objective.beta=1.1", "learner.num_warmup_rounds=40", "sft.num_steps=7")
    trial = Trial(
        task="sudoku", recipe=str(ROOT / TASKS["sudoku"]), row="spg-eubo", seed=0, out=str(tmp_path), overrides=changes
    )
    recipe = recipe_of(trial, base_recipe(trial), Budget(num_completions=1, cpu_s=1, of_round=512))
    assert isinstance(recipe.learner.objective, SandwichConfig)
    assert (recipe.learner.objective.beta, recipe.learner.objective.mix) == (1.1, 1.0)
    assert (recipe.learner.num_warmup_rounds, recipe.sft.num_steps) == (40, 7)


def test_a_trial_ends_when_both_budgets_are_spent(small: Path, tmp_path: Path) -> None:
    trial = Trial(task="sudoku", recipe=str(small), row="cj-grpo", seed=0, out=str(tmp_path))
    start(trial)
    result = try_row(trial, BUDGET)
    assert result.num_rounds == 2
    assert result.failure is None
    assert list(result.before) == ["2 steps", "threshold 0.9"] == list(result.at_seconds or {})
    assert list(result.at_completions or {}) == ["2 steps"]
    assert {some["num_problems"] for some in result.before.values()} == {4}
    again = try_row(trial, BUDGET)
    assert replace(again, cpu_s=result.cpu_s) == result, "a trial depends on its seed alone"


def test_the_control_continues_sft_for_the_same_seconds(small: Path, tmp_path: Path) -> None:
    """It takes batches of four labelled completions, and its learning rate falls over its seconds, as SFT's does."""
    trial = Trial(task="sudoku", recipe=str(small), row=CONTROL_ROW, seed=0, out=str(tmp_path))
    start(trial)
    result = try_row(trial, BUDGET)
    assert (result.num_rounds, result.lr, result.gap) == (24 // 4, base_recipe(trial).sft.lr, None)
    assert set(result.before) == set(result.at_seconds or {})
    control = LocalControl(base_recipe(trial), make_sft_checkpoint(base_recipe(trial)), cpu_s=1.0)
    trained = list(itertools.takewhile(lambda one: one.cpu_s < 1, control.rounds()))
    losses, rates = ([one.metrics[name] for one in trained] for name in ("loss", "lr"))
    assert max(rates) > 5 * rates[-1]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_a_lora_recipe_trains_an_adapter_beside_frozen_bfloat16_weights(small: Path, tmp_path: Path) -> None:
    """SFT is merged into its checkpoint, and each stage moves the policy."""
    start(first := Trial(task="sudoku", recipe=str(small), row="cj-grpo", seed=0, out=str(tmp_path)))
    base = make_sft_checkpoint(base_recipe(first))
    length = "reward.terms={length: {kind: length_penalty, buffer_tokens: 18, weight: 0.5}}"
    changes = (f"model={{checkpoint: {base}, lora: {{rank: 2, alpha: 4}}}}", "sharding.compute_dtype=bfloat16", length)
    trial = replace(first, out=str(tmp_path / "lora"), overrides=changes)
    recipe = base_recipe(trial)
    checkpoint = make_sft_checkpoint(recipe)
    before, after = load_policy(base, torch.bfloat16).state_dict(), load_policy(checkpoint).state_dict()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name].float())}
    assert changed == {f"{layer}.weight" for layer in adaptable_layers(load_policy(base))}
    run = LocalRun(recipe_of(trial, recipe, BUDGET), checkpoint)
    frozen = {name: one.clone() for name, one in run.policy.named_parameters() if not one.requires_grad}
    assert {one.dtype for one in frozen.values()} == {torch.bfloat16}
    trained = run.learner.policy.trained_parameters
    next(run.rounds())
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in trained)
    assert run.learner.policy.has_learned
    assert all(torch.equal(one, frozen[name]) for name, one in run.policy.named_parameters() if name in frozen)


def test_opdlm_learns_from_a_teacher_that_is_made_for_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher of one training step teaches something else than one of 40."""
    monkeypatch.setattr(teacher, "_STEPS", 40)
    trial = Trial(task="sudoku", recipe=str(small), row="opdlm", seed=0, out=str(tmp_path))
    start(trial)
    result = try_row(trial, BUDGET)
    assert (result.failure, result.num_rounds) == (None, 2)
    taught = result.metrics["teacher_divergence"]
    monkeypatch.setattr(teacher, "_STEPS", 1)
    shutil.rmtree(teacher.teacher_of(base_recipe(trial)))
    assert 0 < try_row(trial, BUDGET).metrics["teacher_divergence"] != taught


def _result(row: str, seed: int, correct: int) -> Result:
    scores = {
        name: {"num_correct": n, "num_problems": 100, "mean_steps": 9.0}
        for name, n in (("9 steps", correct), ("threshold 0.9", 1))
    }
    before = {name: some | {"num_correct": 10} for name, some in scores.items()}
    return Result(
        task="sudoku",
        row=row,
        seed=seed,
        rate=1.0,
        lr=1e-3,
        num_updates=1,
        group_size=4,
        num_rounds=10,
        cpu_s=20.0,
        before=before,
        at_completions={"9 steps": scores["9 steps"]},
        at_seconds=scores,
        metrics={"estimator_variance": 0.25},
        gap=-0.5,
        failure=None,
    )


def test_the_table_pools_seeds_and_sorts_by_accuracy() -> None:
    other_sft = {"9 steps": {"num_correct": 14, "num_problems": 100, "mean_steps": 9.0}}
    espo = _result("espo", 1, 60)
    espo = replace(espo, before={**espo.before, **other_sft})
    text = markdown([_result("spg", 0, 20), _result("espo", 0, 40), espo], BUDGETS)
    first, second = [line for line in text.splitlines() if line.startswith("| `")][:2]
    accuracy = "50.0 % (43.1 to 56.9)"
    assert first.startswith(f"| `espo` | 2 | 1 x 4 | 1.0e-03 | {accuracy} | {accuracy} | 1.0 in 9.0 | ")
    assert first.endswith("| 2.00 | -0.500 | 0.2500 |")
    assert second.startswith("| `spg` | 1 | 1 x 4 | 1.0e-03 | 20.0 %")
    assert "| SFT |  |  |  |  | 12.0 | 10.0 in 9.0 |  |  |  |" in text, "the mean of both seeds' checkpoints"


def test_the_table_shows_the_best_learning_rate() -> None:
    collapsed = replace(_result("spg", 0, 5), lr=4e-3)
    assert (collapsed.has_learned, _result("spg", 0, 20).has_learned) == (False, True)
    for results in ([collapsed, _result("spg", 0, 20)], [_result("spg", 0, 20), collapsed]):
        (line,) = [line for line in markdown(results, BUDGETS).splitlines() if line.startswith("| `spg` | 1 |")]
        assert line.startswith("| `spg` | 1 | 1 x 4 | 1.0e-03 | 20.0 %")


def test_learning_rates_are_compared_on_their_common_seeds() -> None:
    slow = [replace(_result("spg", seed, correct), lr=1e-4) for seed, correct in ((0, 40), (1, 10))]
    (line,) = [line for line in markdown([_result("spg", 0, 30), *slow], BUDGETS).splitlines() if "x 4" in line]
    assert line.startswith("| `spg` | 2 | 1 x 4 | 1.0e-04 | 25.0 %")


def _benchmark(small: Path, results: Path, *rates: str) -> None:
    """Run the command with two rows and twelve completions at some learning rates."""
    command = "algorithms --tasks sudoku --rows cj-grpo wd1 --jobs 1 --completions 12 --round 12 --seconds 0.01"
    places = ["--out", str(results / "runs"), "--results", str(results)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(TASKS, "sudoku", small)
        patched.setattr("sys.argv", [*command.split(), *places, "--rates", *rates])
        main()


@pytest.fixture(scope="module")
def done(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the command at one learning rate."""
    results = tmp_path_factory.mktemp("done")
    _benchmark(small, results, "1")
    return results


@pytest.fixture
def benchmark(small: Path, done: Path, tmp_path: Path) -> Callable[..., None]:
    """The command, with results at one learning rate already saved."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    return lambda *rates: _benchmark(small, tmp_path, *rates)


@pytest.mark.nightly
def test_a_row_that_has_learned_is_not_tried_at_another_rate(
    benchmark: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sudoku.jsonl"
    kept = {one["row"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert {one["rate"] for one in kept.values()} == {1.0}
    # Twelve completions teach nothing, so pretend that one row has improved.
    kept["wd1"]["before"] = {name: score | {"num_correct": -1} for name, score in kept["wd1"]["before"].items()}
    file.write_text("".join(json.dumps(one) + "\n" for one in kept.values()))
    benchmark("1", "0.5")
    (further,) = [json.loads(line) for line in file.read_text().splitlines()][2:]
    assert (further["row"], further["rate"], further["lr"]) == ("cj-grpo", 0.5, kept["cj-grpo"]["lr"] / 2)
    assert "| `cj-grpo` | 1 |" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_trial_that_fails_is_named_after_the_tables(
    benchmark: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sudoku.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if '"wd1"' not in line))
    (tmp_path / "runs" / "sudoku-0" / "before.json").write_text("{")
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^sudoku wd1 seed 0 x1 failed: "):
        benchmark("1")
    assert "| `cj-grpo` | 1 |" in capsys.readouterr().out


@pytest.mark.nightly
def test_finished_trials_are_not_repeated(benchmark: Callable[..., None], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "runs")
    benchmark("1")
    assert not (tmp_path / "runs").exists(), "a checkpoint takes half a minute, and all results were there"


def test_pool_functions_are_importable_by_spawned_processes() -> None:
    """Run as a command, the module is `__main__`, which a spawned process cannot import."""
    assert {function.__module__ for function in (begin, start, try_row)} == {"benchmarks.algorithms.trial"}


def test_the_table_says_why_a_trial_ended_early() -> None:
    failed = replace(_result("spg", 0, 20), at_completions=None, at_seconds=None, failure="the loss is nan")
    line = next(line for line in markdown([failed, _result("espo", 0, 1)], BUDGETS).splitlines() if "`spg`" in line)
    assert line.count("ended before") == 2
    assert "the loss is nan" in line


def test_accuracies_are_written_into_the_table_of_algorithms(tmp_path: Path) -> None:
    path = tmp_path / "algorithms.md"
    table = "| algorithm | paper | ours, % of chess |\n|---|---|---:|\n| `spg` | a | 9 |\n| `bgpo` | b | 9 |\n"
    path.write_text(f"before\n\n{table}\nafter\n")
    results = [_result("spg", 0, 20), _result("spg", 1, 25), replace(_result("spg", 0, 5), lr=4e-3)]
    write_columns(path, [*results, replace(_result("bgpo", 0, 1), task="countdown")])
    assert path.read_text() == (
        "before\n\n"
        "| algorithm | paper | ours, % of countdown | ours, % of sudoku |\n"
        "|---|---|---:|---:|\n"
        "| `spg` | a | - | 22.5 |\n"
        "| `bgpo` | b | 1.0 | - |\n"
        "\nafter\n"
    )
    path.write_text("no table")
    with pytest.raises(ValueError, match="has no table"):
        write_columns(path, results)


def test_gains_are_over_each_seeds_own_sft() -> None:
    """From 10 % before; the run that ended early lost all of it. A row without a trial of both tasks is left out."""
    results = [_result("spg", 0, 20), _result("spg", 1, 25), replace(_result("tba", 0, 0), at_seconds=None)]
    countdown = [replace(result, task="countdown", rate=0.25) for result in (_result("spg", 0, 8), results[2])]
    further = [replace(_result(row, 0, 90), task="smollm2") for row in ("tba", "vrpo")]
    learners = {
        row: LearnerConfig.model_validate({"algorithm": row, "num_rounds": 1})
        for row in ("tba", "spg", "tracerl-value", "vrpo")
    }
    trials = [*results, *countdown, *further, _result("vrpo", 0, 90)]
    heads, _, *lines = gains(trials, learners, ["sudoku", "countdown"]).splitlines()
    assert heads.startswith("| row | Countdown | Sudoku | SmolLM2 | rate | ")
    assert lines == [
        "| `spg` | -2.0, 1 | +12.5 (+10.0 to +15.0), 2 | - | 0.25, 1 | 2.00 | none |",
        "| `tba` | -10.0, 1 | -10.0, 1 | +80.0, 1 | 0.25, 1, 1 | 2.00 | reference |",
    ], "ranked without the third task"
