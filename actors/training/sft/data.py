"""SFT data: demonstrations of the task or of a file, encoded as training and held-out documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateError

from actors.plan import RunPlan
from actors.spec import RunSpec
from learner.model.tokenizer import ChatTokenizer
from learner.seeds import key_of
from learner.sft.documents import Documents, TokenizedExample, make_documents
from learner.sft.packing import packed_padding_share, padding_share
from rewards import Problem
from rewards.data.demonstrations import Demonstration, read_demonstrations
from rewards.problem import Message, chat

if TYPE_CHECKING:
    from torch import Tensor

# Minimum number of chunks for each one that is held out, if there are few texts.
_LEAST_TRAINED_FOR_ONE = 5
_TRAIN, _HELD_OUT = "train", "held_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class SftData:
    """The examples of a run's SFT."""

    train: Documents
    """Training examples."""
    held_out: Documents | None
    """Examples for the evaluation loss; None if the recipe has none."""
    facts: dict[str, Any]
    """Fields of the run log's `sft_data` event."""
    tokenizer: ChatTokenizer
    """The tokenizer that encoded them."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all documents as tensors by name."""
        parts = {_TRAIN: self.train} if self.held_out is None else {_TRAIN: self.train, _HELD_OUT: self.held_out}
        return {f"{part}/{name}": value for part, some in parts.items() for name, value in some.tensors().items()}

    @classmethod
    def of(cls, facts: dict[str, Any], tensors: Mapping[str, Tensor], tokenizer: ChatTokenizer) -> Self:
        """Restore the data whose `tensors` these are."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = value
        held_out = Documents(**parts[_HELD_OUT]) if _HELD_OUT in parts else None
        return cls(train=Documents(**parts[_TRAIN]), held_out=held_out, facts=facts, tokenizer=tokenizer)


def load_sft_data(spec: RunSpec, plan: RunPlan, tokenizer: ChatTokenizer) -> SftData:
    """Load and encode the recipe's SFT examples.

    A text without a prompt gives one example per chunk of `sft.max_tokens`.

    Raises ValueError, in one sentence, if `sft.data` has an invalid line, too few examples, or only examples that are
    too long; and if no demonstration of the task fits in its canvas.
    """
    if spec.sft.data is None:
        train, held_out, num_overlong = _of_task(spec, plan, tokenizer)
    else:
        train, held_out, num_overlong = _of_file(spec, tokenizer)
    trains_padding = spec.sft.eos_padding == "trained"
    documents = make_documents(train, tokenizer.eos_id, trains_padding=trains_padding)
    num_tokens = [example.num_tokens for example in train]
    return SftData(
        train=documents,
        held_out=make_documents(held_out, tokenizer.eos_id, trains_padding=trains_padding) if held_out else None,
        facts={
            "num_examples": len(train),
            "num_held_out": len(held_out),
            "num_overlong": num_overlong,
            "mean_tokens": round(sum(num_tokens) / len(num_tokens), 1),
            "padding_share": round(padding_share(num_tokens, documents.ids.shape[1]), 4),
            "packed_padding_share": round(packed_padding_share(num_tokens, spec.sft.batch_size), 4),
        },
        tokenizer=tokenizer,
    )


def _of_task(
    spec: RunSpec, plan: RunPlan, tokenizer: ChatTokenizer
) -> tuple[list[TokenizedExample], list[TokenizedExample], int]:
    """Return training examples, held-out ones, and the number of demonstrations that do not fit in the canvas."""
    gen_length = spec.rollout.sampling.gen_length

    def fitting(problems: Sequence[Problem]) -> list[TokenizedExample]:
        examples = [_of_problem(plan, tokenizer, problem, gen_length) for problem in problems]
        return [example for example in examples if len(example.completion_ids) <= gen_length]

    problems = plan.train[: spec.sft.num_labels]
    train, held_out = fitting(problems), fitting(plan.loss_problems[: spec.sft.num_eval])
    if not train:
        shortest = min(len(tokenizer.encode_plain(problem.reference_completion)) for problem in problems)
        raise ValueError(
            f"the shortest demonstration of task {spec.task.name} has {shortest} tokens; "
            f"rollout.sampling.gen_length {gen_length} must be at least that"
        )
    return train, held_out, len(problems) - len(train)


def _of_problem(plan: RunPlan, tokenizer: ChatTokenizer, problem: Problem, gen_length: int) -> TokenizedExample:
    completion = tokenizer.encode_plain(problem.reference_completion)
    return TokenizedExample(prompt_ids=plan.prompt_ids(problem), completion_ids=tuple(completion), num_slots=gen_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keyed:
    """An example of a file, with its hold-out key."""

    key: int
    """Hash of its prompt, or of the text that it is a chunk of. Equal keys are held out together."""
    example: TokenizedExample
    """The example."""


def _of_file(spec: RunSpec, tokenizer: ChatTokenizer) -> tuple[list[TokenizedExample], list[TokenizedExample], int]:
    """Return training examples, held-out ones, and the number of examples that were too long."""
    sft, limit = spec.sft, spec.sft_tokens
    assert sft.data is not None, "there is a file"
    kept: list[_Keyed] = []
    num_overlong = 0
    for demonstration in read_demonstrations(sft.data):
        if demonstration.is_text:
            kept += _chunks(demonstration.completion, tokenizer, limit)
            continue
        prompt = encode_prompt(demonstration.messages, demonstration.place, tokenizer)
        completion = tuple(tokenizer.encode_plain(demonstration.completion))
        if len(prompt) + len(completion) > limit:
            num_overlong += 1
            if sft.overlong == "drop" or len(prompt) >= limit:
                continue
        num_slots = limit - len(prompt)
        example = TokenizedExample(prompt_ids=prompt, completion_ids=completion[:num_slots], num_slots=num_slots)
        kept.append(_Keyed(key=_prompt_key(demonstration), example=example))
    train, held_out = _hold_out(kept, sft.num_eval)
    if not train or (sft.num_labels is not None and sft.num_labels > len(train)):
        asked = "" if sft.num_labels is None else f"sft.num_labels is {sft.num_labels} and "
        default = "" if sft.max_tokens else " (its default, the canvas of the rollout)"
        raise ValueError(
            f"{asked}sft.data {sft.data} leaves {len(train)} to train on: {num_overlong} are longer than "
            f"sft.max_tokens {limit}{default}, {len(held_out)} are held out; raise sft.max_tokens"
            f"{', take sft.overlong=truncate,' if sft.overlong == 'drop' else ''} or ask for fewer with sft.num_labels "
            "or sft.num_eval"
        )
    return train[: sft.num_labels], held_out, num_overlong


def _chunks(text: str, tokenizer: ChatTokenizer, limit: int) -> list[_Keyed]:
    """Split a text into chunks of `limit` tokens; the last ends with the end of text, if it has room. All slots are
    trained on."""
    ids = tokenizer.encode_text(text, add_special_tokens=True)
    # Some tokenizers append the end of text themselves.
    ids = ids[:-1] if ids[-1:] == [tokenizer.eos_id] else ids
    key = key_of(text)
    chunks = [tuple(ids[begin : begin + limit]) for begin in range(0, len(ids), limit)]
    num_slots = [len(chunk) for chunk in chunks]
    if num_slots:
        num_slots[-1] = min(limit, num_slots[-1] + 1)
    return [
        _Keyed(key=key, example=TokenizedExample(prompt_ids=(), completion_ids=chunk, num_slots=slots))
        for chunk, slots in zip(chunks, num_slots, strict=True)
    ]


def encode_prompt(messages: Sequence[Message], place: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Encode the conversation of a row. Raises ValueError with its place if the chat template refuses it."""
    try:
        return tuple(tokenizer.encode_chat(chat(messages)))
    except TemplateError as error:
        raise ValueError(f"{place}: the policy's chat template refuses it: {error}") from error


def _hold_out(examples: Sequence[_Keyed], num_eval: int) -> tuple[list[TokenizedExample], list[TokenizedExample]]:
    """Hold out at least `num_eval` examples, each with all others of its prompt.

    The choice depends on the prompts alone, not on the run's seed nor on the order of the lines. So runs are
    comparable, and most held-out examples stay held out when lines are added to the file. Texts are held out whole, and
    `num_eval` chunks of them are evaluated, since a text may have thousands. If whole texts would be more than half of
    all chunks, the last chunks are held out instead, at most a fifth.
    """
    held_out_keys = set(sorted(one.key for one in examples)[:num_eval])
    train = [one.example for one in examples if one.key not in held_out_keys]
    held_out = [one.example for one in sorted(examples, key=lambda one: one.key) if one.key in held_out_keys]
    if any(example.prompt_ids for example in held_out):
        return train, held_out
    if len(held_out) > len(train):
        end = len(examples) - min(num_eval, len(examples) // _LEAST_TRAINED_FOR_ONE)
        return [one.example for one in examples[:end]], [one.example for one in examples[end:]]
    return train, held_out[:num_eval]


def _prompt_key(demonstration: Demonstration) -> int:
    return key_of(json.dumps([[message.role, message.content] for message in demonstration.messages]))
