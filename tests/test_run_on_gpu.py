"""A whole run in one process, without Ray, on a GPU or a simulated one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
import torch.distributed as dist

from actors.messages import ScoredWorkUnit, WeightsId, WorkUnit
from actors.plan import RunPlan
from actors.registry.records import PolicyVersion
from actors.resources import GpuSection
from actors.spec import Phase, RunSpec
from actors.training.context import RunContext
from actors.training.training import TrainingRun
from deploy.offline.item import Batch, Item
from deploy.offline.pool import PoolSettings, place_workers
from deploy.offline.worker import Worker, WorkerConfig
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.run_directory import create_run_dir, make_spec
from deploy.service.contract import Done, Job
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.on_ray.given_device import given_device
from deploy.service.source import Source
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import load_config
from learner.model.lora_config import LoraConfig
from learner.model.tokenizer import ChatTokenizer
from learner.parallel.consensus import Ranks
from learner.parallel.sharded_tensors import local_part
from tests.actors.local_run import LocalRun, Pulse, in_process
from tests.simulated.stand_in_gpu import stand_in_machine

_RECIPE: dict[str, Any] = {
    "name": "walk",
    "task": {"name": "sums"},
    "num_train_problems": 40,
    # A random policy solves nothing, but its completions differ in length.
    "reward": {"terms": {"brief": {"kind": "length_penalty", "buffer_tokens": 8}}},
    "model": {"d_model": 32, "num_layers": 2, "num_heads": 2, "mlp_hidden_size": 32},
    "sft": {"num_labels": 8, "num_steps": 6, "batch_size": 8, "lr": 2e-2},
    "rollout": {
        "num_samplers": 1,
        "batch_size": 16,
        "sampling": {"gen_length": 8, "block_length": 8, "num_denoise_steps": 4},
    },
    "learner": {
        "num_workers": 1,
        "num_rounds": 3,
        "groups_per_round": 2,
        "group_size": 4,
        "inner_updates": 1,
        "lr": 1e-3,
    },
    "evaluation": {"num_problems": 8, "every_rounds": 1},
    "control": {"enabled": False},
    "checkpoint_every_rounds": 1,
}
_APART = GpuSection(sampler=0.3, learner=0.4, engine=0.2)
_TURNS = GpuSection(sampler=0.5, learner=0.75, engine=0.2, colocate=True)
_ADAPTER = LoraConfig(rank=4, alpha=8.0)
# To torch's C++ the results of the stand-in are views.
_of_the_stand_in = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


class Served(LocalRun):
    """A run whose inference engine switches to each announced version and answers with it."""

    def __init__(self, spec: RunSpec, engine: EngineHost) -> None:
        super().__init__(spec)
        self.served: list[tuple[int, bool]] = []
        """The versions that answered, and whether their tokens equal the samplers'."""
        self._engine = engine

    def watch(self, context: RunContext) -> None:
        """Run samplers only while the learner has nothing on the GPU that they share."""
        self._learner = context

    def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        super().announce(weights_id, phase, round_index)
        announced = PolicyVersion(
            version=weights_id.version,
            round=round_index,
            phase=phase,
            num_correct=None,
            num_problems=None,
            checkpoint=None,
            weight_store="store",
            manifest_digest=weights_id.digest,
        )
        with in_process(store=self.store):
            self._engine.versions.adopt(announced)

    def _score(self, work_unit: WorkUnit, weights_id: WeightsId) -> ScoredWorkUnit:
        if self._spec.gpus.colocate:
            held = [*self._learner.policy.tensors(), *self._learner.learner_tensors()]
            assert {local_part(tensor).untyped_storage().nbytes() for tensor in held} == {0}
        scored = super()._score(work_unit, weights_id)
        if weights_id.version == self._engine.versions.policy.version:
            answered = asyncio.run(
                _answers(self._engine, Job(requests=dict(enumerate(work_unit.requests)), wanted="policy"))
            )
            sampled = [completion.token_ids.tolist() for completion in scored.completions]
            self.served.append((weights_id.version, answered == sampled))
        return scored


async def _answers(host: EngineHost, job: Job) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    async with aclosing(host.stream(job)) as stream:
        async for events in stream:
            found |= {event.choice: event.completion.token_ids.tolist() for event in events if isinstance(event, Done)}
    return [found[choice] for choice in range(len(job.requests))]


@contextmanager
def _machine(device: str, meeting: Path) -> Iterator[list[float] | None]:
    """Fake a learner group of one rank, as Ray Train makes it, and the actor context of an engine, on a simulated GPU
    if there is none."""
    given = SimpleNamespace(
        get_accelerator_ids=lambda: {"GPU": ["0"] if device == "cuda" else []},
        get_assigned_resources=lambda: {"GPU": 0.2},
        get_node_id=lambda: "node",
    )
    is_there = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if is_there else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
    try:
        with (
            nullcontext() if device == "cpu" or is_there else stand_in_machine() as shares,
            patch.object(ray, "get_runtime_context", lambda: given),
        ):
            yield shares
    finally:
        dist.destroy_process_group()


class Walk:
    """A run stopped after its first round and resumed, with an engine and a final evaluation."""

    def __init__(self, recipe: Recipe) -> None:
        self._spec = spec = make_spec(recipe, Stages.ALL)
        create_run_dir(recipe, spec, None).close()
        self.events: list[dict[str, Any]] = []
        self.served: list[tuple[int, bool]] = []
        self.taken: dict[str, int] = {}
        source = Source(directory=str(spec.run_dir), is_run=True, registry_url=None)
        versions = self._made("engine", lambda: source.versions(given_device()))
        engine = Engine(versions)
        try:
            for pulse in (Pulse("round 0"), Pulse()):
                run = self._made("samplers", lambda: Served(spec, EngineHost(versions, engine)))
                training = self._made("learner", partial(TrainingRun, spec, run, pulse, Ranks()))
                run.watch(training._context)
                training.run()
                self.events += run.events
                self.served += run.served
        finally:
            engine.close()
        self.num_swaps = versions.num_swaps
        self.evaluated = self._made("evaluation", lambda: self._evaluated(spec.checkpoints_dir / "rl-000003"))

    def _made(self, what: str, make: Callable[[], Any]) -> Any:
        """Create an object and record the GPU memory that it takes."""
        before = torch.cuda.memory_allocated()
        made = make()
        self.taken[what] = torch.cuda.memory_allocated() - before
        return made

    def of(self, event: str, *keys: str) -> list[Any]:
        """Return the run log's events of that name."""
        return [one[key] for one in self.events if one["event"] == event for key in keys]

    @property
    def num_parameters(self) -> int:
        """The number of parameters, without adapters."""
        return sum(tensor.numel() for tensor in load_policy(self._spec.initial_checkpoint).parameters())

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the last checkpoint."""
        return load_policy(self._spec.checkpoints_dir / "rl-000003").state_dict()

    def _evaluated(self, checkpoint: Path) -> tuple[Worker, list[str]]:
        """Run a worker of the pool on the held-out problems and read the grades of its answers."""
        plan = RunPlan(self._spec, ChatTokenizer(checkpoint))
        (work_unit,) = plan.evaluation_work_units(self._spec.rollout.sampling, load_config(checkpoint))
        batch = Batch(
            index=0,
            task=self._spec.task,
            items=tuple(
                Item(index=index, place=problem.problem_id, problem=problem, request=request)
                for index, (problem, request) in enumerate(zip(work_unit.problems, work_unit.requests, strict=True))
            ),
        )
        config = WorkerConfig(checkpoint=checkpoint, engine=self._spec.rollout.engine, device="", num_threads=1)
        wanted = PoolSettings(num_workers=1, device=self._spec.device)
        placed, _ = place_workers(config, wanted)
        worker = Worker(placed)
        return worker, [answer.generation for answer in worker.answer(batch).answers]


@pytest.fixture(autouse=True)
def _as_in_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch torch.distributed so that ranks gather by the name that every supported torch has."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.delattr(dist, "all_gather_single", raising=False)


def _walked(device: str, directory: Path, **changes: Any) -> tuple[Walk, list[float] | None]:
    directory.mkdir()
    recipe = Recipe.model_validate(_RECIPE | {"runs_dir": directory / "runs", "device": device} | changes)
    with _machine(device, directory / "meeting") as shares:
        return Walk(recipe), shares


def _assert_placed(walk: Walk, gpus: GpuSection, shares: list[float] | None, least_bytes: int) -> None:
    """Assert that each process had its share of the GPU and used it, and that each version was served as sampled."""
    if shares is not None:
        assert shares == [gpus.engine, gpus.sampler, gpus.learner, gpus.sampler, gpus.learner]
    for what, num_bytes in walk.taken.items():
        is_offloaded = what == "samplers" and gpus.colocate
        assert num_bytes == 0 if is_offloaded else num_bytes >= least_bytes, what
    assert walk.num_swaps == 4
    assert {version for version, _ in walk.served} == set(range(5))
    assert all(is_same for _, is_same in walk.served)


@_of_the_stand_in
@pytest.mark.parametrize(("gpus", "lora"), [(_APART, LoraConfig()), (_TURNS, _ADAPTER)], ids=["apart", "taking turns"])
def test_a_run_on_a_gpu_equals_the_run_on_the_cpu(gpus: GpuSection, lora: LoraConfig, tmp_path: Path) -> None:
    model = {**_RECIPE["model"], "lora": lora}
    here, _ = _walked("cpu", tmp_path / "cpu", model=model)
    there, shares = _walked("cuda", tmp_path / "cuda", model=model, gpus=gpus)
    assert not any(here.taken.values())
    _assert_placed(there, gpus, shares, 4 * here.num_parameters)
    assert there.of("checkpoint", "path") == here.of("checkpoint", "path")
    assert there.of("round", "rewards") == here.of("round", "rewards")
    assert len({reward for rewards in here.of("round", "rewards") for reward in rewards}) > 1, "there is an advantage"
    for event, keys in {"sft": ("loss", "grad_norm"), "round": ("loss", "grad_norm", "kl")}.items():
        # Only the last SFT steps: which others are logged depends on the time.
        count = len(keys) if event == "sft" else 0
        assert there.of(event, *keys)[-count:] == pytest.approx(here.of(event, *keys)[-count:], rel=1e-2, abs=1e-4)
    assert there.of("evaluation", "num_correct") == here.of("evaluation", "num_correct")
    assert there.evaluated[1] == here.evaluated[1]
    for name, tensor in here.weights().items():
        torch.testing.assert_close(there.weights()[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


@_of_the_stand_in
def test_a_run_in_half_precision_completes_every_stage(tmp_path: Path) -> None:
    """As for an adapter of a large model. The exact bits depend on the kernels, so that they are not compared."""
    walk, shares = _walked(
        "cuda",
        tmp_path / "cuda",
        gpus=_APART,
        model={**_RECIPE["model"], "lora": _ADAPTER},
        sharding={"compute_dtype": "bfloat16", "activation_checkpointing": True},
        rollout={**_RECIPE["rollout"], "engine": {"dtype": "bfloat16"}},
    )
    _assert_placed(walk, _APART, shares, 2 * walk.num_parameters)
    assert all(map(math.isfinite, walk.of("round", "loss")))
    assert walk.of("checkpoint", "path")[-1] == "checkpoints/rl-000003"
