"""Conversion of demonstrations into SFT documents, from the task or from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.plan import RunPlan
from actors.spec import RunSpec
from actors.training.sft.data import SftData, load_sft_data
from learner.model.tokenizer import ChatTokenizer
from learner.sft.documents import Documents


def _load(spec: RunSpec, **sft: Any) -> SftData:
    spec = spec.model_copy(update={"sft": spec.sft.model_copy(update=sft)})
    tokenizer = ChatTokenizer(spec.initial_checkpoint)
    return load_sft_data(spec, RunPlan(spec, tokenizer), tokenizer)


def _texts(spec: RunSpec, documents: Documents) -> list[tuple[str, str]]:
    """Return the prompt and completion of each document, without special tokens."""
    tokenizer = ChatTokenizer(spec.initial_checkpoint)
    rows = zip(documents.ids.tolist(), documents.prompt_lengths.tolist(), documents.lengths.tolist(), strict=True)
    return [(tokenizer.decode(ids[:prompt]), tokenizer.decode(ids[prompt:length])) for ids, prompt, length in rows]


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[[list[dict[str, str]]], Path]:
    def write(rows: list[dict[str, str]]) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def _rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{index} ?", "completion": f"{index}"} for index in range(count)]


def test_without_a_file_sft_uses_the_first_training_and_held_out_problems(spec: RunSpec, plan: RunPlan) -> None:
    data, tokenizer = _load(spec, num_eval=3), ChatTokenizer(spec.initial_checkpoint)
    for documents, problems in ((data.train, plan.train[:10]), (data.held_out, plan.heldout[:3])):
        assert documents is not None
        assert [completion for _, completion in _texts(spec, documents)] == [p.reference_completion for p in problems]
        for row, problem in enumerate(problems):
            prompt = plan.prompt_ids(problem)
            end = len(prompt) + len(tokenizer.encode_plain(problem.reference_completion))
            ids = documents.ids[row].tolist()
            assert tuple(ids[: len(prompt)]) == prompt
            assert ids[end : int(documents.lengths[row])] == [tokenizer.eos_id] * (8 - (end - len(prompt)))
    assert data.facts["num_examples"] == 10
    assert data.facts["num_held_out"] == 3


def _with_slots(spec: RunSpec, gen_length: int) -> RunSpec:
    sampling = spec.rollout.sampling.model_copy(update={"gen_length": gen_length})
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"sampling": sampling})})


def test_a_canvas_too_short_for_the_task_is_refused(spec: RunSpec) -> None:
    with pytest.raises(ValueError, match=r"has 5 tokens; rollout\.sampling\.gen_length 4 must be at least that"):
        _load(_with_slots(spec, 4))


def test_demonstrations_that_do_not_fit_are_left_out_and_counted(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ChatTokenizer.encode_plain
    texts = [
        problem.reference_completion for problem in RunPlan(spec, ChatTokenizer(spec.initial_checkpoint)).train[:10]
    ]
    longer = [*encode(ChatTokenizer(spec.initial_checkpoint), texts[0]), 2, 2, 2, 2]
    monkeypatch.setattr(
        ChatTokenizer, "encode_plain", lambda self, text: longer if text == texts[0] else encode(self, text)
    )
    facts = _load(_with_slots(spec, 8)).facts
    assert facts["num_overlong"] == texts.count(texts[0])
    assert facts["num_examples"] == 10 - facts["num_overlong"]


def test_padding_fills_the_canvas_or_ends_with_the_text(spec: RunSpec, file_of: Callable[..., Path]) -> None:
    path = file_of([{"prompt": "7", "completion": "7 7"}, {"prompt": "1 2 3", "completion": "9"}])
    trained = _load(spec, data=path, num_labels=None, max_tokens=16).train
    ignored = _load(spec, data=path, num_labels=None, max_tokens=16, eos_padding="ignored").train
    assert trained.lengths.tolist() == [16, 16]
    assert (ignored.lengths - ignored.prompt_lengths).tolist() == [4, 2]
    assert _texts(spec, trained) == _texts(spec, ignored) == [("7", "7 7"), ("1 2 3", "9")]


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_examples_that_are_too_long_are_counted_and_left_out_or_cut(
    spec: RunSpec, file_of: Callable[..., Path], overlong: str
) -> None:
    rows = [
        {"prompt": "1", "completion": "1 2 3 4"},
        {"prompt": "2", "completion": "2"},
        {"prompt": "1 2 3 4 5 6", "completion": "no room"},
    ]
    data = _load(spec, data=file_of(rows), num_labels=None, max_tokens=8, overlong=overlong)
    texts = [("1", "1 2 3"), ("2", "2")] if overlong == "truncate" else [("2", "2")]
    assert _texts(spec, data.train) == texts
    assert data.facts["num_overlong"] == 2


def test_a_text_that_fills_the_canvas_has_no_end_of_text(spec: RunSpec, file_of: Callable[..., Path]) -> None:
    path = file_of([{"prompt": "1", "completion": "1 2 3"}])
    (length,) = _load(spec, data=path, num_labels=None, max_tokens=20, eos_padding="ignored").train.lengths.tolist()
    full = _load(spec, data=path, num_labels=None, max_tokens=length - 1, eos_padding="ignored").train
    assert full.lengths.tolist() == [length - 1]
    assert _texts(spec, full) == [("1", "1 2 3")]


def test_held_out_examples_depend_on_the_prompts_alone(spec: RunSpec, file_of: Callable[..., Path]) -> None:
    rows = _rows(30)

    def split(rows: list[dict[str, str]], seed: int) -> tuple[set[tuple[str, str]], list[tuple[str, str]]]:
        data = _load(spec.model_copy(update={"seed": seed}), data=file_of(rows), num_labels=None, num_eval=6)
        assert data.held_out is not None
        return set(_texts(spec, data.train)), _texts(spec, data.held_out)

    train, held_out = split(rows, seed=0)
    assert (len(train), len(held_out)) == (24, 6)
    assert train.isdisjoint(held_out)
    assert split(rows[::-1], seed=1) == (train, held_out)
    _, of_more = split(_rows(33), seed=0)
    assert len(set(of_more) & set(held_out)) >= 3


def test_examples_of_one_prompt_are_held_out_together(spec: RunSpec, file_of: Callable[..., Path]) -> None:
    rows = [{"prompt": f"{index // 5} ?", "completion": f"{index}"} for index in range(15)]
    data = _load(spec, data=file_of(rows), num_labels=None, num_eval=2)
    assert data.held_out is not None
    assert (data.train.num_rows, data.held_out.num_rows) == (10, 5)
    assert len({prompt for prompt, _ in _texts(spec, data.held_out)}) == 1


def test_too_few_examples_are_refused(spec: RunSpec, file_of: Callable[..., Path]) -> None:
    path = file_of([*_rows(4), {"prompt": "1 2 3 4 5 6 7 8 9 10 11 12", "completion": "0"}])
    with pytest.raises(ValueError, match=r"sft.num_labels is 4 and .* leaves 3 to train on: 1 .* 20 \(its default"):
        _load(spec, data=path, num_labels=4, num_eval=1)
    with pytest.raises(
        ValueError, match=r"sft.data .*data.jsonl leaves 0 to train on: 5 are longer than sft.max_tokens 3,"
    ):
        _load(spec, data=path, num_labels=None, max_tokens=3)


def test_a_conversation_that_the_chat_template_refuses_is_named(spec: RunSpec, file_of: Callable[..., Path]) -> None:
    class Strict(ChatTokenizer):
        def encode_chat(self, messages: Any) -> list[int]:
            self._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
            return super().encode_chat(messages)

    path = file_of(_rows(1))
    plan = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))
    sft = spec.sft.model_copy(update={"data": path, "num_labels": None})
    with pytest.raises(ValueError, match=r"data.jsonl, line 1: .* chat template refuses it: roles must alternate"):
        load_sft_data(spec.model_copy(update={"sft": sft}), plan, Strict(spec.initial_checkpoint))


def test_padding_is_counted_without_and_with_packing(spec: RunSpec, file_of: Callable[..., Path]) -> None:
    rows = [{"prompt": "1", "completion": " ".join("1" * count)} for count in (9, 1, 1, 1, 1)]
    facts = _load(spec, data=file_of(rows), num_labels=None, max_tokens=32, eos_padding="ignored").facts
    # A prompt of 3 tokens, the digits and spaces, and the end of text: 21 tokens; four documents have 5.
    assert facts["mean_tokens"] == pytest.approx(41 / 5)
    assert facts["padding_share"] == pytest.approx(1 - 41 / 105, abs=1e-4)
    assert facts["packed_padding_share"] == pytest.approx(1 - 41 / 42, abs=1e-4)


def test_texts_are_cut_into_chunks_of_which_the_last_ends(spec: RunSpec, tmp_path: Path) -> None:
    tokenizer, texts = ChatTokenizer(spec.initial_checkpoint), ["1 2 3 4 5 6", "7 8", "1 2 3 4"]
    (tmp_path / "data.txt").write_text("<|endoftext|>".join(texts))
    documents = _load(spec, data=tmp_path / "data.txt", num_labels=None, max_tokens=7).train
    assert documents.prompt_lengths.tolist() == [0, 0, 0, 0]
    ids = [row[:length] for row, length in zip(documents.ids.tolist(), documents.lengths.tolist(), strict=True)]
    whole = [tokenizer.encode_plain(text) for text in texts]
    end = [tokenizer.eos_id]
    # Eleven tokens need two chunks; three leave room for the end; seven do not.
    assert ids == [whole[0][:7], whole[0][7:] + end, whole[1] + end, whole[2]]


def test_texts_are_held_out_whole(spec: RunSpec, tmp_path: Path) -> None:
    texts = [f"{index} " * 20 for index in range(6)]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    data = _load(spec, data=tmp_path, num_labels=None, max_tokens=8, num_eval=7)
    assert data.held_out is not None
    held_out = {text.split()[0] for _, text in _texts(spec, data.held_out)}
    # Each text has five chunks. Seven chunks of two texts are held out, and no chunk of these texts is trained on.
    assert (len(held_out), data.held_out.num_rows, data.train.num_rows) == (2, 7, 20)
    assert held_out.isdisjoint(text.split()[0] for _, text in _texts(spec, data.train))


@pytest.mark.parametrize(
    ("num_chunks", "num_eval", "num_held_out"), [((20,), 3, 3), ((20,), 9, 4), ((18, 2), 3, 3), ((1,), 2, 0)]
)
def test_of_few_texts_the_last_chunks_are_held_out(
    num_chunks: tuple[int, ...], num_eval: int, num_held_out: int, spec: RunSpec, tmp_path: Path
) -> None:
    tokenizer = ChatTokenizer(spec.initial_checkpoint)
    texts = [" ".join("1" * (4 * count - 1)) for count in num_chunks]
    (tmp_path / "data.txt").write_text("<|endoftext|>".join(texts))
    every = _load(spec, data=tmp_path / "data.txt", num_labels=None, max_tokens=8).train.ids.tolist()
    assert (len(every), len(tokenizer.encode_plain("1 1"))) == (sum(num_chunks), 3)
    data = _load(spec, data=tmp_path / "data.txt", num_labels=None, max_tokens=8, num_eval=num_eval)
    held_out = [] if data.held_out is None else data.held_out.ids.tolist()
    assert len(held_out) == num_held_out
    assert data.train.ids.tolist() + held_out == every
