"""The engine, and how a swap meets requests that are under way."""

import threading
from dataclasses import replace

import pytest

from deploy.service.engine import InvalidPromptError
from learner.model.tokenizer import EOS, MASK, USER

ASK = {"max_tokens": None, "temperature": None, "seed": 1, "num_choices": 1}


class HeldSampler:
    """A sampler that begins, and goes on when it is let."""

    def __init__(self, sampler):
        self.model, self.policy_version = sampler.model, sampler.policy_version
        self.began, self.may_go_on = threading.Event(), threading.Event()
        self._sampler = sampler

    def generate(self, requests):
        self.began.set()
        assert self.may_go_on.wait(20)
        return self._sampler.generate(requests)


def texts(generation):
    return [text.text for text in generation.texts]


def test_a_request_that_began_under_a_version_finishes_under_it(engine, make_sampler, make_policy):
    expected = texts(engine.complete(["2 + 3"], **ASK))
    held = HeldSampler(make_sampler(1))
    engine._current = (held, engine.policy)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(engine.complete(["2 + 3"], **ASK)))
    thread.start()
    assert held.began.wait(20)
    engine.swap(make_sampler(2), make_policy(2))
    during = engine.complete(["2 + 3"], **ASK)
    held.may_go_on.set()
    thread.join(20)
    assert during.policy.version == 2
    assert answers[0].policy.version == 1
    assert texts(answers[0]) == expected != texts(during)


def test_a_swap_before_the_first_forward_is_too_late_too(engine, make_sampler, make_policy, monkeypatch):
    expected = texts(engine.complete(["2 + 3"], **ASK))
    encode = engine._encode

    def swap_and_encode(*arguments):
        engine.swap(make_sampler(2), make_policy(2))
        return encode(*arguments)

    monkeypatch.setattr(engine, "_encode", swap_and_encode)
    answer = engine.complete(["2 + 3"], **ASK)
    assert (answer.policy.version, texts(answer), engine.policy.version) == (1, expected, 2)


def test_while_versions_change_every_answer_is_that_of_the_version_it_names(engine, make_sampler, make_policy):
    samplers = {version: make_sampler(version) for version in range(1, 6)}
    expected = {}
    for version, sampler in samplers.items():
        engine.swap(sampler, make_policy(version))
        expected[version] = texts(engine.complete(["2 + 3"], **ASK))
    assert len({tuple(text) for text in expected.values()}) == 5
    done, answers = threading.Event(), []

    def ask():
        while not done.is_set():
            answers.append(engine.complete(["2 + 3"], **ASK))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        for version, sampler in samplers.items():
            engine.swap(sampler, make_policy(version))
            done.wait(0.01)
    done.set()
    for thread in threads:
        thread.join(20)
    assert len({answer.policy.version for answer in answers}) > 1
    assert all(texts(answer) == expected[answer.policy.version] for answer in answers)


def test_a_score_changes_what_is_known_and_not_the_weights(engine, make_policy):
    before, policy = texts(engine.complete(["2 + 3"], **ASK)), engine.policy
    engine.learn(replace(policy, num_correct=3, num_problems=4))
    assert (engine.policy.num_correct, engine.scored.version, engine.num_swaps) == (3, 1, 0)
    assert texts(engine.complete(["2 + 3"], **ASK)) == before
    engine.learn(make_policy(7, num_correct=1, num_problems=4))
    assert (engine.policy.version, engine.scored.version) == (1, 7)


def test_the_same_seed_gives_the_same_text(engine):
    ask = ASK | {"temperature": 1.0}
    first = texts(engine.complete(["2 + 3"], **ask))
    assert texts(engine.complete(["2 + 3"], **ask)) == first
    assert texts(engine.complete(["2 + 3"], **(ask | {"seed": 2}))) != first
    unseeded = {tuple(texts(engine.complete(["2 + 3"], **(ask | {"seed": None})))) for _ in range(3)}
    assert len(unseeded) == 3


def test_choices_of_a_prompt_differ_and_come_prompt_by_prompt(engine):
    both = engine.complete(["2 + 3", "4"], **(ASK | {"temperature": 1.0, "num_choices": 2}))
    assert len(set(texts(both))) == 4
    first = engine.complete(["2 + 3"], **(ASK | {"temperature": 1.0, "num_choices": 2}))
    assert texts(first) == texts(both)[:2]


def test_text_is_cut_after_max_tokens(engine):
    whole = engine.complete(["2 + 3"], **ASK).texts[0]
    cut = engine.complete(["2 + 3"], **(ASK | {"max_tokens": 3})).texts[0]
    assert (cut.num_tokens, cut.is_cut) == (3, True)
    assert whole.num_tokens > 3
    assert whole.text.startswith(cut.text.rstrip("\ufffd"))
    with pytest.raises(InvalidPromptError, match="at most 16 tokens"):
        engine.complete(["2 + 3"], **(ASK | {"max_tokens": 17}))


def test_a_string_is_the_users_turn_and_ids_are_raw(engine):
    ids = engine._tokenizer.encode_chat([{"role": "user", "content": "2 + 3"}])
    assert texts(engine.complete(["2 + 3"], **ASK)) == texts(engine.complete([ids], **ASK))
    assert engine.complete(["2 + 3"], **ASK).num_prompt_tokens == len(ids)


@pytest.mark.parametrize("token", [MASK, EOS, USER])
@pytest.mark.parametrize("prompt", ["{}", "2 + 3{}4", "{} {}", "<|user|{}"])
def test_text_that_spells_a_special_token_is_refused(engine, token, prompt):
    with pytest.raises(InvalidPromptError, match="a special token"):
        engine.complete([prompt.replace("{}", token)], **ASK)


def test_text_that_only_resembles_a_special_token_is_text(engine):
    assert engine.complete(["<|mdm_mask| > <user> <|x|>"], **ASK).texts


@pytest.mark.parametrize(
    ("ids", "message"),
    [([0], "mask id 0"), ([5, -1], "between 0 and"), ([10**6], "between 0 and"), ([5] * 49, "at most 48")],
)
def test_ids_that_cannot_be_a_prompt_are_refused(engine, ids, message):
    with pytest.raises(InvalidPromptError, match=message):
        engine.complete([ids], **ASK)


def test_a_prompt_that_just_fits_is_answered(engine):
    assert engine.complete([[5] * 48], **ASK).num_prompt_tokens == 48
