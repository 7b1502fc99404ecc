"""Progress display of a run, on a terminal and in a log."""

from __future__ import annotations

import io
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from deploy import wait_display
from deploy.runs import progress
from deploy.runs.progress import ProgressDisplay
from deploy.wait_display import WaitDisplay

Events = list[dict[str, Any]]


def _shown(events: Events, *, is_terminal: bool) -> str:
    file = io.StringIO()
    with ProgressDisplay(Console(file=file, force_terminal=is_terminal, width=140)) as display:
        for event in events:
            display(event)
    return file.getvalue()


def test_a_log_has_a_line_for_each_phase_and_evaluation(events: Events) -> None:
    lines = _shown(events, is_terminal=False).splitlines()
    texts = [line.partition(" s  ")[2] for line in lines]
    assert "SFT: 100 steps" in texts
    assert "RL: 12 rounds" in texts
    assert "control: 46 seconds" in texts
    assert "held-out accuracy before training: 0.0 % (0.0 to 0.8), 0 of 500" in texts
    assert "held-out accuracy after round 6: 36.0 % (31.9 to 40.3), 180 of 500" in texts
    assert "held-out accuracy after the control: 28.0 % (24.2 to 32.1), 140 of 500" in texts
    assert "checkpoint checkpoints/rl-000012" in texts
    assert texts[-1].startswith("done in 2 min")


def test_a_log_describes_the_sft_data_and_its_loss(recorder: Any) -> None:
    counts = {"num_examples": 990, "num_held_out": 10, "num_overlong": 3, "mean_tokens": 812.4}
    recorder.add("sft_data", **counts, padding_share=0.801, packed_padding_share=0.042)
    recorder.add("sft_eval", phase="sft", step=20, loss=1.23456, loss_at_t=[1.0])
    examples, loss = (line.partition(" s  ")[2] for line in _shown(recorder.events, is_terminal=False).splitlines())
    assert examples == "990 examples of 812 tokens, 10 held out, 3 too long; 80 % padding, 4 % if packed"
    assert loss == "validation loss after 20 steps: 1.235"


def test_a_round_shows_the_divergence_from_the_teacher_that_it_learns_from(recorder: Any) -> None:
    recorder.add("phase", phase="rl", num_steps=2)
    recorder.add("round", round=0, reward=0.5, correct=0.25, tokens_per_s=10.0, teacher_divergence=1.23456)
    assert "  divergence 1.235  reward 0.500  correct 25 %" in _shown(recorder.events, is_terminal=False)


def test_a_log_shows_sft_with_its_validation_loss_the_time_left_and_harmless_samples(recorder: Any) -> None:
    recorder.add("phase", phase="sft", num_steps=40, from_step=10)
    recorder.add("sft_eval", phase="sft", step=10, loss=2.5, loss_at_t=[1.0])
    samples = [
        {"prompt": "p" * 100 + "\n2 + 3?", "completion": "\x1b[2J5\n" + "5 " * 200},
        {"prompt": "1", "completion": ""},
    ]
    recorder.add("sft_samples", phase="sft", step=10, samples=samples)
    recorder.add("sft", 60.0, phase="sft", step=15, loss=2.25, grad_norm=1.0, lr=1e-3, tokens_per_s=160.0)
    _, loss, head, first, second, step = _shown(recorder.events, is_terminal=False).splitlines()
    assert loss.endswith("validation loss after 10 steps: 2.5")
    assert head.endswith("completions after 10 steps:")
    assert first.strip().startswith("...ppp")
    assert "p 2 + 3? -> \\u001b[2J5 5 5 " in first
    assert first.endswith("...")
    assert len(first) < 250
    assert second.strip() == "1 -> (nothing)"
    assert step.endswith("SFT 15/40 steps  loss 2.25  validation 2.5  160 tokens/s  5 min left")


def test_a_log_has_a_line_for_steps_and_rounds_every_five_seconds_at_most(events: Events) -> None:
    lines = _shown(events, is_terminal=False).splitlines()
    times = [float(line.split()[0]) for line in lines if "RL" in line and "rounds  reward" in line]
    assert len(times) >= 6
    assert all(later - earlier >= 5 for earlier, later in pairwise(times))
    assert "RL 1/12 rounds  reward 0.300  correct 20 %  600 tokens/s" in "\n".join(lines)
    assert "SFT 10/100 steps  loss 4.019  validation 5  5000 tokens/s  18 s left" in "\n".join(lines)


def test_a_log_has_no_escape_sequences(events: Events) -> None:
    assert "\x1b" not in _shown(events, is_terminal=False)


def test_a_terminal_shows_the_phase_its_progress_and_the_numbers(events: Events) -> None:
    def until(kind: str, count: int) -> str:
        seen = [index for index, event in enumerate(events) if event["event"] == kind]
        return _shown(events[: seen[count] + 1], is_terminal=True)

    during = until("round", 6)
    assert "RL" in during
    assert "7/12" in during.replace(" 7/12", "7/12")
    assert "reward 0.420  correct 32 %  600 tokens/s" in during
    assert "held-out accuracy after SFT: 24.0 %" in during


def test_the_control_counts_seconds(events: Events) -> None:
    text = _shown(events, is_terminal=True)
    assert "46/46" in text
    assert "step 230" in text


def test_a_resumed_control_goes_on_counting_seconds(recorder: Any) -> None:
    recorder.sft_steps("control", 50, planned=0, limit_s=60.0, spent_s=40.0)
    text = _shown(recorder.events, is_terminal=False)
    assert "control: 60 seconds" in text
    assert "control 42/60 seconds  step 10  loss" in text
    assert "step" in _shown(recorder.events, is_terminal=True)


def test_a_failure_is_one_harmless_line(recorder: Any) -> None:
    recorder.add("failure", what="[red]sampler died\x1b[2J\nTraceback ...", attempt=2)
    text = _shown(recorder.events, is_terminal=False)
    assert text.endswith("failure, attempt 2: [red]sampler died\\u001b[2J\n")


def test_a_pause_reports_its_reason_and_its_end(recorder: Any) -> None:
    recorder.add("pause", what="http://judge/v1 does not answer: refused\x1b[2J\nmore")
    recorder.add("pause_end", seconds=75.2)
    paused, goes_on = _shown(recorder.events, is_terminal=False).splitlines()
    assert paused.endswith("the run is paused until this recovers: http://judge/v1 does not answer: refused\\u001b[2J")
    assert goes_on.endswith("the run resumed after 1 min 15 s")


def test_a_status_is_shown_as_it_is() -> None:
    status = {"event": "status", "what": "serving [tiny] at http://127.0.0.1:8000"}
    assert _shown([status], is_terminal=False).strip() == status["what"]


def test_waits_of_the_driver_are_printed_at_once() -> None:
    wait = {"event": "waiting", "what": "starting Ray\x1b[2J"}
    assert _shown([wait], is_terminal=False).strip() == "starting Ray\\u001b[2J"
    assert "starting Ray" in _shown([wait], is_terminal=True)


def _waited_for(events: Events, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what is displayed during a silence after the events."""
    monkeypatch.setattr(wait_display, "EVERY_S", 0.01)
    said, file = threading.Event(), io.StringIO()
    display = ProgressDisplay(Console(file=file, width=140))
    write = WaitDisplay._print

    def heard(wait: WaitDisplay, text: str) -> None:
        write(wait, text)
        said.set()

    for event in events:
        display(event)
    monkeypatch.setattr(WaitDisplay, "_print", heard)
    if events[-1]["event"] == "done":
        display.stop()
        display.wait_for_end()
    assert said.wait(60)
    display.stop()
    return file.getvalue().splitlines()[-1].strip().partition(": ")[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("evaluation", "preparing the next stage"),
        ("checkpoint", "evaluating"),
        ("phase_end", "writing a checkpoint"),
        ("round", "waiting for round 2"),
    ],
)
def test_a_long_step_is_explained(events: Events, monkeypatch: pytest.MonkeyPatch, kind: str, said: str) -> None:
    first = next(index for index, event in enumerate(events) if event["event"] == kind)
    monkeypatch.setattr(progress, "_UNUSUAL", 0.0)
    assert _waited_for(events[: first + 1], monkeypatch) == said


def test_a_slow_shutdown_is_reported(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _waited_for(events, monkeypatch) == "ending the run's processes"


def test_a_scaled_pool_is_one_line(recorder: Any) -> None:
    recorder.add("scale", pool="samplers", before=2, after=4)
    assert _shown(recorder.events, is_terminal=False).endswith("samplers: 2 -> 4\n")


@pytest.mark.parametrize("what", ["a learner worker failed: OSError", "the learner group restarted from checkpoint x"])
def test_a_restart_of_the_learners_is_reported(recorder: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    recorder.add("phase", phase="rl", num_steps=12)
    recorder.round(0, 0.5)
    recorder.add("failure", what=what, attempt=1)
    assert _waited_for(recorder.events, monkeypatch) == "restarting the learners"


def test_what_the_coordinator_waits_for_ends_no_wait(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the coordinator has nothing more to say, the run may still wait."""
    recorder.add("failure", what="a learner worker failed: OSError", attempt=1)
    waits = {"event": "waits", "what": "learner rank 1 silent for 15 s"}
    assert _waited_for([*recorder.events, waits], monkeypatch) == "restarting the learners"


def test_a_background_checkpoint_ends_no_wait(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(index for index, event in enumerate(events) if event["event"] == "round")
    written = next(event for event in events if event["event"] == "checkpoint") | {"beside": True}
    monkeypatch.setattr(progress, "_UNUSUAL", 0.0)
    assert _waited_for([*events[: first + 1], written], monkeypatch) == "waiting for round 2"


def test_stopping_twice_is_no_error(events: Events) -> None:
    display = ProgressDisplay(Console(file=io.StringIO(), force_terminal=True))
    with display:
        display(events[2])
        display.stop()
    display.stop()


def test_parts_of_a_wait_share_its_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_display, "EVERY_S", 0.01)
    shown = io.StringIO()
    with ProgressDisplay(Console(file=shown, width=140)) as display:
        display({"event": "waiting", "what": "making the run directory"})
        display({"event": "waiting", "what": "hashing the checkpoint: 8.0 of 16.0 GB, 2.0 GB/s", "goes_on": True})
        until = time.monotonic() + 10
        while "hashing" not in shown.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    lines = [line.strip() for line in shown.getvalue().splitlines()]
    assert lines[0] == "making the run directory"
    assert "hashing the checkpoint: 8.0 of 16.0 GB, 2.0 GB/s: 0 s" in lines
    assert "hashing the checkpoint: 8.0 of 16.0 GB, 2.0 GB/s" not in lines, "once a second it would be a line each"


def test_a_log_reports_the_throughput_of_loading(recorder: Any) -> None:
    recorder.add("loaded", path="checkpoints/sft", num_bytes=16_000_000_000, check_s=5.0, load_s=4.0)
    (line,) = _shown(recorder.events, is_terminal=False).splitlines()
    assert line.endswith("checkpoints/sft: 16.0 GB checked in 5.0 s, 3.2 GB/s; loaded in 4.0 s, 4.0 GB/s")
