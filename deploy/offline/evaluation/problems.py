"""Held-out problems of an evaluation cell, and their batches of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.batching import evaluation_batches
from deploy.errors import UserError, user_errors
from deploy.offline.evaluation.cells import Cell
from deploy.offline.item import Batch, Item
from deploy.offline.tasks import open_task
from learner.model.config import TransformerConfig
from learner.model.renoising.config import RenoisingConfig
from learner.model.tokenizer import ChatTokenizer
from learner.seeds import fold, key_of
from rewards import Problem, Split, Task
from rewards.data.dataset import file_order
from rewards.data.prompts import user_turn
from rewards.first_d1 import evaluation as first_d1
from rewards.problem import chat
from rollout.renoising.request import RenoisingRequest
from rollout.request import Request, SamplingParams, canvas_of

_NUM_GENERATED = 500
_SAMPLE_KEY = 31
_PromptSample = tuple[Problem, tuple[int, ...], int]
"""Problem, prompt ids, and index of the sample."""


def problems_of(cell: Cell, on_warning: Callable[[str], object]) -> list[Problem]:
    """Return the held-out problems of a cell; `on_warning` receives warnings about the data.

    Raises UserError if there are too few, or the data is not available.
    """
    task = open_task(cell.task)
    with user_errors(ValueError):
        found = _of_d1(cell, task) if cell.protocol == "d1" else heldout(task, cell.num_problems)
    for warning in task.warnings():
        on_warning(warning)
    return found[: cell.num_problems]


def batches_of(
    cell: Cell,
    problems: Sequence[Problem],
    tokenizer: ChatTokenizer,
    batch_size: int,
    policy: TransformerConfig | RenoisingConfig,
    *,
    usual: int | None = None,
) -> list[Batch]:
    """Build the batches of a cell: problem by problem, with all samples of a problem in succession.

    Prompts with more than `usual` tokens come later, as in evaluations of a run whose `rollout.max_prompt_tokens` is
    `usual`. Prompts that leave no room for the completion come last.

    Raises UserError if no prompt leaves room.
    """
    prompts = [_prompt(cell, problem, tokenizer) for problem in problems]
    _check_room(cell, min(map(len, prompts)), policy)
    fitting, others = list[_PromptSample](), list[_PromptSample]()
    for problem, prompt in zip(problems, prompts, strict=True):
        some = fitting if _room(cell, len(prompt), policy) >= 0 else others
        some += [(problem, prompt, sample) for sample in range(cell.num_samples)]
    lengths = [len(prompt) for _, prompt, _ in fitting]
    places = evaluation_batches(lengths, batch_size, max(lengths) if usual is None else usual, cell.params.gen_length)
    together = [[fitting[place] for place in some] for some in places]
    batches = [_batch(cell, index, some) for index, some in enumerate(together)]
    return [*batches, *([_batch(cell, len(batches), others, has_room=False)] if others else [])]


def _room(cell: Cell, prompt_length: int, policy: TransformerConfig | RenoisingConfig) -> int:
    """Return the context left after a prompt and its completion, in tokens; negative if they do not fit."""
    params = cell.params
    if isinstance(policy, RenoisingConfig) or not isinstance(params, SamplingParams):
        canvas = _canvas(policy)
        return policy.max_sequence_length - prompt_length - -(-params.gen_length // canvas) * canvas
    request = Request(prompt_ids=(0,) * prompt_length, params=params, seed=0)
    return policy.max_sequence_length - canvas_of(request, policy).end


def _canvas(policy: TransformerConfig | RenoisingConfig) -> int:
    """Return the granularity of the completion length: a canvas for renoising policies, else one slot."""
    return policy.canvas_length if isinstance(policy, RenoisingConfig) else 1


def _check_room(cell: Cell, shortest: int, policy: TransformerConfig | RenoisingConfig) -> None:
    if _room(cell, shortest, policy) >= 0:
        return
    canvas = _canvas(policy)
    room = (policy.max_sequence_length - shortest) // canvas * canvas
    rest = f"take a length of at most {room}" if room > 0 else "there is no room for any completion"
    raise UserError(
        f"{cell.task.name} at {cell.params.gen_length} slots: its shortest prompt has {shortest} tokens, and the "
        f"policy takes {policy.max_sequence_length} in all; {rest}"
    )


def _batch(cell: Cell, index: int, asked: Sequence[_PromptSample], *, has_room: bool = True) -> Batch:
    return Batch(
        index=index,
        items=tuple(_item(cell, number, *one) for number, one in enumerate(asked)),
        task=cell.task,
        grades_whole_canvas=cell.protocol == "d1",
        has_room=has_room,
    )


def _item(cell: Cell, index: int, problem: Problem, prompt: tuple[int, ...], sample: int) -> Item:
    params, seed = cell.params, fold(cell.seed, _SAMPLE_KEY, key_of(problem.problem_id), sample)
    return Item(
        index=index,
        place=problem.problem_id,
        sample=sample,
        num_samples=cell.num_samples,
        request=Request(prompt_ids=prompt, params=params, seed=seed)
        if isinstance(params, SamplingParams)
        else RenoisingRequest(prompt_ids=prompt, params=params, seed=seed),
        problem=problem,
    )


def heldout(task: Task, count: int | None) -> list[Problem]:
    """Return `count` held-out problems of a task; None: all, or up to 500 of a task that generates them.

    The split does not depend on the seed of a run: a run is evaluated on the same problems. Raises ValueError if there
    are fewer.
    """
    if count is None:
        count = task.size(Split.HELDOUT) or min(_NUM_GENERATED, task.max_size(Split.HELDOUT))
    return task.problems(Split.HELDOUT, count, seed=0)


def _of_d1(cell: Cell, task: Task) -> list[Problem]:
    size = task.size(Split.HELDOUT)
    if size is None:
        return first_d1.evaluated_problems(cell.task.name, heldout(task, None))
    found = task.problems(Split.HELDOUT, size, seed=0)
    return first_d1.evaluated_problems(
        cell.task.name, file_order(found, task=cell.task.name, split=Split.HELDOUT, seed=0)
    )


def _prompt(cell: Cell, problem: Problem, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    if cell.protocol == "d1":
        turn = user_turn(first_d1.d1_prompt(cell.task.name, problem))
        return tuple(tokenizer.encode_chat(chat(turn), first_d1.ANSWER_PREFIX))
    return tuple(tokenizer.encode_chat(chat(problem.messages)))
