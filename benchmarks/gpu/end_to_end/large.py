"""Stages of LLaDA-8B's shape with LoRA: training with a loaded engine, and offloading to host memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from actors.registry.server import free_port
from actors.run_log import Event, read_events
from benchmarks.gpu.end_to_end.asking import Client, under_load
from benchmarks.gpu.end_to_end.commands import ROOT, started
from benchmarks.gpu.end_to_end.small import tell_memory
from benchmarks.gpu.end_to_end.visit import StageError, Visit
from deploy.capacity.gpus import DEFAULT_KIND, GPU_KINDS, GpuKind
from deploy.capacity.plan import Plan, make_plan
from deploy.recipe.overrides import load_recipe

_NAME, _CHECKPOINT = "llada", "llada-8b"
RECIPE = ROOT / "recipes" / "llada-gsm8k.yaml"
_SHORT = (
    "task={name: countdown}",
    "model.lora={rank: 128, alpha: 64}",
    "sft={num_labels: 1, num_steps: 0}",
    "rollout.num_samplers=1",
    "rollout.batch_size=12",
    "rollout.engine={num_slots: 12, dtype: bfloat16}",
    "rollout.sampling={gen_length: 128, block_length: 32, num_denoise_steps: 64, temperature: 0.9}",
    "learner.num_workers=1",
    "learner.num_rounds=3",
    "learner.groups_per_round=2",
    "learner.group_size=6",
    "learner.inner_updates=2",
    "evaluation={num_problems: 12}",
    "checkpoint_every_rounds=0",
    "checkpoint_every_s=0",
    "num_checkpoints_kept=1",
)
_ON_GPU = ("device=cuda", "gpus={sampler: 0.3, learner: 0.4, engine: 0.3}")
_REHEARSED = (
    "device=cpu",
    "rollout.sampling={gen_length: 64, block_length: 16, num_denoise_steps: 8, temperature: 0.9}",
    "model.lora={rank: 4, alpha: 2}",
    "learner.group_size=3",
)


def made(visit: Visit) -> None:
    """Make a checkpoint of random bfloat16 weights and a tokenizer."""
    for row in _rows(visit, "made_policy", str(visit.out / _CHECKPOINT)):
        visit.row(row["what"], row["measured"])


def trained(visit: Visit) -> None:
    """Train three rounds under Ray while an engine serves, and compare with the predictions of `d1 plan`."""
    overrides, port = overrides_of(visit), free_port()
    plan = make_plan(load_recipe(RECIPE, [*overrides, "device=cuda"]), 1, _kind(visit))
    client = Client(port=port, token_path=visit.out / _NAME / "service.token", prompt="Using 1, 2 and 3, make 6.")
    with started(visit, "train", str(RECIPE), *overrides, f"service.port={port}", "--serve") as command:
        events = partial(_events, visit)
        ready_s = command.wait_until(lambda: bool(_of(events(), "phase")), "the rounds to begin")
        visit.row("seconds until the rounds began", f"{ready_s:.1f} s")
        command.wait_until(client.is_up, "the service")
        with under_load(client, 2) as load:
            for number in range(3):
                command.wait_until(lambda: len(_of(events(), "round")) > number, f"round {number}")  # noqa: B023
                _tell_round(visit, _of(events(), "round")[number], plan)
        visit.row("requests while versions were swapped", load.in_words())
        planned = {memory.label: f"plan {memory.num_bytes / 1e9:.2f} GB" for memory in plan.processes}
        tell_memory(visit, command.memory, planned)


def offloaded(visit: Visit) -> None:
    """Time a learner worker's offloading to host memory, and its return."""
    for row in _rows(visit, "offload"):
        visit.row(row["what"], row["measured"])


def overrides_of(visit: Visit) -> list[str]:
    """Return the run's overrides of its recipe."""
    return [
        f"name={_NAME}",
        f"runs_dir={visit.out}",
        f"model.checkpoint={visit.out / _CHECKPOINT}",
        *_SHORT,
        *(_REHEARSED if visit.is_rehearsal else _ON_GPU),
    ]


def _kind(visit: Visit) -> GpuKind:
    """Look up this machine's GPU among those of `d1 plan`."""
    if visit.is_rehearsal:
        return GPU_KINDS[DEFAULT_KIND]
    for kind in GPU_KINDS.values():
        if kind.name.partition("-")[0] in re.split(r"[\s-]", visit.gpu):
            return kind
    raise StageError(f"d1 plan does not know a GPU called {visit.gpu}")


def _events(visit: Visit) -> list[Event]:
    directory = visit.out / _NAME
    return read_events(directory) if directory.is_dir() else []


def _of(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _tell_round(visit: Visit, event: Event, plan: Plan) -> None:
    split, number = plan.splits[0], event["round"]
    planned = {"sampling_s": split.sampling_s, "training_s": split.learning_s, "publish_s": plan.publishing_s}
    for name, seconds in planned.items():
        beside = "" if seconds is None else f"plan {seconds:.2f} s"
        visit.row(f"{name} of round {number}", f"{event[name]:.2f} s", beside)
    if (peak := event.get("peak_memory_bytes")) is not None:
        visit.row(f"learner's allocated memory, round {number}", f"{peak / 1e9:.2f} GB")
    difference = event.get("sampling/sampling_logp_difference/mean")
    if difference is not None:
        visit.row(f"sampler's distance from the learner, round {number}", f"{difference:.5f} nats a token")


def _rows(visit: Visit, module: str, *words: str) -> list[dict[str, str]]:
    """Run a program of this folder in a child process, which frees its GPU memory at exit. Returns its rows."""
    command = [sys.executable, "-m", f"benchmarks.gpu.end_to_end.{module}", "--device", visit.device, *words]
    command += ["--tiny"] if visit.is_rehearsal else []
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=max(1.0, visit.left_s)
        )
    except subprocess.TimeoutExpired as error:
        raise StageError(f"its time was over while {module} ran") from error
    if done.returncode:
        raise StageError((done.stderr.strip() or f"{module} ended with {done.returncode}").splitlines()[-1])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
