"""`d1 eval`: the requests to the workers, resumption, interruption and refusals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.grader import GraderWorker
from actors.plan import RunPlan
from deploy.offline.item import AnsweredBatch, Batch
from deploy.offline.worker import Worker, WorkerConfig
from deploy.recipe.recipe import Stages
from deploy.runs.checkpoints import read_recipe
from deploy.runs.run_directory import make_spec
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import EOS, ChatTokenizer
from rollout.config import EngineConfig
from rollout.sampler import Sampler
from tests.simulated.stand_in_gpu import DEVICE, stand_in_gpu

Rows = list[dict[str, Any]]


def _cells(ended: Any) -> Rows:
    assert ended.status == 0, ended.err
    return json.loads(ended.out)["cells"]


def _lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("inline")
def test_eval_of_a_run_equals_the_evaluation_of_the_run(evaluate: Callable, runs: Path, workdir: Path) -> None:
    cells = _cells(evaluate("--json"))
    assert [(cell["task"], cell["gen_length"], cell["schedule"]) for cell in cells] == [
        ("sums", 8, "4 steps"),
        ("sums", 8, "threshold 0.9"),
    ]
    recipe = read_recipe(runs / "tiny")
    checkpoint = runs / "tiny" / "checkpoints" / "rl-000003"
    spec = make_spec(recipe, Stages.ALL)
    plan = RunPlan(spec, ChatTokenizer(checkpoint))
    grader = GraderWorker(spec.task, spec.reward, checkpoint)
    sampler = Sampler(load_policy(checkpoint), 0, spec.rollout.engine)
    for params, cell in zip(recipe.evaluated_params, cells, strict=True):
        texts, num_forwards = [], 0
        for work_unit in plan.evaluation_work_units(params, sampler.model.config):
            completions = sampler.generate(work_unit.requests)
            texts += grader.grade(work_unit, completions)[1].texts
            num_forwards += sum(completion.num_forwards for completion in completions)
        rows = _lines(workdir / "out" / cell["answers"])[1:]
        assert [row["generation"] for row in rows] == texts
        assert cell["mean_forwards"] == num_forwards / 20


@pytest.mark.usefixtures("inline")
def test_there_is_a_cell_for_each_task_length_and_schedule(evaluate: Callable) -> None:
    words = ("--tasks", "sums,sudoku", "--lengths", "8,16", "--schedules", "0.5,steps=16,threshold=0.8", "--json")
    refused = evaluate(*words, "sudoku.prompt=compact", "--problems", "3")
    refused.assert_refused("--lengths 8 --schedules steps=16", "steps 16 must be a multiple of the 1 blocks")
    words = ("--tasks", "sums,sudoku", "--lengths", "8,16", "--schedules", "0.5,threshold=0.8", "--json")
    cells = _cells(evaluate(*words, "sudoku.prompt=compact", "--problems", "3"))
    assert [(cell["task"], cell["gen_length"], cell["schedule"]) for cell in cells] == [
        (task, length, schedule)
        for task in ("sums", "sudoku")
        for length, schedule in ((8, "4 steps"), (8, "threshold 0.8"), (16, "8 steps"), (16, "threshold 0.8"))
    ]
    assert {cell["num_problems"] for cell in cells} == {3}
    assert all(("items" in cell) == (cell["task"] == "sudoku") for cell in cells)


@pytest.mark.usefixtures("inline")
def test_a_run_with_one_block_keeps_one_block_at_any_length(evaluate: Callable, workdir: Path) -> None:
    for cell in _cells(evaluate("--lengths", "8,12", "--schedules", "0.5,threshold=0.8", "--json")):
        params = _lines(workdir / "out" / cell["answers"])[0]["asked"]["params"]
        assert params["block_length"] == params["gen_length"] == cell["gen_length"]
    (cell,) = _cells(evaluate("--lengths", "16", "--block-length", "4", "--schedules", "0.5", "--json"))
    assert _lines(workdir / "out" / cell["answers"])[0]["asked"]["params"]["block_length"] == 4


def test_an_interrupted_evaluation_resumes_after_the_last_complete_batch(
    evaluate: Callable, inline: list[Batch], workdir: Path
) -> None:
    whole = _cells(evaluate("--json"))
    path = workdir / "out" / "sums.8.4-steps.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    answers = [_without_seconds(row) for row in _lines(path)]
    # Killed while writing the second of three batches.
    path.write_text("".join(lines[:12]) + lines[12][:20])
    asked_before = len(inline)
    again = _cells(evaluate("--json"))
    assert [len(batch.requests) for batch in inline[asked_before:]] == [8, 4]
    assert [_without_seconds(row) for row in _lines(path)] == answers
    assert [cell["accuracy"] for cell in again] == [cell["accuracy"] for cell in whole]
    asked_before = len(inline)
    evaluate("--json")
    assert len(inline) == asked_before, "nothing is asked twice"


def test_a_worker_on_a_gpu_gives_the_answers_of_one_on_a_cpu(
    evaluate: Callable, inline: list[Batch], runs: Path
) -> None:
    evaluate("--json")
    checkpoint, batch = runs / "tiny" / "checkpoints" / "rl-000003", inline[0]
    config = WorkerConfig(checkpoint=checkpoint, engine=EngineConfig(), device="cpu", num_threads=1)
    expected = Worker(config).answer(batch).answers
    with stand_in_gpu():
        worker = Worker(replace(config, device="cuda"))
        assert worker.answer(batch).answers == expected
        assert {weight.device for weight in worker._sampler.model.parameters()} == {DEVICE}


def _answer(row: dict[str, Any]) -> str:
    """Return a row without its seconds, as JSON."""
    return json.dumps(_without_seconds(row))


def _without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def test_samples_differ_and_are_reproducible(evaluate: Callable, inline: list[Batch], workdir: Path) -> None:
    words = ("--samples", "4", "--temperature", "1", "--problems", "6", "--schedules", "0.5", "--json")
    (cell,) = _cells(evaluate(*words))
    assert (cell["num_problems"], cell["num_samples"]) == (6, 4)
    assert cell["answers"] == "sums.8.4-steps.4-at-1.jsonl"
    assert 0 <= cell["accuracy"] <= cell["pass@2"] <= cell["pass@4"] <= 1
    path = workdir / "out" / cell["answers"]
    rows = _lines(path)[1:]
    assert [row["sample"] for row in rows] == [0, 1, 2, 3] * 6
    assert len({row["generation"] for row in rows}) > 12
    path.unlink()
    evaluate(*words)
    assert [row["generation"] for row in _lines(path)[1:]] == [row["generation"] for row in rows]
    path.unlink()
    evaluate(*words, "--seed", "1")
    assert [row["generation"] for row in _lines(path)[1:]] != [row["generation"] for row in rows]
    assert all(request.params.temperature == 1 for batch in inline for request in batch.requests)


@pytest.mark.usefixtures("inline")
def test_warnings_about_the_data_are_printed_once(evaluate: Callable, workdir: Path) -> None:
    rows = [{"prompt": "3 + 4", "answer": 7}] * 2
    (workdir / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--tasks", "jsonl", "jsonl.grader=number", "--lengths", "8,16")
    data = ("jsonl.train_data=own.jsonl", "jsonl.heldout_data=own.jsonl")
    ended = evaluate(*words, *data, "--schedules", "0.5", "--json")
    assert [cell["num_problems"] for cell in _cells(ended)] == [1, 1]
    assert ended.err.count("d1: own.jsonl: 1 of 2 rows repeats an earlier problem and is left out, first line 2") == 1


@pytest.mark.parametrize("shape", [(), ("--lengths", "8")])
@pytest.mark.parametrize("temperature", ["2000", "1e-9"])
def test_an_invalid_temperature_is_refused(
    temperature: str, shape: tuple[str, ...], evaluate: Callable, workdir: Path
) -> None:
    evaluate("--temperature", temperature, *shape).assert_refused("--temperature ", f"{float(temperature):g}")
    assert not list((workdir / "out").glob("*.jsonl"))


def test_a_directory_without_checkpoint_is_refused_by_name(d1: Callable, workdir: Path) -> None:
    (workdir / "empty").mkdir()
    d1("eval", "empty", "--tasks", "sums").assert_refused("empty is not a checkpoint: it has no config.json")


def test_protocol_d1_uses_the_prompts_and_parameters_of_the_first_d1(
    evaluate: Callable, d1: Callable, inline: list[Batch], runs: Path, workdir: Path, shared: Path
) -> None:
    data = shared / "data" / "d1-eval" / "4x4_test_sudoku.csv"
    words = ("--tasks", "sudoku", "--protocol", "d1", f"sudoku.heldout_data={data}", "--problems", "2", "--json")
    evaluate(*words, "--lengths", "32").assert_refused("sudoku at 32 slots: its shortest prompt has", "takes 64 in all")
    _copy(runs / "tiny" / "checkpoints" / "rl-000003", workdir / "wide", max_sequence_length=2048)
    (cell,) = _cells(d1("eval", "wide", "--out", str(workdir / "out"), *words, "--lengths", "32"))
    assert (cell["schedule"], cell["num_problems"]) == ("16 steps", 2)
    assert cell["answers"] == "sudoku.d1.32.16-steps.jsonl"
    for row in _lines(workdir / "out" / cell["answers"])[1:]:
        rest = row["generation"].partition(EOS)[2]
        assert row["is_truncated"] == (EOS not in row["generation"])
        assert (row["num_tokens"] < 32) == bool(rest), "what follows the end is kept, and is no part of the text"
    tokenizer = ChatTokenizer(workdir / "wide")
    requests = inline[0].requests
    prompt = tokenizer.decode_all(requests[0].prompt_ids)
    assert prompt.startswith("<|user|>Please solve the following 4x4 Sudoku puzzle.")
    assert prompt.endswith("Solve the following Sudoku puzzle: 4320004330100004<|assistant|><reasoning>")
    params = requests[0].params
    assert (params.block_length, params.num_denoise_steps, params.temperature, params.stop_ids) == (32, 16, 0, ())
    evaluate(*words, "--schedules", "0.5").assert_refused("--protocol d1 denoises as the first d1 does")
    evaluate("--protocol", "d1").assert_refused("the first d1 evaluates countdown, gsm8k", "leave out sums")


def _of_lengths(workdir: Path, *lengths: int) -> list[str]:
    """Return options that evaluate problems with prompts of about these lengths."""
    rows = [{"prompt": f"{index}{'x' * length}", "answer": "1"} for index, length in enumerate(lengths)]
    (workdir / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workdir / "train.jsonl").write_text(json.dumps({"prompt": "z", "answer": "1"}))
    data = [f"jsonl.{split}_data={workdir / name}.jsonl" for split, name in (("heldout", "rows"), ("train", "train"))]
    return ["--tasks", "jsonl", "jsonl.grader=exact", *data]


def test_a_prompt_without_room_counts_as_wrong_and_is_named(
    evaluate: Callable, inline: list[Batch], workdir: Path
) -> None:
    words = [*_of_lengths(workdir, 4, 90, 5, 6, 90, 7), "--schedules", "0.5"]
    (cell,) = _cells(evaluate(*words, "--json"))
    rows = _lines(workdir / "out" / cell["answers"])[1:]
    assert (cell["num_problems"], cell["num_correct"], len(rows)) == (6, 0, 6)
    named = [row["problem_id"] for row in rows if "leaves no room for a completion" in row["detail"]]
    assert len(named) == 2
    assert cell["without_room"] == named
    assert [len(row["question"]) > 90 for row in rows] == [False] * 4 + [True] * 2
    assert cell["mean_tokens"] == sum(row["num_tokens"] for row in rows) / 4 > 0
    num_asked = len(inline)
    shown = evaluate(*words)
    assert len(inline) == num_asked, "all was there"
    caption = " ".join(shown.out.split())
    assert "n = 6; 95 % intervals in brackets; 2 prompts without room for a completion count as wrong" in caption
    assert all(name in caption for name in named)
    evaluate(*_of_lengths(workdir, 90, 91), "--out", "other").assert_refused(
        "jsonl at 8 slots: its shortest prompt has", "there is no room for any completion"
    )


def test_overlong_prompts_of_the_run_are_batched_separately(
    evaluate: Callable, inline: list[Batch], runs: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(runs / "tiny")
    rollout = recipe.rollout.model_copy(update={"max_prompt_tokens": 20})
    changed = recipe.model_copy(update={"rollout": rollout})
    monkeypatch.setattr("deploy.offline.evaluation.evaluate.read_recipe", lambda _: changed)
    _cells(evaluate(*_of_lengths(workdir, 4, 46, 5, 46, 6), "--schedules", "0.5", "--json"))
    lengths = [[len(request.prompt_ids) for request in batch.requests] for batch in inline]
    assert [len(some) for some in lengths] == [3, 2]
    assert max(lengths[0]) <= 20 < min(lengths[1])
    assert all(batch.has_room for batch in inline)


def _copy(checkpoint: Path, directory: Path, **changes: object) -> None:
    """Copy a checkpoint without its manifest, with changed values in its config."""
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("manifest.json", "trainer_state.json"))
    config = json.loads((checkpoint / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


REFUSALS = [
    (("--lengths", "8,x"), "--lengths 8,x: x is no number of slots"),
    (("--lengths", "9" * 5000), "is no number of slots"),
    (("--schedules", f"steps={'9' * 5000}"), "is no schedule"),
    (("--tasks", "sudoku", "--protocol", "d1", "--lengths", "100"), "blocks of 32; --lengths 100 is no multiple of 32"),
    (("--out", "x" * 300), "cannot write"),
    (("--schedules", "half"), "--schedules half is no schedule"),
    (("--schedules", "1.5"), "--schedules 1.5 is no schedule"),
    (("--schedules", "threshold=2"), "threshold"),
    (("--tasks", "chess"), "there is no task chess"),
    (("--lengths", "64"), "sums at 64 slots: its shortest prompt has", "take a length of at most"),
    (("sudoku.prompt=compact",), "sudoku.prompt=compact is a field of none of the tasks sums"),
    (("--samples", "3"), "--samples 3 of the likeliest tokens are all alike"),
    (("--tasks", "jsonl", "jsonl.grader=exact", "jsonl.train_data=nowhere.jsonl"), "nowhere.jsonl"),
    (("--problems", "999999"), "999999"),
    (("--device", "cuda"), "--device cuda: torch sees no GPU"),
]


@pytest.mark.parametrize("words", [words for words, *_ in REFUSALS], ids=lambda words: " ".join(words)[:60])
def test_invalid_options_are_refused_in_one_sentence(evaluate: Callable, words: tuple[str, ...], workdir: Path) -> None:
    parts = next(parts for some, *parts in REFUSALS if some == words)
    evaluate(*words).assert_refused(*parts)
    assert not list(workdir.glob("out/*.jsonl")) or words == ("--device", "cuda"), "nothing was begun"


@pytest.mark.usefixtures("workdir")
def test_an_unusable_checkpoint_is_refused_in_one_sentence(d1: Callable, runs: Path) -> None:
    _copy(runs / "tiny" / "checkpoints" / "rl-000003", Path("bare"))
    d1("eval", "bare").assert_refused("say which tasks, as in --tasks countdown,sudoku")
    Path("bare/tokenizer.json").write_text("{")
    d1("eval", "bare", "--tasks", "sums").assert_refused("the tokenizer in", "bare cannot be read")
    for path in Path("bare").glob("*token*"):
        path.unlink()
    d1("eval", "bare", "--tasks", "sums").assert_refused("bare has no tokenizer")
    config = json.loads(Path("bare/config.json").read_text())
    del config["mask_token_id"]
    Path("bare/config.json").write_text(json.dumps(config))
    d1("eval", "bare", "--tasks", "sums").assert_refused("mask_token_id")


@pytest.mark.usefixtures("inline")
def test_a_record_with_other_settings_is_refused(evaluate: Callable, d1: Callable, runs: Path) -> None:
    evaluate()
    evaluate("--problems", "5").assert_refused(
        "sums.8.4-steps.jsonl has answers to something else: num_problems was 20, and is 5; take another --out"
    )
    d1("eval", "tini", "--runs-dir", str(runs)).assert_refused("did you mean tiny?")


@pytest.mark.usefixtures("inline")
def test_repeated_options_make_one_cell(evaluate: Callable, workdir: Path) -> None:
    (cell,) = _cells(evaluate("--lengths", "8,8", "--schedules", "0.5,steps=4,0.50", "--json"))
    assert (cell["num_problems"], cell["num_samples"]) == (20, 1)
    assert len(_lines(workdir / "out" / cell["answers"])) == 21


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_finished_answers(
    sent: signal.Signals,
    evaluate: Callable,
    inline: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
    workdir: Path,
) -> None:
    # Ctrl-C is ignored when the tests run in a script's background job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    whole = Worker.answer

    def interrupted(self: Worker, batch: Batch) -> AnsweredBatch:
        if len(inline) == 2:
            signal.raise_signal(sent)
        return whole(self, batch)

    monkeypatch.setattr(Worker, "answer", interrupted)
    try:
        ended = evaluate()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.status == 130
    assert ended.err.endswith("stopped; 16 answers are kept, and the same command goes on from there\n")
    assert len(_lines(workdir / "out" / "sums.8.4-steps.jsonl")) == 17


def test_invalid_weights_are_reported_in_one_sentence(d1: Callable, runs: Path, workdir: Path) -> None:
    _copy(runs / "tiny" / "checkpoints" / "rl-000003", workdir / "bare")
    (workdir / "bare" / "model.safetensors").write_bytes(b"nothing")
    d1("eval", "bare", "--tasks", "sums", "--lengths", "8", "--workers", "1").assert_refused("bare cannot be sampled: ")


@pytest.mark.usefixtures("inline")
def test_a_narrow_table_drops_columns_instead_of_truncating_numbers(
    evaluate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--tasks", "sudoku", "sudoku.prompt=compact", "--problems", "3", "--lengths", "16")
    for width, columns in ((80, ["tokens"]), (200, ["tokens", "a forward", "cut", "worker time"])):
        monkeypatch.setenv("COLUMNS", str(width))
        out = evaluate(*words).out
        assert "…" not in out
        assert re.findall("tokens|a forward|cut|worker time", out) == columns


@pytest.mark.usefixtures("inline")
def test_a_file_of_answers_can_be_graded_again(evaluate: Callable, d1: Callable, workdir: Path) -> None:
    words = ("--tasks", "sudoku", "sudoku.prompt=compact", "--problems", "4", "--lengths", "16", "--json")
    (cell,) = _cells(evaluate(*words))
    path = workdir / "again.jsonl"
    path.write_text("".join((workdir / "out" / cell["answers"]).read_text().splitlines(keepends=True)[1:]))
    graded = json.loads(d1("grade", "sudoku", str(path), "--json").out)
    assert graded["accuracy"] == cell["items"]
    assert graded["num_solved"] == cell["num_correct"]


@pytest.mark.ray
def test_workers_on_ray_give_the_answers_of_one_worker_even_after_a_kill(
    evaluate: Callable, inline: list[Batch], monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    alone = _cells(evaluate("--json"))
    (workdir / "out").rename(workdir / "alone")
    monkeypatch.undo()
    monkeypatch.chdir(workdir)
    killed: list[int] = []

    def kill() -> None:
        while not (found := _processes("ray::Worker.answer")):
            time.sleep(0.01)
        killed.append(found[0].pid)
        found[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    together = _cells(evaluate("--json", "--workers", "2"))
    killer.join()
    assert killed
    for cell in alone:
        rows = [
            sorted(map(str, map(_without_seconds, _lines(workdir / out / cell["answers"])))) for out in ("alone", "out")
        ]
        assert rows[0] == rows[1]
    assert [cell["accuracy"] for cell in together] == [cell["accuracy"] for cell in alone]
    assert len(inline) == 6
    assert not _processes("ray::")


def _processes(title: str) -> list[psutil.Process]:
    """Return the descendants of this process with a title."""
    children = psutil.Process().children(recursive=True)
    found = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            if " ".join(child.cmdline()).startswith(title):
                found.append(child)
    return found


def test_a_missing_harness_names_the_extra(d1: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.cli.evaluation._PACKAGE", "lm_eval_that_is_not_there")
    d1("lm-eval", "tiny", "--tasks", "gsm8k").assert_refused("lm-eval is missing; pip install 'd1[lm-eval]'")
