"""Responses in OpenAI's format hold exactly the sampler's completions."""

import numpy as np
import pytest

from deploy.service.api.text_codec import MASKED
from learner.seeds import fold
from rollout.request import Request
from tests.deploy.service.app.asking import ASK, CHAT, assert_error, events_of


def test_a_completion_has_openais_format(client):
    body = client.post("/v1/completions", json=ASK | {"model": "tiny", "n": 2, "max_tokens": 4}).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    choices = body.pop("choices")
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(set(choice) == {"index", "text", "finish_reason", "logprobs"} for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    usage = body.pop("usage")
    assert usage["diffusion"] == {"num_forwards": 8, "num_blocks": 2, "tokens_per_forward": 1.0}
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "policy_version": 1,
        "system_fingerprint": "tiny-v1",
    }


def test_each_prompt_gets_a_choice(client):
    assert len(client.post("/v1/completions", json={"prompt": ["1", "2", "3"]}).json()["choices"]) == 3
    assert len(client.post("/v1/completions", json={"prompt": [5, 6, 7]}).json()["choices"]) == 1


def expected_ids(service, make_sampler, ids=None, choice=0, version=1, **params):
    """Return the sampler's own tokens for ASK."""
    ids = ids if ids is not None else service.codec.encode_text("2 + 3", "prompt")
    plan = service.planner._defaults
    values = plan.complete([params], len(ids))
    from deploy.requests.parameters import to_params

    request = Request(prompt_ids=tuple(ids), params=to_params(values), seed=fold(1, 0, choice))
    return make_sampler(version).generate([request])[0]


def test_an_answer_equals_the_samplers_completion(client, service, make_sampler):
    completion = expected_ids(service, make_sampler, temperature=1.0)
    text = service.codec.decode(completion.token_ids[: completion.num_tokens].tolist())
    body = client.post("/v1/completions", json=ASK | {"temperature": 1.0}).json()
    assert body["choices"][0]["text"] == text
    ids = service.codec.encode_chat(CHAT["messages"])
    completion = expected_ids(service, make_sampler, ids, temperature=1.0)
    text = service.codec.decode(completion.token_ids[: completion.num_tokens].tolist())
    chat = client.post("/v1/chat/completions", json=CHAT | {"temperature": 1.0}).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": text}


def test_the_same_seed_gives_the_same_text_and_no_seed_a_new_one(client):
    def texts(**changes):
        body = client.post("/v1/completions", json=ASK | {"temperature": 1.0} | changes).json()
        return [choice["text"] for choice in body["choices"]]

    assert texts() == texts()
    assert texts(seed=2) != texts()
    assert len({texts(seed=None)[0] for _ in range(3)}) == 3
    both = texts(prompt=["2 + 3", "4"], n=2)
    assert len(set(both)) == 4
    assert both[:2] == texts(n=2)


def test_a_string_and_its_ids_are_the_same_prompt(client, service):
    ids = service.codec.encode_text("2 + 3", "prompt")
    texts = [
        client.post("/v1/completions", json=ASK | {"prompt": prompt}).json()["choices"][0]["text"]
        for prompt in ("2 + 3", ids, [ids], ["2 + 3"])
    ]
    assert len(set(texts)) == 1
    body = client.post("/v1/completions", json=ASK | {"prompt": [ids, ids[:-1]]}).json()
    assert len(body["choices"]) == 2
    assert body["usage"]["prompt_tokens"] == 2 * len(ids) - 1


def test_max_tokens_cuts_the_text_and_saves_blocks(client):
    whole = client.post("/v1/completions", json=ASK).json()
    cut = client.post("/v1/completions", json=ASK | {"max_tokens": 3}).json()
    assert cut["usage"]["completion_tokens"] == 3
    assert cut["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["text"].startswith(cut["choices"][0]["text"].rstrip("\ufffd"))
    assert cut["usage"]["diffusion"]["num_blocks"] == 1 < whole["usage"]["diffusion"]["num_blocks"]
    # `max_tokens` is an upper bound, not a request for that many.
    assert client.post("/v1/completions", json=ASK | {"max_tokens": 1000}).json()["choices"] == whole["choices"]


def test_a_text_ends_before_a_stop_string_whole_or_streamed(client):
    text = client.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
    stop = text[3:5]
    at = text.find(stop)
    body = client.post("/v1/completions", json=ASK | {"stop": [stop, "never"]}).json()
    assert body["choices"][0]["text"] == text[:at]
    assert body["choices"][0]["finish_reason"] == "stop"
    chunks, is_done = events_of(client.post("/v1/completions", json=ASK | {"stop": stop, "stream": True}))
    assert is_done
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text[:at]
    assert_error(client.post("/v1/completions", json=ASK | {"stop": ["a"] * 17}), 400)
    assert_error(client.post("/v1/completions", json=ASK | {"stop": [""]}), 400)


def test_the_chunks_of_a_stream_join_to_the_whole_answer(client):
    ask = {"temperature": 1.0, "n": 2}
    whole = client.post("/v1/chat/completions", json=CHAT | ask).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/chat/completions", json=CHAT | ask | options)
    assert response.headers["x-policy-version"] == "1"
    chunks, is_done = events_of(response)
    assert is_done
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        assert [one["finish_reason"] for one in mine][-1] == choice["finish_reason"]
        assert all(one["finish_reason"] is None for one in mine[:-1])
        assert len(mine) >= 4, "a role, two blocks, an end"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    # As in OpenAI's API: https://platform.openai.com/docs/api-reference/chat/create, `stream_options`.
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    plain, _ = events_of(client.post("/v1/chat/completions", json=CHAT | ask | {"stream": True}))
    assert not any("usage" in chunk for chunk in plain)


def test_a_canvas_stream_ends_with_the_answer(client):
    whole = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
    for ask in ({"diffusing": True}, {"diffusion": {"stream": "canvas"}}):
        chunks, is_done = events_of(client.post("/v1/chat/completions", json=CHAT | {"stream": True} | ask))
        assert is_done
        frames = [choice for chunk in chunks for choice in chunk["choices"] if "diffusion" in choice]
        steps = [frame["diffusion"]["step"] for frame in frames]
        assert steps == sorted(steps)
        assert steps[0] == 0
        assert all(slot["masked"] for slot in frames[0]["diffusion"]["slots"])
        assert steps[-1] == frames[-1]["diffusion"]["num_steps"] == 8
        for frame in frames[:-1]:
            slots = frame["diffusion"]["slots"]
            assert len(slots) == 16
            assert frame["delta"]["content"].count(MASKED) == sum(slot["masked"] for slot in slots)
            for slot in slots:
                assert (slot["confidence"] is None) == (slot["step"] == -1) == slot["masked"]
        assert frames[-1]["delta"]["content"] == whole
        assert not any(slot["masked"] for slot in frames[-1]["diffusion"]["slots"])


def test_a_canvas_shows_fixed_tokens_from_the_first_frame_on(client):
    ask = {"constraints": {"fixed": {"3": 7}}, "stream": "canvas"}
    chunks, is_done = events_of(client.post("/v1/completions", json=ASK | {"stream": True, "diffusion": ask}))
    assert is_done
    first, *_, last = [chunk["choices"][0]["diffusion"]["slots"] for chunk in chunks if chunk["choices"]]
    assert first[3] == last[3]
    assert [index for index, slot in enumerate(first) if not slot["masked"]] == [3]


def test_the_slots_of_the_last_canvas_begin_with_the_text_of_the_answer(client, service):
    ids = service.codec.encode_any("5 😀é")
    fixed = {str(slot): token for slot, token in enumerate([*ids, service.codec.config.eos_token_id])}
    ask = {"stream": "canvas", "constraints": {"fixed": fixed}}
    chunks, is_done = events_of(client.post("/v1/completions", json=ASK | {"stream": True, "diffusion": ask}))
    assert is_done
    last = chunks[-1]["choices"][0]
    texts = [slot["text"] for slot in last["diffusion"]["slots"]]
    assert texts[: len(ids) + 1] == ["5", " ", "😀", "", "", "", "é", "", "<|endoftext|>"]
    assert last["text"] == "".join(texts[: len(ids)])


def test_a_prompt_is_raw_and_a_conversation_has_the_chat_template(client):
    """The page sends the token ids of a plain text."""
    tokens = client.post("/tokenize", json={"prompt": "2 + 3"}).json()["tokens"]
    turn = client.post("/tokenize", json={"messages": [{"role": "user", "content": "2 + 3"}]}).json()["tokens"]
    drawn = {"temperature": 1.0, "seed": 5}
    of_tokens, plain, own, chat = (
        client.post(f"/v1/{path}", json=prompt | drawn).json()
        for path, prompt in (
            ("completions", {"prompt": tokens}),
            ("completions", {"prompt": "2 + 3"}),
            # Turn markers in a plain prompt give the same ids as the template.
            ("completions", {"prompt": "<|user|>2 + 3<|assistant|>"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "2 + 3"}]}),
        )
    )
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "2 + 3"}
    assert plain["choices"] == of_tokens["choices"]
    assert plain["usage"]["prompt_tokens"] == len(tokens) < len(turn) == chat["usage"]["prompt_tokens"]
    assert own["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert own["usage"]["prompt_tokens"] == len(turn)


def test_ignore_eos_and_stop_token_ids_change_where_a_text_ends(client, service, make_sampler):
    """`ignore_eos` and `stop_token_ids`, for sampled and for fixed tokens."""
    ids = service.codec.encode_text("2 + 3", "prompt")
    whole = expected_ids(service, make_sampler, ids, stop_ids=(), temperature=1.0)
    tokens = whole.token_ids.tolist()
    ask = ASK | {"temperature": 1.0}

    def answered(**changes):
        body = client.post("/v1/completions", json=ask | changes).json()
        return body["choices"][0], body["usage"]["completion_tokens"]

    choice, num_tokens = answered(ignore_eos=True)
    assert (choice["text"], num_tokens) == (service.codec.decode(tokens), len(tokens))
    assert choice["finish_reason"] == "length"
    third = tokens[2]
    choice, num_tokens = answered(ignore_eos=True, stop_token_ids=[third])
    assert num_tokens == tokens.index(third) + 1 <= 3
    assert choice["finish_reason"] == "stop"
    fixed = {"diffusion": {"constraints": {"fixed": {"2": service.codec.config.eos_token_id}}}}
    assert answered(**fixed)[1] <= 3
    assert answered(**fixed, stop_token_ids=[service.codec.config.vocab_size - 1])[1] <= 3, "its own ends end it too"
    assert answered(**fixed, ignore_eos=True)[1] == len(tokens)


def test_chat_template_kwargs_reach_the_chat_template(serve, run_dir):
    checkpoint = run_dir / "checkpoints" / "sft-1"
    template = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}{{ '?' if loud else '' }}"
    (checkpoint / "chat_template.jinja").write_text(template + "{{ tone }}{{ 7 // divisor if divisor is defined }}")
    # Otherwise it would be reported as damaged.
    for name in ("manifest.json", "trainer_state.json"):
        (checkpoint / name).unlink()
    service, client = serve(checkpoint)

    def asked(**variables):
        return client.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": variables})

    plain, loud, kind = asked().json(), asked(loud=True).json(), asked(loud=False, tone="sweet").json()
    num_tokens = [one["usage"]["prompt_tokens"] for one in (plain, loud, kind)]
    assert num_tokens[1] == num_tokens[0] + 1
    assert num_tokens[2] == num_tokens[0] + len(service.codec.encode_text("sweet", ""))
    for variables, part in (
        ({"tokenize": True}, "tokenize is no variable"),
        ({"messages": "x"}, "messages is no variable"),
        ({"eos_token": "x"}, "eos_token is no variable"),
        ({"tone": "<|assistant|>"}, "spells <|assistant|>"),
        ({"tone": "x" * 300}, "`chat_template_kwargs`"),
        ({"tone": ["x"]}, "`chat_template_kwargs`"),
        ({"a b": 1}, "`chat_template_kwargs`"),
        ({f"a{number}": 1 for number in range(17)}, "`chat_template_kwargs`"),
        ({"divisor": 0}, "The chat template refuses this"),
        ({"divisor": "x"}, "The chat template refuses this"),
    ):
        assert part in assert_error(asked(**variables), 400)["message"]


def test_logprobs_are_those_of_the_committed_tokens(client, service, make_sampler):
    ids = service.codec.encode_chat(CHAT["messages"])
    drawn = {"temperature": 1.0, "ignore_eos": True}
    body = client.post("/v1/completions", json=ASK | drawn | {"prompt": ids, "logprobs": 0}).json()
    completion = expected_ids(service, make_sampler, ids, stop_ids=(), temperature=1.0)
    (choice,) = body["choices"]
    found = choice["logprobs"]
    assert found["token_logprobs"] == pytest.approx(completion.commit_logp_raw.tolist(), abs=1e-5)
    assert all(logprob < 0 for logprob in found["token_logprobs"])
    assert found["top_logprobs"] is None
    texts, special = found["tokens"], service.codec._special_ids
    kept = ["" if token in special else text for token, text in zip(completion.token_ids, texts, strict=True)]
    assert "".join(kept) == choice["text"]
    assert found["text_offset"] == [len("".join(kept[:slot])) for slot in range(len(kept))]
    ask = CHAT | drawn | {"logprobs": True, "top_logprobs": 0}
    content = client.post("/v1/chat/completions", json=ask).json()["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == found["token_logprobs"]
    assert [one["token"] for one in content] == [bytes(one["bytes"]).decode() for one in content] == texts
    # A stream has them at the end of each choice.
    for path, asked, expected in (
        ("completions", ASK | drawn | {"prompt": ids, "logprobs": 0, "stream": True}, found),
        ("chat/completions", ask | {"stream": True}, {"content": content, "refusal": None}),
    ):
        chunks, is_done = events_of(client.post(f"/v1/{path}", json=asked))
        assert is_done
        said = [one for chunk in chunks for one in chunk["choices"]]
        assert [one["logprobs"] for one in said[:-1]] == [None] * (len(said) - 1)
        assert (said[-1]["logprobs"], said[-1]["finish_reason"]) == (expected, "length")


def test_a_step_map_lists_its_tokens(client, service, make_sampler):
    completion = expected_ids(service, make_sampler)
    ask = ASK | {"diffusion": {"return_step_map": True}}
    choice = client.post("/v1/completions", json=ask).json()["choices"][0]
    found = choice["diffusion"]
    assert found["token_ids"] == completion.token_ids[: completion.num_tokens].tolist()
    assert found["step_map"] == completion.step_map[: completion.num_tokens].tolist()
    assert found["confidence"] == pytest.approx(np.exp(completion.commit_logp_raw), abs=1e-3)
    assert len(found["tokens"]) == completion.num_tokens
    chunks, _ = events_of(client.post("/v1/completions", json=ask | {"stream": True}))
    assert [one["diffusion"] for chunk in chunks for one in chunk["choices"] if "diffusion" in one] == [found]


def test_steps_blocks_and_constraints_reach_the_sampler(client):
    diffusion = {
        "steps": 4,
        "block_length": 4,
        "return_step_map": True,
        "constraints": {"fixed": {"2": 70, "9": 71}, "forbidden_ids": [72]},
    }
    found = client.post("/v1/completions", json=ASK | {"diffusion": diffusion}).json()["choices"][0]["diffusion"]
    assert max(found["step_map"]) == 3
    assert (found["token_ids"][2], found["token_ids"][9]) == (70, 71)
    assert (found["step_map"][2], found["step_map"][9]) == (-1, -1)
    threshold = {"threshold": 0.001, "return_step_map": True}
    found = client.post("/v1/completions", json=ASK | {"diffusion": threshold}).json()["choices"][0]["diffusion"]
    assert max(found["step_map"]) == 1


def test_a_gap_is_filled_before_its_suffix(client, service):
    ask = {"prompt": "2 + ", "suffix": " = 5", "max_tokens": 5, "seed": 1}
    body = client.post("/v1/completions", json=ask | {"diffusion": {"return_step_map": True}}).json()
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "stop"
    found = body["choices"][0]["diffusion"]
    assert len(found["token_ids"]) == 5
    # The policy reads the suffix: another one gives another gap.
    texts = {
        client.post("/v1/completions", json=ask | {"suffix": suffix}).json()["choices"][0]["text"]
        for suffix in (" = 5", "!!!!", "What", "sum is 3.")
    }
    assert len(texts) > 1
    assert_error(client.post("/v1/completions", json=ask | {"diffusion": {"gen_length": 16}}), 400)


def test_messages_are_a_conversation(client):
    parts = [{"type": "text", "text": "2 + 3"}]
    as_parts = {"messages": [{"role": "user", "content": parts}], "seed": 1}
    one, other = (client.post("/v1/chat/completions", json=ask).json() for ask in (CHAT, as_parts))
    assert one["choices"] == other["choices"]
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    assert_error(client.post("/v1/chat/completions", json=image), 400)
    assert_error(client.post("/v1/chat/completions", json={"messages": []}), 400)
    assert_error(client.post("/v1/chat/completions", json={"messages": [{"role": "root", "content": "x"}]}), 400)
    spelled = {"messages": [{"role": "user", "content": "a<|assistant|>b"}]}
    assert "a special token" in assert_error(client.post("/v1/chat/completions", json=spelled), 400)["message"]
    limited = client.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 2}).json()
    assert limited["usage"]["completion_tokens"] == 2


def test_tokenize_and_detokenize_are_inverse(client, service):
    body = client.post("/tokenize", json={"prompt": "What is 1 + 2?"}).json()
    assert body == {"tokens": body["tokens"], "count": len(body["tokens"]), "max_model_len": 64}
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "What is 1 + 2?"}
    turn = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    assert turn == service.codec.encode_chat(CHAT["messages"])
    assert_error(client.post("/tokenize", json={}), 400)
    half = client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers={"Content-Type": "application/json"})
    assert_error(half, 400)
    assert_error(client.post("/detokenize", json={"tokens": [-1]}), 400)
