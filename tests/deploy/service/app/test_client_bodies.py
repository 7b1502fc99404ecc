"""Request bodies of clients of OpenAI, vLLM and SGLang, whose fields must mean the same here.

The bodies of openai 2.54, litellm 1.106, langchain-openai 1.7, llama-index, dspy, instructor and openai-agents were
recorded, and their texts cut. The others are written by hand: the request classes of vLLM and SGLang, every field with
its default, and what benchmarks, chats and harnesses send to them.
"""

import json
from pathlib import Path

import pytest

from deploy.requests.body import ChatRequest, CompletionRequest
from deploy.requests.errors import RequestError
from rollout.request import MIN_TEMPERATURE
from tests.deploy.service.app.asking import ASK, CHAT, assert_error, events_of

KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
PATHS = pytest.mark.parametrize("path", KINDS)
BODIES = [json.loads(line) for line in (Path(__file__).parent / "bodies.jsonl").read_text().splitlines()]
TURNS = CHAT["messages"]


def ask_of(path):
    return {"/v1/completions": ASK, "/v1/chat/completions": CHAT}[path]


def text_of(answer):
    """Return the text of a completion or a chat completion."""
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.fixture
def said(client):
    """Return the text that answers a body."""

    def say(path, **changes):
        response = client.post(path, json=ask_of(path) | changes)
        assert response.status_code == 200, response.text
        return text_of(response.json())

    return say


def test_recorded_client_bodies_are_answered_with_all_their_fields(client, service):
    for number, sent in enumerate(BODIES):
        path, body, place = sent["path"], sent["body"], f"body {number}, of {sent['client']}"
        response = client.post(path, json=body)
        assert response.status_code == 200, (place, response.text)
        plan = service.planner.plan(KINDS[path].model_validate(body))
        asked = {key: value for key, value in body.items() if value is not None}
        params = plan.requests[0].params
        assert len(plan.requests) == asked.get("n", 1), place
        assert params.temperature == asked.get("temperature", 0), place
        assert (params.top_p, params.top_k) == (asked.get("top_p", 1), max(asked.get("top_k", 0), 0)), place
        most = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        assert plan.most_tokens == min(most, 16), place
        assert list(plan.body.stops) == asked.get("stop", []), place
        assert (params.stop_ids == ()) == asked.get("ignore_eos", False), place
        form = (asked.get("response_format") or {}).get("type", "text")
        assert (plan.grammar is None) == (form == "text"), place
        assert plan.body.includes_usage == (asked.get("stream_options") or {}).get("include_usage", False), place
        is_streamed = response.headers["content-type"].startswith("text/event-stream")
        assert is_streamed == asked.get("stream", False), place
        if form != "text":
            assert set(json.loads(text_of(response.json()))) == ({"value"} if form == "json_schema" else set()), place


@PATHS
def test_unsupported_fields_are_accepted_with_neutral_values(path):
    kind, ask = KINDS[path], ask_of(path)
    plain = kind.model_validate(ask)
    for field, values in kind.ignored_values.items():
        for value in (None, *(["anything", 5, {"a": [1]}] if values is None else values)):
            assert kind.model_validate(ask | {field: value}) == plain, field


@PATHS
def test_unsupported_fields_are_refused_with_other_values(path):
    for field in [field for field, values in KINDS[path].ignored_values.items() if values is not None]:
        with pytest.raises(RequestError, match=f"^`{field}` is not supported") as refused:
            KINDS[path].model_validate(ask_of(path) | {field: "x"})
        assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")


def test_values_that_would_change_the_answer_are_refused_by_name(client):
    changes = {
        "add_generation_prompt": False,
        "allowed_token_ids": [],
        "bad_words": ["a"],
        "best_of": 2,
        "chat_template": "{{ messages }}",
        "continue_final_message": True,
        "echo": True,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": 0.5},
        "lora_path": "a",
        "min_p": 0.1,
        "min_tokens": 1,
        "prompt_logprobs": 0,
        "repetition_penalty": 1.1,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "stream_options": {"continuous_usage_stats": True},
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "truncate_prompt_tokens": 5,
        "use_beam_search": True,
        "vllm_xargs": {"a": 1},
    }
    for field, value in changes.items():
        answer = client.post("/v1/chat/completions", json=CHAT | {field: value})
        assert assert_error(answer, 400, "unsupported_parameter")["param"].partition(".")[0] == field


@PATHS
def test_seed_minus_1_means_no_seed(said, path):
    drawn = {"temperature": 1}
    assert len({said(path, seed=-1, **drawn) for _ in range(3)}) == 3
    assert said(path, seed=-2, **drawn) == said(path, seed=-2.0, **drawn) != said(path, seed=2, **drawn)


@PATHS
def test_neutral_values_do_not_change_the_text(said, path):
    drawn = {"temperature": 1}
    plain = said(path, **drawn)
    assert plain != said(path)
    for changes in (
        {"top_k": -1},
        {"top_k": 0, "top_p": 1},
        {"n": 1, "best_of": 1, "stop": [], "stop_token_ids": None},
        {"model": "", "seed": 1.0},
        {"stream": False, "stream_options": {}},
    ):
        assert said(path, **drawn | changes) == plain, changes
    assert said(path, temperature=1e-6) == said(path, temperature=0)
    assert said(path, max_tokens=4.0) == said(path, max_tokens=4)


def test_a_tiny_temperature_becomes_the_minimum(service):
    plan = service.planner.plan(CompletionRequest.model_validate(ASK | {"temperature": 1e-6}))
    assert plan.requests[0].params.temperature == MIN_TEMPERATURE


def test_best_of_must_equal_n(client):
    body = ASK | {"n": 2, "best_of": 2, "temperature": 1}
    assert len(client.post("/v1/completions", json=body).json()["choices"]) == 2
    error = assert_error(client.post("/v1/completions", json=body | {"best_of": 3}), 400, "unsupported_parameter")
    assert error["param"] == "best_of"


def test_a_text_ends_at_the_first_stop_string_and_may_include_it(client, service):
    ids = service.codec.encode_any("4 km away")
    fixed = {str(slot): token for slot, token in enumerate(ids)}
    stops = [*(f"never {index}" for index in range(14)), "away", "km"]
    body = ASK | {"stop": stops, "diffusion": {"constraints": {"fixed": fixed}}}
    kept = body | {"include_stop_str_in_output": True}
    for asked, text in ((body, "4 "), (kept, "4 km"), (body | {"no_stop_trim": True}, "4 km")):
        answer = client.post("/v1/completions", json=asked).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
        assert answer["usage"]["completion_tokens"] == len(service.codec.encode_any(text))
        chunks, _ = events_of(client.post("/v1/completions", json=asked | {"stream": True}))
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text


def test_a_stop_id_is_part_of_the_text_only_on_request(client, service):
    ids = service.codec.encode_any("4 km")
    ask = ASK | {"diffusion": {"constraints": {"fixed": {str(slot): token for slot, token in enumerate(ids)}}}}
    for more, text in (({}, "4 k"), ({"include_stop_str_in_output": True}, "4 km")):
        answer = client.post("/v1/completions", json=ask | {"stop_token_ids": [ids[-1]]} | more).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
        assert answer["usage"]["completion_tokens"] == len(ids)


def test_all_names_of_structured_output_are_equivalent(said):
    truth = {"true", "false"}
    for asked, texts in (
        ({"structured_outputs": {"regex": "a|b"}}, {"a", "b"}),
        ({"regex": "a|b"}, {"a", "b"}),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, truth),
        ({"json_schema": '{"type": "boolean"}'}, truth),
        ({"response_format": {"type": "json_schema", "schema": {"type": "boolean"}}}, truth),
    ):
        assert said("/v1/completions", **asked) in texts, asked


def test_names_that_vllm_has_removed_are_refused_by_name(client):
    """vLLM 0.12 removed them; what it was to constrain must not come back unconstrained."""
    error = assert_error(client.post("/v1/completions", json=ASK | {"guided_regex": "a|b"}), 400)
    assert error["message"] == "The body has `guided_regex`, which this service does not know."


def test_two_structured_output_fields_are_refused(client):
    both = {"regex": "a", "structured_outputs": {"choice": ["b"]}}
    error = assert_error(client.post("/v1/completions", json=ASK | both), 400)
    assert "`regex` and `structured_outputs` both constrain the text" in error["message"]
    error = assert_error(client.post("/v1/completions", json=ASK | {"json_schema": "{"}), 400)
    assert error["message"] == "`json_schema`: must be a JSON schema, as an object or as its text."


SAYS_ALL = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.name }}{{ message.reasoning_content }}"
    "{{ message.reasoning }}{{ message.content }}{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}"
)


@pytest.fixture
def prompt(serve, run_dir):
    """The rendered prompt of some turns, by a template that prints all of its inputs."""
    checkpoint = run_dir / "checkpoints" / "sft-1"
    (checkpoint / "chat_template.jinja").write_text(SAYS_ALL)
    for name in ("manifest.json", "trainer_state.json"):
        (checkpoint / name).unlink()
    _, client = serve(checkpoint)

    def render(*turns, **changes):
        answer = client.post("/tokenize", json={"messages": turns} | changes)
        if answer.status_code != 200:
            return answer.json()["error"]["message"]
        return client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]

    return render


def test_turns_reach_the_chat_template_as_in_vllm(prompt):
    def assistant(**turn):
        return prompt({"role": "assistant"} | turn)

    silent = "<|assistant|>"
    assert assistant(content=None) == assistant() == assistant(content="") == assistant(content=[]) == silent
    assert assistant(content=None, tool_calls=[], refusal=None, name=None, reasoning_content=None) == silent
    assert assistant(content="5", reasoning_content="t") == assistant(content="5", reasoning="t") == f"{silent}tt5"
    assert assistant(content="5", name="Ann") == f"{silent}Ann5"
    parts = ["2", {"type": "text", "text": " + ", "cache_control": {"type": "ephemeral"}}]
    parts.append({"type": "input_text", "text": "3"})
    assert prompt({"role": "user", "content": parts}) == "<|user|>2\n + \n3"
    hidden = {"reasoning_details": [{}], "provider_specific_fields": {"a": 1}, "thinking_blocks": [], "id": "x"}
    assert assistant(content="5", **hidden) == f"{silent}5"
    user = {"role": "user", "content": "2"}
    assert prompt(user, chat_template_kwargs={"enable_thinking": None}) == "<|user|>2"
    assert prompt(user, reasoning_effort="low") == "<|user|>2lowTrue"
    assert prompt(user, reasoning={"effort": "none", "summary": "auto"}) == "<|user|>2noneFalse"
    assert prompt(user, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}) == "<|user|>2lowFalse"


def test_special_tokens_in_any_field_of_a_turn_are_refused(prompt):
    for field in ("content", "name", "reasoning", "reasoning_content"):
        assert "spells <|assistant|>" in prompt({"role": "assistant", "content": "5"} | {field: "<|assistant|>"})


def test_tokenize_adds_special_tokens_as_completions_and_chats_do(serve, run_dir):
    checkpoint = run_dir / "checkpoints" / "sft-1"
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    begin, rest = "<|endoftext|>", {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, rest],
        "pair": [rest, rest],
        "special_tokens": {begin: {"id": begin, "ids": [1], "tokens": [begin]}},
    }
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("manifest.json", "trainer_state.json"):
        (checkpoint / name).unlink()
    _, client = serve(checkpoint)
    for path, ask in (("/v1/completions", {"prompt": "2"}), ("/v1/chat/completions", {"messages": TURNS})):
        is_text = "prompt" in ask
        for changes in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
            ids = client.post("/tokenize", json=ask | changes).json()["tokens"]
            assert (ids[0] == 1) == changes.get("add_special_tokens", is_text)
            assert client.post(path, json=ask | changes).json()["usage"]["prompt_tokens"] == len(ids)


def test_only_assistant_turns_may_lack_content(client):
    for turn in ({"role": "user", "content": None}, {"role": "system"}):
        error = assert_error(client.post("/v1/chat/completions", json={"messages": [turn]}), 400)
        assert error["param"] == "messages.content"
