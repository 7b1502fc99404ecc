"""Dynamic sampling: which groups of a round are trained on, and how many more are asked for those that teach nothing.

DAPO (arXiv 2503.14476, section 3.2) samples until a round is full of groups whose rewards differ. Here a round has
candidates in a fixed order, `groups_per_round` of them asked at first. Each that turns out to teach nothing calls for
one more, and the first that teach are trained on. Which those are, and how many are asked, follows from the rewards
alone: what is known so far only says that a candidate is needed, never that it is not. So it does not matter who
answers first, and groups that are quickly sampled have no advantage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from actors.run_config import RunConfig
from rewards import Grade

_SAME = 1e-6

Rows = tuple[Sequence[int], Sequence[Grade]]
"""The group of each row of a portion, and its grade."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChoice:
    """How the groups of a round are chosen from its candidates."""

    num_groups: int
    """Groups of a round."""
    most_groups: int
    """Candidates of a round; as many as groups where none is replaced."""
    min_accuracy: float = 0.0
    """Groups of which a smaller share is correct teach nothing."""
    max_accuracy: float = 1.0
    """Nor do those of which a greater share is."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """As a recipe says."""
        return cls(
            num_groups=config.learner.groups_per_round,
            most_groups=config.most_groups_per_round,
            min_accuracy=config.learner.filters.min_accuracy,
            max_accuracy=config.learner.filters.max_accuracy,
        )

    @property
    def is_dynamic(self) -> bool:
        """Whether groups that teach nothing are replaced."""
        return self.most_groups > self.num_groups

    def trained_rows(self, portions: Sequence[Rows]) -> list[list[int]]:
        """The rows of each portion of a round, in their order, that are trained on."""
        room, chosen = self.num_groups, []
        for group_ids, grades in portions:
            kept = graded_rows(group_ids, grades)
            if self.is_dynamic:
                teaching = self._teaching(kept, group_ids, grades)[:room]
                room -= len(teaching)
                kept = [row for row in kept if group_ids[row] in teaching]
            chosen.append(kept)
        return chosen

    def num_teaching(self, rows: Rows) -> int:
        """Groups of a portion that teach something; where none is replaced, all of them."""
        return len(self._teaching(graded_rows(*rows), *rows)) if self.is_dynamic else len(set(rows[0]))

    def portions_needed(self, sizes: Sequence[int], teaching: Mapping[int, int]) -> int:
        """How many portions a round needs for all that is known.

        Args:
            sizes: groups of each portion of candidates.
            teaching: groups that teach, by portion; for those that are not known yet it is hoped that all do.
        """
        hoped = 0
        for index, size in enumerate(sizes):
            if hoped >= self.num_groups:
                return index
            hoped += teaching.get(index, size)
        return len(sizes)

    def _teaching(self, rows: Sequence[int], group_ids: Sequence[int], grades: Sequence[Grade]) -> list[int]:
        of_group: dict[int, list[Grade]] = {}
        for row in rows:
            of_group.setdefault(group_ids[row], []).append(grades[row])
        return [group for group, its_grades in of_group.items() if self._teaches(its_grades)]

    def _teaches(self, grades: Sequence[Grade]) -> bool:
        rewards = [grade.reward for grade in grades]
        accuracy = sum(grade.correct for grade in grades) / len(grades)
        is_between = self.min_accuracy - _SAME <= accuracy <= self.max_accuracy + _SAME
        return is_between and max(rewards) - min(rewards) > _SAME


EVERY_GROUP = GroupChoice(num_groups=1, most_groups=1)
"""Of what trains on all groups that it is given."""


def graded_rows(group_ids: Sequence[int], grades: Sequence[Grade]) -> list[int]:
    """The rows that can be trained on: those whose grade counts, where their group has a second one to compare with.

    A grade that timed out or failed says nothing about its completion, so it is no zero: the group does without it,
    unless the recipe wants the zero.
    """
    graded = [row for row, grade in enumerate(grades) if grade.counts]
    of_group = Counter(group_ids[row] for row in graded)
    return [row for row in graded if of_group[group_ids[row]] > 1]
