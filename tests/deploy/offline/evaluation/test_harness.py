"""lm-evaluation-harness on a checkpoint: the scores of `d1 eval`, and likelihood bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.algorithms.local_run import make_sft_checkpoint
from deploy.recipe.recipe import Recipe
from learner.likelihood import evidence_lower_bound
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler

ROOT = Path(__file__).parents[4]
_CLIENTS = ROOT / ".venv-clients"
_IS_HERE = find_spec("lm_eval") is not None

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        not (_IS_HERE or (_CLIENTS / ".installed").is_file()),
        reason="needs the clients that make test-clients installs",
    ),
]

CHOICES = ("<answer>5</answer>", "<answer>12</answer>")
Ended = subprocess.CompletedProcess[str]


def _rows(numbers: range) -> list[dict[str, str]]:
    """Return problems of our own in GSM8K's format."""
    return [
        {
            "question": f"Ann has {number} pens and finds {number % 3 + 1}.",
            "answer": f"{number} + {number % 3 + 1} are hers.\n#### {number + number % 3 + 1}",
        }
        for number in numbers
    ]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that memorised some problems, and a file with these and others."""
    directory = tmp_path_factory.mktemp("harness")
    for name, rows in (("train", _rows(range(2, 10))), ("test", _rows(range(2, 18)))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "gsm8k", "prompt": "compact"}
    files = {"train_data": str(directory / "train.jsonl"), "heldout_data": str(directory / "test.jsonl")}
    recipe = {
        "name": "gsm",
        "runs_dir": str(directory / "runs"),
        "task": task | files,
        "num_train_problems": 8,
        "model": {"d_model": 48, "num_layers": 2, "num_heads": 2, "mlp_hidden_size": 96},
        "sft": {"num_labels": 8, "num_steps": 120, "batch_size": 16, "lr": 0.003},
        "rollout": {
            "max_prompt_tokens": 40,
            "sampling": {"gen_length": 8, "block_length": 8, "num_denoise_steps": 4},
        },
        "learner": {"num_rounds": 1, "groups_per_round": 2, "group_size": 2, "algorithm": "diffu-grpo"},
        "evaluation": {"num_problems": 16},
    }
    torch.set_num_threads(1)
    make_sft_checkpoint(Recipe.model_validate(recipe))
    for name, config in _tasks(files["heldout_data"]).items():
        (directory / "tasks").mkdir(exist_ok=True)
        (directory / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | config))
    return directory


def _tasks(path: str) -> dict[str, dict[str, Any]]:
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": path}}, "test_split": "test"}
    generates = {
        **data,
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "generation_kwargs": {"until": ["\n\n", "Question:", "</s>", "<|im_end|>", "###"], "do_sample": False},
        "filter_list": [
            {"name": "answer", "filter": [{"function": "regex", "regex_pattern": r"<answer>\s*(\d+)\s*</answer>"},
                                          {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    chooses = {
        **data,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": list(CHOICES),
        "doc_to_target": 0,
        "target_delimiter": "",
    }
    rolls = {**data, "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}
    rolls["metric_list"] = [{"metric": "word_perplexity"}]
    return {"pens": generates, "pens_by_choice": chooses, "pens_rolling": rolls}


@pytest.fixture
def d1_with_harness(work: Path, tmp_path: Path) -> Callable[..., Ended]:
    """Run `d1` where the harness is installed, without a network."""
    here = [str(ROOT)] if _IS_HERE else [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(here),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    python = sys.executable if _IS_HERE else str(_CLIENTS / "bin" / "python")

    def run(*words: str) -> Ended:
        command = [python, "-c", "from deploy.cli import main; main()", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, cwd=work, check=False
        )

    return run


def _evaluated(run: Callable[..., Ended], out: Path, task: str, *words: str) -> dict[str, Any]:
    options = ("--tasks", task, "--include_path", "tasks", "--output_path", str(out), "--log_samples")
    ended = run("lm-eval", "gsm/sft", *options, *words)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())
    return found | {"samples": [json.loads(line) for line in samples.read_text().splitlines()], "stderr": ended.stderr}


def test_the_harness_agrees_with_d1_eval(d1_with_harness: Callable[..., Ended], work: Path, tmp_path: Path) -> None:
    found = _evaluated(d1_with_harness, tmp_path / "a", "pens", "--apply_chat_template")
    ours = d1_with_harness("eval", "gsm/sft", "--out", str(tmp_path / "ours"), "--json", "--workers", "1")
    assert ours.returncode == 0, ours.stderr
    (cell,) = json.loads(ours.stdout)["cells"]
    assert found["results"]["pens"]["exact_match,answer"] == cell["accuracy"]
    assert 0.3 < cell["accuracy"] < 1, "it knows what it has learned by heart"
    rows = map(json.loads, _lines(tmp_path / "ours" / cell["answers"]))
    answers = {row["question"]: row["generation"] for row in rows}
    theirs = {sample["doc"]["question"]: sample["resps"][0][0] for sample in found["samples"]}
    assert theirs == answers, "to the letter"
    assert found["config"]["d1_checkpoint"] == "gsm/sft"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]


def test_without_the_chat_template_the_prompts_differ(d1_with_harness: Callable[..., Ended], tmp_path: Path) -> None:
    found = _evaluated(
        d1_with_harness, tmp_path / "a", "pens", "--limit", "4", "--model_args", "gen_length=16,block_length=8,steps=4"
    )
    assert len(found["samples"]) == 4
    assert found["samples"][0]["arguments"]["gen_args_0"]["arg_0"].startswith("Ann has 2 pens")


def test_a_likelihood_is_the_lower_bound_and_says_so(
    d1_with_harness: Callable[..., Ended], work: Path, tmp_path: Path
) -> None:
    words = ("--apply_chat_template", "--limit", "3", "--model_args", "draws=16")
    found = _evaluated(d1_with_harness, tmp_path / "a", "pens_by_choice", *words)
    assert found["config"]["d1_loglikelihood"] == "evidence lower bound, 16 masks"
    assert "loglikelihood is a lower bound from 16 masks each" in found["stderr"]
    checkpoint = work / "runs" / "gsm" / "checkpoints" / "sft"
    policy, tokenizer = load_policy(checkpoint), ChatTokenizer(checkpoint)
    sampler, is_greedy = Sampler(policy, 0), []
    for sample in found["samples"]:
        prompt = tokenizer.encode_chat([{"role": "user", "content": sample["doc"]["question"]}])
        for choice, ((bound, said),) in zip(CHOICES, sample["resps"], strict=True):
            text = tokenizer.encode_plain(choice)
            expected = evidence_lower_bound(policy, prompt, text, num_draws=2000, max_rows=500, seed=5)
            assert float(bound) == pytest.approx(expected, rel=0.5, abs=1.0)
            params = SamplingParams(
                gen_length=len(text), block_length=len(text), num_denoise_steps=len(text), temperature=0.0
            )
            (done,) = sampler.generate([Request(prompt_ids=tuple(prompt), params=params, seed=0)])
            is_greedy.append(done.token_ids.tolist() == text)
            assert str(said) == str(is_greedy[-1])
    assert len(is_greedy) == 6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("gsm/stf", "--tasks", "pens"), "did you mean"),
        (
            ("gsm/sft", "--tasks", "pens_rolling"),
            "(loglikelihood_rolling) is none that a masked",
        ),
        (("gsm/sft", "--tasks", "pens", "--model_args", "gen_length=4000"), "(a prompt that begins 'Ann has"),
        (("gsm/sft", "--tasks", "pens", "--gen_kwargs", "num_beams=4"), "num_beams"),
        (("gsm/sft", "--tasks", "pens", "--model_args", "lenght=128"), "lenght is no key of a d1 model; did you mean"),
        (("gsm/sft", "--tasks", "pens", "--model_args", "dtype=half"), "--model_args: dtype is 'half'; it should be"),
    ],
)
def test_invalid_requests_of_the_harness_are_refused_in_one_sentence(
    d1_with_harness: Callable[..., Ended], words: tuple[str, ...], sentence: str
) -> None:
    ended = d1_with_harness("lm-eval", *words, "--include_path", "tasks", "--limit", "2")
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert sentence in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
