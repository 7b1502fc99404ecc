"""Responses of the source model as training data: requests, which answers are kept, and resumption."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.adapt import prompts as prompts_module
from deploy.adapt import responses
from deploy.adapt.prompts import Conversation, encode_prompts, file_prompts, task_prompts
from deploy.adapt.responses import ResponseOutcome, ResponseProgress, write_responses
from deploy.errors import UserError
from learner.model.autoregressive.source import AutoregressiveCheckpoint, open_source
from rewards import SumsConfig
from rewards.data.demonstrations import read_demonstrations
from rewards.data.prompts import user_turn
from rollout.autoregressive import generator as module
from rollout.autoregressive.generator import (
    ModelResponse,
    Sampling,
    TransformersGenerator,
    gpu_batch_size,
    open_generator,
)
from tests.learner.model.autoregressive.tiny_autoregressive import write_gguf, write_source

PROMPTS = [user_turn(f"what is {number} + {number * number}?") for number in range(10)]
SAMPLING = Sampling(max_new_tokens=12, temperature=1.0)
# Enough for prompts in a tokenizer without merges.
CONTEXT = 512


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> AutoregressiveCheckpoint:
    directory = tmp_path_factory.mktemp("source")
    write_source(directory)
    return open_source(str(directory))


class Says:
    """Fake generator of given texts that raises KeyboardInterrupt at batch `dies_at`."""

    batch_size = 4

    def __init__(self, tokenizer: Any, texts: Sequence[str], *, dies_at: int = -1) -> None:
        self._tokenizer, self._texts, self._dies_at = tokenizer, texts, dies_at
        self.seeds: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[ModelResponse]:
        """Return the texts in turn. A text that ends in ... counts as cut off."""
        if len(self.seeds) // self.batch_size == self._dies_at:
            raise KeyboardInterrupt
        self.seeds += seeds
        texts = [self._texts[(len(self.seeds) - len(prompts) + row) % len(self._texts)] for row in range(len(prompts))]
        return [
            ModelResponse(
                token_ids=tuple(self._tokenizer(text.removesuffix("..."))["input_ids"]), is_ended=text[-3:] != "..."
            )
            for text in texts
        ]


@pytest.fixture
def speaker(source: AutoregressiveCheckpoint, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the next writers use a fake generator of the given texts."""

    def use(texts: Sequence[str], *, dies_at: int = -1) -> Says:
        says = Says(source.tokenizer(), texts, dies_at=dies_at)
        monkeypatch.setattr(responses, "open_generator", lambda *_: says)
        return says

    return use


def kept(path: Path) -> list[str]:
    return [row.completion for row in read_demonstrations(path)]


def in_order(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines(), key=lambda line: int(json.loads(line)["index"]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_does_not_depend_on_its_batch(source: AutoregressiveCheckpoint, temperature: float) -> None:
    tokenizer = source.tokenizer()
    asked = encode_prompts(source, tokenizer, [*PROMPTS[:5], user_turn("hi")], 12)
    generator = TransformersGenerator(source, [2], replace(SAMPLING, temperature=temperature), "cpu")
    generator._model.float()
    together = generator.generate([one.ids for one in asked], [one.index for one in asked])
    alone = [generator.generate([one.ids], [one.index])[0] for one in asked]
    assert together == alone
    others = generator.generate([one.ids for one in asked], [one.index + 100 for one in asked])
    assert (others == together) == (temperature == 0)


def test_greedy_responses_are_those_of_transformers(source: AutoregressiveCheckpoint) -> None:
    import torch

    [asked] = encode_prompts(source, source.tokenizer(), PROMPTS[:1], 12)
    generator = TransformersGenerator(source, [2], replace(SAMPLING, temperature=0.0), "cpu")
    generator._model.float()
    ids = torch.tensor([asked.ids])
    for _ in range(12):
        ids = torch.cat([ids, generator._model(ids).logits[:, -1:].argmax(-1)], 1)
    [found] = generator.generate([asked.ids], [0])
    assert list(found.token_ids) == ids[0, len(asked.ids) :].tolist()[: len(found.token_ids)]
    assert found.is_ended == (len(found.token_ids) < 12)


def test_vllm_is_used_if_it_can_run_with_seeds_and_token_ids(
    source: AutoregressiveCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake of the library, which needs a GPU: d1's calls, and how it reads the answers."""

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert (options["model"], options["trust_remote_code"]) == (str(source.directory), False)

        def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[Any]:
            asked = zip(prompts, params, strict=True)
            ids = [
                [one.seed, *prompt["prompt_token_ids"], *one.stop_token_ids][: one.max_tokens] for prompt, one in asked
            ]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=some)]) for some in ids]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    tokenizer = source.tokenizer()
    assert isinstance(open_generator(source, tokenizer, SAMPLING), TransformersGenerator)
    monkeypatch.setattr(module, "_is_installed", lambda _: True)
    write_gguf(tmp_path / "tiny.gguf", source.directory, "F32")
    packed = open_source(str(tmp_path / "tiny.gguf"))
    assert isinstance(open_generator(packed, tokenizer, SAMPLING), TransformersGenerator)
    generator = open_generator(source, tokenizer, replace(SAMPLING, max_new_tokens=3))
    assert generator.generate([[5], [5, 6]], [70, 80]) == [
        ModelResponse(token_ids=(70, 5), is_ended=True),
        ModelResponse(token_ids=(80, 5, 6), is_ended=False),
    ]


def test_the_written_file_is_readable_as_sft_data(
    source: AutoregressiveCheckpoint, tmp_path: Path, speaker: Any
) -> None:
    speaker(["the sky is blue."])
    written = write_responses(source, PROMPTS, tmp_path / "own.jsonl", SAMPLING)
    rows = read_demonstrations(tmp_path / "own.jsonl")
    assert sorted(row.messages[0].content for row in rows) == sorted(turns[0].content for turns in PROMPTS)
    assert {row.completion for row in rows} == {"the sky is blue."}
    assert written.outcomes == {ResponseOutcome.KEPT: 10}


def test_an_unfinished_response_keeps_whole_sentences_and_an_empty_one_is_left_out(
    source: AutoregressiveCheckpoint, tmp_path: Path, speaker: Any
) -> None:
    speaker(["It is 4.", 'It is so! "Yes." And then the...', "1. the sky...", " \n"])
    written = write_responses(source, PROMPTS[:4], tmp_path / "own.jsonl", SAMPLING)
    assert kept(tmp_path / "own.jsonl") == ["It is 4.", 'It is so! "Yes."']
    assert written.outcomes == dict.fromkeys(ResponseOutcome, 1)
    assert written.num_kept == 2
    assert str(written).startswith(
        "2 of 4 responses kept, 1 cut after a sentence, 1 left out without a whole sentence, 1 left out as empty; "
    )


def test_a_killed_writer_resumes_where_it_was(source: AutoregressiveCheckpoint, tmp_path: Path, speaker: Any) -> None:
    path, whole = tmp_path / "own.jsonl", tmp_path / "whole.jsonl"
    all_seeds = speaker(["the sky is blue."]).seeds
    write_responses(source, PROMPTS, whole, SAMPLING)
    first = speaker(["the sky is blue."], dies_at=2)
    with pytest.raises(KeyboardInterrupt):
        write_responses(source, PROMPTS, path, SAMPLING)
    assert len(kept(path)) == 8
    # Partial line of a process that was killed while writing.
    with path.open("a") as file:
        file.write('{"messages": [{"role": "us')
    second = speaker(["the sky is blue."])
    written = write_responses(source, PROMPTS, path, SAMPLING)
    assert path.read_text() == whole.read_text()
    assert first.seeds + second.seeds == all_seeds
    assert (written.num_answered, written.num_kept) == (10, 10)
    speaker([], dies_at=0)
    assert write_responses(source, PROMPTS, path, SAMPLING) == written


def test_a_file_with_other_content_is_refused_and_unchanged(
    source: AutoregressiveCheckpoint, tmp_path: Path, speaker: Any
) -> None:
    speaker(["the sky is blue."])
    path = tmp_path / "own.jsonl"
    path.write_text("mine\n")
    with pytest.raises(UserError, match="already exists, and is not a file of a model's responses"):
        write_responses(source, PROMPTS, path, SAMPLING)
    assert path.read_text() == "mine\n"
    path.unlink()
    write_responses(source, PROMPTS, path, SAMPLING)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"has responses to something else: temperature was 1\.0, and is 0\.5"):
        write_responses(source, PROMPTS, path, replace(SAMPLING, temperature=0.5))
    with pytest.raises(UserError, match="has responses to something else: prompts was"):
        write_responses(source, PROMPTS[1:], path, SAMPLING)
    assert path.read_bytes() == before
    path.write_bytes(before[:-9])
    with pytest.raises(UserError, match="is shorter than it was"):
        write_responses(source, PROMPTS, path, SAMPLING)


def test_prompts_without_room_are_counted_and_refused_if_none_fits(
    source: AutoregressiveCheckpoint, tmp_path: Path, speaker: Any
) -> None:
    says = speaker(["the sky is blue."])
    long = user_turn("sky " * CONTEXT)
    written = write_responses(source, [PROMPTS[0], long, PROMPTS[1]], tmp_path / "own.jsonl", SAMPLING)
    assert (written.num_kept, written.num_overlong, len(says.seeds)) == (2, 1, 2)
    assert written.is_complete
    with pytest.raises(UserError, match="no prompt fits into the context"):
        write_responses(source, [long], tmp_path / "long.jsonl", SAMPLING)
    assert not (tmp_path / "long.jsonl").exists()
    # The longest prompt that leaves room for every token of an answer.
    [one] = encode_prompts(source, source.tokenizer(), PROMPTS[:1], CONTEXT - len(source_ids(source, PROMPTS[0])))
    assert one.index == 0
    with pytest.raises(ValueError, match="no prompt fits"):
        encode_prompts(source, source.tokenizer(), PROMPTS[:1], CONTEXT + 1 - len(source_ids(source, PROMPTS[0])))


def source_ids(source: AutoregressiveCheckpoint, turns: Conversation) -> Sequence[int]:
    return encode_prompts(source, source.tokenizer(), [turns], 0)[0].ids


def test_a_model_without_responses_or_chat_template_is_refused(
    source: AutoregressiveCheckpoint, tmp_path: Path, speaker: Any
) -> None:
    speaker([" "])
    with pytest.raises(UserError, match="no response is left to train on: 0 of 10 responses kept"):
        write_responses(source, PROMPTS, tmp_path / "own.jsonl", SAMPLING)
    base = tmp_path / "base"
    write_source(base)
    (base / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template, so it cannot be prompted"):
        write_responses(open_source(str(base)), PROMPTS, tmp_path / "base.jsonl", SAMPLING)


def test_every_prefix_of_the_prompts_is_a_fair_sample_and_batches_have_similar_lengths(
    source: AutoregressiveCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "_SORTED", 4)
    turns = [user_turn("sky " * (length % 5)) if length % 5 else user_turn("a") for length in range(8)]
    found = encode_prompts(source, source.tokenizer(), turns, 1)
    assert [{one.index for one in found[:4]}, {one.index for one in found[4:]}] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    lengths = [len(one.ids) for one in found]
    assert lengths[:4] == sorted(lengths[:4])
    assert lengths[4:] == sorted(lengths[4:])


def test_task_prompts_are_those_of_the_policy() -> None:
    config = SumsConfig()
    found = task_prompts(config, 5)
    from rewards import Split, make_task

    assert found == [problem.messages for problem in make_task(config).problems(Split.TRAIN, 5, seed=0)]
    with pytest.raises(UserError, match="sums"):
        task_prompts(config, 10**9)


def test_prompts_of_files(tmp_path: Path) -> None:
    plain = tmp_path / "prompts.txt"
    plain.write_text("\ufefftell me a story\n\n  and another \r\n", encoding="utf-8")
    assert file_prompts(plain) == [user_turn("tell me a story"), user_turn("and another")]
    turn, answer = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
    rows = [
        {"prompt": "why?"},
        {"messages": [turn]},
        {"messages": [turn, answer]},
        {"prompt": [turn], "completion": "x"},
    ]
    chat = tmp_path / "prompts.jsonl"
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert file_prompts(chat) == [user_turn("why?")] * 4


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "\n \n", "a.txt has no prompts; it should have one on each line"),
        ("b.txt", b"\xff\xfe\x00", "b.txt, its byte order mark says UTF-16"),
        ("c.jsonl", '{"question": "why?"}', "c.jsonl, line 1: it has question; it should have messages or prompt"),
        (
            "d.jsonl",
            '{"messages": [{"role": "assistant", "content": "so"}]}',
            "d.jsonl, line 1: messages has the assist",
        ),
        ("e.txt", None, "cannot read .*e.txt: no such file or directory"),
        ("poems", None, "there is no task and no file .*poems; the tasks are countdown, "),
    ],
)
def test_a_file_without_prompts_is_refused_in_one_sentence(
    name: str, text: str | bytes | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError, match=sentence):
        file_prompts(path)


def test_a_summary_without_work_is_valid() -> None:
    assert ResponseProgress(num_prompts=0).is_complete


def test_batch_on_a_gpu_fits_its_memory() -> None:
    small = SimpleNamespace(hidden_size=576, num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3)
    large = SimpleNamespace(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32)
    free = 60 * 2**30
    assert gpu_batch_size(small, 256, free) == 546
    # 32 layers x 32 heads x 128 dimensions, keys and values in two bytes: 0.5 MiB a token, 640 MiB a row.
    assert gpu_batch_size(large, 256, free) == 24
    assert gpu_batch_size(large, 256, 0) == 1
    assert gpu_batch_size(small, 16, 2**40) == 1024
