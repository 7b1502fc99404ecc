"""Dynamic sampling (DAPO): trains on groups with reward variance, and samples replacements for others.

DAPO (arXiv 2503.14476, section 3.2) samples until a round is full of groups whose rewards differ. Here a round has
candidates in a fixed order, of which `groups_per_round` are sampled at first. Each uninformative group requests one
more candidate, and the first informative ones are trained on. Which those are, and how many are sampled, follows from
the rewards alone: partial results can show that a candidate is needed, but never that it is not. So the order of
answers does not matter, and groups that are sampled quickly have no advantage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from actors.run_config import RunConfig
from rewards import Grade

_SAME = 1e-6

GradedRows = tuple[Sequence[int], Sequence[Grade]]
"""Group and grade of each row of a work unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSelection:
    """Rule that chooses a round's groups from its candidates."""

    num_groups: int
    """Groups of a round."""
    max_groups: int
    """Candidate groups of a round; as many as `num_groups` without dynamic sampling."""
    min_accuracy: float = 0.0
    """Groups with a smaller share of correct completions are uninformative."""
    max_accuracy: float = 1.0
    """So are those with a greater share."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build the rule from a recipe."""
        return cls(
            num_groups=config.learner.groups_per_round,
            max_groups=config.max_groups_per_round,
            min_accuracy=config.learner.filters.min_accuracy,
            max_accuracy=config.learner.filters.max_accuracy,
        )

    @property
    def is_dynamic(self) -> bool:
        """Whether uninformative groups are replaced."""
        return self.max_groups > self.num_groups

    def trained_rows(self, work_units: Sequence[GradedRows]) -> list[list[int]]:
        """Return the rows of each work unit of a round that are trained on, in order."""
        room, chosen = self.num_groups, []
        for group_ids, grades in work_units:
            kept = graded_rows(group_ids, grades)
            if self.is_dynamic:
                informative = self._informative(kept, group_ids, grades)[:room]
                room -= len(informative)
                kept = [row for row in kept if group_ids[row] in informative]
            chosen.append(kept)
        return chosen

    def num_informative(self, rows: GradedRows) -> int:
        """Count the informative groups of a work unit; without dynamic sampling, all of its groups."""
        return len(self._informative(graded_rows(*rows), *rows)) if self.is_dynamic else len(set(rows[0]))

    def work_units_needed(self, sizes: Sequence[int], informative: Mapping[int, int]) -> int:
        """Return how many work units a round needs, by the results so far.

        Args:
            sizes: groups of each candidate work unit.
            informative: informative groups by work unit; of those without a result, all are assumed to be.
        """
        expected = 0
        for index, size in enumerate(sizes):
            if expected >= self.num_groups:
                return index
            expected += informative.get(index, size)
        return len(sizes)

    def _informative(self, rows: Sequence[int], group_ids: Sequence[int], grades: Sequence[Grade]) -> list[int]:
        of_group: dict[int, list[Grade]] = {}
        for row in rows:
            of_group.setdefault(group_ids[row], []).append(grades[row])
        return [group for group, its_grades in of_group.items() if self._is_informative(its_grades)]

    def _is_informative(self, grades: Sequence[Grade]) -> bool:
        rewards = [grade.reward for grade in grades]
        accuracy = sum(grade.correct for grade in grades) / len(grades)
        is_between = self.min_accuracy - _SAME <= accuracy <= self.max_accuracy + _SAME
        return is_between and max(rewards) - min(rewards) > _SAME


EVERY_GROUP = GroupSelection(num_groups=1, max_groups=1)
"""Rule that trains on all given groups."""


def graded_rows(group_ids: Sequence[int], grades: Sequence[Grade]) -> list[int]:
    """Return the trainable rows: those whose grade counts, in groups with at least two of them to compare.

    A grade that timed out or failed says nothing about its completion. So it is dropped and not a zero, unless the
    recipe wants the zero.
    """
    graded = [row for row, grade in enumerate(grades) if grade.counts]
    of_group = Counter(group_ids[row] for row in graded)
    return [row for row in graded if of_group[group_ids[row]] > 1]
