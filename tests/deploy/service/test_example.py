"""The example curl command: it prompts the policy with a held-out problem of its task."""

import json
import shlex

import pytest
import yaml

from deploy.runs.checkpoints import read_recipe
from deploy.service.example import example_prompts, example_request
from deploy.service.on_ray.launch import banner
from rewards import Split, make_task
from rewards.problem import Message


def _recipe(run_dir, **changes):
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text()) | changes
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def test_the_example_of_a_run_is_a_held_out_problem(run_dir):
    sudoku = {"name": "sudoku", "prompt": "compact", "min_empty": 4, "max_empty": 9}
    _recipe(run_dir, task=sudoku)
    path, body = example_request(run_dir)
    assert path == "/v1/chat/completions"
    (turn,) = json.loads(shlex.split(body)[0])["messages"]
    prompt = turn["content"]
    assert "2 + 3" not in prompt
    _recipe(run_dir, task={"name": "sums"})
    assert example_request(run_dir) != (path, body)
    assert example_request(run_dir) == example_request(run_dir / "checkpoints" / "sft-1")
    line = banner(run_dir, "http://127.0.0.1:8000").splitlines()
    assert shlex.split(line[2])[-1] == shlex.split(example_request(run_dir)[1])[0]


@pytest.mark.parametrize("task", [{"name": "sums"}, {"name": "countdown"}, {"name": "sudoku"}])
def test_the_example_is_the_shortest_of_several_problems(run_dir, task):
    _recipe(run_dir, task=task)
    (turn,) = json.loads(shlex.split(example_request(run_dir)[1])[0])["messages"]
    prompt = turn["content"]
    recipe = read_recipe(run_dir)
    count = min(8, recipe.evaluation.num_problems)
    problems = make_task(recipe.task).problems(Split.HELDOUT, count, seed=0)
    texts = [problem.messages[0].content for problem in problems]
    assert prompt in texts
    assert len(prompt) == min(map(len, texts))


def test_without_data_or_run_the_example_is_neutral(run_dir, tmp_path):
    _recipe(run_dir, task={"name": "jsonl", "grader": "exact", "train_data": str(tmp_path / "gone.jsonl")})
    turn = {"role": "user", "content": "What is 2 + 3?"}
    neutral = "/v1/chat/completions", shlex.quote(json.dumps({"messages": [turn]}))
    assert example_request(run_dir) == neutral
    assert example_request(tmp_path) == neutral


def test_the_example_is_quoted_for_shell_and_terminal(run_dir, monkeypatch):
    hostile = 'it\'s $(id) `id` \x1b[2J\n"done" \u202e'

    class _Task:
        def problems(self, split, count, seed):
            return [type("P", (), {"messages": (Message(role="user", content=hostile),)})]

    monkeypatch.setattr("deploy.service.example.make_task", lambda config: _Task())
    _, body = example_request(run_dir)
    assert json.loads(shlex.split(body)[0]) == {"messages": [{"role": "user", "content": hostile}]}
    assert body.isascii()
    assert body.isprintable()


def test_a_conversation_becomes_a_multi_turn_example(run_dir, monkeypatch):
    turns = [
        Message(role="user", content="a"),
        Message(role="assistant", content="b"),
        Message(role="user", content=""),
    ]

    class _Task:
        def problems(self, split, count, seed):
            return [type("P", (), {"messages": tuple(turns)})]

    monkeypatch.setattr("deploy.service.example.make_task", lambda config: _Task())
    path, body = example_request(run_dir)
    assert path == "/v1/chat/completions"
    assert [turn["role"] for turn in json.loads(shlex.split(body)[0])["messages"]] == ["user", "assistant", "user"]


CARD = """---
license: apache-2.0
widget:
- text: Write a story about a fox.
- messages:
  - {role: user, content: "Why?"}
- messages: [{role: user, content: a}, {role: assistant, content: b}]
---
# A model
"""


def test_the_example_of_a_checkpoint_is_from_its_model_card(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    assert example_prompts(tmp_path) == (None, ["Write a story about a fox.", "Why?"])
    (turn, *_) = json.loads(shlex.split(example_request(tmp_path)[1])[0])["messages"]
    assert turn["content"] == "a"


@pytest.mark.parametrize("card", ["", "# A model", "---\nwidget: [1]\n---\n", "---\n{\n---\n", "---\n- a\n---\n"])
def test_a_model_card_without_examples_has_none(card, tmp_path):
    (tmp_path / "README.md").write_text(card)
    assert example_prompts(tmp_path) == (None, [])
    assert "2 + 3" in example_request(tmp_path)[1]


def test_examples_are_held_out_problems_of_the_runs_task(run_dir, monkeypatch):
    task, prompts = example_prompts(run_dir)
    recipe = read_recipe(run_dir)
    heldout = make_task(recipe.task).problems(Split.HELDOUT, 8, seed=0)
    assert task == recipe.task.name
    assert prompts == [problem.messages[-1].content for problem in heldout if len(problem.messages) == 1]
    assert len(prompts) == 8
    # The task's data may be on another machine.
    monkeypatch.setattr("deploy.service.example.make_task", lambda _: (_ for _ in ()).throw(ValueError("no data")))
    example_prompts.cache_clear()
    assert example_prompts(run_dir) == (recipe.task.name, [])
