"""A run in one process without Ray: coordinator, samplers and weight store, as rank 0 calls them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
import torch

from actors.checkpoints.best import Evaluations
from actors.grader import GraderWorker
from actors.messages import Next, ScoredWorkUnit, WeightsId, WorkUnit
from actors.plan import RunPlan
from actors.run_log import VALIDATION
from actors.sampler import SamplerWorker
from actors.spec import Phase, RunSpec
from actors.weights.fetching import Reader, StoreReader
from actors.weights.store import Manifest, WeightStore
from actors.weights.tensors import put, verify
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from tests.actors.offered import Offers

_TIMEOUT_S = 60.0


class Handle:
    """A fake Ray handle of an actor in this process."""

    def __init__(self, actor: Callable[[], Any]) -> None:
        """`actor` returns the current actor, which may change after a restart."""
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor(), name))


@contextmanager
def in_process(**actors: Handle) -> Iterator[None]:
    """Replace Ray's calls within one process: `put` returns the object itself, and calls are synchronous."""
    with (
        patch.object(ray, "put", lambda value: value),
        patch.object(ray, "get", lambda reference, timeout=None: reference),
        patch.object(ray, "get_actor", lambda name, namespace: actors[name]),
    ):
        yield


class LocalRun:
    """The run's samplers in rotation, a grader, a weight store and a log."""

    def __init__(self, spec: RunSpec) -> None:
        self.events: list[dict[str, Any]] = []
        self.published_digests: list[tuple[int, str]] = []
        self.loses_next = 0
        """The number of upcoming requests that find the store without its version."""
        self._spec = spec
        self._plan = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))
        self._grader = GraderWorker(spec.task, spec.reward, spec.initial_checkpoint)
        self._store = WeightStore(spec.learner.max_staleness + 2)
        self.store = Handle(lambda: self._store)
        """A handle of the weight store, which is replaced when it is lost."""
        self._samplers = cycle([self._sampler() for _ in range(spec.rollout.num_samplers)])
        self._offers: Offers | None = None
        self._beside: tuple[WeightsId | None, str, dict[str, int]] = None, "", {}
        self.sent_bytes: list[int] = []
        """The size of each published version."""

    def _sampler(self) -> SamplerWorker:
        spec = self._spec
        device, engine, gpus = spec.device, spec.rollout.engine, spec.gpus
        return SamplerWorker(
            spec.initial_checkpoint, self.reader, device, engine, gpus.sampler, is_offloaded=gpus.colocate
        )

    def reader(self) -> Reader:
        """Return the reader with which samplers load weights from the store."""
        return _LocalReader(StoreReader(self.store, _TIMEOUT_S))

    def learner_started(self, checkpoint: str, position: Mapping[str, Any]) -> None:
        self.record("started", {"checkpoint": checkpoint, "position": position})

    def record(self, event: str, values: Mapping[str, Any]) -> None:
        self.events.append(json.loads(json.dumps({"event": event, **values})))

    def stopped(self, position: Mapping[str, Any]) -> None:
        self.record("stopped", position)

    def offer(self, key: str, rank: int, shards: Mapping[str, torch.Tensor]) -> None:
        assert self._offers is None, "one offer at a time"
        self._offers = Offers()
        self._offers.offer(key, shards)

    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool:
        assert self._offers is not None
        self.publish(manifest, self._offers.taken(manifest, key, num_ranks))
        return True

    def withdraw(self) -> None:
        self._offers = None

    def publish(self, manifest: Manifest, weights: Mapping[str, torch.Tensor]) -> None:
        verify(manifest, weights)
        self.sent_bytes.append(sum(tensor.nbytes for tensor in weights.values()))
        with in_process():
            self._store.publish(manifest, put(weights))
        self.published_digests.append((manifest.version, manifest.digest))

    def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        assert (weights_id.version, weights_id.digest) == self.published_digests[-1]

    def next_batch(self, round_index: int, weights_id: WeightsId, label: str = "") -> tuple[Next, list[ScoredWorkUnit]]:
        if self._has_lost():
            return Next.PUBLISH, []
        if label:
            self._beside = weights_id, label, self._evaluated(weights_id, label)
        count = range(self._plan.work_units_per_round)
        return Next.CONTINUE, [
            self._score(self._plan.round_work_unit(round_index, index), weights_id) for index in count
        ]

    def published(
        self, round_index: int, weights_id: WeightsId, values: Mapping[str, Any], work_units: list[ScoredWorkUnit]
    ) -> None:
        rewards = [grade.reward for scored in work_units for grade in scored.summary.grades]
        self.record("round", {"round": round_index, "policy_version": weights_id.version, "rewards": rewards, **values})

    def report_round(self) -> None:
        pass

    def evaluate(self, weights_id: WeightsId, label: str, round_index: int, *, is_new: bool) -> Next:
        if self._has_lost():
            return Next.PUBLISH
        counts = self._beside[2] if self._beside[:2] == (weights_id, label) else self._evaluated(weights_id, label)
        self.record("evaluation", {"label": label, "policy_version": weights_id.version, "round": round_index} | counts)
        return Next.CONTINUE

    def _evaluated(self, weights_id: WeightsId, label: str) -> dict[str, int]:
        asked = self._plan.validation if label == VALIDATION else self._plan.heldout
        params = self._spec.evaluation.params(self._spec.rollout.sampling)[0]
        work_units = self._plan.evaluation_work_units(
            params, load_config(self._spec.initial_checkpoint), problems=asked
        )
        grades = [grade for work_unit in work_units for grade in self._score(work_unit, weights_id).summary.grades]
        return {"num_correct": sum(grade.correct for grade in grades), "num_problems": len(grades)}

    def versions_to_keep(self) -> list[int]:
        best = Evaluations(self.events).best()
        return [] if best is None else [best]

    def _has_lost(self) -> bool:
        self.loses_next -= 1
        if self.loses_next >= 0:
            self._store = WeightStore(self._spec.learner.max_staleness + 2)
        return self.loses_next >= 0

    def _score(self, work_unit: WorkUnit, weights_id: WeightsId) -> ScoredWorkUnit:
        assert (weights_id.version, weights_id.digest) == self.published_digests[-1]
        sampler = next(self._samplers)
        completions, _ = sampler.generate(weights_id, work_unit)
        if self._spec.gpus.colocate:
            sampler.offload()
        return self._grader.grade(work_unit, list(completions))[0]


class _LocalReader:
    """A reader of the weight store in this process."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        def read(*arguments: Any) -> Any:
            with in_process():
                return getattr(self._reader, name)(*arguments)

        return read


class Pulse:
    """A heartbeat without a listener, which may request a stop."""

    def __init__(self, stop_when: str = "") -> None:
        self._doing, self._stop_when = "", stop_when
        self.must_stop = False
        """Set once the rank reports the activity `stop_when`."""

    @property
    def doing(self) -> str:
        return self._doing

    @doing.setter
    def doing(self, doing: str) -> None:
        self._doing = doing
        self.must_stop = self.must_stop or (bool(self._stop_when) and doing.startswith(self._stop_when))


def facts(spec: RunSpec) -> dict[str, Any]:
    """Return the training state stored in each checkpoint, by checkpoint name."""
    found = sorted(spec.checkpoints_dir.glob("[!.]*/"))
    return {path.name: json.loads((path / "trainer_state.json").read_text()) for path in found}
