"""Settings of `d1 adapt`, and the recipe, responses and initial policy that follow from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.run_log import CHECKPOINTS, RECIPE
from deploy.errors import UserError, user_errors
from deploy.machine import why_not_creatable
from deploy.recipe.overrides import load_recipe, parse_override
from deploy.recipe.recipe import Recipe
from deploy.runs.run_directory import scratch_policy
from learner.model.checkpoint_files import load_config
from learner.model.storage.throughput import ReportProgress
from rewards.data.demonstrations import read_demonstrations
from rewards.tasks.registry import task_names

if TYPE_CHECKING:
    from learner.model.autoregressive.mask_token import MaskToken
    from learner.model.autoregressive.source import AutoregressiveCheckpoint

_RECIPE = Path(__file__).with_name("adapt.yaml")
# OUT and MODEL set these.
_OWN_KEYS = ("name", "runs_dir", "model.checkpoint")
# Maximum tokens of an example with the model's own response; half of them are for the prompt.
_TOKENS_OF_RESPONSES = 512
# Slots that each denoise step of a block commits.
_SLOTS_PER_STEP = 4


def trains(recipe: Recipe) -> bool:
    """Return whether the recipe has SFT steps or rounds; without them only the untrained policy is written."""
    return recipe.sft.num_steps > 0 or recipe.learner.num_rounds > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """Settings of an adaptation: source model, its changes, training data and run directory."""

    model: str
    """The source: a directory, a hub id, a GGUF file or `smollm2`."""
    out: Path
    """The run directory."""
    data: str | None = None
    """Training data: a file, a directory or a dataset of the hub; None: as `prompts` or an override says."""
    prompts: str | None = None
    """A task or a file of prompts; the model's own responses to them are the training data."""
    block_length: int | None = None
    """Slots of a block of a block-causal policy; None: every slot attends to every other."""
    shift: bool = True
    """Whether the output at a slot predicts the token of the next slot, as in the source."""
    mask_token: str | None = None
    """The mask token; None: a reserved one."""
    distill_rounds: int = 0
    """Rounds of on-policy distillation from the source after SFT; 0: none."""
    overrides: tuple[str, ...] = ()
    """Changes to the recipe, `dotted.key=value`."""

    @property
    def responses(self) -> Path:
        """File of the model's own responses: next to the run directory, which is created after they are complete."""
        out = self.out.absolute()
        return out.with_name(f"{out.name}.responses.jsonl")

    def recipe(self) -> Recipe:
        """Build the run's recipe. Without steps and rounds, only the untrained policy is written.

        Raises UserError as `load_recipe` does, and if training data is missing or unused, or if the rounds lack a task.
        """
        self._check()
        out = self.out.absolute()
        own: dict[str, str | int] = {
            "name": out.name,
            "runs_dir": str(out.parent),
            "model.checkpoint": str(out / CHECKPOINTS / "initial"),
        }
        if self.block_length is not None:
            own["rollout.sampling.block_length"] = self.block_length
            own["rollout.sampling.steps_per_block"] = max(1, self.block_length // _SLOTS_PER_STEP)
        if self.data is not None or self.prompts is not None:
            own["sft.data"] = self.data or str(self.responses)
        if self.prompts is not None:
            own["sft.max_tokens"] = _TOKENS_OF_RESPONSES
        if self.prompts in task_names():
            own["task.name"] = self.prompts
        if self.distill_rounds:
            own["learner.num_rounds"] = self.distill_rounds
        recipe = load_recipe(_RECIPE, [*(f"{key}={json.dumps(value)}" for key, value in own.items()), *self.overrides])
        if not trains(recipe) and self._names_data():
            raise UserError("sft.num_steps is 0, so nothing trains on the given data; leave one of them out")
        names_task = self.prompts in task_names() or not self._given().keys().isdisjoint(("task", "task.name"))
        if recipe.learner.num_rounds and not names_task:
            raise UserError(
                "the rounds of distillation need a task's prompts, and no task is named: give --prompts TASK, or "
                f"task.name=TASK; the tasks are {', '.join(task_names())}"
            )
        if self.prompts is None and recipe.sft.data is not None:
            # Before a model is opened, which takes longer.
            with user_errors(ValueError, prefix="sft.data: "):
                read_demonstrations(recipe.sft.data)
        return recipe

    def _given(self) -> dict[str, object]:
        """Return the overrides by key."""
        return dict(map(parse_override, self.overrides))

    def _names_data(self) -> bool:
        return self.data is not None or self.prompts is not None or "sft.data" in self._given()

    def _check(self) -> None:
        given = self._given()
        if taken := sorted(given.keys() & set(_OWN_KEYS)):
            raise UserError(f"the override {taken[0]}=... is set by MODEL and OUT; leave it out")
        if self.data is not None and self.prompts is not None:
            raise UserError("--data and --prompts are alternatives; give one of them")
        if not self._names_data() and given.get("sft.num_steps") != 0:
            raise UserError(
                "there is nothing to train on: give --data FILE, or --prompts TASK for the model's own responses to "
                "it; for the untrained policy alone, sft.num_steps=0"
            )

    @property
    def is_generating_responses(self) -> bool:
        """Whether an earlier attempt ended while the model answered the prompts, before the run began."""
        return self.prompts is not None and self.responses.exists() and not self.out.exists()

    def write_responses(self, source: AutoregressiveCheckpoint, recipe: Recipe, say: ReportProgress) -> str:
        """Generate the model's own responses to the prompts, or resume an earlier attempt. Returns a summary.

        Raises UserError if there are no such prompts or the model cannot answer.
        """
        from deploy.adapt.prompts import file_prompts, task_prompts
        from deploy.adapt.responses import write_responses
        from rollout.autoregressive.generator import Sampling

        assert self.prompts is not None, "there are prompts"
        if self.prompts in task_names():
            prompts = task_prompts(recipe.task, recipe.num_train_problems)
        else:
            prompts = file_prompts(Path(self.prompts))
        self.responses.parent.mkdir(parents=True, exist_ok=True)
        sampling = Sampling(max_new_tokens=recipe.sft_tokens // 2, seed=recipe.seed)
        return str(write_responses(source, prompts, self.responses, sampling, say))

    def write(self, source: AutoregressiveCheckpoint, say: ReportProgress | None = None) -> tuple[Path, MaskToken]:
        """Write the run's initial policy next to the run directory. Returns its directory and its mask token.

        Raises UserError if the source cannot become such a policy, or it cannot be written.
        """
        from learner.model.autoregressive.conversion import convert_checkpoint

        directory = scratch_policy(self.out.absolute())
        with user_errors(ValueError, OSError):
            directory.parent.mkdir(parents=True, exist_ok=True)
            mask = convert_checkpoint(
                source,
                directory,
                block_length=self.block_length,
                predicts_next=self.shift,
                mask_token=self.mask_token,
                report=say,
            )
        return directory, mask

    def check_creatable(self) -> None:
        """Raise UserError if the run directory cannot be created. Checked before a model is opened."""
        if self.out.is_file() or (self.out.is_dir() and any(self.out.iterdir())):
            raise UserError(f"{self.out} already exists; continue with --resume, or take another OUT")
        if obstacle := why_not_creatable(self.out.absolute().parent):
            raise UserError(f"{self.out} cannot be made: {obstacle}; take another OUT")

    def check_resumable(self) -> None:
        """Raise UserError if the run has not begun, or began with a different policy."""
        initial = self.out / CHECKPOINTS / "initial"
        if not initial.is_dir():
            raise UserError(f"there is no run to resume in {self.out}; start it without --resume")
        with user_errors(ValueError):
            config = load_config(initial)
        for option, value, began in (
            ("--block-length", self.block_length, config.block_length),
            ("--shift", self.shift, config.predicts_next),
        ):
            if value != began:
                raise UserError(
                    f"{option} is {value} and the run in {self.out} began with {began}; resume with that, or take "
                    "another OUT"
                )


@user_errors(ValueError)
def open_source_model(model: str) -> AutoregressiveCheckpoint:
    """Open a source model by name. Raises UserError if there is none that can be adapted."""
    from learner.model.autoregressive.source import open_source

    if (Path(model) / RECIPE).is_file():
        raise UserError(f"{model} is a run, and its policy a diffusion policy already; train it with --from {model}")
    return open_source(model)
