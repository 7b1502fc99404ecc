"""Run plan: the problems, requests and seeds of every round and evaluation.

It is a pure function of the run's seed and, with a curriculum, of the rewards so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from actors.batching import balanced_batches, consecutive_batches, evaluation_batches
from actors.curriculum import Outcomes, SolveRates, choose_problems
from actors.messages import EVALUATION_ROUND, WorkUnit, WorkUnitKey
from actors.spec import RunSpec
from learner.model.config import TransformerConfig
from learner.model.tokenizer import ChatTokenizer
from learner.seeds import fold, key_of
from learner.tree.config import inner_nodes
from rewards import Problem, Split, make_task
from rewards.problem import chat
from rollout.request import Request, SamplingParams, canvas_of

_ORDER_KEY, _SAMPLE_KEY, MASK_KEY, _SCHEDULE_KEY, _NODE_KEY = 11, 12, 13, 14, 15
# Number of rounds whose plans, and of epochs whose orders, stay cached.
_MAX_CACHED = 16


class EpochOrder:
    """Order in which the rounds of a run take its items: shuffled anew in every epoch."""

    def __init__(self, num_items: int, seed: int) -> None:
        """Order `num_items` items by the run's seed."""
        self._num_items, self._seed = num_items, seed
        self._orders: dict[int, list[int]] = {}

    def item_at(self, position: int) -> tuple[int, int]:
        """Return the index of the item at a position of the whole run, and its epoch."""
        epoch, place = divmod(position, self._num_items)
        if epoch not in self._orders:
            if len(self._orders) > _MAX_CACHED:
                del self._orders[next(iter(self._orders))]
            order = partial(fold, fold(self._seed, _ORDER_KEY, epoch))
            self._orders[epoch] = sorted(range(self._num_items), key=order)
        return self._orders[epoch][place], epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class _RoundPlan:
    """Candidate groups of a round, and their work units."""

    problems: list[tuple[Problem, int]]
    """The problem of each group, with its epoch."""
    work_units: list[tuple[int, ...]]
    """The groups of each work unit."""


class RunPlan:
    """The problems of a run, and the work units of its rounds and evaluations."""

    def __init__(self, spec: RunSpec, tokenizer: ChatTokenizer) -> None:
        """Create the problems and encode their prompts.

        Training problems whose prompts are too long are dropped or truncated, as the recipe says. Held-out and
        validation problems are never dropped, and truncated only if the recipe says so.

        Raises ValueError if the task has too few problems or every training prompt is too long.
        """
        task = make_task(spec.task)
        self._spec, self._params = spec, spec.rollout.params
        self._tokenizer = tokenizer
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._round_plans: dict[int, _RoundPlan] = {}
        self.solve_rates = SolveRates()
        self.num_overlong = 0
        # The split is by solution and not by seed, so the held-out and validation sets are the same for every run.
        self.train = self._encode_and_filter(task.problems(Split.TRAIN, spec.num_train_problems, spec.seed))
        self.heldout = self._encode(task.problems(Split.HELDOUT, spec.evaluation.num_problems, seed=0))
        self._order = EpochOrder(len(self.train), spec.seed)
        num_validation = spec.evaluation.num_validation
        self.validation = (
            self._encode(task.problems(Split.VALIDATION, num_validation, seed=0)) if num_validation else []
        )

    @property
    def selection_problems(self) -> list[Problem]:
        """Problems for model selection during a run: the validation problems, or without any the held-out ones."""
        return self.validation or self.heldout

    @property
    def loss_problems(self) -> list[Problem]:
        """Problems of `selection_problems` whose prompts fit the training canvases."""
        return [problem for problem in self.selection_problems if not self._is_overlong(problem)]

    @property
    def length_warning(self) -> str:
        """A sentence about prompts that are too long, and how they are handled; empty if there are none."""
        rollout = self._spec.rollout
        fate = "cut to their last tokens" if rollout.overlong_prompts == "truncate_left" else "not trained on"
        limit = f"rollout.max_prompt_tokens {rollout.max_prompt_tokens}"
        return f"{self.num_overlong} prompts are longer than {limit} and {fate}" if self.num_overlong else ""

    @property
    def work_units_per_round(self) -> int:
        """Work units of a round, before any group is replaced."""
        return self._spec.work_units_per_round

    def work_unit_sizes(self, round_index: int) -> list[int]:
        """Return the number of groups in each candidate work unit of a round."""
        return [len(groups) for groups in self._round_plan(round_index).work_units]

    def round_work_unit(self, round_index: int, index: int) -> WorkUnit:
        """Make a work unit of a round. Problems are shuffled anew in every epoch; every sample has its own seed."""
        spec, round_plan = self._spec, self._round_plan(round_index)
        problems, requests = [], []
        for group in round_plan.work_units[index]:
            problem, epoch = round_plan.problems[group]
            problem_key = key_of(problem.problem_id), epoch
            params = self._params[fold(spec.seed, _SCHEDULE_KEY, *problem_key) % len(self._params)]
            for sample in range(spec.learner.group_size):
                problems.append(problem)
                request = self._request(problem, params, fold(spec.seed, _SAMPLE_KEY, *problem_key, sample))
                nodes = enumerate(inner_nodes(spec.learner.branches, sample))
                request = replace(
                    request,
                    num_step_answers=spec.learner.num_step_answers(params.fixed_num_steps or params.gen_length),
                    samples_step_answers=spec.learner.samples_step_answers,
                    node_seeds=tuple(fold(spec.seed, _NODE_KEY, *problem_key, *node) for node in nodes),
                )
                requests.append(request)
        return WorkUnit(
            key=WorkUnitKey(round=round_index, index=index),
            problems=tuple(problems),
            group_ids=self.group_ids(WorkUnitKey(round=round_index, index=index)),
            requests=tuple(requests),
        )

    def group_ids(self, key: WorkUnitKey) -> tuple[int, ...]:
        """Return the group of each request of a work unit, numbered within the round."""
        groups = self._round_plan(key.round).work_units[key.index]
        return tuple(group for group in groups for _ in range(self._spec.learner.group_size))

    def work_unit_problems(self, key: WorkUnitKey) -> list[Problem]:
        """Return the problem of each request of a round's work unit."""
        problems = self._round_plan(key.round).problems
        return [problems[group][0] for group in self.group_ids(key)]

    def evaluation_work_units(
        self,
        params: SamplingParams,
        policy: TransformerConfig,
        first_index: int = 0,
        problems: Sequence[Problem] | None = None,
    ) -> list[WorkUnit]:
        """Make the work units of an evaluation: each problem once, at temperature 0.

        Problems whose prompts leave no room in the policy's longest canvas are left out.

        Args:
            params: sampling parameters; their temperature is ignored.
            policy: config of the policy that answers.
            first_index: index of the first work unit.
            problems: which of the plan's problems; None: the held-out ones.

        Raises ValueError if no problem has room.
        """
        problems = self.heldout if problems is None else problems
        has_no_room = {problem.problem_id for problem in self.without_room(params, policy, problems)}
        if has_no_room and len(has_no_room) == len(problems):
            raise ValueError(
                f"every evaluation prompt of task {self._spec.task.name} is too long: with {params.gen_length} slots "
                f"of a completion it exceeds the policy's {policy.max_sequence_length} tokens"
            )
        answered = [problem for problem in problems if problem.problem_id not in has_no_room]
        params = params.model_copy(update={"temperature": 0.0})
        lengths = [len(self._prompts[problem.problem_id]) for problem in answered]
        rollout = self._spec.rollout
        batches = evaluation_batches(lengths, rollout.batch_size, rollout.max_prompt_tokens, params.gen_length)
        return [
            WorkUnit(
                key=WorkUnitKey(round=EVALUATION_ROUND, index=index),
                problems=tuple(answered[place] for place in places),
                group_ids=places,
                requests=tuple(self._request(answered[place], params, seed=0) for place in places),
                is_long=self._is_overlong(answered[places[0]]),
            )
            for index, places in enumerate(batches, first_index)
        ]

    def without_room(
        self, params: SamplingParams, policy: TransformerConfig, problems: Sequence[Problem] | None = None
    ) -> list[Problem]:
        """Return the problems whose prompts leave no room for a completion in the policy's longest canvas.

        The arguments are those of `evaluation_work_units`.
        """
        return [
            problem
            for problem in (self.heldout if problems is None else problems)
            if canvas_of(self._request(problem, params, seed=0), policy).end > policy.max_sequence_length
        ]

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """Return the encoded prompt of one of the plan's problems."""
        return self._prompts[problem.problem_id]

    def prompt_text(self, problem: Problem) -> str:
        """Return the prompt as readable text."""
        return "\n".join(message.content for message in problem.messages)

    def record_outcomes(self, round_index: int, outcomes: Outcomes) -> None:
        """Record a graded round's outcomes, from which a curriculum plans later rounds again."""
        if self._spec.rollout.curriculum > 1:
            self.solve_rates.record(round_index, outcomes)
            self._round_plans = {index: plan for index, plan in self._round_plans.items() if index <= round_index}

    def _round_plan(self, round_index: int) -> _RoundPlan:
        if round_index not in self._round_plans:
            if len(self._round_plans) > _MAX_CACHED:
                del self._round_plans[min(self._round_plans)]
            self._round_plans[round_index] = self._make_round_plan(round_index)
        return self._round_plans[round_index]

    def _make_round_plan(self, round_index: int) -> _RoundPlan:
        # A round has its own spare problems for replacements, so its problems do not depend on other rounds' groups.
        spec, most, times = self._spec, self._spec.max_groups_per_round, self._spec.rollout.curriculum
        first = round_index * most * times
        problems = [self._problem_at(first + place) for place in range(most * times)]
        if times > 1:
            # Only rounds that are certain to be graded before this one begins.
            known = self.solve_rates.before(round_index - spec.learner.max_staleness)
            problems = choose_problems(problems, most, known, spec.seed, round_index)
        whole, size = spec.learner.groups_per_round, spec.groups_per_work_unit
        lengths = [len(self._prompts[problem.problem_id]) + spec.rollout.sampling.gen_length for problem, _ in problems]
        at_first = balanced_batches(lengths[:whole], size, spec.max_groups_per_work_unit)
        # Replacement groups stay in order, so that short ones have no advantage.
        return _RoundPlan(problems=problems, work_units=[*at_first, *consecutive_batches(range(whole, most), size)])

    def _problem_at(self, position: int) -> tuple[Problem, int]:
        index, epoch = self._order.item_at(position)
        return self.train[index], epoch

    def _request(self, problem: Problem, params: SamplingParams, seed: int) -> Request:
        return Request(prompt_ids=self._prompts[problem.problem_id], params=params, seed=seed)

    def _encode_and_filter(self, problems: list[Problem]) -> list[Problem]:
        """Encode prompts and drop those that are too long, unless they are truncated."""
        kept = [problem for problem in self._encode(problems) if not self._is_overlong(problem)]
        self.num_overlong += len(problems) - len(kept)
        if not kept:
            raise ValueError(
                f"every prompt of task {self._spec.task.name} is longer than "
                f"rollout.max_prompt_tokens {self._spec.rollout.max_prompt_tokens}; raise it"
            )
        return kept

    def _encode(self, problems: list[Problem]) -> list[Problem]:
        """Encode prompts, truncating those that are too long if the recipe says so."""
        rollout = self._spec.rollout
        for problem in problems:
            prompt = self._tokenizer.encode_chat(chat(problem.messages))
            if len(prompt) > rollout.max_prompt_tokens and rollout.overlong_prompts == "truncate_left":
                self.num_overlong += 1
                prompt = prompt[-rollout.max_prompt_tokens :]
            self._prompts[problem.problem_id] = tuple(prompt)
        return problems

    def _is_overlong(self, problem: Problem) -> bool:
        return len(self._prompts[problem.problem_id]) > self._spec.rollout.max_prompt_tokens
