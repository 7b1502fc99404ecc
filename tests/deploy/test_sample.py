"""`d1 sample`: what it answers, in which order, and what it says of requests that it cannot serve."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from rich.console import Console
from rich.text import Text

from deploy.cli.sample import sample
from deploy.errors import UserError
from deploy.sampling import batch, prompt
from deploy.sampling.defaults import Defaults, overlay
from deploy.sampling.policy import open_policy
from deploy.sampling.prepare import OPTION_KEYS
from deploy.sampling.request_line import SAMPLING_KEYS, RequestLine, to_params
from deploy.sampling.view import MASK_CHARACTER, Canvas, Colour, canvas_in, canvas_text, legend, window
from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.tokenizer import EOS, MASK, ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, TransformerConfig, init_weights
from rollout.config import EngineConfig
from rollout.request import Cache, Drawing, Request, SamplingParams, Schedule
from rollout.sampler import Sampler

RECIPE = """\
name: tiny
task: {name: sums}
sft: {num_labels: 8, num_steps: 20, lr: 1e-3}
rollout:
  sampling: {gen_length: 24, block_length: 8, num_denoise_steps: 6, temperature: 0.7}
learner: {num_rounds: 3, groups_per_round: 2, lr: 1e-4}
"""
SHORT = {"gen_length": 16, "block_length": 8, "steps": 8}
STATE = {"phase": "rl", "round": 3, "policy_version": 7, "rl_seconds": 0.0}


def _save(directory: Path, config: TransformerConfig, tokenizer: Path, seed: int = 0) -> None:
    model = Transformer(config)
    init_weights(model, seed)
    with torch.no_grad():
        model.head.weight.mul_(4.0)
    save_checkpoint(directory, config, model.state_dict(), tokenizer, trainer_state=STATE)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`with`: a tiny policy with a tokenizer, in a run. `bare`: one without either."""
    base = tmp_path_factory.mktemp("sample")
    make_tokenizer(["What is 2 + 3? The answer is five."] * 5, base / "tokenizer", 320)
    tokenizer = ChatTokenizer(base / "tokenizer")
    eos = tokenizer.token_id(EOS)
    config = TransformerConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        mlp_hidden_size=48,
        max_sequence_length=96,
        mask_token_id=tokenizer.token_id(MASK),
        eos_token_id=eos,
        pad_token_id=eos,
    )
    _save(base / "with", config, base / "tokenizer")
    _save(base / "bare", config, base / "none")
    _save(base / "run" / "checkpoints" / "rl", config, base / "tokenizer")
    (base / "run" / "recipe.yaml").write_text(RECIPE)
    (base / "run" / "metrics.jsonl").write_text("")
    (base / "bare" / "trainer_state.json").unlink()
    return base


@dataclass
class Answers:
    """What a command with `--json` printed, and how it ended."""

    lines: list[dict[str, Any]]
    err: str
    status: int


@pytest.fixture
def ask(d1: Callable, checkpoints: Path, workdir: Path) -> Callable[..., Answers]:
    """`d1 sample CHECKPOINT --requests FILE --json`; a request that is a string is a line as it stands."""

    def run(requests: list[Any], *words: str, checkpoint: str = "with") -> Answers:
        lines = [request if isinstance(request, str) else json.dumps(request) for request in requests]
        (workdir / "requests.jsonl").write_text("\n".join(lines) + "\n")
        ended = d1("sample", str(checkpoints / checkpoint), "--requests", "requests.jsonl", "--json", *words)
        return Answers([json.loads(line) for line in ended.out.splitlines()], ended.err, ended.status)

    return run


@pytest.fixture
def stop_soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes a token of the tiny policy's own texts its end of text, so that texts end early. Returns its id."""

    def stop(token: int) -> None:
        def load(directory: Path, dtype: torch.dtype = torch.float32) -> Transformer:
            policy = load_policy(directory, dtype)
            object.__setattr__(policy, "config", policy.config.model_copy(update={"eos_token_id": token}))
            return policy

        monkeypatch.setattr("deploy.sampling.policy.load_policy", load)

    return stop  # type: ignore[return-value]


def test_answers_are_those_of_the_sampler_and_come_in_order_whatever_the_lengths(
    ask: Callable, checkpoints: Path
) -> None:
    asked = [
        {"prompt_ids": [5, 6, 7 + index], "gen_length": 8 * length, "block_length": 8, "steps": 4 * length}
        | {"temperature": 0.8, "seed": index}
        for index, length in enumerate([5, 1, 3, 1, 2])
    ]
    answers = ask(asked, "--slots", "2")
    params = [
        {"gen_length": r["gen_length"], "block_length": 8, "num_denoise_steps": r["steps"], "temperature": 0.8}
        for r in asked
    ]
    requests = [
        Request(prompt_ids=tuple(r["prompt_ids"]), params=SamplingParams(**p), seed=r["seed"])
        for r, p in zip(asked, params, strict=True)
    ]
    sampler = Sampler(load_policy(checkpoints / "with"), 7, EngineConfig(num_slots=2))
    tokenizer = ChatTokenizer(checkpoints / "with")
    assert answers.status == 0
    assert answers.err == ""
    assert [answer["index"] for answer in answers.lines] == [0, 1, 2, 3, 4]
    for answer, completion in zip(answers.lines, sampler.generate(requests), strict=True):
        end = completion.num_tokens
        assert list(answer) == [
            "index",
            "token_ids",
            "text",
            "num_tokens",
            "step_map",
            "commit_logp",
            "commit_logp_raw",
            "commit_entropy",
            "fallback",
            "tail",
            "num_forwards",
            "finish_reason",
            "exact",
            "logp_exact",
            "policy_version",
        ]
        assert answer["token_ids"] == completion.token_ids[:end].tolist()
        assert answer["text"] == tokenizer.decode(answer["token_ids"])
        assert answer["step_map"] == completion.step_map[:end].tolist()
        assert answer["fallback"] == completion.fallback[:end].tolist()
        for name in ("commit_logp", "commit_logp_raw", "commit_entropy"):
            as_float32 = torch.tensor(answer[name], dtype=torch.float32).tolist()
            assert as_float32 == getattr(completion, name)[:end].tolist()
        assert answer["num_forwards"] == completion.num_forwards
        assert answer["finish_reason"] == completion.finish_reason
        assert answer["policy_version"] == 7
        assert answer["exact"]
        assert answer["logp_exact"]


def test_an_answer_is_printed_as_soon_as_those_before_it_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    items = [SimpleNamespace(index=index, request=index != 2) for index in range(5)]
    for item in items:
        item.request = None if item.index == 2 else item.request
    answers = batch._InOrder(items, lambda item, completion: shown.append(item.index))  # type: ignore[arg-type]
    seen = []
    for index in (1, 3, 0, 4):
        answers.add(items[index], completion=object())  # type: ignore[arg-type]
        seen.append(list(shown))
    assert seen == [[], [], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_bad_requests_are_answered_in_their_place_and_the_others_are_served(ask: Callable) -> None:
    good = {"prompt_ids": [5, 6], **SHORT}
    answers = ask([good | {"id": "a"}, "", good | {"stepss": 3, "id": {"b": 1}}, "nope", good])
    assert answers.status == 2
    assert [line["index"] for line in answers.lines] == [0, 1, 2, 3]
    assert answers.lines[0]["id"] == "a"
    assert answers.lines[0]["token_ids"] == answers.lines[3]["token_ids"]
    unknown = "stepss is no key of a request; did you mean steps?"
    assert answers.lines[1] == {"index": 1, "id": {"b": 1}, "error": unknown}
    broken = "it is not JSON: Expecting value at character 1"
    assert answers.lines[2] == {"index": 2, "error": broken}
    assert answers.err == f"d1: request 1 (line 3): {unknown}\nd1: request 2 (line 4): {broken}\n"


REFUSALS = [
    ({"prompt_ids": [5], "gen_length": 20, "block_length": 8}, "block_length 8 does not divide gen_length 20"),
    ({"prompt_ids": [5], **SHORT, "steps": 1}, "steps 1 must be a multiple of the 2 blocks and at most gen_length 16"),
    ({"prompt_ids": [5] * 90, **SHORT}, "prompt_ids of 90 and gen_length 16 make 106 tokens; the policy takes at most"),
    ({"prompt": "a" * 200, **SHORT}, "prompt of 202 and gen_length 16 make 218 tokens"),
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
    ({"prompt_ids": [5], "seed": -1}, "seed -1 is not between 0 and 2**63 - 1"),
    ({"prompt_ids": [5], "seed": 2**63}, "seed is 9223372036854775808; it should be at most 9223372036854775807"),
    ({"prompt_ids": [5], "top_k": 10**30}, "top_k is 1000000000000000000000000000000; it should be at most"),
    ({"prompt_ids": [5], "gen_length": 8.5}, "gen_length is 8.5; it should be a whole number"),
    ({"prompt_ids": [5], "gen_length": -8}, "gen_length is -8; it should be greater than 0"),
    ({"prompt_ids": [5], "block_length": 0}, "block_length is 0; it should be greater than 0"),
    ({"prompt_ids": [5], "num_denoise_steps": 8}, "num_denoise_steps is no key of a request; did you mean steps?"),
    ({"prompt_ids": [5], "colour": "red"}, "colour is no key of a request, which has id, prompt, messages"),
    ({"prompt_ids": [5], "schedule": "fast"}, "schedule is 'fast'; it should be 'quota', 'threshold'"),
    ({"prompt_ids": [5], "schedule": "threshold"}, "schedule threshold needs threshold"),
    ({"prompt_ids": [5], "schedule": "quota", "factor": 1}, "schedule quota does not take factor"),
    ({"prompt_ids": [5], "cfg_scale": 1, "cache": "dual"}, "cfg_scale 1 needs cache none"),
    ({"prompt_ids": [5], "fixed_tokens": {"x": 5}}, "fixed_tokens has slot 'x'; slots are whole numbers from 0"),
    ({"prompt_ids": [5], **SHORT, "fixed_tokens": {"16": 5}}, "fixed_tokens has slot 16; the completion has slots"),
    ({"prompt_ids": [5], "fixed_tokens": {"01": 5}}, "fixed_tokens has slot '01'"),
    ({"prompt_ids": [5], "fixed_tokens": [5]}, "fixed_tokens is [5]; it should be an object"),
    ({"prompt_ids": [5], "stop_ids": [-1]}, "stop_ids[0] is -1; it should be at least 0"),
    ([5], "it is no JSON object"),
    ('{"prompt_ids": [5], "seed": 1, "seed": 2}', "seed is given twice"),
    ('{"prompt_ids": [5], "temperature": NaN}', "it is not JSON: NaN is no number there"),
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
        (["hi", "--temperature", "-1"], "--temperature is -1.0; it should be at least 0"),
        (["hi", "--steps", "0"], "--steps is 0; it should be greater than 0"),
        (["hi", "--seed", "-1"], "--seed -1 is not between 0 and 2**63 - 1"),
        (["hi", "--top-k", "1" + "0" * 30], "--top-k is 1000"),
        (["hi", "--temperature", "nan"], "--temperature is nan; it should be a finite number"),
        (["hi", "--gen-length", "20", "--block-length", "8"], "--block-length 8 does not divide --gen-length 20"),
        (["hi", "--gen-length", "32", "--block-length", "8", "--steps", "2"], "--steps 2 must be a multiple of the 4"),
        (["hi", "--gen-length", "96"], "the prompt of 4 and --gen-length 96 make 100 tokens; the policy takes at"),
        (["hi", "--schedule", "threshold"], "--schedule threshold needs --threshold"),
        (["hi", "--cache-refresh-steps", "3"], "--cache-refresh-steps 3 needs a --cache: prefix or dual"),
        ([""], "the prompt is empty"),
        ([MASK], "the prompt has the mask id 0"),
        (["\udcff"], "the prompt has half of a surrogate pair or bytes that are not UTF-8"),
        ([], "give a prompt or --requests FILE"),
        (["hi", "--requests", "x"], "give a prompt or --requests FILE"),
        (["--requests", "nowhere"], "cannot read the requests nowhere: no such file or directory"),
        (["--requests", "."], "cannot read the requests .: is a directory"),
        (["--requests", "empty"], "empty has no requests; it should have one JSON object on each line"),
        (["--requests", "r", "--temperature", "-1"], "--temperature is -1.0"),
        (["hi", "--device", "cuda"], "--device cuda: torch sees no GPU on this machine"),
    ],
)
def test_a_bad_command_is_refused_with_the_names_of_options(
    words: list[str], sentence: str, d1: Callable, checkpoints: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (workdir / "empty").write_text("\n \n")
    (workdir / "r").write_text('{"prompt_ids": [5]}')
    ended = d1("sample", str(checkpoints / "with"), *words)
    ended.assert_refused(sentence)
    assert ended.out == ""


def test_a_value_from_an_option_is_named_as_the_option_also_in_a_file(ask: Callable) -> None:
    answers = ask([{"prompt_ids": [5], "gen_length": 16, "block_length": 8}, {"prompt_ids": [5]}], "--steps", "3")
    assert [line["error"].partition(" must")[0] for line in answers.lines] == ["--steps 3", "--steps 3"]


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
    assert d1("sample", "plain", "hi", "--raw", "--gen-length", "16").status == 0


def test_a_checkpoint_without_tokenizer_serves_token_ids(ask: Callable, d1: Callable, checkpoints: Path) -> None:
    answers = ask([{"prompt": "hi"}, {"prompt_ids": [5], **SHORT}], checkpoint="bare")
    assert answers.status == 2
    assert answers.lines[0]["error"].startswith("prompt is text, and ")
    assert answers.lines[0]["error"].endswith("has no tokenizer; give prompt_ids")
    assert answers.lines[1]["text"] is None
    assert answers.lines[1]["policy_version"] == 0
    d1("sample", str(checkpoints / "bare"), "hi").assert_refused("has no tokenizer; give token ids: --requests FILE")
    lines = d1("sample", str(checkpoints / "bare"), "--requests", "requests.jsonl").out.splitlines()
    assert lines[0] == "--- request 1 (line 2): 16 tokens, 8 forwards, 2.0 tokens a forward, length"
    assert lines[1] == " ".join(map(str, answers.lines[1]["token_ids"]))


def test_a_text_ends_at_its_stop_token_and_what_follows_in_the_block_is_its_tail(ask: Callable) -> None:
    request = {"prompt_ids": [5, 6], **SHORT}
    whole = ask([request | {"stop_ids": []}]).lines[0]
    assert whole["num_tokens"] == 16
    assert whole["finish_reason"] == "length"
    assert whole["tail"] == {"token_ids": [], "step_map": []}
    stop = whole["token_ids"][3]
    end = whole["token_ids"].index(stop) + 1
    (cut,) = ask([request | {"stop_ids": [stop]}]).lines
    assert cut["num_tokens"] == end
    assert cut["finish_reason"] == "eos"
    for name in ("token_ids", "step_map", "commit_logp_raw", "commit_entropy", "fallback", "commit_logp"):
        assert cut[name] == whole[name][:end]
    assert cut["tail"] == {"token_ids": whole["token_ids"][end:8], "step_map": whole["step_map"][end:8]}
    assert cut["num_forwards"] == 4


def test_keep_after_eos_fills_the_canvas_whatever_ends_a_text(ask: Callable, stop_soon: Callable) -> None:
    request = {"prompt_ids": [5, 6], **SHORT}
    whole = ask([request | {"stop_ids": []}]).lines[0]
    stop_soon(whole["token_ids"][3])
    assert ask([request]).lines[0]["num_tokens"] < 16
    assert ask([request], "--keep-after-eos").lines == [whole]
    assert ask([request | {"stop_ids": [7]}], "--keep-after-eos").lines == [whole]


def test_prompts_go_through_the_chat_template_unless_raw(ask: Callable, checkpoints: Path) -> None:
    tokenizer = ChatTokenizer(checkpoints / "with")
    by_template = tokenizer.encode_chat([{"role": "user", "content": "What is 2?"}])
    plain = tokenizer.encode_completion("What is 2?")
    asked = [
        {"prompt": "What is 2?"},
        {"messages": [{"role": "user", "content": "What is 2?"}]},
        {"prompt_ids": by_template},
        {"prompt_ids": plain},
    ]
    first, second, third, last = (ask([a | SHORT]).lines[0]["commit_logp_raw"] for a in asked)
    assert first == second == third != last
    assert ask([asked[0] | SHORT], "--raw").lines[0]["commit_logp_raw"] == last


def test_what_a_line_leaves_out_comes_from_the_options_then_from_the_run_at_temperature_0(ask: Callable) -> None:
    asked = [{"prompt_ids": [5]}, {"prompt_ids": [5], "gen_length": 8}, {"prompt_ids": [5], "temperature": 1}]
    of_run, short, _ = ask(asked, checkpoint="run").lines
    assert (of_run["num_tokens"], of_run["num_forwards"]) == (24, 6)
    assert (short["num_tokens"], short["num_forwards"]) == (8, 4)
    assert set(of_run["commit_logp"]) == {0.0}
    assert ask(asked[:1], checkpoint="run/checkpoints/rl").lines == [of_run]
    first, *_ = ask(asked, "--temperature", "0.5", "--gen-length", "16", checkpoint="run").lines
    assert (first["num_tokens"], first["num_forwards"]) == (16, 8)
    assert set(first["commit_logp"]) != {0.0}
    by_option, by_line = ask(asked[2:], "--seed", "4").lines, ask([asked[2] | {"seed": 4}]).lines
    assert by_option == by_line != ask(asked[2:]).lines
    # Without a run: 256 tokens, but the policy has 96 columns.
    (own,) = ask(asked[:1]).lines
    assert (own["num_tokens"], own["num_forwards"]) == (64, 32)


@pytest.mark.parametrize(
    ("given", "num_prompt_tokens", "expected"),
    [
        ({}, 10, (256, 32, 128)),
        ({"gen_length": 16}, 10, (16, 16, 8)),
        ({"gen_length": 64, "block_length": 64}, 10, (64, 64, 32)),
        ({"block_length": 1}, 10, (256, 1, 256)),
        ({"block_length": 7}, 10, (252, 7, 108)),
        ({}, 200, (96, 32, 48)),
        ({}, 290, (10, 10, 5)),
        ({"steps": 8}, 200, (96, 32, 8)),
    ],
)
def test_lengths_that_are_left_out_fit_into_the_policy(
    given: dict[str, int], num_prompt_tokens: int, expected: tuple[int, int, int]
) -> None:
    values = Defaults.of_policy(300).complete([given], num_prompt_tokens)
    assert (values["gen_length"], values["block_length"], values["steps"]) == expected


@pytest.mark.parametrize(
    ("lower", "upper", "schedule", "parameters"),
    [
        ({"schedule": "quota"}, {"threshold": 0.9}, "threshold", {"threshold": 0.9}),
        ({"schedule": "threshold", "threshold": 0.8}, {"schedule": "quota"}, "quota", {}),
        ({"schedule": "threshold", "threshold": 0.8}, {"factor": 2}, "factor", {"factor": 2}),
        ({"schedule": "left_to_right"}, {"threshold": 0.9}, "left_to_right", {"threshold": 0.9}),
        ({"threshold": 0.8}, {"schedule": "threshold"}, "threshold", {"threshold": 0.8}),
    ],
)
def test_a_schedule_and_its_parameter_are_replaced_together(
    lower: dict[str, Any], upper: dict[str, Any], schedule: str, parameters: dict[str, float]
) -> None:
    values = overlay(lower, upper)
    assert values == {"schedule": schedule, **parameters}
    assert to_params(values).schedule == schedule


def test_a_parameter_stays_with_the_schedule_of_the_layer_below() -> None:
    defaults = Defaults.of_run(SamplingParams(schedule="left_to_right"))
    assert defaults.complete([{}, {"threshold": 0.9}], 1)["schedule"] == "left_to_right"


def test_no_cache_takes_no_refreshes_along() -> None:
    assert overlay({"cache": "dual", "cache_refresh_steps": 3}, {"cache": "none"}) == {"cache": "none"}


def test_every_parameter_of_the_sampler_can_be_asked_for() -> None:
    assert set(SAMPLING_KEYS) <= set(RequestLine.model_fields)
    hints = get_type_hints(sample)
    assert set(OPTION_KEYS) | {"seed"} <= set(hints)
    for name, kind in (("schedule", Schedule), ("drawing", Drawing), ("cache", Cache)):
        literal = next(hint for hint in get_args(hints[name]) if get_args(hint))
        assert list(get_args(literal)) == [str(choice) for choice in kind]
    assert list(get_args(hints["colour"])) == [str(choice) for choice in Colour]


def test_every_parameter_reaches_the_sampler(ask: Callable) -> None:
    base = {"prompt_ids": [5, 6], **SHORT, "temperature": 1.0, "seed": 3}
    plain = ask([base]).lines[0]
    for change in (
        {"threshold": 0.02},
        {"factor": 30.0},
        {"entropy_bound": 9.0},
        {"schedule": "random"},
        {"schedule": "left_to_right"},
        {"drawing": "sample_then_select"},
        {"cfg_scale": 2.0},
        {"top_p": 0.1},
        {"top_k": 1},
        {"seed": 4},
        {"forbidden_ids": plain["token_ids"][:1]},
        {"fixed_tokens": {"2": 9}},
    ):
        (other,) = ask([base | change]).lines
        assert other["step_map"] != plain["step_map"] or other["token_ids"] != plain["token_ids"], change
    changes = {"fixed_tokens": {"2": 9}}, {"cache": "dual", "cache_refresh_steps": 2}, {"drawing": "sample_then_select"}
    fixed, cached, drawn = ask([base | change for change in changes]).lines
    assert (fixed["token_ids"][2], fixed["step_map"][2]) == (9, -1)
    assert (cached["exact"], drawn["logp_exact"]) == (False, False)


def test_a_prompt_that_is_piped_prints_the_text_alone(d1: Callable, checkpoints: Path) -> None:
    words = ["What is 2?", "--gen-length", "16"]
    (as_json,) = d1("sample", str(checkpoints / "with"), *words, "--json").out.splitlines()
    ended = d1("sample", str(checkpoints / "with"), *words)
    assert ended.status == 0
    assert ended.out == prompt.printable(json.loads(as_json)["text"]) + "\n"
    assert ended.err.startswith("16 tokens, 8 forwards, 2.0 tokens a forward, ")
    assert ended.err.count("\n") == 1


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the tokenizer decodes every completion to."""
    text = "[bold red]x[/] \x1b]0;owned\x07 \u202eright"
    monkeypatch.setattr(ChatTokenizer, "decode", lambda self, ids: text)
    return text


def test_hostile_text_is_shown_harmless_and_markup_as_it_is(
    hostile: str, ask: Callable, d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "[bold red]x[/] \\u001b]0;owned\\u0007 \\u202eright"
    assert d1("sample", str(checkpoints / "with"), "hi", "--gen-length", "8").out == shown + "\n"
    request = {"prompt": "hi", "id": "\x1b[2J", "gen_length": 8}
    assert ask([request]).lines[0]["text"] == hostile
    raw = d1("sample", str(checkpoints / "with"), "--requests", "requests.jsonl", "--json").out
    assert raw.isascii()
    assert "\x1b" not in raw
    out = d1("sample", str(checkpoints / "with"), "--requests", "requests.jsonl").out
    assert out.startswith("--- request 0 (line 1) \\u001b[2J: 8 tokens")
    assert out.endswith(shown + "\n")
    canvas = Canvas(token_ids=[1], masked=[False], steps=[0], probabilities=[0.5])
    assert canvas_text(canvas, lambda ids: hostile, Colour.STEP).plain == shown


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_canvas_fills_in(d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(prompt, "_LEAST_FRAME_S", 0.0)
    monkeypatch.setattr(sys, "stdout", screen)
    ended = d1("sample", str(checkpoints / "with"), "What is 2?", "--gen-length", "16")
    assert ended.status == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert [f"step {step}, {2 * step} of at most 16 tokens" in shown for step in range(9)] == [True] * 9
    assert f"{MASK_CHARACTER * 16}" in shown
    assert "probability ■ <20%" in shown
    assert "\x1b[?25h" in screen.getvalue()


def test_the_canvas_that_is_shown_is_the_one_that_is_denoised(checkpoints: Path) -> None:
    policy = load_policy(checkpoints / "with")
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0)
    running = Sampler(policy, 0).open([Request(prompt_ids=(5, 6, 7), params=params, seed=0)])
    canvases = []
    completion = None
    while completion is None:
        done = running.step()
        canvases.append(canvas_in(running.slots))
        completion = done[0][1] if done else None
    assert [canvas.num_committed for canvas in canvases] == list(range(2, 18, 2))
    assert canvases[-1].token_ids == completion.token_ids.tolist()
    assert canvases[-1].steps == completion.step_map.tolist()
    assert torch.tensor(canvases[-1].probabilities).log().tolist() == pytest.approx(
        completion.commit_logp_raw.tolist(), abs=1e-5
    )
    for step, canvas in enumerate(canvases):
        assert canvas.masked == [committed > step for committed in completion.step_map.tolist()]


def _decode(ids: Any) -> str:
    return bytes(token for token in ids if token).decode("utf-8", errors="replace")


def test_colours_say_how_sure_or_how_early_a_token_is() -> None:
    canvas = Canvas(
        token_ids=[65, 66, 67, 0, 68, 0],
        masked=[False, False, False, True, False, False],
        steps=[0, 4, 2, -1, -1, 3],
        probabilities=[0.1, 0.99, 0.5, 0.0, 1.0, 0.3],
    )
    sure = canvas_text(canvas, _decode, Colour.CONFIDENCE, special="·")
    assert sure.plain == f"ABC{MASK_CHARACTER}D·"
    assert [str(span.style) for span in sure.spans] == ["red", "bright_cyan", "yellow", "dim", "bold", "dark_orange"]
    early = canvas_text(canvas, _decode, Colour.STEP)
    assert early.plain == f"ABC{MASK_CHARACTER}D"
    styles = [str(span.style) for span in early.spans]
    assert styles[:3] == ["bright_cyan", "orange1", "medium_purple1"]
    assert legend(Colour.STEP, 5).plain.startswith("step ■ 0-  ■ 1-  ■ 2-  ■ 3-  ■ 4-")


def test_tokens_that_are_bytes_of_one_character_are_shown_as_it() -> None:
    ids = [*"é".encode(), 65, *"日".encode()]
    canvas = Canvas(token_ids=ids, masked=[False] * 6, steps=[0, 1, 2, 3, 4, 5], probabilities=[0.9] * 6)
    assert canvas_text(canvas, _decode, Colour.STEP).plain == "éA日"
    masked = [False, True, False, False, False, False]
    torn = Canvas(token_ids=ids, masked=masked, steps=[0] * 6, probabilities=[0.9] * 6)
    assert canvas_text(torn, _decode, Colour.STEP).plain == f"\ufffd{MASK_CHARACTER}A日"


def test_a_canvas_that_is_higher_than_the_screen_is_shown_where_it_is_denoised() -> None:
    lines = [Text(str(index)) for index in range(10)] + [Text(MASK_CHARACTER)] * 5
    assert window(lines, 20) == lines
    assert [line.plain for line in window(lines, 4)] == ["8", "9", MASK_CHARACTER, MASK_CHARACTER]
    assert [line.plain for line in window(lines[:10], 3)] == ["7", "8", "9"]


def test_ctrl_c_prints_what_was_done(
    d1: Callable, checkpoints: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Sampler):
        """Is interrupted when a second request is done."""

        def generate(self, requests: Any, on_completion: Any = None) -> Any:
            done = super().generate(requests)
            on_completion(2, done[2])
            on_completion(0, done[0])
            raise KeyboardInterrupt

    monkeypatch.setattr("deploy.sampling.policy.Sampler", Interrupted)
    (workdir / "r").write_text(f"{json.dumps({'prompt_ids': [5], **SHORT})}\n" * 4 + "nope\n")
    ended = d1("sample", str(checkpoints / "with"), "--requests", "r", "--json")
    assert ended.status == 130
    assert [json.loads(line)["index"] for line in ended.out.splitlines()] == [0, 2, 4]
    assert "stopped; 2 of 4 requests, 32 tokens" in ended.err
    assert "Traceback" not in ended.err


def test_ctrl_c_shows_the_canvas_so_far(d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.sampler import SlotBatch

    steps = iter(range(100))
    real = SlotBatch.step

    def step(self: SlotBatch) -> Any:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(SlotBatch, "step", step)
    ended = d1("sample", str(checkpoints / "with"), "hi", "--gen-length", "16")
    assert ended.status == 130
    assert ended.out.count(MASK_CHARACTER) == 10
    assert ended.err == "stopped after 3 steps, 6 tokens committed\n"


def test_a_reader_that_goes_is_no_traceback(checkpoints: Path, workdir: Path) -> None:
    (workdir / "r").write_text(f"{json.dumps({'prompt_ids': [5], **SHORT})}\n" * 200)
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "sample", str(checkpoints / "with")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, "--requests", str(workdir / "r"), "--json", "--slots", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=root,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert json.loads(running.stdout.readline())["index"] == 0
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


@pytest.mark.parametrize(("times", "expected"), [(1, ["whole"]), (2, [])])
def test_ctrl_c_waits_until_an_answer_is_printed_and_a_second_one_does_not(times: int, expected: list[str]) -> None:
    printed = []

    def print_one() -> None:
        with batch._uninterrupted():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            printed.append("whole")

    with pytest.raises(KeyboardInterrupt):
        print_one()
    assert printed == expected


def test_standard_input_can_be_the_file(
    d1: Callable, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable
) -> None:
    request = json.dumps({"prompt_ids": [5], **SHORT})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(request.encode())))
    ended = d1("sample", str(checkpoints / "with"), "--requests", "-", "--json")
    assert [json.loads(line) for line in ended.out.splitlines()] == ask([request]).lines


def test_the_progress_of_a_file_never_gets_into_what_is_piped(
    d1: Callable, checkpoints: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "r").write_text(f"{json.dumps({'prompt_ids': [5], **SHORT})}\n" * 3)
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", screen)
    ended = d1("sample", str(checkpoints / "with"), "--requests", "r", "--json")
    assert len([json.loads(line) for line in ended.out.splitlines()]) == 3
    shown = Text.from_ansi(screen.getvalue()).plain
    assert "3/3" in shown
    assert "tokens/s" in shown


def test_weights_can_be_bfloat16(checkpoints: Path) -> None:
    policy = open_policy(str(checkpoints / "with"), "cpu", EngineConfig(dtype="bfloat16"))
    assert {parameter.dtype for parameter in policy.sampler.model.parameters()} == {torch.bfloat16}
    with pytest.raises(UserError, match="is no directory"):
        open_policy("no where", "cpu", EngineConfig())


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_tokens_are_those_of_the_original_samplers(family: str, d1: Callable, shared: Path, workdir: Path) -> None:
    directory = shared / "fixtures" / f"{family}-tiny"
    cases = json.loads((directory / "expected_generations.json").read_text())
    keys = ("gen_length", "block_length", "steps", "cfg_scale")
    asked = [{"prompt_ids": ids} | {key: case[key] for key in keys} for case in cases for ids in case["prompt"]]
    (workdir / "r").write_text("\n".join(map(json.dumps, asked)))
    ended = d1("sample", str(directory), "--requests", "r", "--json", "--keep-after-eos")
    assert ended.status == 0
    outputs = [ids for case in cases for ids in case["output"]]
    assert [json.loads(line)["token_ids"] for line in ended.out.splitlines()] == outputs


def test_the_bar_shows_answers_above_it_where_both_go_to_one_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    monkeypatch.setattr(sys, "stderr", Screen())
    bar = batch._Bar(3)
    assert bar._progress is not None
    assert bar._progress.console is bar.stdout
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    elsewhere = batch._Bar(3)
    assert elsewhere._progress is not None
    assert isinstance(elsewhere._progress.console, Console)
    assert elsewhere._progress.console.stderr


def test_bad_weights_and_a_full_disk_are_sentences(checkpoints: Path, workdir: Path) -> None:
    config = load_policy(checkpoints / "with").config
    model = Transformer(config)
    init_weights(model, 0)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    save_checkpoint(workdir / "bad", config, model.state_dict(), checkpoints / "with")
    main = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from deploy.cli import main; main()"
    for words, redirect, status, part in (
        (["bad", "x"], "", 1, "predicts what is no number"),
        ([str(checkpoints / "with"), "x", "--json"], ">/dev/full", 2, "standard output takes no more: no space left"),
        ([str(checkpoints / "with"), "x"], ">&-", 2, "standard output is closed"),
    ):
        done = subprocess.run(
            ["bash", "-c", f'"$0" -c "$1" sample "${{@:2}}" {redirect}', sys.executable, main, *words],
            cwd=workdir,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert part in done.stderr
        assert "Traceback" not in done.stderr
