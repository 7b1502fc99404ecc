"""Run view: what the page reads of a run directory while the run writes it."""

import json
import math

import pytest

from actors.checkpoints.selection import servable_checkpoints
from deploy.runs.checkpoints import read_recipe
from deploy.service.api import run_view
from deploy.service.api.run_view import RunView
from deploy.service.example import Examples
from rewards import Split, make_task


def _line(index):
    return json.dumps({"event": "round", "round": index}) + "\n"


def _rounds(page):
    return [event["round"] for event in page.events]


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_events_are_read_on_after_those_that_were_seen(tmp_path, metrics):
    view = RunView(tmp_path)
    assert view.events(0).model_dump() == {"events": [], "next": 0}
    metrics.write_text("".join(map(_line, range(3))))
    assert _rounds(view.events(0)) == [0, 1, 2]
    with metrics.open("a") as file:
        file.write("no JSON\n" + _line(3) + _line(4)[:7])
    assert _rounds(view.events(2)) == [2, 3]
    with metrics.open("a") as file:
        file.write(_line(4)[7:])
    assert view.events(4).model_dump() == {"events": [{"event": "round", "round": 4}], "next": 5}


def test_a_page_has_an_end(tmp_path, metrics, monkeypatch):
    monkeypatch.setattr(run_view, "MAX_EVENTS", 2)
    metrics.write_text("".join(map(_line, range(5))))
    view = RunView(tmp_path)
    assert [_rounds(view.events(after)) for after in (0, 2, 4, 5, 99)] == [[0, 1], [2, 3], [4], [], []]


def test_lines_that_were_seen_are_not_read_again(tmp_path, metrics, monkeypatch):
    metrics.write_text("".join(map(_line, range(50))))
    view = RunView(tmp_path)
    view.events(0)
    parsed = []

    def loads(line, _loads=json.loads):
        parsed.append(line)
        return _loads(line)

    monkeypatch.setattr(run_view.json, "loads", loads)
    with metrics.open("a") as file:
        file.write(_line(50))
    assert _rounds(view.events(50)) == [50]
    # Once to recognise it as an event, and once to answer.
    assert len(parsed) == 2


def test_a_run_that_began_anew_is_read_from_its_beginning(tmp_path, metrics):
    metrics.write_text("".join(map(_line, range(9))))
    view = RunView(tmp_path)
    view.events(0)
    metrics.write_text(_line(7))
    assert _rounds(view.events(0)) == [7]


def test_the_disk_is_not_read_for_every_question_about_versions(run_dir, add_checkpoint, monkeypatch):
    view = RunView(run_dir)
    assert view.versions() == (1,)
    assert view.checkpoint(1).phase == "sft"
    read = []
    monkeypatch.setattr(run_view, "servable_checkpoints", lambda path: read.append(path) or servable_checkpoints(path))
    add_checkpoint(run_dir, 2)
    assert view.versions() == (1,)
    assert view.checkpoint(2) is None
    assert read == []
    view._looked_at = -math.inf
    assert view.versions() == (1, 2)
    assert view.checkpoint(2).version == 2
    assert len(read) == 1


def test_problems_are_held_out_ones_of_the_runs_task(run_dir, monkeypatch):
    task, prompts = Examples(run_dir).single_turns()
    recipe = read_recipe(run_dir)
    heldout = make_task(recipe.task).problems(Split.HELDOUT, 8, seed=0)
    assert task == recipe.task.name
    assert prompts == [problem.messages[-1].content for problem in heldout if len(problem.messages) == 1]
    assert len(prompts) == 8
    # The task's data may be on another machine.
    monkeypatch.setattr("deploy.service.example.make_task", lambda _: (_ for _ in ()).throw(ValueError("no data")))
    assert Examples(run_dir).single_turns() == (recipe.task.name, [])
