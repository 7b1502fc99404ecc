"""`d1 report`: one self-contained HTML file, in which hostile text is only text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from deploy.offline.item import Answer, AnsweredBatch
from deploy.offline.record import RecordWriter
from deploy.report.eval_results import pareto_front, read_eval_cells
from deploy.report.examples import GradedCompletion, ReportExample, Token, make_examples
from deploy.report.figures import smooth
from deploy.report.report import fields_of, write_report
from deploy.runs.checkpoints import read_recipe
from deploy.runs.listing import read_run
from learner.model.storage.fingerprint import fingerprint
from rollout.request import SamplingParams

Events = list[dict[str, Any]]
HOSTILE = '<script>alert(1)</script><img src="http://example.com/x"> $\\frac$ {{ 7 * 7 }}'


class Page(HTMLParser):
    """Parser of a page: its elements with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def _assert_is_self_contained(page: Page) -> None:
    """Assert that there is no script, and nothing that a browser would fetch."""
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "srcset")]
        assert all((attributes.get(name) or "#").startswith("#") for name in ("xlink:href",))
        for value in attributes.values():
            assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", value or ""))


def test_a_report_of_one_run(d1: Callable, make_run: Callable, events: Events, workdir: Path) -> None:
    make_run("tiny", events)
    ended = d1("report", "tiny", "--out", "here/report.html")
    assert (ended.status, ended.out, ended.err) == (0, "", "d1: here/report.html has the report\n")
    page = Page((workdir / "here" / "report.html").read_text())
    _assert_is_self_contained(page)
    assert "tiny: SFT" in page.texts
    row = page.texts.index("tiny: SFT + RL")
    assert page.texts[row : row + 6] == ["tiny: SFT + RL", "50.0 %", "45.6 to 54.4 %", "500", "46 s", "12 rounds"]
    assert page.text.count("Parts of the reward: tiny") == 1
    titles = ("Held-out accuracy", "SFT loss", "Reward", "Share correct", "KL to the reference", "Clipped tokens")
    for title in (*titles, "Groups without signal", "Throughput", "Waiting for samples"):
        assert title in page.texts
    assert "learner.lr" in page.text
    assert d1("report", "tiny", "--out", "again.html").status == 0
    assert (workdir / "again.html").read_text() == (workdir / "here" / "report.html").read_text()


def test_plots_without_data_are_left_out(d1: Callable, make_run: Callable, recorder: Any, workdir: Path) -> None:
    recorder.add("run", name="$\\frac$ [b]", seed=0, commit="", hardware="", versions={})
    recorder.evaluation("start", 100)
    make_run("tiny", recorder.events)
    assert d1("report", "tiny").status == 0
    texts = Page((workdir / "report.html").read_text()).texts
    assert "Held-out accuracy" in texts
    assert not {"SFT loss", "Reward", "Throughput"} & set(texts)
    recorder.round(0, float("nan"))
    make_run("odd", recorder.events)
    assert d1("report", "odd", "--examples", "0").status == 0
    assert "Reward" in Page((workdir / "report.html").read_text()).texts


def test_the_moving_mean_covers_a_twentieth() -> None:
    assert smooth([1, 2, 3]) == [1, 2, 3]
    assert smooth(range(40))[:4] == [0, 0.5, 1.5, 2.5]


def test_a_report_of_two_runs_lists_their_differences(
    d1: Callable, make_run: Callable, events: Events, workdir: Path
) -> None:
    first, second = make_run("first", events), make_run("second", events)
    recipe = (second / "recipe.yaml").read_text()
    (second / "recipe.yaml").write_text(recipe.replace("lr: 1e-4", "lr: 2e-4"))
    assert d1("report", str(first), "second").status == 0
    text = (workdir / "report.html").read_text()
    differing = text[text.index("What differs") : text.index("What they have in common")]
    assert re.findall(r"<td>(.*?)</td>", differing) == ["learner.lr", "0.0001", "0.0002"]
    assert "first: SFT + RL" in Page(text).texts
    assert "second: SFT + RL" in Page(text).texts


def test_hostile_texts_are_escaped(d1: Callable, make_run: Callable, events: Events, workdir: Path) -> None:
    run = make_run("tiny", events)
    for event in events:
        if event["event"] == "round":
            event["reward_parts"] = {HOSTILE: 0.1, "correct": 0.2}
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe + f"wandb_project: {json.dumps(HOSTILE)}\n")
    assert d1("report", "tiny").status == 0
    page = Page((workdir / "report.html").read_text())
    _assert_is_self_contained(page)
    assert page.text.count(HOSTILE) == 2, "in the recipe, and in the legend of a plot"


def test_hostile_completions_are_escaped(make_run: Callable, events: Events, tmp_path: Path) -> None:
    token = Token(text=HOSTILE, step=1, shade=3)
    answered = GradedCompletion(policy=HOSTILE, correct=False, num_steps=1, tokens=[token])
    example = ReportExample(prompt=HOSTILE, completions=[answered])
    write_report({HOSTILE: read_run(make_run("tiny", events))}, {HOSTILE: [example]}, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    _assert_is_self_contained(page)
    assert page.text.count(HOSTILE) > 8


def test_what_cannot_be_reported_is_refused_in_one_sentence(
    d1: Callable, make_run: Callable, events: Events, workdir: Path, runs: Path
) -> None:
    make_run("empty", events[:1])
    d1("report", "empty").assert_refused("the run empty has not begun: it has no evaluation and no round")
    make_run("tiny", events)
    d1("report", "tiny", "runs/tiny").assert_refused("tiny and runs/tiny name one run twice")
    (workdir / "file").write_text("")
    d1("report", "tiny", "--out", "file/report.html").assert_refused("cannot write the report to file/report.html")
    d1("report", "tini").assert_refused("did you mean tiny?")
    shutil.copytree(runs / "tiny" / "checkpoints", workdir / "runs" / "tiny" / "checkpoints")
    for weights in (workdir / "runs" / "tiny" / "checkpoints").glob("*/model.safetensors"):
        weights.write_bytes(b"")
    d1("report", "tiny").assert_refused("is whole", "--examples 0 leaves them out")
    assert d1("report", "tiny", "--examples", "0").status == 0


def test_examples_are_the_first_problems_before_and_after(runs: Path) -> None:
    run = runs / "tiny"
    # More than one batch of eight.
    found = make_examples(run, read_recipe(run), 11)
    assert len(found) == len({example.prompt for example in found}) == 11
    for example in found:
        before, after = example.completions
        assert (before.policy, after.policy) == ("initial", "rl-000003")
        assert {token.step for token in before.tokens} == set(range(1, before.num_steps + 1))
        assert [token.shade for token in before.tokens if token.step == 1] == [0] * 2
    assert any(before.tokens != after.tokens for before, after in (example.completions for example in found))
    assert make_examples(run, read_recipe(run), 0) == []


def test_recipe_fields_are_compared_side_by_side() -> None:
    first = {"name": "a", "learner": {"lr": 0.1, "betas": [0.9, 0.99]}, "task": {}}
    second = {"name": "b", "learner": {"lr": 0.2, "betas": [0.9, 0.99]}, "seed": 3}
    found = {field.path: (field.values, field.differs) for field in fields_of([first, second])}
    assert found == {
        "learner.lr": (("0.1", "0.2"), True),
        "learner.betas": (("[0.9, 0.99]", "[0.9, 0.99]"), False),
        "task": (("{}", ""), True),
        "seed": (("", "3"), True),
    }


@pytest.mark.usefixtures("workdir")
def test_schedules_that_took_as_many_steps_are_both_drawn(d1: Callable, make_run: Callable, recorder: Any) -> None:
    recorder.add("run", name="tiny", seed=0, commit="", hardware="", versions={})
    # Every completion ended in its first block.
    recorder.evaluation("rl", 100, 3, schedules={"4 steps": (100, 2.0), "2 steps": (90, 2.0)})
    make_run("tiny", recorder.events)
    assert d1("report", "tiny").status == 0


@pytest.mark.usefixtures("workdir")
def test_schedules_are_a_table_and_a_plot(d1: Callable, make_run: Callable, recorder: Any) -> None:
    recorder.add("run", name="tiny", seed=0, commit="", hardware="", versions={})
    schedules = {"9 steps": (100, 9.0), "1 step": (50, 1.0), "threshold 0.9": (90, 3.25)}
    recorder.evaluation("sft", 100, schedules=schedules)
    recorder.evaluation("rl", 200, 3, schedules={**schedules, "9 steps": (200, 9.0)})
    make_run("tiny", recorder.events)
    assert d1("report", "tiny").status == 0
    text = Path("report.html").read_text()
    heads = re.findall(r'<th scope="col">(.*?)</th>', text)
    assert heads[heads.index("1 step") :][:3] == ["1 step", "9 steps", "threshold 0.9"]
    assert "40.0 (35.8 to 44.4)" in Page(text).texts
    assert "Accuracy against compute" in text


def _answer(number: int, *, correct: bool, num_forwards: int) -> Answer:
    return Answer(
        problem_id=f"p{number}",
        sample=0,
        question="",
        generation="",
        ground_truth="",
        answer=None,
        correct=correct,
        num_right=int(correct),
        num_items=1,
        outcome="graded",
        detail="",
        num_tokens=4,
        num_forwards=num_forwards,
        is_truncated=False,
    )


def _evaluate(run: Path, checkpoint: str, slots: int, steps: int, num_correct: int, task: str = "sums") -> Path:
    """Write the files that `d1 eval` leaves for twenty problems."""
    directory = run / "checkpoints" / checkpoint
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text(checkpoint)
    place = run.parent / "evaluations" / f"{run.name}-{checkpoint}"
    place.mkdir(parents=True, exist_ok=True)
    params = SamplingParams(gen_length=slots, block_length=slots, num_denoise_steps=steps, temperature=0.0)
    facts = {
        "checkpoint": {"path": str(directory), "fingerprint": fingerprint(directory)},
        "task": {"name": task},
        "protocol": "fixed",
        "params": params.model_dump(mode="json"),
        "num_samples": 1,
        "dtype": "float32",
    }
    answers = [_answer(number, correct=number < num_correct, num_forwards=steps) for number in range(20)]
    record = RecordWriter(place / f"{task}.{slots}.{steps}-steps.jsonl", facts, [20])
    record.add(AnsweredBatch(index=0, seconds=1.0, answers=tuple(answers)))
    return record.path


def test_results_of_d1_eval_are_in_the_report(d1: Callable, make_run: Callable, events: Events, workdir: Path) -> None:
    run = make_run("tiny", events)
    assert d1("report", "tiny", "--examples", "0").status == 0
    assert "By length and schedule" not in (workdir / "report.html").read_text()
    for checkpoint, more in (("sft", 0), ("rl-000002", 5)):
        for slots in (8, 16):
            for steps in (2, 4):
                _evaluate(run, checkpoint, slots, steps, steps + more + (slots == 16))
    assert d1("report", "tiny", "--examples", "0").status == 0
    text = (workdir / "report.html").read_text()
    page = Page(text)
    _assert_is_self_contained(page)
    assert "By length and schedule: tiny, sums" in page.texts
    assert "Accuracy by slots and forwards: tiny, sums" in page.texts
    assert [text for text in page.texts if text in ("8 slots", "16 slots")] == ["8 slots", "16 slots"], "the legend"
    rows = re.findall(r"<tr>((?:<td>[^<]*</td>){4})</tr>", text)
    cells = [re.findall(r"<td>([^<]*)</td>", row) for row in rows]
    assert [[cell.split(" (")[0] for cell in row] for row in cells] == [
        ["8", "2 steps", "10.0", "35.0"],
        ["8", "4 steps", "20.0", "45.0"],
        ["16", "2 steps", "15.0", "40.0"],
        ["16", "4 steps", "25.0", "50.0"],
    ]
    assert text.index('<th scope="col">sft</th>') < text.index('<th scope="col">rl-000002</th>')


def test_only_complete_evaluations_of_the_same_weights_are_reported(make_run: Callable, events: Events) -> None:
    run, other = make_run("tiny", events), make_run("tiny-2", events)
    _evaluate(run, "sft", 8, 4, 5)
    half = _evaluate(run, "sft", 8, 2, 5)
    half.write_text("".join(half.read_text().splitlines(keepends=True)[:-1]))
    _evaluate(other, "sft", 16, 4, 5)
    _evaluate(run, "control", 8, 4, 5)
    (run / "checkpoints" / "control" / "model.safetensors").write_text("trained anew")
    _evaluate(run, "rl-000001", 8, 4, 5)
    shutil.rmtree(run / "checkpoints" / "rl-000001")
    _evaluate(run, "sft", 8, 8, 5, task="countdown")
    found = [(one.setting, one.checkpoint, one.gen_length, one.schedule, one.accuracy) for one in read_eval_cells(run)]
    assert found == [("countdown", "sft", 8, "8 steps", 0.25), ("sums", "sft", 8, "4 steps", 0.25)]


def test_the_legend_names_each_length_once(d1: Callable, make_run: Callable, events: Events, workdir: Path) -> None:
    run = make_run("tiny", events)
    for checkpoints in (["sft"], ["rl-000001", "rl-000002"]):
        for checkpoint in checkpoints:
            for slots in (8, 16):
                _evaluate(run, checkpoint, slots, 4, 5)
        assert d1("report", "tiny", "--examples", "0").status == 0
        texts = Page((workdir / "report.html").read_text()).texts
        assert [text for text in texts if text.endswith(" slots")] == ["8 slots", "16 slots"]


def test_the_pareto_front_has_the_best_at_each_cost(make_run: Callable, events: Events) -> None:
    run = make_run("tiny", events)
    for steps, slots, right in ((1, 8, 3), (2, 8, 2), (4, 8, 6), (4, 16, 7), (6, 8, 7), (8, 8, 7), (8, 16, 9)):
        _evaluate(run, "sft", slots, steps, right)
    places = [(one.mean_forwards, one.gen_length) for one in pareto_front(read_eval_cells(run))]
    assert places == [(1.0, 8), (4.0, 16), (8.0, 16)]
