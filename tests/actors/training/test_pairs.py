"""Rounds on stored preference pairs: their batches, what is refused, and runs that stop, resume and have ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actors.run_config import ControlSection
from actors.spec import Phase, RunSpec, sampler_facts
from actors.training.pairs import PairBatches, load_pairs
from actors.training.training import TrainingRun
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from learner.parallel.consensus import Ranks
from rollout.config import EvaluationConfig
from tests.actors.local_run import LocalRun, Pulse
from tests.ranks import run_ranks

Row = tuple[str, str, str]
ROWS: list[Row] = [(f"{number}?", f"{number}", f"{number}{number}") for number in range(10)]


def _spec(spec: RunSpec, directory: Path, rows: Sequence[Row] = tuple(ROWS), **learner: Any) -> RunSpec:
    """Return a run of rounds on `rows`: prompt, chosen and rejected completion."""
    shutil.copytree(spec.initial_checkpoint, directory / "checkpoints" / "initial")
    path = directory / "pairs.jsonl"
    keys = ("prompt", "chosen", "rejected")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    settings = {"algorithm": "vrpo", "num_rounds": 6, "groups_per_round": 4, "lr": 1e-2, "pairs": path, **learner}
    return spec.model_copy(
        update={
            "run_dir": directory,
            "phases": (Phase.RL,),
            "learner": LearnerConfig.model_validate(settings),
            "evaluation": EvaluationConfig(num_problems=8, every_rounds=2),
            "control": ControlSection(enabled=False),
        }
    )


def _with_rollout(spec: RunSpec, **changes: Any) -> RunSpec:
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update=changes)})


def _batches(spec: RunSpec) -> PairBatches:
    data = load_pairs(spec, ChatTokenizer(spec.initial_checkpoint))
    return PairBatches(spec, data, load_config(spec.initial_checkpoint), sampler_facts(spec.rollout.params[0]))


def _texts(spec: RunSpec, batch: RolloutBatch) -> list[Row]:
    """Return prompt, chosen and rejected completion of each group, as text."""
    tokenizer, found = ChatTokenizer(spec.initial_checkpoint), []
    for row in range(0, batch.num_rows, 2):
        prompt = tokenizer.decode(batch.prompt_ids[row, : batch.prompt_lengths[row]].tolist())
        texts = [batch.completion_ids[at, : batch.completion_lengths[at]].tolist() for at in (row, row + 1)]
        assert all(ids[-1] == tokenizer.eos_id for ids in texts)
        found.append((prompt, *(tokenizer.decode(ids[:-1]) for ids in texts)))
    return found


def test_a_round_takes_each_pair_once_an_epoch_in_another_order(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run", groups_per_round=5)
    batches = _batches(run)
    epochs = [[batches.of_round(2 * epoch + half) for half in (0, 1)] for epoch in (0, 1)]
    orders = [[row for batch in epoch for row in _texts(run, batch)] for epoch in epochs]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(order) == ROWS
    keys = [key for epoch in epochs for batch in epoch for key in batch.sample_keys.tolist()]
    assert len(set(keys)) == len(keys), "every completion has other masks in every epoch"


def test_the_chosen_completion_has_the_higher_reward_of_a_group_of_two(spec: RunSpec, tmp_path: Path) -> None:
    batch = _batches(_spec(spec, tmp_path / "run")).of_round(0)
    assert batch.rewards.tolist() == [1.0, 0.0] * 4
    assert batch.correct.tolist() == [True, False] * 4
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.completion_lengths.tolist() == [2, 3] * 4


def test_batches_depend_on_the_seed_and_the_round_alone(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run")
    first, again = _batches(run), _batches(run)
    expected = [first.of_round(index).given() for index in range(5)]
    for index in (4, 0, 2):
        found = again.of_round(index).given()
        assert all(torch.equal(found[name], expected[index][name]) for name in found)
    other = _batches(run.model_copy(update={"seed": 1})).of_round(0)
    assert _texts(run, other) != _texts(run, first.of_round(0))


def test_the_block_in_which_a_text_ends_is_the_last_one_that_is_scored(spec: RunSpec, tmp_path: Path) -> None:
    sampling = spec.rollout.sampling.model_copy(update={"block_length": 2})
    run = _with_rollout(
        _spec(spec, tmp_path / "run", [(f"{n}?", "1", "12345678") for n in range(4)]), sampling=sampling
    )
    batch = _batches(run).of_round(0)
    # The end of text of the first has a slot of its own; the second fills the canvas without one.
    assert (batch.step_map[0] >= 0).tolist() == [True] * 2 + [False] * 6
    assert (batch.step_map[1] >= 0).all()
    assert batch.truncated.tolist() == [False, True] * 4


def test_a_completion_longer_than_the_canvas_is_refused_with_its_line(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run", [*ROWS, ("a?", "a", "123456789"), ("b?", "1234567890ab", "b")])
    said = "has 9 tokens, and rollout.sampling.gen_length is 8; take at least"
    with pytest.raises(ValueError, match=f"{said} 12, or leave out the pairs of 2 such completions$") as refused:
        _batches(run)
    assert str(refused.value).startswith(f"learner.pairs: {run.learner.pairs}, line 11: rejected ")
    with pytest.raises(ValueError, match=f"{said} 9, or leave that pair out$"):
        _batches(_spec(spec, tmp_path / "one", [*ROWS, ("a?", "123456789", "a")]))


def test_a_pair_whose_prompt_is_too_long_is_left_out_or_cut_as_the_recipe_says(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run", [*ROWS, ("x" * 11, "1", "2")])
    tokenizer = ChatTokenizer(run.initial_checkpoint)
    dropped = load_pairs(run, tokenizer)
    assert (dropped.facts["num_pairs"], dropped.num_overlong) == (10, 1)
    cut = load_pairs(_with_rollout(run, overlong_prompts="truncate_left"), tokenizer)
    assert (cut.facts["num_pairs"], cut.num_overlong) == (11, 1)
    assert [len(pair.prompt) for pair in cut.pairs] == [4] * 10 + [12]
    assert cut.pairs[-1].prompt[-1] == cut.pairs[0].prompt[-1], "the last tokens stay: the assistant's turn begins"


def test_a_round_of_more_pairs_than_there_are_is_refused(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run", groups_per_round=11)
    with pytest.raises(ValueError, match=r"has 10 pairs, and a round takes learner\.groups_per_round 11, each once"):
        _batches(run)


def _run(spec: RunSpec, pulse: Pulse | None = None) -> LocalRun:
    run = LocalRun(spec)
    TrainingRun(spec, run, pulse or Pulse(), Ranks()).run()
    return run


def _rounds(run: LocalRun | list[dict[str, Any]]) -> list[dict[str, Any]]:
    events = run.events if isinstance(run, LocalRun) else run
    return [event for event in events if event["event"] == "round"]


def _weights(spec: RunSpec) -> bytes:
    return (spec.checkpoints_dir / "rl-000006" / "model.safetensors").read_bytes()


def test_a_run_learns_the_pairs_without_sampling_for_its_rounds(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run", num_rounds=10, groups_per_round=10)
    done = _run(run)
    (facts,) = [event for event in done.events if event["event"] == "pairs"]
    assert (facts["num_pairs"], facts["mean_chosen_tokens"], facts["mean_rejected_tokens"]) == (10, 1.0, 2.0)
    rounds = _rounds(done)
    assert [event["rewards"] for event in rounds] == [[]] * 10, "nothing was graded"
    assert (rounds[0]["preferred"], rounds[0]["margin"]) == (0, 0), "the policy still is the reference"
    assert rounds[-1]["preferred"] == 1
    assert rounds[-1]["margin"] > 0.5
    assert not {"entropy", "reward_std", "tokens_per_forward"} & rounds[0].keys(), "there was no sampler and no reward"
    assert not any(name.startswith("sampling/") for name in rounds[0]), "there is no record to compare with"
    assert rounds[0]["completions/mean_length"] == 2.5
    labels = [(event["label"], event["round"]) for event in done.events if event["event"] == "evaluation"]
    assert labels == [("start", 0), ("round", 2), ("round", 4), ("round", 6), ("round", 8), ("rl", 10)]


def test_a_stopped_run_resumes_to_the_same_bits(spec: RunSpec, tmp_path: Path) -> None:
    whole, halved = (_spec(spec, tmp_path / name) for name in ("whole", "halved"))
    expected = _rounds(_run(whole))
    first = _run(halved, Pulse("round 2: training"))
    assert first.events[-1] == {"event": "stopped", "phase": "rl", "round": 3, "step": None}
    rest = _run(halved)
    assert not [event for event in rest.events if event["event"] == "pairs"], "it is told once"
    margins = [event["margin"] for event in _rounds(first) + _rounds(rest)]
    assert margins == [event["margin"] for event in expected]
    assert _weights(halved) == _weights(whole)


def _rank(rank: int, spec: RunSpec) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec.run_dir}/port", rank=rank, world_size=2)
    if rank:
        # The file is on the machine of rank 0 alone.
        spec = spec.model_copy(update={"learner": spec.learner.model_copy(update={"pairs": Path("absent.jsonl")})})
    run = LocalRun(spec)
    TrainingRun(spec, run, Pulse(), Ranks()).run()
    if rank == 0:
        (spec.run_dir / "events.json").write_text(json.dumps(run.events))
    dist.destroy_process_group()


def test_ranks_share_the_pairs_of_rank_0_and_learn_what_one_alone_does(spec: RunSpec, tmp_path: Path) -> None:
    alone, shared = (_spec(spec, tmp_path / name, lr=1e-3) for name in ("alone", "shared"))
    expected = _rounds(_run(alone))
    run_ranks(_rank, shared, num=2)
    found = _rounds(json.loads((shared.run_dir / "events.json").read_text()))
    assert [event["margin"] for event in found] == pytest.approx([event["margin"] for event in expected], abs=1e-4)
    assert [event["num_trained_completions"] for event in found] == [8] * 6
