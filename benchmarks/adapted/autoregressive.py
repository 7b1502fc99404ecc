"""Held-out accuracy of an unadapted autoregressive model, with d1's prompts and graders.

    python -m benchmarks.adapted.autoregressive smollm2 gsm8k --count 40 --out runs/autoregressive
    python -m benchmarks.adapted.autoregressive smollm2 gsm8k heldout_data=test.jsonl train_data=train.jsonl

Decoding is greedy. Each finished batch is saved in the format of `d1 eval`, and a second call resumes after it.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from deploy.adapt.prompts import batches_of, encode_prompts
from deploy.errors import UserError
from deploy.offline.evaluation.metrics import compute_metrics
from deploy.offline.evaluation.problems import heldout
from deploy.offline.item import AnsweredBatch, answer_of
from deploy.offline.record import RecordWriter, take_lock
from deploy.offline.tasks import open_task, task_config
from deploy.printing import duration, share
from learner.model.autoregressive.source import AutoregressiveCheckpoint, open_source
from rewards import Grader, Problem, RewardConfig, Sample, TaskConfig
from rollout.autoregressive.generator import ModelResponse, Sampling, open_generator


def scored(
    source: AutoregressiveCheckpoint,
    task: TaskConfig,
    out: Path,
    *,
    count: int | None,
    max_new_tokens: int,
    batch_size: int,
) -> dict[str, Any]:
    """Evaluate a model on a task's held-out problems, with the metrics of `d1 eval`.

    Args:
        source: the model.
        task: the task of the problems.
        out: folder of the answers.
        count: number of problems. None: all, or 500 of a task that generates them.
        max_new_tokens: maximum tokens of an answer.
        batch_size: problems per batch.

    Raises the UserError of `RecordWriter` and the ValueError of `encode_prompts`.
    """
    tokenizer, made = source.tokenizer(), open_task(task)
    problems = heldout(made, count or None)
    asked = encode_prompts(source, tokenizer, [problem.messages for problem in problems], max_new_tokens)
    if len(asked) < len(problems):
        raise ValueError(
            f"{len(problems) - len(asked)} prompts have no room for an answer; take a smaller max_new_tokens"
        )
    facts = {"model": str(source.path), "task": task.model_dump(mode="json"), "max_new_tokens": max_new_tokens}
    batches = list(batches_of(asked, batch_size))
    record = RecordWriter(out / f"{task.name}-{max_new_tokens}.jsonl", facts, list(map(len, batches)))
    missing = [index for index in range(len(batches)) if index not in record.recorded.batches]
    if missing:
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0)
        generator, grader = open_generator(source, tokenizer, sampling), Grader(task, RewardConfig())
    for index in missing:
        began = time.monotonic()
        responses = generator.generate([one.ids for one in batches[index]], [0] * len(batches[index]))
        some = [problems[one.index] for one in batches[index]]
        samples = [_sample(*pair, tokenizer, max_new_tokens) for pair in zip(some, responses, strict=True)]
        graded = zip(samples, grader.evaluate(samples), strict=True)
        answers = tuple(answer_of(sample, 0, grade) for sample, grade in graded)
        record.add(AnsweredBatch(index=index, answers=answers, seconds=time.monotonic() - began))
        done = record.recorded.answers
        print(f"{len(done)} of {len(problems)}, {sum(one.correct for one in done)} right", file=sys.stderr, flush=True)
    return compute_metrics(record.recorded)


def _sample(problem: Problem, response: ModelResponse, tokenizer: Any, max_new_tokens: int) -> Sample:
    num_tokens = len(response.token_ids) + response.is_ended
    return Sample(
        problem=problem,
        text=str(tokenizer.decode(list(response.token_ids), skip_special_tokens=True)),
        num_tokens=num_tokens,
        num_forwards=num_tokens,
        max_tokens=max_new_tokens,
        is_truncated=not response.is_ended,
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, a hub id, a .gguf file, or smollm2")
    parser.add_argument("task")
    parser.add_argument("fields", nargs="*", help="fields of the task, key=value")
    parser.add_argument("--count", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/autoregressive"))
    given = parser.parse_args()
    try:
        with closing(take_lock(given.out, "benchmark")):
            found = scored(
                open_source(given.model),
                task_config(given.task, given.fields),
                given.out,
                count=given.count,
                max_new_tokens=given.max_new_tokens,
                batch_size=given.batch_size,
            )
    except (UserError, ValueError) as error:
        sys.exit(f"{error}")
    ended = f"{100 * found['truncated']:.0f} % cut at {given.max_new_tokens} tokens"
    parts = f", parts {share(found['items'], found['items_interval'])} %" if "items" in found else ""
    print(
        f"{given.task}: {found['num_correct']} of {found['num_problems']} right, "
        f"{share(found['accuracy'], found['accuracy_interval'])} %{parts}; {ended}, {found['mean_tokens']:.0f} tokens "
        f"on average; {duration(found['worker_seconds'])}"
    )


if __name__ == "__main__":
    _main()
