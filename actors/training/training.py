"""The training run on one learner worker: the stages, in order.

Every rank runs the same program on the same batches. Rank 0 alone looks at a clock or at the list of checkpoints, and
talks to the rest of the run; what it finds out, the others hear from it (`learner/parallel/ranks.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.messages import Generation, Next, ScoredPortion
from actors.plan import RunPlan
from actors.run_log import FAILED_BATCHES
from actors.spec import Phase, RunSpec, sampler_facts
from actors.training.checkpointing import Checkpointer
from actors.training.checkpoints import FoundCheckpoint, Position, newest_checkpoint, to_go_on
from actors.training.collate import collate
from actors.training.sft_data import SftData, load_sft_data
from actors.weight_store import Manifest
from actors.weights import make_manifest
from learner.batch import RolloutBatch
from learner.hardware import forget_peak_memory, peak_flop_per_s, peak_memory_bytes
from learner.learner import Learner
from learner.model.adapter import ADAPTER, Adapter, read_adapter
from learner.model.checkpoint import LEARNER_STATE, load_policy, verify_checkpoint
from learner.model.tokenizer import ChatTokenizer
from learner.model.transformer import Transformer
from learner.parallel.ranks import Ranks
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.sft.learner import SftLearner, evaluation_loss

_LAG_TIMEOUT_S = 600.0
_LOG_EVERY_S = 1.0


class Client(Protocol):
    """What rank 0 asks of the rest of the run: `actors/training/run_client.py`."""

    def learner_started(self, checkpoint: str, position: Mapping[str, Any]) -> None: ...
    def record(self, event: str, values: Mapping[str, Any]) -> None: ...
    def publish(self, manifest: Manifest, weights: Mapping[str, Tensor]) -> None: ...
    def announce(self, generation: Generation, phase: Phase, round_index: int) -> None: ...
    def next_batch(self, round_index: int, generation: Generation) -> tuple[Next, list[ScoredPortion]]: ...
    def published(
        self, round_index: int, generation: Generation, values: Mapping[str, Any], portions: list[ScoredPortion]
    ) -> None: ...
    def evaluate(self, generation: Generation, label: str, round_index: int, *, is_new: bool) -> tuple[Next, bool]: ...
    def versions_to_keep(self) -> list[int]: ...


class Pulse(Protocol):
    """What a rank says it is at, and hears: `actors/training/run_client.py`'s `Heartbeat`."""

    doing: str
    must_stop: bool


class StopRequestedError(Exception):
    """The run is to stop here."""


class Stopwatch:
    """Seconds that a stage has taken, without those that it was paused for."""

    def __init__(self, clock: Callable[[], float], before_s: float = 0.0) -> None:
        """Begin; `before_s` is what an interrupted run had come to."""
        self._clock, self._began = clock, clock() - before_s

    def seconds(self) -> float:
        """So far."""
        return self._clock() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the block takes does not count."""
        began = self._clock()
        yield
        self._began += self._clock() - began


class TrainingRun:
    """One rank's side of a run."""

    def __init__(
        self, spec: RunSpec, client: Client, pulse: Pulse, ranks: Ranks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load the newest checkpoint of the run directory, which is the initial one in a fresh run."""
        self._spec, self._client, self._pulse, self._ranks, self._clock = spec, client, pulse, ranks, clock
        torch.set_num_threads(1)
        pulse.doing = "loading a checkpoint"
        self._found = self._agreed_checkpoint()
        self._position = self._found.position
        self._generation: Generation | None = None
        self._state: Callable[[], Mapping[str, Tensor]] | None = None
        self._logged_at, self._logged_tokens = 0.0, 0
        self._num_skipped = 0
        mesh = make_mesh(spec.device)
        device = torch.device(spec.device, torch.cuda.current_device()) if spec.device == "cuda" else "cpu"
        adapter, model = self._found_policy()
        if spec.lora.base_weights == "full":
            model = model.to(device)
        # Else it may be too large for a GPU: what the 4 bits leave of it goes there block by block.
        self._policy = ShardedPolicy(model, mesh, spec.sharding, lora=spec.lora, seed=spec.seed)
        if adapter is not None:
            self._policy.load_adapter(adapter.matrices)
        self._checkpointer = Checkpointer(spec, self._policy, self._ranks, client, clock)

    def _agreed_checkpoint(self) -> FoundCheckpoint:
        """Where to go on. Raises ValueError when there is no checkpoint, or none that is whole."""

        def find() -> dict[str, Any]:
            found = newest_checkpoint(self._spec.checkpoints_dir, to_go_on(self._spec.learner.num_rounds))
            if found is None:
                raise ValueError(f"{self._spec.checkpoints_dir} has no checkpoint")
            position = asdict(found.position)
            return {"name": found.directory.name, "position": position, "passed_over": found.passed_over}

        found = self._ranks.agreed(find)
        return FoundCheckpoint(
            directory=self._spec.checkpoints_dir / found["name"],
            position=Position.of(found["position"]),
            passed_over=tuple(found["passed_over"]),
        )

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
        """The stages that the run asks for and that the checkpoint has not seen, or as far as somebody stops it."""
        where, position = self._found.directory.name, asdict(self._position)
        self._ranks.on_rank_0(lambda: self._client.learner_started(where, position))
        for what in self._found.passed_over:
            self._record("failure", what=what, attempt=1)
        try:
            self._stages()
        except StopRequestedError:
            self._stop()

    def _stages(self) -> None:
        phases, position = self._spec.phases, self._position
        if not position.is_published and position.phase not in phases:
            raise ValueError(
                f"the run was stopped in the midst of {position.phase}, which this command leaves out; resume it with "
                "the command that began it"
            )
        if position.is_published:
            # Samplers and service may be new: the store must have what they will be asked for.
            self._publish(position.policy_version, position.phase, position.round)
            if self._label() != "round" or self._is_evaluation_due():
                self._evaluate(self._label(), is_new=False)
        if Phase.SFT in phases and (position.phase is Phase.UNTRAINED or self._resumes(Phase.SFT)):
            self._sft()
        if Phase.RL in phases and self._position.round < self._spec.learner.num_rounds:
            self._rounds()
        if Phase.CONTROL in phases and (self._position.phase is not Phase.CONTROL or self._resumes(Phase.CONTROL)):
            self._control()

    def _resumes(self, phase: Phase) -> bool:
        """Whether the run goes on in the midst of SFT or the control."""
        return self._position.phase is phase and not self._position.is_published

    def _stop(self) -> None:
        """Keep what there is of the stage under way."""
        self._pulse.doing = "stopping"
        if self._state is not None and self._position not in (self._found.position, self._checkpointer.newest):
            self._save()
        position = self._position
        self._record("stopped", phase=position.phase, round=position.round, step=position.step)

    # Stage 1.

    def _sft(self) -> None:
        self._resume_from(self._spec.initial_checkpoint, Phase.SFT)
        data = self._sft_data()
        if not self._resumes(Phase.SFT):
            self._record("sft_data", **data.facts)
        seconds, num_steps = self._sft_steps(data, Phase.SFT, self._spec.sft.num_steps)
        self._record("phase_end", phase=Phase.SFT, seconds=seconds, num_steps=num_steps)
        self._finish(Position(phase=Phase.SFT, round=0, policy_version=1, rl_seconds=0.0))

    def _sft_data(self) -> SftData:
        tokenizer = ChatTokenizer(self._spec.initial_checkpoint)
        return load_sft_data(self._spec, RunPlan(self._spec, tokenizer), tokenizer)

    def _resume_from(self, start: Path, phase: Phase) -> None:
        """Under LoRA, in the midst of a stage: the adapter, and what it stands on; the weights have it merged."""
        if self._resumes(phase) and self._spec.lora.rank:
            verify_checkpoint(start)
            self._policy.load_full_weights(dict(load_policy(start).named_parameters()))
            self._policy.load_adapter(read_adapter(self._found.directory).matrices)

    def _sft_steps(
        self, data: SftData, phase: Phase, num_steps: int, limit_s: float = 0.0, first_step: int = 0
    ) -> tuple[float, int]:
        """`num_steps` optimizer steps, or as many as fit into `limit_s` seconds. Returns seconds and steps.

        Evaluations and checkpoints do not count into the seconds.
        """
        sft, start = self._spec.sft, self._position
        learner = SftLearner(self._policy, sft, data.train, self._spec.seed)
        self._state = learner.full_state
        step = evaluated_step = 0
        if self._resumes(phase):
            learner.load_full_state(load_file(self._found.directory / LEARNER_STATE))
            step = evaluated_step = start.step or 0
        self._record("phase", phase=phase, num_steps=num_steps, **({"from_step": step} if step else {}))
        if not step:
            self._evaluate_loss(data, phase, 0)
        watch = Stopwatch(self._clock, start.stage_seconds)
        self._logged_at, self._logged_tokens = self._clock(), 0
        while True:
            self._pulse.doing = f"{phase}, step {step}"
            seconds, is_due, must_stop = self._ranks.agreed(
                lambda: (watch.seconds(), self._checkpointer.is_due(), self._pulse.must_stop)
            )
            if step:
                self._position = replace(start, phase=phase, step=step, stage_seconds=seconds)
            progress = _progress(step, num_steps, seconds, limit_s)
            if progress >= 1:
                break
            if must_stop:
                raise StopRequestedError
            with watch.paused():
                self._save_if(is_due and step > 0)
            metrics = learner.step(first_step + step, sft.lr_at(step, progress))
            step += 1
            if step == num_steps or self._clock() - self._logged_at > _LOG_EVERY_S:
                self._record_step(learner, phase, step, metrics)
            if sft.eval_every_steps and step % sft.eval_every_steps == 0:
                with watch.paused():
                    self._evaluate_loss(data, phase, step)
                self._logged_at, evaluated_step = self._clock(), step
        self._state = None
        if step != evaluated_step:
            self._evaluate_loss(data, phase, step)
        return round(seconds, 3), step

    def _record_step(self, learner: SftLearner, phase: Phase, step: int, metrics: dict[str, float]) -> None:
        now = self._clock()
        rate = round((learner.num_trained - self._logged_tokens) / (now - self._logged_at), 1)
        self._record("sft", phase=phase, step=step, **metrics, tokens_per_s=rate)
        self._logged_at, self._logged_tokens = now, learner.num_trained

    def _evaluate_loss(self, data: SftData, phase: Phase, step: int) -> None:
        """The loss on the held-out examples, recorded."""
        if data.held_out is not None:
            evaluated = evaluation_loss(self._policy, data.held_out, self._spec.sft.batch_size)
            self._record("sft_eval", phase=phase, step=step, **asdict(evaluated))

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
        learner = Learner(self._policy, spec.learner, sampler_facts(spec.rollout.params[0]))
        self._restore(learner)
        self._record("phase", phase=Phase.RL, num_steps=spec.learner.num_rounds)
        for round_index in range(first, spec.learner.num_rounds):
            self._round(learner, round_index)
            self._state = learner.full_state
            self._after_round()
        seconds = self._position.rl_seconds
        self._record("phase_end", phase=Phase.RL, seconds=seconds, num_steps=spec.learner.num_rounds)
        self._save()
        self._state = None
        self._evaluate(self._label())

    def _round(self, learner: Learner, round_index: int) -> None:
        began = self._clock()
        self._pulse.doing = f"round {round_index}: waiting for completions"
        batch, portions = self._pull(round_index)
        sampled = self._clock()
        self._pulse.doing = f"round {round_index}: training"
        metrics = {"num_trained_completions": 0.0} if batch is None else self._updated(learner, batch, round_index)
        trained = self._clock()
        version = self._position.policy_version + 1
        self._publish(version, Phase.RL, round_index + 1)

        def tell() -> float:
            published = self._clock()
            seconds = {"sampling_s": sampled - began, "training_s": trained - sampled, "publish_s": published - trained}
            values = metrics | {name: round(value, 4) for name, value in seconds.items()}
            self._client.published(round_index, self._published, values, portions)
            return round(self._position.rl_seconds + self._clock() - began, 3)

        rl_seconds = self._ranks.agreed(tell)
        self._position = Position(
            phase=Phase.RL,
            round=round_index + 1,
            policy_version=version,
            rl_seconds=rl_seconds,
        )

    def _updated(self, learner: Learner, batch: RolloutBatch, round_index: int) -> dict[str, float]:
        self._policy.wait_for_all(f"round {round_index}", _LAG_TIMEOUT_S)
        forget_peak_memory(self._policy.device)
        began = self._clock()
        try:
            metrics = learner.update(batch, round_index)
        except FloatingPointError as error:
            self._skip(batch, round_index, error)
            return {"num_trained_completions": 0.0}
        self._num_skipped = 0
        return metrics | self._use_of_devices(learner.model_flops / (self._clock() - began))

    def _skip(self, batch: RolloutBatch, round_index: int, error: FloatingPointError) -> None:
        """Keep a batch that no step was taken on. Raises FloatingPointError after too many rounds of that in a row."""
        path = self._spec.run_dir / FAILED_BATCHES / f"round-{round_index:06d}.safetensors"
        if self._ranks.rank == 0:
            path.parent.mkdir(exist_ok=True)
            save_file({field.name: getattr(batch, field.name) for field in fields(batch)}, path)
        self._num_skipped += 1
        if self._num_skipped > self._spec.learner.max_skipped_rounds:
            raise FloatingPointError(f"round {round_index}: {error}. Its batch is in {path}") from error
        self._record("failure", what=f"round {round_index} is skipped: {error}. Its batch is in {path}", attempt=1)

    def _use_of_devices(self, flop_per_s: float) -> dict[str, float]:
        """How much of its devices an update used: arithmetic of all workers, memory of the one that took most."""
        device = self._policy.device
        memory = self._policy.max_over_ranks(torch.tensor([peak_memory_bytes(device)])).item()
        used = {"flop_per_s": flop_per_s, "peak_memory_bytes": int(memory)}
        peak = peak_flop_per_s(device)
        return used if peak is None else used | {"mfu": flop_per_s / (peak * self._policy.world_size)}

    def _after_round(self) -> None:
        """Evaluate and checkpoint where the recipe or the clock says so; the last round's are the stage's own."""
        spec, done = self._spec, self._position.round
        if done == spec.learner.num_rounds:
            return
        is_due, must_stop = self._ranks.agreed(lambda: (self._checkpointer.is_due(), self._pulse.must_stop))
        every = spec.checkpoint_every_rounds
        self._save_if(is_due or (bool(every) and done % every == 0))
        if must_stop:
            raise StopRequestedError
        if self._is_evaluation_due():
            is_best = self._evaluate(self._label())
            self._save_if(is_best and self._checkpointer.newest != self._position)

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
        directory = self._started_from()
        verify_checkpoint(directory)
        return dict(load_policy(directory).named_parameters())

    def _started_from(self) -> Path:
        """The checkpoint that the rounds and the control start from: the SFT stage's, or the initial one."""
        name = str(Phase.SFT)
        is_there = self._ranks.agreed((self._spec.checkpoints_dir / name).is_dir)
        return self._spec.checkpoints_dir / name if is_there else self._spec.initial_checkpoint

    def _pull(self, round_index: int) -> tuple[RolloutBatch | None, list[ScoredPortion]]:
        """A round's batch, if anything of it can be trained on; and on rank 0 what it was made of."""
        portions: list[ScoredPortion] = []

        def ask() -> tuple[Next, dict[str, Tensor]]:
            what, portions[:] = self._client.next_batch(round_index, self._published)
            gen_length, eos_id = self._spec.rollout.sampling.gen_length, self._policy.config.eos_token_id
            batch = collate(portions, gen_length, eos_id) if what is Next.GO_ON else None
            return what, {} if batch is None else {field.name: getattr(batch, field.name) for field in fields(batch)}

        while self._must_ask_again(answer := self._ranks.shared(ask)):
            pass
        _, tensors = answer
        return RolloutBatch(**tensors) if tensors else None, portions

    # The control.

    def _control(self) -> None:
        """More SFT on the same labels from the SFT checkpoint, for the seconds that the rounds took."""
        spec, position = self._spec, self._position
        if self._resumes(Phase.CONTROL):
            self._resume_from(self._started_from(), Phase.CONTROL)
        else:
            self._policy.load_full_weights(self._start_of_rounds())
        limit_s = 0.0 if spec.control_steps else position.rl_seconds
        # Its steps go on counting where SFT's ended: other orders of the labels, other masks.
        seconds, num_steps = self._sft_steps(
            self._sft_data(), Phase.CONTROL, spec.control_steps, limit_s, spec.sft.num_steps
        )
        self._record("phase_end", phase=Phase.CONTROL, seconds=seconds, num_steps=num_steps)
        self._finish(
            Position(
                phase=Phase.CONTROL,
                round=position.round,
                policy_version=position.policy_version + 1,
                rl_seconds=position.rl_seconds,
            )
        )

    # What every stage does.

    def _finish(self, position: Position) -> None:
        """Publish, checkpoint and evaluate the end of a stage."""
        self._position = position
        self._publish(position.policy_version, position.phase, position.round)
        self._save()
        self._evaluate(self._label())

    @property
    def _published(self) -> Generation:
        """On rank 0: what was published last."""
        assert self._generation is not None, "a stage publishes before it asks for anything"
        return self._generation

    def _publish(self, version: int, phase: Phase, round_index: int) -> None:
        """Hand the weights to the store; the service hears of all versions but the control's."""
        weights = self._policy.weights_on_rank_0()

        def on_rank_0() -> None:
            manifest = make_manifest(version, weights)
            self._generation = Generation(version=version, digest=manifest.digest)
            self._client.publish(manifest, weights)
            if phase is not Phase.CONTROL:
                self._client.announce(self._generation, phase, round_index)

        self._ranks.on_rank_0(on_rank_0)

    def _publish_again(self) -> None:
        """The weight store has lost what was published last, which is what the policy still is."""
        weights = self._policy.weights_on_rank_0()

        def publish() -> None:
            manifest = make_manifest(self._published.version, weights)
            self._generation = Generation(version=manifest.version, digest=manifest.digest)
            self._client.publish(manifest, weights)

        self._ranks.on_rank_0(publish)

    def _save(self) -> None:
        """A checkpoint of where the run stands."""
        self._pulse.doing = "writing a checkpoint"
        position = self._position
        is_published = position.is_published and self._generation is not None
        digest = self._published.digest if is_published else None
        is_end = position.is_published and (self._state is None or position.round == self._spec.learner.num_rounds)
        self._checkpointer.write(position, digest, self._state, self._adapter(), may_fail=not is_end)

    def _save_if(self, is_due: bool) -> None:
        if is_due:
            self._save()

    def _adapter(self) -> Adapter | None:
        """The adapter of the stage under way; None without LoRA. A collective; its matrices are on rank 0."""
        lora = self._spec.lora
        if not lora.rank:
            return None
        base = self._spec.initial_checkpoint if self._position.phase is Phase.SFT else self._started_from()
        return Adapter(rank=lora.rank, alpha=lora.alpha, base=base.name, matrices=self._policy.adapter_on_rank_0())

    def _label(self) -> str:
        """What an evaluation of the current position is called."""
        position, spec = self._position, self._spec
        if position.phase is Phase.UNTRAINED:
            return "untrained" if Phase.SFT in spec.phases else "start"
        is_between = position.phase is Phase.RL and position.round < spec.learner.num_rounds
        return "round" if is_between else str(position.phase)

    def _evaluate(self, label: str, *, is_new: bool = True) -> bool:
        """Held-out accuracy; of a version that is not new, only where the interrupted run did not get to it.

        Returns whether the version is the best of the rounds so far.
        """
        self._pulse.doing = f"waiting for the evaluation of version {self._position.policy_version}"
        round_index = self._position.round

        def ask() -> tuple[Next, bool]:
            return self._client.evaluate(self._published, label, round_index, is_new=is_new)

        while self._must_ask_again(answer := self._ranks.agreed(ask)):
            pass
        return bool(answer[1])

    def _must_ask_again(self, answer: tuple[str, Any]) -> bool:
        """Whether the weight store had lost what was asked for. Raises StopRequestedError where the run is to stop."""
        if answer[0] == Next.STOP:
            raise StopRequestedError
        if answer[0] == Next.PUBLISH:
            self._publish_again()
        return answer[0] == Next.PUBLISH

    def _record(self, event: str, **values: Any) -> None:
        if self._ranks.rank == 0:
            self._client.record(event, values)


def _progress(step: int, num_steps: int, seconds: float, limit_s: float) -> float:
    """How much of a stage of SFT is done: of its time where that is limited, else of its steps."""
    if limit_s:
        return seconds / limit_s
    return step / num_steps if num_steps else 1.0
