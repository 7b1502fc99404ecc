"""Training context of one rank, shared by the stages: policy, position, checkpoints, publication."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from actors.checkpoints import writing
from actors.checkpoints.selection import Position
from actors.checkpoints.writing import Checkpointer, ResumableLearner
from actors.messages import Next, ScoredWorkUnit, WeightsId
from actors.resources import OBJECT_STORE
from actors.run_log import CHECKPOINTS
from actors.spec import Phase, RunSpec
from actors.training import evaluation, publication
from actors.training.evaluation import Evaluator
from actors.training.limits import Decision, Pulse, agreed_decision
from actors.training.publication import Publisher
from actors.training.shards import TransferFormat
from actors.training.starting import agreed_checkpoint, base_of, load_sharded, start_of, verified_weights
from learner.model.adapter import Adapter, read_chain
from learner.model.checkpoint_files import ADAPTER, checkpoint_chain, verify_checkpoint, weight_bytes
from learner.model.storage.weights import StoredWeights
from learner.parallel.consensus import Ranks
from learner.parallel.offload import offloaded

_LARGE_BYTES = 1_000_000_000
LAG_TIMEOUT_S = 600.0
"""Timeout for ranks that lag behind the first one."""


class Client(publication.PublicationClient, evaluation.EvaluationClient, writing.CheckpointClient, Protocol):
    """Interface of rank 0 to the rest of the run; implemented by `actors/training/run_client.py`."""

    def learner_started(self, checkpoint: str, position: Mapping[str, Any]) -> None: ...
    def stopped(self, position: Mapping[str, Any]) -> None: ...
    def next_batch(self, round_index: int, weights_id: WeightsId, label: str) -> tuple[Next, list[ScoredWorkUnit]]: ...
    def published(
        self, round_index: int, weights_id: WeightsId, values: Mapping[str, Any], work_units: list[ScoredWorkUnit]
    ) -> None: ...
    def report_round(self) -> None: ...


class RunContext:
    """State of a run on one rank, in every stage."""

    def __init__(self, spec: RunSpec, client: Client, pulse: Pulse, ranks: Ranks, clock: Callable[[], float]) -> None:
        """Load the newest checkpoint of the run directory, which is the initial one in a fresh run."""
        self.spec, self.client, self.pulse, self.ranks, self.clock = spec, client, pulse, ranks, clock
        pulse.doing = "loading a checkpoint"
        began = time.monotonic()
        self.found = agreed_checkpoint(spec, ranks, self._say)
        """The checkpoint that the run starts or resumes from."""
        self.position = self.found.position
        """Current progress of the run."""
        self.learner: ResumableLearner | None = None
        """The current stage's learner, whose state is in checkpoints; None between stages."""
        self.learner_tensors: Callable[[], Iterable[Tensor]] = tuple
        """Returns the tensors that the learner of the rounds holds besides the policy."""
        checked = time.monotonic()
        self.policy = load_sharded(spec, self.found.directory, self.position.phase, self._say)
        self.loading = {"check_s": checked - began, "load_s": time.monotonic() - checked}
        """Seconds to verify the checkpoint's files, and to load them."""
        transfer_format = TransferFormat(
            dtype=spec.rollout.engine.torch_dtype, stays_on_device=spec.weight_transport != OBJECT_STORE
        )
        self.publisher = Publisher(self.policy, ranks, client, self._samplers_turn, transfer_format)
        self.publisher.base = base_of(self.position.phase, spec, ranks)
        self.evaluator = Evaluator(spec, ranks, self.publisher, client)
        self.checkpointer = Checkpointer(spec, self.policy, ranks, client, clock)

    def _say(self, what: str) -> None:
        self.pulse.doing = what

    def record_loading(self) -> None:
        """Log how long a large checkpoint took to load."""
        directory = self.found.directory
        num_bytes = weight_bytes(checkpoint_chain(directory)[-1])
        if num_bytes >= _LARGE_BYTES:
            self.record("loaded", path=f"{CHECKPOINTS}/{directory.name}", num_bytes=num_bytes, **self.loading)

    def resumes(self, phase: Phase) -> bool:
        """Return whether the run resumes within this stage (SFT or the control)."""
        return self.position.phase is phase and not self.position.is_published

    def start_weights(self, phase: Phase) -> StoredWeights:
        """Verify and open the weights that a stage starts from. Raises ValueError if their files are damaged."""
        return verified_weights(start_of(phase, self.spec, self.ranks))

    def begin_adapter(self, phase: Phase) -> None:
        """Begin a stage with a fresh adapter, on top of the adapters of earlier stages. A collective.

        Raises ValueError if the files of what it starts from are damaged.
        """
        start = start_of(phase, self.spec, self.ranks)
        if (start / ADAPTER).is_file():
            verify_checkpoint(start, [ADAPTER])
        self.policy.reset_adapter(read_chain(start).combined, self.spec.lora_of(phase))
        self.publisher.base = base_of(phase, self.spec, self.ranks)

    def decide(self, seconds: Callable[[], float]) -> Decision:
        """Agree on what all ranks do next; `seconds` returns the stage's time by rank 0's clock. A collective."""
        return agreed_decision(self.ranks, self.pulse, seconds, self.checkpointer.is_due)

    def record(self, event: str, **values: Any) -> None:
        """Append to the run log, once for all ranks."""
        if self.ranks.rank == 0:
            self.client.record(event, values)

    def publish(self, digest_override: str | None = None) -> None:
        """Publish the current policy to the samplers and the service; `digest_override` as in `Publisher.publish`."""
        position = self.position
        self.publisher.publish(position.policy_version, position.phase, position.round, digest_override)

    def evaluate(self, *, is_new: bool = True) -> None:
        """Evaluate the version that was published last; see `Evaluator.evaluate`."""
        self.pulse.doing = f"waiting for the evaluation of version {self.position.policy_version}"
        self.evaluator.evaluate(self.position, is_new=is_new)

    def evaluate_in_background(self) -> None:
        """Evaluate the version in the background of the next round; with `gpus.colocate`, at once.

        A checkpoint of the version must have been written.
        """
        if self.spec.gpus.colocate:
            self.evaluate()
        else:
            self.evaluator.begin(self.position)

    def collect_evaluation(self) -> None:
        """Wait for the background evaluation, if there is one."""
        if (background := self.evaluator.background) is not None:
            self.pulse.doing = f"waiting for the evaluation of version {background.position.policy_version}"
            self.evaluator.collect()

    def save(self) -> None:
        """Write a checkpoint of the current position: the policy's weights, or under LoRA its adapter."""
        self.pulse.doing = "writing a checkpoint"
        position = self.position
        digest = self.publisher.digest if position.is_published else None
        is_under_way = self.learner is not None and position.round != self.spec.learner.num_rounds
        may_fail = is_under_way or not position.is_published
        self.checkpointer.write(position, digest, self.learner, self._adapter(), may_fail=may_fail)

    def finish(self, position: Position) -> None:
        """End a stage at a position: publish, checkpoint and evaluate it."""
        self.position = position
        self.publish()
        self.save()
        self.evaluate()

    @contextmanager
    def _samplers_turn(self) -> Iterator[None]:
        """Offload the learner within the block, so that samplers can use the GPUs that they share with it. A
        collective."""
        if not self.spec.gpus.colocate:
            yield
            return
        with offloaded(chain(self.policy.tensors(), self.learner_tensors()), self.policy.device):
            self.policy.barrier("the samplers' turn", LAG_TIMEOUT_S)
            yield

    def _adapter(self) -> Adapter | None:
        """Gather the current stage's adapter, with its matrices on rank 0; None without LoRA. A collective."""
        lora, base = self.policy.lora, self.publisher.base
        if base is None:
            return None
        return Adapter(
            rank=lora.rank,
            alpha=lora.alpha,
            base=base.checkpoint,
            base_digest=base.digest,
            matrices=self.policy.adapter_on_rank_0(),
            base_weights=lora.base_weights,
        )
