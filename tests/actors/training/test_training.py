"""Stages of a run on its ranks, without Ray: agreement of ranks, stopping and resuming."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from actors.checkpoints.best import validated_best
from actors.checkpoints.selection import Position, newest_checkpoint, resumable, servable_checkpoints
from actors.messages import ScoredWorkUnit, WeightsId, WorkUnit
from actors.resources import GpuSection
from actors.run_config import ControlSection, ModelSection
from actors.spec import Phase, RunSpec
from actors.training.context import RunContext
from actors.training.limits import OutOfGpuMemoryError
from actors.training.round_update import RoundUpdate
from actors.training.training import TrainingRun
from actors.weights.fetching import PolicyLoader
from actors.weights.store import Manifest
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.adapter import read_adapter
from learner.model.checkpoint import load_merged, load_policy, save_checkpoint
from learner.model.checkpoint_files import LEARNER_STATE, verify_checkpoint, weight_bytes
from learner.model.lora import merge_adapters
from learner.model.lora_config import LoraConfig
from learner.model.transformer import Transformer
from learner.parallel.consensus import Ranks
from learner.parallel.sharded_tensors import local_part
from learner.parallel.sharding import ShardedPolicy
from learner.sft.config import SftConfig
from learner.sft.learner import SftLearner
from rollout.config import EvaluationConfig
from tests.actors.local_run import LocalRun, Pulse, facts
from tests.ranks import run_ranks

STAGES = (Phase.SFT, Phase.RL, Phase.CONTROL)


def _spec(spec: RunSpec, run_dir: Path, **changes: Any) -> RunSpec:
    """A run of all stages, in its own directory."""
    shutil.copytree(spec.initial_checkpoint, run_dir / "checkpoints" / "initial")
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "phases": STAGES,
        "sft": SftConfig(
            num_labels=10,
            num_steps=6,
            batch_size=8,
            lr=3e-3,
            num_eval=4,
            eval_every_steps=2,
            num_samples=2,
            attention_annealing_steps=5,
        ),
        "learner": _learner(),
        "evaluation": EvaluationConfig(num_problems=8, every_rounds=1),
        "control": ControlSection(num_steps=4),
    }
    return spec.model_copy(update=values | changes)


def _learner(**changes: Any) -> LearnerConfig:
    values = {"num_rounds": 3, "groups_per_round": 4, "group_size": 4, "inner_updates": 1, "lr": 1e-3}
    return LearnerConfig.model_validate({**values, "estimator": {"name": "one_step"}, **changes})


def _ticking(step_s: float, start_s: float = 0.0) -> Callable[[], float]:
    """Return a clock that advances only when it is read."""
    looks = count()
    return lambda: start_s + step_s * next(looks)


def _run(spec: RunSpec, pulse: Pulse | None = None, clock: Callable[[], float] | None = None) -> LocalRun:
    run = LocalRun(spec)
    TrainingRun(spec, run, pulse or Pulse(), Ranks(), clock or _ticking(0.01)).run()
    return run


def _events(run: LocalRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == name]


def _files(spec: RunSpec, name: str) -> dict[str, bytes]:
    directory = spec.checkpoints_dir / name
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".safetensors"}


def _rank(rank: int, spec: RunSpec, steps_s: tuple[float, float]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec.run_dir}/port", rank=rank, world_size=2)
    run = LocalRun(spec)
    TrainingRun(spec, run, Pulse(), Ranks(), _ticking(steps_s[rank], start_s=1e6 * rank)).run()
    if rank == 0:
        (spec.run_dir / "events.json").write_text(json.dumps(run.events))
    dist.destroy_process_group()


def _run_on_ranks(spec: RunSpec, steps_s: tuple[float, float]) -> list[dict[str, Any]]:
    """Return the events, without the processes' peak memory."""
    run_ranks(_rank, spec, steps_s, num=2)
    return _without_memory(json.loads((spec.run_dir / "events.json").read_text()))


def _without_memory(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in event.items() if key != "peak_memory_bytes"} for event in events]


def test_ranks_with_different_clocks_stay_in_step_through_every_stage(spec: RunSpec, tmp_path: Path) -> None:
    limited = {"control": ControlSection(), "checkpoint_every_s": 0.3}
    alike, unlike = (_spec(spec, tmp_path / name, **limited) for name in ("alike", "unlike"))
    expected = _run_on_ranks(alike, (0.01, 0.01))
    assert _run_on_ranks(unlike, (0.01, 7.3)) == expected
    assert any(event["event"] == "sft_samples" for event in expected), "forwards of both"
    assert facts(alike) == facts(unlike)
    for name in ("sft", "rl-000003", "control"):
        # Learning rates depend on the share of the control's time that has passed, so that ranks must agree on it.
        assert _files(alike, name) == _files(unlike, name), name
    assert len(facts(alike)) > len(STAGES) + 1, "some were written by time"


def test_the_control_takes_the_time_of_the_rounds_plus_at_most_one_step(spec: RunSpec, tmp_path: Path) -> None:
    run = _run(_spec(spec, tmp_path / "run", control=ControlSection()))
    seconds = {event["phase"]: event["seconds"] for event in _events(run, "phase_end")}
    steps = {event["phase"]: event["num_steps"] for event in _events(run, "phase_end")}
    one_step_s = seconds["control"] / steps["control"]
    assert steps["control"] > 2
    assert seconds["rl"] <= seconds["control"] <= seconds["rl"] + one_step_s


def test_with_validation_held_out_problems_are_evaluated_only_at_the_end_of_a_stage(
    spec: RunSpec, tmp_path: Path
) -> None:
    evaluation = EvaluationConfig(num_problems=8, num_validation=12, every_rounds=1)
    task = spec.task.model_copy(update={"validation_fraction": 0.3})
    run = _spec(spec, tmp_path / "run", evaluation=evaluation, task=task)
    done = _run(run)
    asked = [(event["label"], event["round"], event["num_problems"]) for event in _events(done, "evaluation")]
    assert asked == [
        ("untrained", 0, 8),
        ("validation", 0, 12),
        ("sft", 0, 8),
        ("validation", 1, 12),
        ("validation", 2, 12),
        ("validation", 3, 12),
        ("rl", 3, 8),
        ("control", 3, 8),
    ]
    best = validated_best(done.events)
    assert best in {position["policy_version"] for position in facts(run).values()}, "it is kept"


LORAS = {"whole": LoraConfig(), "adapter": LoraConfig(rank=4, alpha=8)}
if find_spec("bitsandbytes") is not None:
    LORAS["adapter on 4 bits"] = LoraConfig(rank=4, alpha=8, base_weights="nf4")


@pytest.mark.parametrize("lora", [pytest.param(x, marks=[pytest.mark.nightly] * ("4 bits" in x)) for x in LORAS])
@pytest.mark.parametrize(
    ("stop_when", "checkpoint", "again"),
    [
        ("sft, step 3", "sft-000003", {"phase": "sft", "round": 0, "step": 3}),
        ("round 1: training", "rl-000002", {"phase": "rl", "round": 2, "step": None}),
        ("control, step 2", "control-000002", {"phase": "control", "round": 3, "step": 2}),
    ],
)
def test_a_run_stopped_anywhere_resumes_to_the_same_bits(
    spec: RunSpec, tmp_path: Path, stop_when: str, checkpoint: str, again: dict[str, Any], lora: str
) -> None:
    whole, halved = (_spec(spec, tmp_path / name, model=ModelSection(lora=LORAS[lora])) for name in ("whole", "halved"))
    expected = _run(whole)
    first = _run(halved, Pulse(stop_when))
    assert first.events[-2]["path"] == f"checkpoints/{checkpoint}"
    assert first.events[-1] == {"event": "stopped", **again}
    assert (halved.checkpoints_dir / checkpoint / LEARNER_STATE).is_file()
    has_weights = (halved.checkpoints_dir / checkpoint / "model.safetensors").is_file()
    assert has_weights == (lora == "whole")
    rest = _run(halved)
    assert rest.events[0]["checkpoint"] == checkpoint
    rounds = _events(first, "round") + _events(rest, "round")
    assert [event["rewards"] for event in rounds] == [event["rewards"] for event in _events(expected, "round")]
    for name in ("sft", "rl-000003", "control"):
        assert _files(whole, name) == _files(halved, name), name


class _RememberingRun(LocalRun):
    """Keeps the samplers' weights of each version."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self._policy = load_policy(spec.initial_checkpoint)
        self._loader = PolicyLoader(self._policy, self.reader(), spec.checkpoints_dir)

    def publish(self, manifest: Manifest, weights: Mapping[str, torch.Tensor]) -> None:
        super().publish(manifest, weights)
        self._loader.load(WeightsId(version=manifest.version, digest=manifest.digest))
        merged = copy.deepcopy(self._policy)
        merge_adapters(merged)
        self.versions[manifest.version] = merged.state_dict()


@pytest.mark.parametrize("lora", [name for name in LORAS if name != "whole"])
def test_a_checkpoint_of_an_adapter_is_the_version_that_was_published(spec: RunSpec, tmp_path: Path, lora: str) -> None:
    """Also where SFT has a different LoRA alpha."""
    sft = SftConfig(num_labels=10, num_steps=6, batch_size=8, lr=3e-3, num_eval=4, eval_every_steps=2, lora_alpha=20)
    run = _spec(
        spec,
        tmp_path / "run",
        model=ModelSection(lora=LORAS[lora]),
        sft=sft,
        learner=_learner(num_rounds=6),
        control=ControlSection(num_steps=3),
        checkpoint_every_rounds=1,
        num_checkpoints_kept=9,
    )
    remembering = _RememberingRun(run)
    TrainingRun(run, remembering, Pulse(), Ranks(), _ticking(0.01)).run()
    found = servable_checkpoints(run.checkpoints_dir)
    assert [path.name for _, path in found] == ["initial", "sft", *(f"rl-00000{done}" for done in range(1, 7))]
    for position, path in found:
        if path.name == "initial" and "4 bits" in lora:
            continue  # Nothing is quantized there yet.
        kept = load_merged(path).state_dict()
        published = remembering.versions[position.policy_version]
        assert all(torch.equal(kept[name], published[name]) for name in kept), path.name
    assert [path.name for _, path in found if (path / "model.safetensors").is_file()] == ["initial"]
    verify_checkpoint(run.checkpoints_dir / "rl-000002")
    alphas = {path.name: read_adapter(path).alpha for _, path in found if path.name != "initial"}
    assert alphas == {"sft": 20} | {f"rl-00000{done}": 8 for done in range(1, 7)}


def test_a_resumed_run_publishes_a_version_under_the_same_digest(spec: RunSpec, tmp_path: Path) -> None:
    """The service finds a version's checkpoint by its digest."""
    changes = {"model": ModelSection(lora=LORAS["adapter"]), "phases": (Phase.SFT, Phase.RL)}
    whole, halved = (_spec(spec, tmp_path / name, **changes) for name in ("whole", "halved"))
    expected = dict(_run(whole).published_digests)
    first = _run(halved.model_copy(update={"phases": (Phase.SFT,)}))
    rest = _run(halved)
    assert [version for version, _ in rest.published_digests] == [1, 2, 3, 4]
    assert dict(first.published_digests) | dict(rest.published_digests) == expected
    for position in (facts(halved)[name] for name in ("sft", "rl-000003")):
        assert position["manifest_digest"] == expected[position["policy_version"]]
    # In every stage only the adapter is sent.
    assert len({*first.sent_bytes, *rest.sent_bytes}) == 1


def test_a_stop_before_any_progress_writes_no_checkpoint(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run")
    stopped = _run(run, Pulse("sft, step 0"))
    assert stopped.events[-1] == {"event": "stopped", "phase": "untrained", "round": 0, "step": None}
    assert list(facts(run)) == ["initial"]


def test_a_lost_version_is_published_again(spec: RunSpec, tmp_path: Path) -> None:
    kept, lost = (_spec(spec, tmp_path / name) for name in ("kept", "lost"))
    expected, run = _run(kept), LocalRun(lost)
    run.loses_next = 5
    TrainingRun(lost, run, Pulse(), Ranks(), _ticking(0.01)).run()
    assert run.published_digests[5:] == expected.published_digests
    assert set(run.published_digests[:6]) == {expected.published_digests[0]}


def test_timed_checkpoints_take_a_small_share_and_the_newest_and_best_are_kept(spec: RunSpec, tmp_path: Path) -> None:
    learner = LearnerConfig(num_rounds=9, groups_per_round=2, group_size=2, inner_updates=1, lr=1e-3)
    control = ControlSection(num_steps=1)
    frequent = _spec(
        spec, tmp_path / "run", learner=learner, checkpoint_every_s=0.001, num_checkpoints_kept=2, control=control
    )
    run = _run(frequent)
    written = [event["path"].rpartition("/")[2] for event in _events(run, "checkpoint")]
    assert 2 < len([name for name in written if name.startswith("rl-")]) <= 9
    rounds = {name for name in facts(frequent) if name.startswith("rl-")}
    best = run.versions_to_keep()[0]
    assert best in {Position.of(state).policy_version for state in facts(frequent).values()}
    assert "rl-000009" in rounds
    assert len(rounds) <= 2 + 1 + 1


def test_half_of_an_sft_is_gone_on_from_and_never_answered_from(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run")
    _run(run, Pulse("sft, step 3"))
    found = newest_checkpoint(run.checkpoints_dir, resumable(3))
    assert found is not None
    assert (found.directory.name, found.position.step) == ("sft-000003", 3)
    assert [path.name for _, path in servable_checkpoints(run.checkpoints_dir)] == ["initial"]


def test_a_checkpoint_that_cannot_be_written_is_left_out_and_one_that_ends_a_stage_is_waited_for(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.checkpoints.writing._PAUSE_S", 0.01)
    unevaluated = EvaluationConfig(num_problems=8)
    run = _spec(spec, tmp_path / "run", checkpoint_every_rounds=1, evaluation=unevaluated)
    refused = []

    def full_at_first(directory: Path, *arguments: Any, **more: Any) -> None:
        if directory.name in ("rl-000001", "sft") and refused.count(directory.name) < 2:
            refused.append(directory.name)
            raise OSError("No space left on device")
        save_checkpoint(directory, *arguments, **more)

    monkeypatch.setattr("actors.checkpoints.writing.save_checkpoint", full_at_first)
    done = _run(run)
    assert refused == ["sft", "sft", "rl-000001"]
    assert {"sft", "rl-000002", "rl-000003", "control"} <= facts(run).keys()
    assert [event["what"] for event in _events(done, "failure")] == [
        f"checkpoint {name}: No space left on device" for name in ("sft", "rl-000001")
    ]


def test_a_finished_run_goes_on_for_more_rounds_from_its_last_round(spec: RunSpec, tmp_path: Path) -> None:
    """The control's checkpoint is newer, but another policy."""
    short = _spec(spec, tmp_path / "short")
    whole = _spec(spec, tmp_path / "whole", learner=short.learner.model_copy(update={"num_rounds": 5}))
    longer = short.model_copy(update={"learner": whole.learner})
    expected = _run(whole)
    _run(short)
    more = _run(longer)
    assert more.events[0]["checkpoint"] == "rl-000003"
    assert [event["round"] for event in _events(more, "round")] == [3, 4]
    # The learning rate is constant, so that a run of five rounds has the same first three.
    assert [event["rewards"] for event in _events(more, "round")] == [
        event["rewards"] for event in _events(expected, "round")
    ][3:]
    for name in ("rl-000005", "control"):
        assert _files(whole, name)["model.safetensors"] == _files(longer, name)["model.safetensors"], name


def _failing_at(*rounds: int) -> Any:
    """An update whose loss is nan in the given rounds."""
    update = Learner.update

    def failing(learner: Learner, batch: RolloutBatch, round_index: int) -> dict[str, float]:
        if round_index in rounds:
            raise FloatingPointError("the loss is nan")
        # The untrained policy is never right, and equal rewards have no gradient.
        return update(learner, replace(batch, rewards=torch.arange(batch.num_rows) % 2.0), round_index)

    return failing


def test_a_round_without_a_finite_loss_is_skipped_counted_and_kept(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "update", _failing_at(0, 2))
    small = _spec(spec, tmp_path / "run", phases=(Phase.RL,), learner=_learner(max_skipped_rounds=1))
    run = _run(small)
    assert [event["what"] for event in _events(run, "failure")] == [
        f"round {index} is skipped: the loss is nan. Its batch is in "
        f"{small.run_dir / 'failed_batches' / f'round-00000{index}.safetensors'}"
        for index in (0, 2)
    ]
    assert load_file(small.run_dir / "failed_batches" / "round-000002.safetensors")["rewards"].shape == (16,)
    trained = [event["num_trained_completions"] for event in _events(run, "round")]
    assert trained[0] == trained[2] == 0 < trained[1]
    digests = dict(run.published_digests)
    assert digests[1] == digests[0] != digests[2] == digests[3], "the policy stays as it was"


def test_a_gpu_without_memory_is_told_from_other_failures_and_halves_change_no_gradient(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next learner group resumes from the checkpoint with smaller micro-batches, to the same policy."""
    runs = [_spec(spec, tmp_path / name, phases=(Phase.RL,)) for name in ("whole", "halves")]
    for run, tokens in zip(runs, (512, 64), strict=True):
        _run(run.with_micro_batches({"learner": tokens}))
    whole, halves = (load_file(run.checkpoints_dir / "rl-000003" / "model.safetensors") for run in runs)
    for name, tensor in whole.items():
        torch.testing.assert_close(halves[name], tensor, atol=2e-4, rtol=1e-3, msg=name)

    def update(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(OutOfGpuMemoryError) as raised:
        _run(_spec(spec, tmp_path / "full", phases=(Phase.RL,)))
    assert str(raised.value) == "round 0: the GPU of rank 0 is out of memory (CUDA out of memory)"
    assert raised.value.section == "learner"


def test_a_gpu_without_memory_in_sft_is_told_too_and_halves_change_no_gradient(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [_spec(spec, tmp_path / name, phases=(Phase.SFT,)) for name in ("whole", "halves")]
    for run, tokens in zip(runs, (160, 40), strict=True):
        _run(run.with_micro_batches({"sft": tokens}))
    whole, halves = (load_file(run.checkpoints_dir / "sft" / "model.safetensors") for run in runs)
    for name, tensor in whole.items():
        torch.testing.assert_close(halves[name], tensor, atol=2e-4, rtol=1e-3, msg=name)

    def step(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(SftLearner, "step", step)
    with pytest.raises(OutOfGpuMemoryError) as raised:
        _run(_spec(spec, tmp_path / "full", phases=(Phase.SFT,)))
    assert str(raised.value) == "sft, step 0: the GPU of rank 0 is out of memory (CUDA out of memory)"
    assert raised.value.section == "sft"


def test_too_many_skipped_rounds_in_a_row_end_the_run(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "update", _failing_at(0, 1))
    small = _spec(spec, tmp_path / "run", phases=(Phase.RL,), learner=_learner(max_skipped_rounds=1))
    with pytest.raises(FloatingPointError, match=r"round 1: the loss is nan\. Its batch is in .*round-000001"):
        _run(small)


class _Samplers(LocalRun):
    """Asserts that the learner is offloaded whenever samplers run."""

    num_turns = 0

    def watch(self, context: RunContext) -> None:
        self._context = context

    def _score(self, work_unit: WorkUnit, weights_id: WeightsId) -> ScoredWorkUnit:
        held = [*self._context.policy.tensors(), *self._context.learner_tensors()]
        assert {local_part(tensor).untyped_storage().nbytes() for tensor in held} == {0}
        self.num_turns += 1
        return super()._score(work_unit, weights_id)


@pytest.mark.parametrize("lora", LORAS)
def test_a_learner_that_sleeps_while_samplers_work_trains_as_one_that_does_not(
    spec: RunSpec, tmp_path: Path, lora: str
) -> None:
    model = ModelSection(lora=LORAS[lora])
    alone, sharing = (_spec(spec, tmp_path / name, model=model) for name in ("alone", "sharing"))
    sharing = sharing.model_copy(update={"gpus": GpuSection(colocate=True)})
    expected, samplers = _run(alone), _Samplers(sharing)
    run = TrainingRun(sharing, samplers, Pulse(), Ranks(), _ticking(0.01))
    samplers.watch(run._context)
    samplers.loses_next = 1
    run.run()
    assert samplers.num_turns > 10
    # With colocation, evaluations do not run in the background, and their results come earlier.
    shared, told = (_without_memory(run.events) for run in (samplers, expected))
    for is_evaluation in (True, False):
        assert [event for event in shared if (event["event"] == "evaluation") is is_evaluation] == [
            event for event in told if (event["event"] == "evaluation") is is_evaluation
        ]
    for name in facts(alone):
        assert _files(sharing, name) == _files(alone, name), name


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [
        # With an adapter trained on the policy, on 4-bit weights where these are supported.
        ({"algorithm": "opdlm", "estimator": {"name": "block_states"}, "num_minibatches": 1}, [*LORAS][-1]),
        ({"algorithm": "d-opsd", "estimator": {"name": "step_states"}, "filters": {"first_correct": False}}, "whole"),
        ({"algorithm": "d-opsd", "estimator": {"name": "step_states"}, "filters": {"first_correct": False}}, "adapter"),
    ],
)
def test_a_teacher_is_what_the_run_started_from_after_a_stop_too(
    algorithm: dict[str, object], lora: str, spec: RunSpec, tmp_path: Path
) -> None:
    changes = {
        "phases": (Phase.SFT, Phase.RL),
        "learner": _learner(**algorithm, num_rounds=2),
        "model": ModelSection(lora=LORAS[lora]),
        "rollout": spec.rollout.model_copy(
            update={"sampling": spec.rollout.sampling.model_copy(update={"block_length": 4})}
        ),
        "sft": SftConfig(num_labels=10, num_steps=2, batch_size=8, lr=3e-3),
        "evaluation": EvaluationConfig(num_problems=2),
    }
    whole, halved = (_spec(spec, tmp_path / name, **changes) for name in ("whole", "halved"))
    divergences = [event["teacher_divergence"] for event in _events(_run(whole), "round")]
    assert min(divergences) > 0
    _run(halved, Pulse("round 0: training"))
    rest = _run(halved)
    assert [event["teacher_divergence"] for event in _events(rest, "round")] == divergences[1:]
    assert _files(whole, "rl-000002") == _files(halved, "rl-000002")


def test_the_reference_is_the_policy_of_a_due_round_that_trained_on_nothing_too(policy: Transformer) -> None:
    learner = Learner(ShardedPolicy(policy, None), _learner(reference_sync_rounds=2))
    assert learner.reference is not None
    update = RoundUpdate(cast(RunContext, None), learner)
    with torch.no_grad():
        policy.head.weight.add_(1.0)
    for round_index, is_synced in ((0, False), (1, True)):
        assert update.run(None, round_index) == {"num_trained_completions": 0.0}
        now = learner.reference.full_weights()["head.weight"]
        assert torch.equal(now, policy.head.weight.detach()) == is_synced


def test_the_log_says_how_long_a_large_checkpoint_took_to_load(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small checkpoint is not logged."""
    begun = spec.model_copy(update={"phases": ()})
    assert _events(_run(begun), "loaded") == []
    num_bytes = weight_bytes(spec.initial_checkpoint)
    monkeypatch.setattr("actors.training.context._LARGE_BYTES", num_bytes)
    (loaded,) = _events(_run(begun), "loaded")
    assert (loaded["path"], loaded["num_bytes"]) == ("checkpoints/initial", num_bytes)
    assert min(loaded["check_s"], loaded["load_s"]) > 0


def test_a_learner_says_how_far_the_loading_of_a_checkpoint_is(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()

    class Listening(Pulse):
        @property
        def doing(self) -> str:
            return said[-1]

        @doing.setter
        def doing(self, doing: str) -> None:
            said.append(doing)

    monkeypatch.setattr("learner.model.storage.throughput._EVERY_S", 0.0)
    _run(spec.model_copy(update={"phases": ()}), Listening())
    begun = list(dict.fromkeys(what.partition(":")[0] for what in said))
    assert begun[:3] == ["loading a checkpoint", "checking initial", "loading initial"]
    assert any(what.endswith("GB/s") for what in said)


def test_samples_in_the_midst_of_sft_are_recorded_and_change_nothing(spec: RunSpec, tmp_path: Path) -> None:
    shown = _spec(spec, tmp_path / "shown", phases=(Phase.SFT,))
    sft = shown.sft.model_copy(update={"num_samples": 0})
    plain = _spec(spec, tmp_path / "plain", phases=(Phase.SFT,), sft=sft)
    assert not _events(_run(plain), "sft_samples")
    found = _events(_run(shown), "sft_samples")
    assert [event["step"] for event in found] == [0, 2, 4, 6]
    prompts = [[sample["prompt"] for sample in event["samples"]] for event in found]
    assert prompts == [prompts[0]] * 4
    assert len(set(prompts[0])) == 2
    assert found[0]["samples"] != found[-1]["samples"], "they are of the policy as it stands"
    assert _files(plain, "sft") == _files(shown, "sft")
