"""Stages of `recipes/tiny.yaml`: one short run on the CPU, and on a GPU in every way of sharing it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from signal import Signals
from statistics import median
from typing import Any

from actors.registry.server import free_port
from actors.run_log import Event, read_events
from benchmarks.gpu.end_to_end.asking import Client, under_load
from benchmarks.gpu.end_to_end.commands import ROOT, Started, carried_out, started
from benchmarks.gpu.end_to_end.memory import MemoryWatch
from benchmarks.gpu.end_to_end.visit import StageError, Visit
from benchmarks.processes.run_processes import Role

RECIPE = str(ROOT / "recipes" / "tiny.yaml")
_PROMPT = "2001104002144103"
_NUM_PROBLEMS = 100
_ROUNDS, _REHEARSED_ROUNDS = 6, 2
# Enough rounds that the service starts before they end.
_AHEAD_ROUNDS, _MORE_ROUNDS = 60, 2
# Maximum differences between devices: losses and rewards of the same samples, and accuracies on so few problems.
_AGREEMENT = {
    "loss at the end of SFT": 0.02,
    "reward of the first round": 0.05,
    "accuracy after SFT": 0.05,
    "accuracy at the end": 0.1,
}
_SHORT = (
    "task.min_empty=1",
    "task.max_empty=3",
    "sft.num_steps=120",
    "rollout.num_samplers=1",
    "rollout.batch_size=256",
    "rollout.engine={num_slots: 256}",
    "learner.num_workers=1",
    "learner.groups_per_round=16",
    "learner.max_staleness=0",
    # Small, so that rounding differences between kernels do not lead to a different policy.
    "learner.lr=5e-5",
    "learner.num_warmup_rounds=0",
    f"evaluation.num_problems={_NUM_PROBLEMS}",
    "evaluation.every_rounds=0",
    "evaluation.schedules=[{num_denoise_steps: 9}]",
    "control.enabled=false",
    "checkpoint_every_rounds=1",
)
_REHEARSED = ("model.d_model=32", "model.num_layers=2", "model.mlp_hidden_size=64", "sft.num_steps=10")
_SERVED = "ahead"


def on_cpu(visit: Visit) -> None:
    """Train on the CPU, as the baseline of the other stages."""
    events = _trained(visit, "on-cpu", "device=cpu")
    visit.on_cpu.update(facts_of(events))
    tell_run(visit, events, {})


def with_shares(visit: Visit) -> None:
    """Train with a sampler and a learner worker that run on one GPU concurrently."""
    tell_run(visit, _trained(visit, "shares", *_gpus(visit, "sampler: 0.3, learner: 0.4")), visit.on_cpu)


def taking_turns(visit: Visit) -> None:
    """Train with a sampler and a learner worker that alternate on the GPU, offloading their memory."""
    shares = "sampler: 0.5, learner: 0.5, colocate: true"
    tell_run(visit, _trained(visit, "turns", *_gpus(visit, shares)), visit.on_cpu)


def ahead(visit: Visit) -> None:
    """Train with two samplers one round ahead, an engine under load, and a learner worker that is killed."""
    port = free_port()
    words = words_of(
        visit, _SERVED, *_gpus(visit, "sampler: 0.2, learner: 0.3, engine: 0.2"), *_ahead(_AHEAD_ROUNDS), "--serve"
    )
    client = _client(visit, port)
    with started(visit, *words, f"service.port={port}") as command:
        visit.row("seconds until the service answers", f"{command.wait_until(client.is_up, 'the service'):.1f} s")
        with under_load(client, 4) as load:
            _kill_learner(visit, command)
            command.wait_until(lambda: bool(_of(visit, "done")), "the run's end")
        visit.row("requests while versions were swapped and a learner was killed", load.in_words())
        tell_memory(visit, command.memory)
        command.interrupt()
    tell_run(visit, read_events(visit.out / _SERVED), {})


def _kill_learner(visit: Visit, command: Started) -> None:
    """Kill the learner worker, and wait for the round that its replacement publishes."""
    command.wait_until(lambda: bool(_of(visit, "round")), "the first round")
    before = len(_of(visit, "round"))
    workers = command.processes.of_role(Role.LEARNER)
    if not workers:
        raise StageError("there was no learner worker to kill")
    workers[0].signal_and_wait(Signals.SIGKILL)
    seconds = command.wait_until(lambda: len(_of(visit, "round")) > before, "a round after the learner was killed")
    visit.row("seconds from the learner's death to its next round", f"{seconds:.1f} s")


def resumed(visit: Visit) -> None:
    """Resume that run for two more rounds."""
    gpus = _gpus(visit, "sampler: 0.2, learner: 0.3, engine: 0.2")
    words = words_of(visit, _SERVED, *gpus, *_ahead(_AHEAD_ROUNDS + _MORE_ROUNDS))
    before = len(_of(visit, "round"))
    carried_out(visit, *words, "--resume")
    visit.row("rounds after --resume", str(len(_of(visit, "round")) - before), str(_MORE_ROUNDS))


def evaluated(visit: Visit) -> None:
    """Run `d1 eval` on that run, and compare with the run's own accuracy."""
    options = ("--device", visit.device, "--problems", str(_NUM_PROBLEMS), "--json", "--out", str(visit.out / "eval"))
    command = carried_out(visit, "eval", _SERVED, "--runs-dir", str(visit.out), *options)
    (cell,) = _json(command)["cells"]
    own = _accuracy(read_events(visit.out / _SERVED), "rl")
    visit.row("accuracy by d1 eval", f"{cell['num_correct'] / cell['num_problems']:.3f}", f"the run's own {own:.3f}")


def sampled(visit: Visit) -> None:
    """Run `d1 sample` on the GPU and on the CPU, and compare the texts."""
    texts = {}
    for device in dict.fromkeys((visit.device, "cpu")):
        words = ("sample", _SERVED, _PROMPT, "--runs-dir", str(visit.out), "--device", device, "--json")
        texts[device] = _json(carried_out(visit, *words))["text"]
    visit.row("text by d1 sample", repr(texts[visit.device]), f"cpu {texts['cpu']!r}")
    if texts[visit.device] != texts["cpu"]:
        raise StageError("d1 sample gives another text than on the CPU")


def served(visit: Visit) -> None:
    """Run `d1 serve` on that run."""
    port = free_port()
    client = _client(visit, port)
    with started(visit, "serve", _SERVED, "--runs-dir", str(visit.out), "--port", str(port)) as command:
        visit.row("seconds until d1 serve answers", f"{command.wait_until(client.is_up, 'the service'):.1f} s")
        times = [client.ask().seconds for _ in range(5)]
        visit.row("seconds of an answer, one at a time", f"{min(times):.2f} to {max(times):.2f} s")
        tell_memory(visit, command.memory)
        command.interrupt()


def tell_memory(visit: Visit, memory: MemoryWatch, planned: dict[str, str] | None = None) -> None:
    """Add a row of peak memory for each kind of process."""
    for who, num_bytes in sorted(memory.most.items()):
        visit.row(f"most memory of {who}", f"{num_bytes / 1e9:.2f} GB", (planned or {}).get(who, ""))


def _num_rounds(visit: Visit) -> int:
    return _REHEARSED_ROUNDS if visit.is_rehearsal else _ROUNDS


def _ahead(num_rounds: int) -> tuple[str, ...]:
    return "learner.max_staleness=1", "rollout.num_samplers=2", f"learner.num_rounds={num_rounds}"


def _gpus(visit: Visit, shares: str) -> tuple[str, ...]:
    return ("device=cpu",) if visit.is_rehearsal else ("device=cuda", f"gpus={{{shares}}}")


def words_of(visit: Visit, name: str, *more: str) -> list[str]:
    """Build the arguments of `d1` for a run: `train`, the recipe, and its overrides."""
    rehearsed = _REHEARSED if visit.is_rehearsal else ()
    rounds = f"learner.num_rounds={_num_rounds(visit)}"
    return ["train", RECIPE, f"name={name}", f"runs_dir={visit.out}", *_SHORT, *rehearsed, rounds, *more]


def _trained(visit: Visit, name: str, *overrides: str) -> list[Event]:
    command = carried_out(visit, *words_of(visit, name, *overrides))
    tell_memory(visit, command.memory)
    return read_events(visit.out / name)


def _client(visit: Visit, port: int) -> Client:
    return Client(port=port, token_path=visit.out / _SERVED / "service.token", prompt=_PROMPT)


def _of(visit: Visit, event: str) -> list[Event]:
    directory: Path = visit.out / _SERVED
    return [one for one in read_events(directory) if one["event"] == event] if directory.is_dir() else []


def _json(command: Started) -> Any:
    """Parse the JSON object in a command's output."""
    return json.loads(next(line for line in command.printed.splitlines() if line.startswith("{")))


def facts_of(events: Sequence[Event]) -> dict[str, float]:
    """Extract the metrics that should agree between devices."""
    rounds = [event for event in events if event["event"] == "round"]
    return {
        "loss at the end of SFT": [event["loss"] for event in events if event["event"] == "sft"][-1],
        "reward of the first round": rounds[0]["reward"],
        "log-probability of a token in the last round": rounds[-1]["token_logp"],
        "accuracy after SFT": _accuracy(events, "sft"),
        "accuracy at the end": _accuracy(events, "rl"),
    }


def _accuracy(events: Sequence[Event], label: str) -> float:
    last = [event for event in events if event["event"] == "evaluation" and event["label"] == label][-1]
    return last["num_correct"] / last["num_problems"]


def tell_run(visit: Visit, events: Sequence[Event], on_cpu: dict[str, float]) -> None:
    """Add the rows of a run. Raises StageError if its metrics differ from the CPU's."""
    rounds = [event for event in events if event["event"] == "round"]
    for name in ("sampling_s", "training_s", "publish_s"):
        visit.row(f"{name}, median of {len(rounds)} rounds", f"{median(event[name] for event in rounds):.3f} s")
    visit.row("seconds of the run", f"{events[-1]['time_s']:.1f} s")
    facts = facts_of(events)
    for what, value in facts.items():
        visit.row(what, f"{value:.4f}", f"cpu {on_cpu[what]:.4f}" if what in on_cpu else "")
    for what, most in _AGREEMENT.items():
        if what in on_cpu and abs(facts[what] - on_cpu[what]) > most:
            raise StageError(f"{what} is {facts[what]:.4f}, and on the CPU it was {on_cpu[what]:.4f}")
