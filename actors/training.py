"""The training run on one learner worker: the stages, in order.

Every rank runs the same program on the same batches. Rank 0 alone talks to the log and the registry; what all ranks
must agree on (a time limit) is decided by rank 0 and summed over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.checkpoints import FoundCheckpoint, Position, newest_checkpoint, to_go_on
from actors.collate import collate
from actors.plan import RunPlan
from actors.run_log import FAILED_BATCHES
from actors.sft_data import SftData, load_sft_data
from actors.spec import Phase, RunSpec, sampler_facts
from actors.weights import make_manifest
from learner.batch import RolloutBatch
from learner.hardware import forget_peak_memory, peak_flop_per_s, peak_memory_bytes
from learner.learner import Learner
from learner.model.adapter import ADAPTER, Adapter, read_adapter
from learner.model.checkpoint import LEARNER_STATE, load_policy, save_checkpoint, verify_checkpoint
from learner.model.tokenizer import ChatTokenizer
from learner.model.transformer import Transformer
from learner.sft_learner import SftLearner, evaluation_loss
from learner.sharding import ShardedPolicy, make_mesh

_CALL_TIMEOUT_S = 600.0
_LAG_TIMEOUT_S = 600.0
_LOG_EVERY_S = 1.0


class TrainingRun:
    """One rank's side of a run."""

    def __init__(self, spec: RunSpec, coordinator: Any, store: Any) -> None:
        """Load the newest checkpoint of the run directory, which is the initial one in a fresh run."""
        self._spec, self._coordinator, self._store = spec, coordinator, store
        torch.set_num_threads(1)
        self._found = _to_go_on_from(spec)
        self._position = self._found.position
        self._published_digest: str | None = None
        mesh = make_mesh(spec.device)
        device = torch.device(spec.device, torch.cuda.current_device()) if spec.device == "cuda" else "cpu"
        adapter, model = self._found_policy()
        if spec.lora.base_weights == "full":
            model = model.to(device)
        # Else it may be too large for a GPU: what the 4 bits leave of it goes there block by block.
        self._policy = ShardedPolicy(model, mesh, spec.sharding, lora=spec.lora, seed=spec.seed)
        if adapter is not None:
            self._policy.load_adapter(adapter.matrices)

    def _found_policy(self) -> tuple[Adapter | None, Transformer]:
        """The checkpoint's policy: whole, or for 4 bits as the adapter and what it stands on.

        Rounded again with its adapter merged, it would not be the policy that the interrupted run had.
        """
        found = self._found.directory
        if self._spec.lora.base_weights == "full" or not (found / ADAPTER).is_file():
            return None, load_policy(found)
        adapter = read_adapter(found)
        base = self._spec.checkpoints_dir / adapter.base
        verify_checkpoint(base)
        return adapter, load_policy(base)

    def run(self) -> None:
        """The stages that the run asks for and that the checkpoint has not seen."""
        phases, position = self._spec.phases, self._position
        for what in self._found.passed_over:
            self._record("failure", what=what, attempt=1)
        self._on_rank_0(lambda: self._coordinator.learner_started.remote(self._found.directory.name))
        # Samplers and service may be new: the store must have what they will be asked for.
        self._publish(position.policy_version, position.phase, position.round)
        if self._label() != "round" or self._is_evaluation_due():
            self._evaluate(self._label(), is_new=False)
        if Phase.SFT in phases and position.phase is Phase.UNTRAINED:
            self._sft()
        if Phase.RL in phases and self._position.round < self._spec.learner.num_rounds:
            self._rounds()
        if Phase.CONTROL in phases and self._position.phase is not Phase.CONTROL:
            self._control()

    # Stage 1.

    def _sft(self) -> None:
        data = self._sft_data()
        self._record("sft_data", **data.facts)
        seconds, num_steps = self._sft_steps(data, Phase.SFT, self._spec.sft.num_steps)
        self._record("phase_end", phase=Phase.SFT, seconds=seconds, num_steps=num_steps)
        self._finish(Position(phase=Phase.SFT, round=0, policy_version=1, rl_seconds=0.0))

    def _sft_data(self) -> SftData:
        tokenizer = ChatTokenizer(self._spec.initial_checkpoint)
        return load_sft_data(self._spec, RunPlan(self._spec, tokenizer), tokenizer)

    def _sft_steps(
        self, data: SftData, phase: Phase, num_steps: int, limit_s: float = 0.0, first_step: int = 0
    ) -> tuple[float, int]:
        """`num_steps` optimizer steps, or as many as fit into `limit_s` seconds. Returns seconds and steps.

        Evaluations do not count into the seconds.
        """
        sft = self._spec.sft
        learner = SftLearner(self._policy, sft, data.train, self._spec.seed)
        self._record("phase", phase=phase, num_steps=num_steps)
        self._evaluate_loss(data, phase, 0)
        began = logged = time.monotonic()
        step = evaluated_step = logged_tokens = 0
        while True:
            progress = self._agreed(time.monotonic() - began) / limit_s if limit_s else step / max(1, num_steps)
            if progress >= 1 or (not limit_s and not num_steps):
                break
            metrics = learner.step(first_step + step, sft.lr_at(step, progress))
            step, now = step + 1, time.monotonic()
            if now - logged > _LOG_EVERY_S or step == num_steps:
                rate = round((learner.num_trained - logged_tokens) / (now - logged), 1)
                self._record("sft", phase=phase, step=step, **metrics, tokens_per_s=rate)
                logged, logged_tokens = now, learner.num_trained
            if sft.eval_every_steps and step % sft.eval_every_steps == 0:
                paused_s = self._evaluate_loss(data, phase, step)
                began, logged, evaluated_step = began + paused_s, logged + paused_s, step
        seconds = round(time.monotonic() - began, 3)
        if step != evaluated_step:
            self._evaluate_loss(data, phase, step)
        return seconds, step

    def _evaluate_loss(self, data: SftData, phase: Phase, step: int) -> float:
        """The loss on the held-out examples, recorded. Returns the seconds that it took."""
        began = time.monotonic()
        if data.held_out is not None:
            evaluated = evaluation_loss(self._policy, data.held_out, self._spec.sft.batch_size)
            self._record("sft_eval", phase=phase, step=step, **asdict(evaluated))
        return time.monotonic() - began

    # Stage 2.

    def _rounds(self) -> None:
        """Pull a round, improve the policy on it, publish the next version."""
        spec, first = self._spec, self._position.round
        if spec.lora.rank:
            # An adapter of its own: without it the policy is the KL reference.
            self._policy.load_full_weights(self._start_of_rounds())
        if spec.lora.base_weights == "nf4" and self._position.phase is Phase.SFT:
            # What SFT published is not rounded yet: the rounds are of completions of the policy that they start from.
            self._position = replace(self._position, policy_version=self._position.policy_version + 1)
            self._publish(self._position.policy_version, Phase.SFT, 0)
        learner = Learner(self._policy, spec.learner, sampler_facts(spec.rollout.sampling))
        self._restore(learner)
        self._record("phase", phase=Phase.RL, num_steps=spec.learner.num_rounds)
        self._on_rank_0(lambda: self._coordinator.start_rounds.remote(first, self._position.policy_version))
        self._agreed(0.0)  # No rank pulls before rank 0 has started the rounds.
        for round_index in range(first, spec.learner.num_rounds):
            self._round(learner, round_index)
            self._after_round(learner)
        seconds = self._position.rl_seconds
        self._record("phase_end", phase=Phase.RL, seconds=seconds, num_steps=spec.learner.num_rounds)
        self._save(learner)
        self._evaluate(self._label())

    def _round(self, learner: Learner, round_index: int) -> None:
        began = time.monotonic()
        gen_length, eos_id = self._spec.rollout.sampling.gen_length, self._policy.config.eos_token_id
        batch = collate(self._pull(round_index), gen_length, eos_id)
        sampled = time.monotonic()
        metrics = {"num_trained_completions": 0.0} if batch is None else self._updated(learner, batch, round_index)
        trained = time.monotonic()
        version = self._position.policy_version + 1
        self._publish(version, Phase.RL, round_index + 1)
        published = time.monotonic()
        seconds = {"sampling_s": sampled - began, "training_s": trained - sampled, "publish_s": published - trained}
        values = metrics | {name: round(value, 4) for name, value in seconds.items()}
        self._on_rank_0(lambda: self._coordinator.published.remote(round_index, version, values))
        rl_seconds = round(self._position.rl_seconds + time.monotonic() - began, 3)
        self._position = Position(phase=Phase.RL, round=round_index + 1, policy_version=version, rl_seconds=rl_seconds)

    def _updated(self, learner: Learner, batch: RolloutBatch, round_index: int) -> dict[str, float]:
        self._policy.wait_for_all(f"round {round_index}", _LAG_TIMEOUT_S)
        forget_peak_memory(self._policy.device)
        began = time.monotonic()
        try:
            metrics = learner.update(batch, round_index)
        except FloatingPointError as error:
            path = self._spec.run_dir / FAILED_BATCHES / f"round-{round_index:06d}.safetensors"
            if self._policy.rank == 0:
                path.parent.mkdir(exist_ok=True)
                save_file({field.name: getattr(batch, field.name) for field in fields(batch)}, path)
            raise FloatingPointError(f"round {round_index}: {error}. Its batch is in {path}") from error
        return metrics | self._use_of_devices(learner.model_flops / (time.monotonic() - began))

    def _use_of_devices(self, flop_per_s: float) -> dict[str, float]:
        """How much of its devices an update used: arithmetic of all workers, memory of the one that took most."""
        device = self._policy.device
        memory = self._policy.max_over_ranks(torch.tensor([peak_memory_bytes(device)])).item()
        used = {"flop_per_s": flop_per_s, "peak_memory_bytes": int(memory)}
        peak = peak_flop_per_s(device)
        return used if peak is None else used | {"mfu": flop_per_s / (peak * self._policy.world_size)}

    def _after_round(self, learner: Learner) -> None:
        """Evaluate and checkpoint where the recipe says so; the last round's are the stage's own."""
        spec, done = self._spec, self._position.round
        if done == spec.learner.num_rounds:
            return
        if spec.checkpoint_every_rounds and done % spec.checkpoint_every_rounds == 0:
            self._save(learner)
        if self._is_evaluation_due():
            self._evaluate(self._label())

    def _is_evaluation_due(self) -> bool:
        every = self._spec.evaluation.every_rounds
        return bool(every) and self._position.round % every == 0

    def _restore(self, learner: Learner) -> None:
        """Go on with the adapter, the optimizer and the reference that an interrupted run of rounds had."""
        if self._position.phase is not Phase.RL:
            return
        if learner.reference is not None:
            learner.reference.load_full_weights(self._start_of_rounds())
        if self._spec.lora.rank:
            self._policy.load_adapter(read_adapter(self._found.directory).matrices)
        learner.load_full_state(load_file(self._found.directory / LEARNER_STATE))

    def _start_of_rounds(self) -> dict[str, Tensor]:
        """The weights that the rounds and the control start from. Raises ValueError when their files are damaged."""
        self._agreed(0.0)  # Rank 0 may still be writing it.
        verify_checkpoint(self._started_from)
        return dict(load_policy(self._started_from).named_parameters())

    @property
    def _started_from(self) -> Path:
        """The checkpoint that the rounds and the control start from: the SFT stage's, or the initial one."""
        directory = self._spec.checkpoints_dir / _checkpoint_name(Phase.SFT, 0)
        return directory if directory.is_dir() else self._spec.initial_checkpoint

    def _pull(self, round_index: int) -> list[Any]:
        references = ray.get(self._coordinator.next_batch.remote(round_index))
        return ray.get(references, timeout=_CALL_TIMEOUT_S)

    # The control.

    def _control(self) -> None:
        """More SFT on the same labels from the SFT checkpoint, for the seconds that the rounds took."""
        spec, position = self._spec, self._position
        self._policy.load_full_weights(self._start_of_rounds())
        limit_s = 0.0 if spec.control_steps else position.rl_seconds
        # Its steps go on counting where SFT's ended: other orders of the labels, other masks.
        seconds, num_steps = self._sft_steps(
            self._sft_data(), Phase.CONTROL, spec.control_steps, limit_s, spec.sft.num_steps
        )
        self._record("phase_end", phase=Phase.CONTROL, seconds=seconds, num_steps=num_steps)
        end = replace(position, phase=Phase.CONTROL, policy_version=position.policy_version + 1)
        self._finish(end)

    # What every stage does.

    def _finish(self, position: Position) -> None:
        """Publish, checkpoint and evaluate the end of a stage."""
        self._position = position
        self._publish(position.policy_version, position.phase, position.round)
        self._save()
        self._evaluate(self._label())

    def _publish(self, version: int, phase: Phase, round_index: int) -> None:
        """Hand the weights to the store; the service hears of all versions but the control's."""
        weights = self._policy.weights_on_rank_0()
        if self._policy.rank:
            return
        manifest = make_manifest(version, weights)
        self._published_digest = manifest.digest
        self._on_rank_0(lambda: self._store.publish.remote(manifest, ray.put(weights)))
        if phase is not Phase.CONTROL:
            self._on_rank_0(lambda: self._coordinator.announce.remote(version, phase, round_index, manifest.digest))

    def _save(self, learner: Learner | None = None) -> None:
        """A checkpoint of what was published last."""
        weights, position, adapter = self._policy.weights_on_rank_0(), self._position, self._adapter()
        state = None if learner is None else learner.full_state()
        if self._policy.rank:
            return
        directory = self._spec.checkpoints_dir / _checkpoint_name(position.phase, position.round)
        save_checkpoint(
            directory,
            self._policy.config,
            weights,
            self._spec.initial_checkpoint,
            adapter=adapter,
            learner_state=state,
            trainer_state=asdict(replace(position, manifest_digest=self._published_digest)),
        )
        self._record(
            "checkpoint",
            path=str(directory.relative_to(self._spec.run_dir)),
            phase=position.phase,
            round=position.round,
            policy_version=position.policy_version,
        )

    def _adapter(self) -> Adapter | None:
        """The adapter of the stage under way; None without LoRA. A collective; its matrices are on rank 0."""
        lora = self._spec.lora
        if not lora.rank:
            return None
        base = self._spec.initial_checkpoint if self._position.phase is Phase.SFT else self._started_from
        return Adapter(rank=lora.rank, alpha=lora.alpha, base=base.name, matrices=self._policy.adapter_on_rank_0())

    def _label(self) -> str:
        """What an evaluation of the current position is called."""
        position, spec = self._position, self._spec
        if position.phase is Phase.UNTRAINED:
            return "untrained" if Phase.SFT in spec.phases else "start"
        is_between = position.phase is Phase.RL and position.round < spec.learner.num_rounds
        return "round" if is_between else str(position.phase)

    def _evaluate(self, label: str, *, is_new: bool = True) -> None:
        """Held-out accuracy; of a version that is not new, only where the interrupted run did not get to it.

        Without a limit of its own: the coordinator bounds every try of every portion.
        """
        position = self._position
        arguments = position.policy_version, label, position.round, is_new
        self._on_rank_0(lambda: self._coordinator.evaluate.remote(*arguments), timeout_s=None)

    def _record(self, event: str, **values: Any) -> None:
        self._on_rank_0(lambda: self._coordinator.record.remote(event, values))

    def _on_rank_0(self, call: Callable[[], Any], timeout_s: float | None = _CALL_TIMEOUT_S) -> None:
        if self._policy.rank == 0:
            ray.get(call(), timeout=timeout_s)

    def _agreed(self, seconds: float) -> float:
        """Rank 0's clock on every rank, so that all take the same number of steps."""
        return self._policy.sum_over_ranks(torch.tensor(seconds if self._policy.rank == 0 else 0.0)).item()


def _to_go_on_from(spec: RunSpec) -> FoundCheckpoint:
    """The newest checkpoint of a run directory. Raises ValueError when there is none, or none that is whole."""
    found = newest_checkpoint(spec.checkpoints_dir, to_go_on(spec.learner.num_rounds))
    if found is None:
        raise ValueError(f"{spec.checkpoints_dir} has no checkpoint")
    return found


def _checkpoint_name(phase: Phase, round_index: int) -> str:
    return f"{phase}-{round_index:06d}" if phase is Phase.RL else str(phase)
