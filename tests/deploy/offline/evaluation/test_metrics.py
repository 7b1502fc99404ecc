"""Evaluation metrics and intervals against counts by hand, and paired comparison of two evaluations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest

from deploy.errors import UserError
from deploy.offline.evaluation.compare import compare, find_evaluation, mcnemar, sentence
from deploy.offline.evaluation.metrics import compute_metrics
from deploy.offline.item import Answer, AnsweredBatch
from deploy.offline.record import CellRecord, RecordWriter, read_record, take_lock
from learner.model.storage.fingerprint import fingerprint
from rewards.score import Score

PARAMS = {"gen_length": 8, "block_length": 8, "num_denoise_steps": 4, "temperature": 0}
FACTS = {"task": {"name": "sums"}, "protocol": "fixed", "params": PARAMS}


def _answer(problem: int, correct: bool, sample: int = 0, items: tuple[int, int] = (0, 1)) -> Answer:
    return Answer(
        problem_id=f"sums/{problem}",
        sample=sample,
        question="1 2",
        generation="<answer>1 3</answer>",
        ground_truth="1 3",
        answer="1 3",
        correct=correct,
        num_right=items[0],
        num_items=items[1],
        outcome="graded",
        detail="",
        num_tokens=4 + sample,
        num_forwards=2,
        is_truncated=not correct,
    )


def _cell(rows: Sequence[Sequence[bool]], **facts: object) -> CellRecord:
    """Build a cell from one row per problem, with the correctness of its samples."""
    answers = tuple(_answer(at, right, number) for at, row in enumerate(rows) for number, right in enumerate(row))
    given = {**FACTS, "num_samples": len(rows[0]), "num_answers": len(answers), **facts}
    return CellRecord(facts=given, batches={0: AnsweredBatch(index=0, answers=answers, seconds=3.0)})


def test_one_sample_a_problem() -> None:
    found = compute_metrics(_cell([[True]] * 30 + [[False]] * 70))
    assert (found["num_correct"], found["accuracy"]) == (30, 0.3)
    assert found["accuracy_interval"] == list(Score(num_correct=30, num_problems=100).interval)
    assert (found["truncated"], found["mean_tokens"], found["tokens_per_forward"]) == (0.7, 4, 2)
    assert (found["ungraded"], found["worker_seconds"]) == (0, 3.0)
    assert not [key for key in found if key.startswith(("pass@", "items"))]


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples() -> None:
    rows = [[True, False, False, False], [False] * 4, [True, True, False, True], [True] * 4]
    found = compute_metrics(_cell(rows))
    assert found["accuracy"] == mean(mean(row) for row in rows)
    for k in (2, 4):
        assert found[f"pass@{k}"] == pytest.approx(mean(mean(map(any, combinations(row, k))) for row in rows))
    assert "pass@8" not in found


def test_the_bootstrap_interval_has_its_coverage() -> None:
    """Against the normal interval of a mean over problems, which is valid for many problems."""
    rows = [[at % 10 < 3, at % 10 < 5] for at in range(1000)]
    low, high = compute_metrics(_cell(rows))["accuracy_interval"]
    middle = 0.4
    variance = mean((mean(row) - middle) ** 2 for row in rows)
    half = 1.96 * (variance / 1000) ** 0.5
    assert (low, high) == (pytest.approx(middle - half, abs=0.003), pytest.approx(middle + half, abs=0.003))


def test_shares_of_0_and_1_have_an_interval_too() -> None:
    for right, share in ((False, 0), (True, 1)):
        found = compute_metrics(_cell([[right] * 4] * 20))
        expected = list(Score(num_correct=20 * share, num_problems=20).interval)
        assert found["accuracy_interval"] == found["pass@4_interval"] == expected
        answers = tuple(_answer(at, right, items=(4 * share, 4)) for at in range(20))
        cells = compute_metrics(CellRecord(facts={}, batches={0: AnsweredBatch(index=0, answers=answers, seconds=1.0)}))
        assert (cells["items"], cells["items_interval"]) == (share, expected)


def test_the_interval_of_items_resamples_problems() -> None:
    answers = tuple(_answer(at, False, items=(at % 5, 4)) for at in range(500))
    found = compute_metrics(CellRecord(facts={}, batches={0: AnsweredBatch(index=0, answers=answers, seconds=1.0)}))
    assert found["items"] == 0.5
    low, high = found["items_interval"]
    # A problem's share has a variance of 1/8 here: twice that of independent cells.
    half = 1.96 * (0.125 / 500) ** 0.5
    assert (low, high) == (pytest.approx(0.5 - half, abs=0.005), pytest.approx(0.5 + half, abs=0.005))


def test_mcnemar_is_the_binomial_test() -> None:
    # Three heads or fewer in twenty tosses: 1 + 20 + 190 + 1140 of 2^20 ways.
    assert mcnemar(3, 17) == mcnemar(17, 3) == 2 * 1351 / 2**20
    assert mcnemar(5, 5) == 1
    assert mcnemar(0, 6) == mcnemar(6, 0) == 2 / 64
    assert mcnemar(0, 0) == 1


def test_a_comparison_is_paired() -> None:
    # 40 and 48 of 100. With other problems in each evaluation, eight points could be chance.
    first = _cell([[at < 40] for at in range(100)])
    second = _cell([[at < 48] for at in range(100)])
    (found,) = compare({"sums.8": first}, {"sums.8": second}, ("a", "b"), None)
    assert (found.accuracies, found.only) == ((0.4, 0.48), (0, 8))
    assert found.is_significant
    assert sentence(found, ("a", "b")).startswith(
        "sums, 8 slots, 4 steps: b solves more than a, by 8.0 points (3.0 to "
    )
    (turned,) = compare({"sums.8": second}, {"sums.8": first}, ("b", "a"), "sums")
    assert sentence(turned, ("b", "a")).startswith(
        "sums, 8 slots, 4 steps: b solves more than a, by 8.0 points (3.0 to "
    )
    shuffled = _cell([[(at * 37) % 100 < 48] for at in range(100)])
    (other,) = compare({"sums.8": first}, {"sums.8": shuffled}, ("a", "b"), None)
    assert not other.is_significant
    assert "no difference can be told; b is ahead of a by 8.0 points (-" in sentence(other, ("a", "b"))


def test_a_conflict_of_sign_test_and_accuracy_is_not_significant() -> None:
    """On twelve problems the second solves one sample in eight more. Only the first ever solves the other two."""
    some, more, none, every = ([True] * right + [False] * (8 - right) for right in (3, 4, 0, 8))
    first, second = _cell([some] * 12 + [every] * 2), _cell([more] * 12 + [none] * 2)
    (found,) = compare({"sums.8": first}, {"sums.8": second}, ("a", "b"), None)
    assert (found.only, found.p < 0.05, found.difference < 0) == ((2, 12), True, True)
    assert not found.is_significant
    assert "no difference can be told; a is ahead of b by " in sentence(found, ("a", "b"))


def test_one_discordant_problem_is_not_significant() -> None:
    (one,) = compare({"sums.8": _cell([[False, False]])}, {"sums.8": _cell([[True, False]])}, ("a", "b"), None)
    assert (one.p, one.is_significant) == (1, False)
    same = {"sums.8": _cell([[True], [False]])}
    (equal,) = compare(same, same, ("a", "b"), None)
    assert sentence(equal, ("a", "b")) == "sums, 8 slots, 4 steps: no difference can be told; both solve as many"


def test_problem_counts_and_training_data_do_not_prevent_a_comparison() -> None:
    rows = [[True], [False]]
    other = {"reward": "d1", "validation_fraction": 0.1, "working": 0.5, "show_working": True}
    first = _cell(rows, num_problems=None, task={"name": "sums"} | other, batch_size=1)
    (found,) = compare({"sums.8": first}, {"sums.8": _cell(rows, num_problems=2)}, ("a", "b"), None)
    assert found.num_problems == 2


def test_cells_are_sorted_by_their_numbers() -> None:
    names = {f"sums.{length}": length for length in (128, 64)}
    shapes = {name: {**PARAMS, "gen_length": length, "num_denoise_steps": 32} for name, length in names.items()}
    cells = {name: _cell([[True]], params=shape) for name, shape in shapes.items()}
    assert [one.gen_length for one in compare(cells, cells, ("a", "b"), None)] == [64, 128]


def test_incomparable_evaluations_are_refused_in_one_sentence(tmp_path: Path) -> None:
    one = {"sums.8": _cell([[True]])}
    with pytest.raises(UserError, match=r"no cell of task sudoku is in both: a has sums.8; b has sums.8"):
        compare(one, one, ("a", "b"), "sudoku")
    with pytest.raises(UserError, match=r"sums.8 of a and of b do not ask the same"):
        compare(one, {"sums.8": _cell([[True]], seed=1)}, ("a", "b"), None)
    for name in ("nothing", "x" * 300):
        with pytest.raises(UserError, match=f"there is no run {name}"):
            find_evaluation(name, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has no checkpoint"):
        find_evaluation(str(tmp_path), tmp_path)
    RecordWriter(tmp_path / "sums.8.jsonl", FACTS, [2])
    with pytest.raises(UserError, match=r"is not complete: sums.8 has 0 of 2 answers"):
        find_evaluation(str(tmp_path), tmp_path)


def test_the_folder_of_an_evaluation_is_locked(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / "a" / "b")
    with pytest.raises(
        UserError, match=rf"process {os.getpid()} on .* writes the evaluation in {tmp_path}/a/b since 20"
    ):
        take_lock(tmp_path / "a" / "b")
    lock.close()
    take_lock(tmp_path / "a" / "b").close()


def test_a_repeated_answer_counts_once(tmp_path: Path) -> None:
    record = RecordWriter(tmp_path / "sums.8.jsonl", FACTS, [2])
    batch = AnsweredBatch(index=0, answers=(_answer(0, True), _answer(1, False)), seconds=1.0)
    record.add(batch)
    record.add(batch)
    assert list(read_record(tmp_path / "sums.8.jsonl").batches.values()) == [batch]
    assert RecordWriter(tmp_path / "sums.8.jsonl", FACTS, [2]).recorded.batches == {0: batch}


def test_a_foreign_file_and_a_changed_checkpoint_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums.8.jsonl"
    path.write_text("{}\n")
    with pytest.raises(UserError, match="is no record of an evaluation"):
        read_record(path)
    path.unlink()
    record = RecordWriter(path, FACTS, [2])
    assert not read_record(path).is_complete
    record.add(AnsweredBatch(index=0, answers=(_answer(0, True), _answer(1, False)), seconds=1.0))
    assert read_record(path).is_complete
    assert json.loads(path.read_text().splitlines()[0])["asked"] == {**FACTS, "num_answers": 2}
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(3 << 20))
    before = fingerprint(directory)
    assert fingerprint(directory) == before
    (directory / "model.safetensors").write_bytes(bytes((3 << 20) - 1) + b"1")
    assert fingerprint(directory) != before
