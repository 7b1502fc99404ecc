"""Result tables: what was measured is shown, and what was not is left out."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from deploy.runs.result_tables import result_tables

Events = list[dict[str, Any]]


def _printed(events: Events, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        for table in result_tables(events):
            console.print(table)
    return capture.get()


def _cells(events: Events) -> str:
    """Return the table of the stages as Markdown."""
    table = next(result_tables(events))
    rows = zip(*([str(column.header), *map(str, column.cells)] for column in table.columns), strict=True)
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    rule = ["---:" if column.justify == "right" else "---" for column in table.columns]
    return f"{lines[0]}| {' | '.join(rule)} |\n{''.join(lines[1:])}\n{table.caption}.\n"


def test_the_table_of_a_whole_run(events: Events) -> None:
    assert _cells(events) == (
        "| policy | held-out accuracy | 95 % interval | n | time | work |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| untrained | 0.0 % | 0.0 to 0.8 % | 500 |  |  |\n"
        "| SFT | 24.0 % | 20.5 to 27.9 % | 500 | 20 s | 100 steps |\n"
        "| SFT + RL | 50.0 % | 45.6 to 54.4 % | 500 | 46 s | 12 rounds |\n"
        "| control: more SFT, same seconds | 28.0 % | 24.2 to 32.1 % | 500 | 46 s | 230 steps |\n"
        "\n2 min 45 s in all\nvalidation loss of SFT: 5 -> 1.5\nvalidation loss of control: 5 -> 1.5.\n"
    )


def test_the_printed_table_has_every_cell(events: Events) -> None:
    text = _printed(events)
    assert "tiny" in text
    for row in _cells(events).splitlines()[2:6]:
        for cell in row.strip("| ").split(" | "):
            assert cell.strip() in text


def test_no_number_is_broken_on_eighty_columns(events: Events) -> None:
    slow = [event | {"seconds": 578.2} if event["event"] == "phase_end" else event for event in events]
    text = _printed(slow, width=80)
    assert all(whole in text for whole in ("45.6 to 54.4 %", "9 min 38 s", "12 rounds"))


def test_stages_that_were_not_evaluated_are_left_out(events: Events) -> None:
    early = events[: next(index for index, event in enumerate(events) if event["event"] == "round")]
    text = _cells(early)
    assert "| SFT |" in text
    assert "GRPO" not in text
    assert "control" not in text


def test_a_run_without_sft_does_not_claim_it(recorder: Any) -> None:
    recorder.evaluation("start", 50)
    recorder.evaluation("rl", 90, 5)
    text = _cells(recorder.events)
    assert "| start | 10.0 % |" in text
    assert "| RL | 18.0 % |" in text


def test_a_control_of_so_many_steps_does_not_claim_the_same_seconds(recorder: Any) -> None:
    recorder.sft_steps("control", 50, planned=50)
    recorder.evaluation("control", 90, 5)
    assert "| control: more SFT |" in _cells(recorder.events)


def test_a_runs_name_is_not_markup(recorder: Any) -> None:
    recorder.add("run", name="[bold]x[/nope]\x1b[2J", seed=0, commit="", hardware="", versions={})
    recorder.evaluation("start", 50)
    text = _printed(recorder.events)
    assert "[bold]x[/nope]\\u001b[2J" in text
    assert "\x1b[2J" not in text


def test_the_accuracy_at_each_schedule_has_a_table(recorder: Any) -> None:
    assert "by schedule" not in _printed(recorder.events)
    free = {"threshold 0.9": (150, 2.34)}
    recorder.evaluation("sft", 100, schedules={"9 steps": (100, 9), "18 steps": (125, 18), "1 step": (50, 1)} | free)
    recorder.evaluation("rl", 200, 5, schedules={"9 steps": (200, 9), "18 steps": (300, 18)})
    assert _printed(recorder.events).splitlines()[-8:] == [
        "┏━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┳━━━━━━┓",
        "┃ denoising     ┃               SFT ┃   RL ┃",
        "┡━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━╇━━━━━━┩",
        "│ 1 step        │              10.0 │      │",
        "│ 9 steps       │              20.0 │ 40.0 │",
        "│ 18 steps      │              25.0 │ 60.0 │",
        "│ threshold 0.9 │ 30.0 in 2.3 steps │      │",
        "└───────────────┴───────────────────┴──────┘",
    ]


def test_the_best_by_validation_is_named_under_the_table(events: Events, recorder: Any) -> None:
    recorder.evaluation("validation", 150)
    recorder.evaluation("validation", 300, 7)
    recorder.evaluation("validation", 290, 12)
    caption = str(next(result_tables(events)).caption)
    assert caption.endswith("\nbest by validation: version 8, after 7 rounds: 60.0 % (55.6 to 64.2), 300 of 500")


def test_without_validation_nothing_is_called_the_best(events: Events) -> None:
    assert "best" not in str(next(result_tables(events)).caption)
