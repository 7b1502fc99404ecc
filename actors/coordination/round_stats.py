"""Statistics of a round: means over its completions, a few readable samples, and the record of both."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from actors.coordination.pools import Pools
from actors.coordination.reporting.metrics import RunGauges
from actors.coordination.reporting.timeline import Timeline
from actors.coordination.rounds import OpenRounds
from actors.curriculum import line_of, outcomes_of
from actors.messages import TrainedRound, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.run_log import RunLog
from actors.training.collate import part_names_of
from actors.training.dynamic_sampling import GroupSelection, graded_rows
from rewards import Grade, Outcome, Problem

_SAMPLES_PER_ROUND = 4


class RoundRecorder:
    """Recorder of the rounds that the learner has trained on and published."""

    def __init__(
        self, plan: RunPlan, rounds: OpenRounds, log: RunLog, *, pools: Pools, timeline: Timeline, gauges: RunGauges
    ) -> None:
        self._plan, self._rounds, self._log = plan, rounds, log
        self._pools, self._timeline, self._gauges = pools, timeline, gauges

    def release(self, trained: TrainedRound, by_key: Mapping[WorkUnitKey, WorkUnitSummary]) -> None:
        """Let later rounds begin: record which problems of this one were solved, and remove it from the ledger."""
        if by_key:
            outcomes = outcomes_of((self._plan.work_unit_problems(key), one.grades) for key, one in by_key.items())
            self._log.add_solve_rates(line_of(trained.round, outcomes))
            self._plan.record_outcomes(trained.round, outcomes)
        self._rounds.publish(trained.round, trained.weights_id)

    async def record(self, trained: TrainedRound, by_key: Mapping[WorkUnitKey, WorkUnitSummary]) -> None:
        """Write a round to the run log, on disk when this returns, and to samples, metrics and timeline."""
        values, version = trained.values, trained.weights_id.version
        stats = self._stats_of_sampled(by_key, version - 1) if by_key else _stats_of_stored(values)
        seconds = values["sampling_s"] + values["training_s"] + values["publish_s"]
        event = self._log.add(
            "round",
            round=trained.round,
            policy_version=version,
            **stats,
            num_retries=self._rounds.num_retries,
            pools=self._pools.use(),
            **values,
            tokens_per_s=round(stats["mean_tokens"] * stats["num_completions"] / seconds, 1),
        )
        self._gauges.show(event)
        self._timeline.add_round(trained.round, values)
        await self._log.written()

    def _stats_of_sampled(self, by_key: Mapping[WorkUnitKey, WorkUnitSummary], newest: int) -> dict[str, Any]:
        """Return the statistics of a round's completions, of which a few are written to samples."""
        plan, summaries = self._plan, list(by_key.values())
        self._log.add_samples(
            readable_samples(
                by_key, _SAMPLES_PER_ROUND, lambda key: plan.round_work_unit(key.round, key.index), plan.prompt_text
            )
        )
        stats = round_stats([plan.group_ids(key) for key in by_key], summaries, self._rounds.selection)
        return stats | _staleness(summaries, newest)


def _stats_of_stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a round that trained on stored pairs: nothing was sampled or graded."""
    # A round that was skipped has no metrics.
    mean_tokens = values.get("completions/mean_length", 0.0)
    return {"num_completions": int(values["num_trained_completions"]), "mean_tokens": mean_tokens}


def round_stats(
    group_ids: Sequence[Sequence[int]], summaries: Sequence[WorkUnitSummary], selection: GroupSelection
) -> dict[str, Any]:
    """Return means over the completions of a round that could be trained on, and how many of its groups could not.

    `num_ungraded` has a count for each outcome without a grade, where the worth of a completion is unknown. Reward
    statistics are over the first `num_groups` groups only, which are always sampled. Replacements are sampled because
    of rewards, so they would bias them.

    Args:
        group_ids: the group of each row of each work unit.
        summaries: of the work units.
        selection: which groups are trained on.
    """
    outcomes = Counter(grade.outcome for summary in summaries for grade in summary.grades)
    rows = [row for ids, summary in zip(group_ids, summaries, strict=True) for row in _graded(ids, summary)]
    grades = [grade for group, grade, _ in rows if group < selection.num_groups]
    asked = max([selection.num_groups, *(1 + ids[-1] for ids in group_ids)])
    chosen = selection.trained_rows([(ids, summary.grades) for ids, summary in zip(group_ids, summaries, strict=True)])
    costs = Counter[str]()
    for summary in summaries:
        costs.update(summary.costs)
    return {
        "reward": fmean(grade.reward for grade in grades) if grades else 0.0,
        "reward_parts": {name: fmean(grade.parts.get(name, 0.0) for grade in grades) for name in part_names_of(grades)},
        "reward_costs": dict(costs),
        "correct": fmean(grade.correct for grade in grades) if grades else 0.0,
        "answer_shapes": _effective_number(Counter(_shape(grade.answer) for grade in grades if grade.correct)),
        "num_completions": len(rows),
        "num_ungraded": {outcome: outcomes[outcome] for outcome in Outcome if outcome is not Outcome.GRADED},
        "num_failed_groups": asked - len({group for group, _, _ in rows}),
        "num_sampled_groups": asked,
        "num_chosen_groups": len({ids[row] for ids, kept in zip(group_ids, chosen, strict=True) for row in kept}),
        "mean_tokens": fmean(count for _, _, count in rows) if rows else 0.0,
    }


def _staleness(summaries: Sequence[WorkUnitSummary], newest: int) -> dict[str, float]:
    """Return mean and maximum policy lag: how many versions older than the trained policy the completions were."""
    lags = [newest - version for summary in summaries for version in summary.policy_versions]
    return {"mean_staleness": fmean(lags), "max_staleness": float(max(lags))}


def _shape(answer: str | None) -> str:
    """Replace every number of an answer by one letter: `3*(14-5)` is `n*(n-n)`."""
    return re.sub(r"\d+", "n", answer or "")


def _effective_number(counts: Counter[str]) -> float:
    """Return e to the entropy of a distribution: n for n equally common items, 0 if there are none."""
    total = counts.total()
    return math.exp(-sum(n / total * math.log(n / total) for n in counts.values())) if total else 0.0


def _graded(group_ids: Sequence[int], summary: WorkUnitSummary) -> list[tuple[int, Grade, int]]:
    """Return group, grade and number of tokens of each completion that can be trained on."""
    kept = graded_rows(group_ids, summary.grades)
    return [(group_ids[row], summary.grades[row], summary.num_tokens[row]) for row in kept]


def readable_samples(
    summaries: Mapping[WorkUnitKey, WorkUnitSummary],
    most: int,
    work_unit_of: Callable[[WorkUnitKey], WorkUnit],
    prompt_text: Callable[[Problem], str],
) -> list[dict[str, Any]]:
    """Return some completions of a round, evenly spaced, as readable JSON objects."""
    ends = list(accumulate(len(summary.grades) for summary in summaries.values()))
    keys, every = list(summaries), max(1, ends[-1] // most)
    chosen = [(bisect_right(ends, at), at) for at in range(0, ends[-1], every)[:most]]
    places = [(keys[index], at - (ends[index - 1] if index else 0)) for index, at in chosen]
    return [_readable(work_unit_of(key), summaries[key], row, prompt_text) for key, row in places]


def _readable(
    work_unit: WorkUnit, summary: WorkUnitSummary, row: int, prompt_text: Callable[[Problem], str]
) -> dict[str, Any]:
    problem, grade = work_unit.problems[row], summary.grades[row]
    return {
        "round": work_unit.key.round,
        "policy_version": summary.policy_versions[row],
        "problem_id": problem.problem_id,
        "prompt": prompt_text(problem),
        "completion": summary.texts[row],
        "reward": grade.reward,
        "reward_parts": dict(grade.parts),
        "correct": grade.correct,
        "outcome": grade.outcome,
        "step_map": list(summary.step_maps[row]),
    }
