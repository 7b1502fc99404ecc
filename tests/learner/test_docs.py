"""Consistency of the documents' tables and worked example with the code."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import Field

import learner.learner
import learner.round
from learner import algorithms
from learner.algorithms import ALGORITHMS
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, OneStepConfig, SamplerFacts, TrajectoryConfig, token_logps
from learner.estimators.groupings import Level
from learner.estimators.terms import make_terms, unit_keys
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from learner.objectives.units import units_of
from learner.parallel.micro_batches import make_micro_batches
from learner.parallel.sharding import ShardedPolicy
from learner.planning.flops import as_leaves, full_group
from tests.learner import slow
from tests.learner.batches import batch_of
from tests.learner.methods import test_algorithms
from tests.learner.methods.test_golden import SOURCES
from tests.learner.worked_example import ROW, BlockStartConfig, block_start

ROOT = Path(__file__).parents[2]
# Every completion fills its canvas, one token a step; every fourth step uses the fallback.
LENGTH, ROWS = 64, 4
GAP = "sampling/sampling_logp_difference/{}"
CANVASES = {
    "steps / 8": LENGTH / 8,
    "steps / 4": LENGTH / 4,
    "steps": LENGTH,
    "tokens": LENGTH,
    "fallbacks": LENGTH / 4,
    "blocks": LENGTH,
    "5 / 16": 5 / 16,
}
# Facts that satisfy every method, including blocks of one slot.
FITTING = SamplerFacts(block_length=1, has_fallback=True, has_varying_steps=True)
LACKING = {
    "recorded likelihoods": {"has_reproducible_logps": False},
    "blocks of 1 slot": {"block_length": 2},
    "a threshold": {"has_fallback": False},
    "two denoise steps": {"max_denoise_steps": 1},
    "seven denoise steps": {"max_denoise_steps": 6},
    "steps that vary": {"has_varying_steps": False},
    "a fixed number of steps": {"has_varying_steps": True},
    "two blocks": {"num_blocks": 1},
    "a bidirectional policy": {"is_block_causal": True, "predicts_canvas": False},
    "no KV cache": {"predicts_canvas": False},
}


def _fitting(name: str) -> SamplerFacts:
    """Return facts that satisfy the method."""
    return replace(FITTING, has_varying_steps=False) if name in ("d-treerpo", "mdpo") else FITTING


def _rows() -> dict[str, dict[str, str]]:
    """Return the table of algorithms, by name."""
    lines = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| algorithm |"))
    table = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[start:] if line.startswith("| `")]
    heads = [cell.strip() for cell in lines[start][1:-1].split("|")]
    rows = [dict(zip(heads, cells, strict=True)) for cells in table if len(cells) == len(heads)]
    return {row["algorithm"].strip("`"): row for row in rows}


def _config(name: str) -> LearnerConfig:
    filters: dict[str, object] = {"min_accuracy": 0.0, "max_accuracy": 1.0, "first_correct": False}
    return LearnerConfig.model_validate(
        {"algorithm": name, "num_rounds": 1, "micro_batch_tokens": 10**6, "filters": filters}
    )


def _batch(rows: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(rows, LENGTH, generator=generator).argsort(dim=1)
    return RolloutBatch(
        # Distinct prompts, so that no canvas is shared.
        prompt_ids=torch.randint(0, 38, (rows, 40), generator=generator),
        prompt_lengths=torch.full((rows,), 40),
        completion_ids=torch.randint(0, 38, (rows, LENGTH), generator=generator),
        completion_lengths=torch.full((rows,), LENGTH),
        sample_keys=torch.arange(rows) * 7919,
        rewards=torch.rand(rows, generator=generator),
        reward_parts=torch.zeros(rows, 1),
        correct=torch.tensor([True, False]).repeat(rows // 2),
        truncated=torch.ones(rows, dtype=torch.bool),
        is_stop=torch.zeros(rows, LENGTH, dtype=torch.bool),
        group_ids=torch.arange(rows) // 2,
        step_map=order,
        commit_logp=-torch.ones(rows, LENGTH),
        commit_entropy=torch.ones(rows, LENGTH),
        commit_law_entropy=torch.ones(rows, LENGTH),
        fallback=order % 4 == 0,
        num_forwards=torch.tensor([LENGTH, LENGTH - 1]).repeat(rows // 2),
        policy_versions=torch.zeros(rows, dtype=torch.long),
        step_rewards=torch.rand(rows, LENGTH, generator=generator),
        step_answers=torch.randint(0, 38, (rows, LENGTH, LENGTH), generator=generator, dtype=torch.int32),
    )


def test_the_algorithm_table_agrees_with_the_results() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    tables = re.findall(r"^### (Countdown|Sudoku)$(.*?)^(?=###|<!--)", results, re.DOTALL | re.MULTILINE)
    assert tables
    for task, table in tables:
        # The second percentage of a line, after the one at equal seconds.
        measured = dict(re.findall(r"^\| `([a-z0-9-]+)` .*?%.*?\| ([0-9.]+) % \(", table, re.MULTILINE))
        said = {name: row[f"ours, % of {task.lower()}"] for name, row in _rows().items()}
        assert said == {name: measured[name] for name in said}


def test_the_pages_example_of_terms_agrees_with_the_code(config: TransformerConfig) -> None:
    a, b, c, d = 5, 6, 7, 8
    batch = batch_of(
        prompts=torch.tensor([[9, 10]] * 4),
        completions=torch.tensor([[a, b, c, d], [a, b, d, c], [b, a, c, d], [c, d, a, b]]),
        lengths=torch.full((4,), 4),
        steps=torch.tensor([[0, 0, 1, 1]] * 3 + [[1, 1, 0, 0]]),
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
    )
    facts = replace(FITTING, block_length=4, max_denoise_steps=2)
    corruption = TrajectoryConfig(steps_per_segment=1).corrupt(GroupedBatch.of(batch), InnerUpdate(0, 1), facts)
    terms = make_terms(GroupedBatch.of(batch), config, corruption)
    micro_batches = make_micro_batches(terms, unit_keys(terms, Level.TOKEN), 12).terms
    units = [len(units_of(terms, level).rows) for level in (Level.TOKEN, Level.PART, Level.ROW)]

    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = {row[1].strip(" `"): row for row in (line.split("|") for line in page.splitlines()) if len(row) == 7}
    shown = {
        word: [int(number) for number in re.findall(r"\d+", rows[word][4])] for word in rows if "py" in rows[word][2]
    }
    assert shown == {
        "Corruption": [len(corruption.rows)],
        "Views": [len(terms.views.ids)],
        "Terms": [terms.num_terms],
        "Units": units,
        "StepPlan": [len(micro_batches), max(micro.views.ids.numel() for micro in micro_batches)],
    }
    assert (list(corruption.masked.shape), list(terms.views.ids.shape)) == ([8, 4], [4, 6])


def test_the_table_and_the_page_name_every_algorithm() -> None:
    rows, page = _rows(), (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert list(rows) == list(ALGORITHMS)
    for name, row in rows.items():
        config = _config(name)
        assert (row["estimator"], row["objective"]) == (f"`{config.estimator.name}`", f"`{config.objective.name}`")
        assert f"**`{name}`**" in page
        for paper in re.findall(r"\d{4}\.\d{5}", row["paper"]):
            assert f"arXiv {paper}" in page, name


def test_the_table_names_the_code_that_the_golden_numbers_are_from() -> None:
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "learner" / "methods").glob("test_*.py")]
    for name, row in _rows().items():
        source = re.fullmatch(r"\[(\S+/\S+)\]\(https://github\.com/\1\) ([0-9a-f]{7})", row["golden numbers from"])
        if name in SOURCES:
            assert source
            assert (source[1], source[2]) == (SOURCES[name].repository, SOURCES[name].commit[:7])
        elif source:
            assert any(source[1] in test and source[2] in test for test in tests), name
        else:
            assert row["golden numbers from"] == "paper only"
            assert name in ("vrpo", "forkgrpo")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_table_says_what_an_algorithm_needs_of_the_sampler(name: str) -> None:
    config, fitting = _config(name), _fitting(name)
    assert config.incompatibility(fitting) is None
    lacking = [need for need, facts in LACKING.items() if config.incompatibility(replace(fitting, **facts))]  # type: ignore[arg-type]
    if "seven denoise steps" in lacking:
        lacking.remove("two denoise steps")
    assert ", ".join(lacking) == _rows()[name]["needs"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_tables_costs_equal_the_learners_forwards(
    name: str, config: TransformerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _rows()[name]
    shape = {"max_sequence_length": 128, "d_model": 8, "num_heads": 2, "num_kv_heads": 1}
    model, ran = Transformer(config.model_copy(update=shape)), Counter[str]()
    init_weights(model, seed=0)
    trained = Learner(ShardedPolicy(model, None), _config(name), _fitting(name))
    # At least one step for each minibatch, and a whole tree.
    num_rows = max(ROWS, trained.config.num_minibatches, math.prod(trained.config.branches))

    def counted(module: Transformer, *arguments: object) -> object:
        views = arguments[0]
        kind = "new" if torch.is_grad_enabled() else "old" if module is model else "reference"
        ran[kind] += len(views.ids)  # type: ignore[attr-defined]
        return token_logps(module, *arguments)  # type: ignore[arg-type]

    for module in (learner.learner, learner.round):
        monkeypatch.setattr(module, "token_logps", counted)
    # Passes of the probes do not count for the method.
    for probe in ("sampling_gap", "mask_variance"):
        monkeypatch.setattr(learner.learner, probe, lambda *_: {})
    batch = _batch(num_rows)
    if trained.config.branches:
        batch = as_leaves(full_group(num_rows, 40, LENGTH, LENGTH), trained.config.branches)
    trained.update(batch, 0)
    canvases = float(CANVASES.get(row["canvases"], 0) or row["canvases"])
    for kind, passes in zip(("new", "old", "reference"), row["passes"].split(" + "), strict=True):
        # An empty mask or complement is not run.
        most = canvases * Fraction(passes) * num_rows
        assert 0.95 * most <= ran[kind] <= most, kind
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert f"({row['passes']})" in page


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_metric_of_a_round_is_documented(name: str, policy: Transformer, rollouts: RolloutBatch) -> None:
    # All completions pass TraceRL's filter.
    settings = {"algorithm": name, "num_rounds": 2, "filters": {}}
    learned = Learner(ShardedPolicy(policy, None), LearnerConfig.model_validate(settings), _fitting(name))
    page = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8").replace(".../max", GAP.format("max"))
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = {field for row in rows for field in re.findall(r"`([^`]+)`", row)}
    metrics = learned.update(rollouts, 1)
    assert metrics.keys() - explained == set()
    assert {"loss", GAP.format("mean")} <= metrics.keys()


def test_the_worked_example_passes_the_tests_of_algorithms(
    policy: Transformer,
    rollouts: RolloutBatch,
    grouped: GroupedBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Extended(LearnerConfig):
        estimator: Annotated[  # type: ignore[assignment, valid-type]
            OneStepConfig | TrajectoryConfig | BlockStartConfig, Field(discriminator="name")
        ]

    monkeypatch.setattr(algorithms, "ALGORITHMS", {**ALGORITHMS, **ROW})
    monkeypatch.setattr(test_algorithms, "LearnerConfig", Extended)
    monkeypatch.setitem(slow.SLOW, "block-start", block_start)
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    test_algorithms.test_loss_and_gradient_equal_the_papers_formula("block-start", policy, rollouts, grouped)
    policy.load_state_dict(state)
    test_algorithms.test_small_micro_batches_give_the_gradient_of_the_whole_batch("block-start", policy, rollouts)
