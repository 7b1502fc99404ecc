"""`d1 sample`: error messages for requests, options and checkpoints that it cannot serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.tokenizer import MASK
from learner.model.transformer import Transformer, init_weights
from tests.deploy.offline.sample.asking import SHORT
from tests.processes import d1_in_bash


def test_bad_requests_are_answered_in_their_place_and_the_others_are_served(ask: Callable) -> None:
    good = {"prompt_ids": [5, 6], **SHORT}
    answers = ask([good | {"id": "a"}, "", good | {"stepss": 3, "id": {"b": 1}}, "nope", good])
    assert answers.status == 2
    assert [line["index"] for line in answers.lines] == [0, 1, 2, 3]
    assert answers.lines[0]["id"] == "a"
    assert answers.lines[0]["token_ids"] == answers.lines[3]["token_ids"]
    unknown = "stepss is not a key of a request; did you mean steps?"
    assert answers.lines[1] == {"index": 1, "id": {"b": 1}, "error": unknown}
    broken = "it is not JSON: Expecting value at character 1"
    assert answers.lines[2] == {"index": 2, "error": broken}
    assert answers.err == f"d1: request 1 (line 3): {unknown}\nd1: request 2 (line 4): {broken}\n"


REFUSALS = [
    ({"prompt_ids": [5], "gen_length": 20, "block_length": 8}, "block_length 8 does not divide gen_length 20"),
    ({"prompt_ids": [5], **SHORT, "steps": 1}, "steps 1 must be a multiple of the 2 blocks and at most gen_length 16"),
    ({"prompt_ids": [5] * 90, **SHORT}, "prompt_ids of 90 and gen_length 16 make 106 tokens; the policy takes at most"),
    ({"prompt": "a" * 200, **SHORT}, "prompt of 200 and gen_length 16 make 216 tokens"),
    ({"prompt": "a" * 200}, "the policy takes at most 96"),
    ({"prompt_ids": [5, 0]}, "prompt_ids has the mask id 0"),
    ({"prompt": f"a {MASK}"}, "prompt has the mask id 0"),
    ({"prompt_ids": []}, "prompt_ids is empty"),
    ({"prompt": ""}, "prompt is empty"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "user", "contents": "a"}]}, "did you mean messages[0].content?"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": "a"}, "messages is 'a'; it should be a list"),
    ({"prompt": "a", "prompt_ids": [5]}, "prompt and prompt_ids are given"),
    ({}, "there is no prompt; give prompt, messages or prompt_ids"),
    ({"prompt": 3}, "prompt is 3; it should be text"),
    ({"prompt": "a\ud800"}, "prompt has half of a surrogate pair"),
    ({"prompt_ids": [5, True]}, "prompt_ids[1] is True; it should be a whole number"),
    ({"prompt_ids": [5, 9999]}, "prompt_ids has 9999; the policy's token ids are 0 to"),
    ({"prompt_ids": [5], "temperature": -1}, "temperature is -1.0; it should be at least 0"),
    ({"prompt_ids": [5], "temperature": "0"}, "temperature is '0'; it should be a number"),
    ({"prompt_ids": [5], "top_k": -2}, "top_k is -2; it should be at least 0"),
    ({"prompt_ids": [5], "seed": 2**63}, "seed is 9223372036854775808; it should be at most 9223372036854775807"),
    ({"prompt_ids": [5], "top_k": 10**30}, "top_k is 1000000000000000000000000000000; it should be at most"),
    ({"prompt_ids": [5], "gen_length": 8.5}, "gen_length is 8.5; it should be a whole number"),
    ({"prompt_ids": [5], "gen_length": -8}, "gen_length is -8; it should be greater than 0"),
    ({"prompt_ids": [5], "block_length": 0}, "block_length is 0; it should be greater than 0"),
    ({"prompt_ids": [5], "num_denoise_steps": 8}, "num_denoise_steps is not a key of a request; did you mean steps?"),
    ({"prompt_ids": [5], "colour": "red"}, "colour is not a key of a request, which has id, prompt, messages"),
    ({"prompt_ids": [5], "schedule": "fast"}, "schedule is 'fast'; it should be 'quota', 'threshold'"),
    ({"prompt_ids": [5], "schedule": "threshold"}, "schedule threshold needs threshold"),
    ({"prompt_ids": [5], "schedule": "quota", "factor": 1}, "schedule quota does not take factor"),
    ({"prompt_ids": [5], "cfg_scale": 1, "cache": "dual"}, "cfg_scale 1 needs cache none"),
    ({"prompt_ids": [5], "fixed_tokens": {"x": 5}}, "fixed_tokens has slot 'x'; slots are whole numbers from 0"),
    ({"prompt_ids": [5], **SHORT, "fixed_tokens": {"16": 5}}, "fixed_tokens has slot 16; the completion has slots"),
    ({"prompt_ids": [5], "fixed_tokens": {"01": 5}}, "fixed_tokens has slot '01'"),
    ({"prompt_ids": [5], "fixed_tokens": [5]}, "fixed_tokens is [5]; it should be an object"),
    ({"prompt_ids": [5], "stop_ids": [-1]}, "stop_ids[0] is -1; it should be at least 0"),
    ([5], "it is not a JSON object"),
    ('{"prompt_ids": [5], "seed": 1, "seed": 2}', "seed is given twice"),
    ('{"prompt_ids": [5], "temperature": NaN}', "it is not JSON: NaN is not a number in JSON"),
    ('{"prompt_ids": [5], "temperature": 1e999}', "the number 1e999 is too large"),
    ('{"prompt_ids": ' + "[" * 5000, "it is not JSON"),
    ('{"prompt_ids": [5], "seed": ' + "1" * 5000 + "}", "a number has too many digits"),
]


def test_every_refusal_is_one_sentence_that_names_the_field_as_it_was_spelled(ask: Callable) -> None:
    answers = ask([request for request, _ in REFUSALS])
    assert answers.status == 2
    assert answers.err.count("\n") == len(REFUSALS)
    for index, ((_, sentence), answer) in enumerate(zip(REFUSALS, answers.lines, strict=True)):
        assert answer["index"] == index
        assert sentence in answer["error"]
        assert f"d1: request {index} (line {index + 1}): {answer['error']}\n" in answers.err


def test_a_file_in_utf_16_with_its_mark_is_read(d1: Callable, checkpoints: Path, workdir: Path) -> None:
    line = json.dumps({"prompt_ids": [5], **SHORT}) + "\r\n"
    (workdir / "r.jsonl").write_bytes(line.encode("utf-16"))
    ended = d1("sample", str(checkpoints / "with"), "--requests", "r.jsonl", "--json")
    assert ended.status == 0
    assert len(json.loads(ended.out)["token_ids"]) == 16


def test_a_line_that_is_not_utf_8_is_refused_alone(d1: Callable, checkpoints: Path, workdir: Path) -> None:
    good = json.dumps({"prompt_ids": [5], **SHORT}).encode()
    (workdir / "r.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\xff\n")
    ended = d1("sample", str(checkpoints / "with"), "--requests", "r.jsonl", "--json")
    assert ended.status == 2
    assert ended.err == "d1: request 1 (line 2): it is not UTF-8: byte 0 is 0xff\n"
    assert len(json.loads(ended.out.splitlines()[0])["token_ids"]) == 16


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["hi", "temperature=-1"], "temperature is -1.0; it should be at least 0"),
        (["hi", "steps=0"], "steps is 0; it should be greater than 0"),
        (["hi", "seed=-1"], "seed -1 is not between 0 and 2**63 - 1"),
        (["hi", "top_k=1" + "0" * 30], "top_k is 1000"),
        (["hi", "temperature=nan"], "temperature is 'nan'; it should be a number"),
        (["hi", "gen_length=20", "block_length=8"], "block_length 8 does not divide gen_length 20"),
        (["hi", "gen_length=32", "block_length=8", "steps=2"], "steps 2 must be a multiple of the 4"),
        (["hi", "gen_length=96"], "the prompt of 4 and gen_length 96 make 100 tokens; the policy takes at"),
        (["hi", "schedule=threshold"], "schedule threshold needs threshold"),
        (["hi", "cache_refresh_steps=3"], "cache_refresh_steps 3 needs a cache: prefix or dual"),
        (["hi", "temperature=.nan"], "temperature is nan; it should be a finite number"),
        (["hi", "stpes=9"], "there is no setting stpes; did you mean steps?"),
        (["hi", "colour=red"], "there is no setting colour; the settings are seed, gen_length, "),
        (["hi", "there"], "'there' should have the form KEY=VALUE, such as steps=9, after the prompt"),
        (["hi", "steps="], "steps has no value; leave it out, or write one"),
        (["hi", "t_min=0.9"], "t_min is for policies without a mask token"),
        (["hi", "t_min=-1"], "t_min is -1.0; it should be at least"),
        (["hi", "--workers", "2"], "--workers is for --requests FILE"),
        ([""], "the prompt is empty"),
        ([MASK], "the prompt has the mask id 0"),
        (["\udcff"], "the prompt has half of a surrogate pair or bytes that are not UTF-8"),
        ([], "give a prompt or --requests FILE"),
        (["hi", "--requests", "x"], "give a prompt or --requests FILE"),
        (["--requests", "nowhere"], "cannot read the requests nowhere: no such file or directory"),
        (["--requests", "."], "cannot read the requests .: is a directory"),
        (["--requests", "empty"], "empty has no requests; it should have one JSON object on each line"),
        (["--requests", "r", "temperature=-1"], "temperature is -1.0"),
        (["hi", "--device", "cuda"], "--device cuda: torch sees no GPU on this machine"),
    ],
)
def test_a_bad_command_is_refused_in_a_sentence(
    words: list[str], sentence: str, d1: Callable, checkpoints: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (workdir / "empty").write_text("\n \n")
    (workdir / "r").write_text('{"prompt_ids": [5]}')
    ended = d1("sample", str(checkpoints / "with"), *words)
    ended.assert_refused(sentence)
    assert ended.out == ""


def test_a_setting_is_named_by_its_key_also_in_a_file(ask: Callable) -> None:
    answers = ask([{"prompt_ids": [5], "gen_length": 16, "block_length": 8}, {"prompt_ids": [5]}], "steps=3")
    assert [line["error"].partition(" must")[0] for line in answers.lines] == ["steps 3", "steps 3"]


def test_a_bad_checkpoint_is_one_sentence(d1: Callable, checkpoints: Path, workdir: Path) -> None:
    import shutil

    d1("sample", "no where", "hi").assert_refused("no where is no directory, and no hub id either")
    d1("sample", str(workdir), "hi").assert_refused("has no config.json")
    for name, content, sentence in (
        ("tokenizer.json", "{", "the tokenizer in"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("trainer_state.json", "[]", "trainer_state.json is damaged"),
        ("model.safetensors", "x", "model.safetensors cannot be read"),
    ):
        shutil.copytree(checkpoints / "with", workdir / "bad", dirs_exist_ok=True)
        (workdir / "bad" / name).write_text(content)
        d1("sample", "bad", "hi").assert_refused(sentence)
    shutil.rmtree(workdir / "bad")
    shutil.copytree(checkpoints / "run", workdir / "bad", ignore=shutil.ignore_patterns("checkpoints"))
    d1("sample", "bad", "hi").assert_refused("has no checkpoint to serve yet")
    shutil.copytree(checkpoints / "with", workdir / "plain")
    (workdir / "plain" / "chat_template.jinja").unlink()
    d1("sample", "plain", "hi").assert_refused("the prompt does not fit the chat template")
    assert d1("sample", "plain", "hi", "--raw", "gen_length=16").status == 0
    # transformers' Trainer writes a state file of the same name.
    (workdir / "plain" / "manifest.json").unlink()
    d1("sample", "plain", "hi", "--raw").assert_refused("has no manifest.json")
    (workdir / "plain" / "trainer_state.json").write_text('{"global_step": 500, "log_history": []}')
    assert d1("sample", "plain", "hi", "--raw", "gen_length=16").status == 0


def test_invalid_weights_are_reported_in_one_sentence(checkpoints: Path, workdir: Path, d1: Callable) -> None:
    config = load_policy(checkpoints / "with").config
    model = Transformer(config)
    init_weights(model, 0)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    save_checkpoint(workdir / "bad", config, model.state_dict(), checkpoints / "with")
    ended = d1("sample", "bad", "x")
    assert ended.status == 1
    assert "has logits that are not finite" in ended.err


def test_an_answer_that_cannot_be_written_is_reported_in_one_sentence(checkpoints: Path, workdir: Path) -> None:
    for words, redirect, part in (
        (["x", "--json"], ">/dev/full", "standard output takes no more: no space left"),
        (["x"], ">&-", "standard output is closed"),
    ):
        done = d1_in_bash(f'"$@" {redirect}', "sample", str(checkpoints / "with"), *words, cwd=workdir)
        assert done.returncode == 2, done.stderr
        assert part in done.stderr
        assert "Traceback" not in done.stderr
