"""Responses of an autoregressive model to prompts, written as a chat file for SFT."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.adapt.generation import ModelResponse, Sampling, batches_of, encode_prompts, open_generator
from deploy.adapt.prompts import Conversation
from deploy.adapt.response_file import ResponseFile, ResponseProgress
from deploy.errors import UserError, user_errors
from deploy.printing import duration
from learner.seeds import fold
from rewards.problem import chat

if TYPE_CHECKING:
    from learner.model.autoregressive.source import AutoregressiveCheckpoint

# End of a sentence, with its closing quotes. A dot after a digit may number a list or be a decimal point.
_SENTENCE_END = re.compile(r"(?<!\d)[.!?]+[\"')\]\u201d\u2019]*(?=\s|$)")


def write_responses(
    source: AutoregressiveCheckpoint,
    prompts: Sequence[Conversation],
    path: Path,
    sampling: Sampling,
    say: Callable[[str], object] = lambda _: None,
) -> ResponseProgress:
    """Write the model's own response to each prompt as a line with `messages`; resume an earlier attempt.

    Args:
        source: the autoregressive model.
        prompts: the prompts.
        path: the file, which `sft.data` can name.
        sampling: sampling parameters of the responses.
        say: receives progress messages.

    Raises:
        UserError: the model cannot be read or has no chat template, no prompt fits into its context, no response is
            left to train on, or the file has other content or cannot be written.
    """
    facts = {"model": str(source.path), "prompts": _digest(prompts), **asdict(sampling)}
    with ResponseFile.open(path, facts, len(prompts)) as file:
        if not file.progress.is_complete:
            with user_errors(ValueError):
                _generate(source, prompts, sampling, file, say)
        if not file.progress.num_kept:
            raise UserError(
                f"no response is left to train on: {file.progress}; a larger sft.max_tokens gives them room"
            )
        return file.progress


def _generate(
    source: AutoregressiveCheckpoint,
    prompts: Sequence[Conversation],
    sampling: Sampling,
    file: ResponseFile,
    say: Callable[[str], object],
) -> None:
    """Generate and append the missing responses. Raises ValueError if the model cannot be read or prompted."""
    tokenizer = source.tokenizer()
    encoded = encode_prompts(source, tokenizer, prompts, sampling.max_new_tokens)
    file.progress = replace(file.progress, num_overlong=len(prompts) - len(encoded))
    generator = open_generator(source, tokenizer, sampling)
    began, num_before = time.monotonic(), file.progress.num_answered
    for batch in batches_of(encoded[num_before:], generator.batch_size):
        batch_began = time.monotonic()
        responses = generator.generate([one.ids for one in batch], [fold(sampling.seed, one.index) for one in batch])
        texts = [_kept(tokenizer, response) for response in responses]
        rows = [
            {"messages": [*chat(prompts[one.index]), {"role": "assistant", "content": text}], "index": one.index}
            for one, text in zip(batch, texts, strict=True)
            if text.strip()
        ]
        file.add(rows, _counted(file.progress, responses, texts, time.monotonic() - batch_began))
        pace = (time.monotonic() - began) / (file.progress.num_answered - num_before)
        left = duration(pace * (len(encoded) - file.progress.num_answered))
        done = f"{file.progress.num_answered} of {len(encoded)} responses"
        say(f"{source.name} answers the prompts: {done}, {file.progress.tokens_per_s:.0f} tokens/s, {left} left")


def _kept(tokenizer: Any, response: ModelResponse) -> str:
    """Return the text to train on: of an unfinished response its whole sentences, because SFT teaches the end of text
    there."""
    text = str(tokenizer.decode(list(response.token_ids), skip_special_tokens=True))
    if response.is_ended:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def _counted(
    progress: ResponseProgress, responses: Sequence[ModelResponse], texts: Sequence[str], seconds: float
) -> ResponseProgress:
    """Return a file's progress after a batch with these responses and remaining texts."""
    kept = Counter(one.is_ended for one, text in zip(responses, texts, strict=True) if text.strip())
    given = Counter(one.is_ended for one in responses)
    return replace(
        progress,
        num_answered=progress.num_answered + len(responses),
        num_kept=progress.num_kept + kept.total(),
        num_cut=progress.num_cut + kept[False],
        num_unfinished=progress.num_unfinished + given[False] - kept[False],
        num_empty=progress.num_empty + given[True] - kept[True],
        num_tokens=progress.num_tokens + sum(len(one.token_ids) + one.is_ended for one in responses),
        seconds=progress.seconds + seconds,
    )


def _digest(prompts: Sequence[Conversation]) -> str:
    return sha256(json.dumps([chat(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
