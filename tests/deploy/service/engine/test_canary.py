"""Canary evaluation: held-out problems that an announced version must solve before it serves."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from actors.plan import RunPlan
from actors.registry.files import rebuild
from deploy.recipe.recipe import CanarySection, Recipe, Stages
from deploy.runs.checkpoints import read_recipe
from deploy.runs.run_directory import make_spec
from deploy.service.api.policy_view import policy_body
from deploy.service.checkpoints import latest_checkpoint
from deploy.service.engine.canary import HeldoutCanary
from deploy.service.engine.follower import VersionFollower
from deploy.service.engine.loaded_version import CanaryError, RefusedVersionError
from deploy.service.engine.versions import Versions
from deploy.service.source import Source
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rollout.sampler import Sampler
from rollout.score import Score

ASKED = 12


@pytest.fixture
def recipe(run_dir):
    """The run's recipe, with a canary that fits its held-out problems and its policy."""
    values = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    values["evaluation"] = {"num_problems": 20}
    values["rollout"] |= {"max_prompt_tokens": 40, "overlong_prompts": "truncate_left"}
    values["service"] = {"canary": {"num_problems": ASKED, "max_drop": 0.25}}
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(values))
    return read_recipe(run_dir)


@pytest.fixture
def make_canary(recipe, run_dir):
    def make(**changes):
        config = recipe.service.canary.model_copy(update=changes)
        return HeldoutCanary(recipe, config, run_dir / "checkpoints" / "sft-1")

    return make


@pytest.fixture
def solving(recipe, run_dir, monkeypatch):
    """Make each policy version solve as many of the held-out problems as this dict says, the first of them."""
    tokenizer = ChatTokenizer(run_dir / "checkpoints" / "sft-1")
    plan = RunPlan(make_spec(recipe, Stages.ALL), tokenizer)
    answers = {plan.prompt_ids(problem): problem.answer for problem in plan.heldout}
    assert len(answers) == len(plan.heldout)
    solved, generated = {}, []

    class Solver(Sampler):
        def open(self, requests=(), max_rows=None):
            batch = super().open(requests, max_rows)
            step, submit, asked = batch.step, batch.submit, []

            def keep(request):
                asked.append(request)
                return submit(request)

            def write():
                return [(index, self._written(asked[index], index, one)) for index, one in step()]

            batch.submit, batch.step = keep, write
            return batch

        def _written(self, request, index, completion):
            generated.append((self.policy_version, index, request))
            answer = answers[request.prompt_ids] if index < solved.get(self.policy_version, 0) else "x"
            ids = np.array(tokenizer.encode_plain(f"<answer>{answer}</answer>"), dtype=np.int32)
            return replace(completion, token_ids=ids, num_tokens=len(ids))

    monkeypatch.setattr("deploy.service.engine.canary.Sampler", Solver)
    solved["asked"] = generated
    return solved


def test_the_first_heldout_problems_are_asked_as_in_an_evaluation(make_canary, make_sampler, solving, recipe, run_dir):
    solving[1] = 5
    assert make_canary().score(make_sampler(1), lambda: True) == Score(num_correct=5, num_problems=ASKED)
    plan = RunPlan(make_spec(recipe, Stages.ALL), ChatTokenizer(run_dir / "checkpoints" / "sft-1"))
    work_units = plan.evaluation_work_units(recipe.rollout.sampling, load_config(run_dir / "checkpoints" / "sft-1"))
    expected = [request for work_unit in work_units for request in work_unit.requests]
    asked = {index: request for _, index, request in solving["asked"]}
    assert [asked[index] for index in range(ASKED)] == expected[:ASKED]
    assert all(request.params.temperature == 0 for request in asked.values())


@pytest.mark.parametrize(
    ("correct", "serving", "is_worse"), [(5, 8, False), (4, 8, True), (12, 0, False), (0, 3, False)]
)
def test_a_drop_beyond_the_margin_is_an_objection_with_both_numbers(make_canary, correct, serving, is_worse):
    objection = make_canary().objection(
        Score(num_correct=correct, num_problems=12), Score(num_correct=serving, num_problems=12)
    )
    assert (objection is not None) == is_worse
    if is_worse:
        assert "solves 4 of the 12 canary problems" in objection
        assert "serves 8;" in objection
        assert "max_drop is 0.25" in objection


def test_a_canary_that_takes_too_long_says_how_far_it_came(make_canary, make_sampler):
    with pytest.raises(CanaryError, match=r"\d+ of 12 problems were answered within service\.canary\.timeout_s 1e-09"):
        make_canary(timeout_s=1e-9).score(make_sampler(1), lambda: True)


def test_a_canary_without_problems_or_grades_has_no_score(make_canary, make_sampler, solving, recipe, monkeypatch):
    canary = make_canary()
    canary._recipe = recipe.model_copy(update={"num_train_problems": 10**6})
    with pytest.raises(CanaryError, match="has"):
        canary.score(make_sampler(1), lambda: True)

    def broken(*_):
        raise OSError("no sandbox here")

    canary = make_canary()
    canary._made()
    monkeypatch.setattr(canary._grader._grader._task, "grade", broken)
    with pytest.raises(CanaryError, match=r"a grade is missing: .*no sandbox here"):
        canary.score(make_sampler(1), lambda: True)


def test_a_canary_larger_than_the_heldout_set_is_refused(recipe):
    values = recipe.model_dump(mode="json")
    values["service"]["canary"]["num_problems"] = 21
    with pytest.raises(ValidationError, match=r"canary\.num_problems 21 exceeds evaluation\.num_problems 20"):
        Recipe.model_validate(values)
    assert CanarySection(num_problems=1).max_drop == 0.1


# Decisions.


@pytest.fixture
def make_versions(make_canary, make_sampler, make_policy, run_dir):
    def make():
        return Versions(
            make_sampler(1),
            latest_checkpoint(run_dir),
            load=lambda policy: make_sampler(policy.version),
            locate=make_policy,
            canary=make_canary(),
        )

    return make


def test_a_worse_version_stays_out_unless_somebody_chose_it(make_versions, make_policy, solving):
    solving |= {1: 8, 2: 6, 3: 2, 4: 3}
    versions = make_versions()
    versions.adopt(make_policy(2))
    assert (versions.policy.version, versions.canary) == (2, Score(num_correct=6, num_problems=ASKED))
    with pytest.raises(RefusedVersionError, match=r"version 3 is not served: it solves 2 of the 12 .* serves 6;"):
        versions.adopt(make_policy(3))
    assert (versions.policy.version, [refused.version for refused in versions.refused]) == (2, [3])
    # It is compared with the serving version, and no version is scored twice.
    versions.adopt(make_policy(4))
    assert versions.policy.version == 4
    assert sorted({version for version, _, _ in solving["asked"]}) == [1, 2, 3, 4]
    assert len(solving["asked"]) == 4 * ASKED
    versions.adopt(make_policy(3), is_chosen=True)
    assert (versions.policy.version, versions.canary.num_correct) == (3, 2)


def test_the_recipe_says_whether_versions_are_compared(recipe, run_dir, add_checkpoint, make_policy, solving):
    solving |= {1: 8, 2: 1}
    worse = make_policy(2, checkpoint=str(add_checkpoint(run_dir, 2)))
    (run_dir / "checkpoints" / "rl-2").rename(run_dir / "rl-2")
    worse = replace(worse, checkpoint=str(run_dir / "rl-2"))
    source = Source(directory=str(run_dir), is_run=True, registry_url=None)
    with pytest.raises(RefusedVersionError, match="it solves 1 of the 12"):
        source.versions("cpu").adopt(worse)
    values = recipe.model_dump(mode="json")
    values["service"]["canary"] = None
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(values))
    versions = source.versions("cpu")
    versions.adopt(worse)
    assert versions.policy.version == 2


def test_who_asks_for_a_version_by_name_gets_it_and_it_is_judged_all_the_same(make_versions, make_policy, solving):
    solving |= {1: 8, 3: 2}
    versions = make_versions()
    live = versions.acquire(3)
    assert live.policy.version == 3
    assert not solving["asked"]
    with pytest.raises(RefusedVersionError, match="it solves 2"):
        versions.adopt(make_policy(3))
    versions.release(live)


def test_others_load_versions_while_the_canary_runs(make_versions, make_policy, solving):
    solving |= {1: 8, 2: 8}
    versions = make_versions()
    score, is_asked, may_end = versions._canary.score, threading.Event(), threading.Event()

    def slowly(sampler, still_wanted):
        is_asked.set()
        assert may_end.wait(10)
        return score(sampler, still_wanted)

    versions._canary.score = slowly
    adopting = threading.Thread(target=versions.adopt, args=(make_policy(2),))
    adopting.start()
    assert is_asked.wait(10)
    assert versions.acquire("policy").policy.version == 1
    assert versions.acquire(7).policy.version == 7
    may_end.set()
    adopting.join(30)
    assert versions.policy.version == 2


def test_an_engine_that_begins_takes_what_the_others_serve_and_compares_later(
    make_versions, make_policy, registry, run_dir, solving
):
    solving |= {2: 8, 3: 8}
    rebuild(registry, run_dir)
    registry.announce(make_policy(2))
    registry.move("policy", 2, expected=None)
    registry.announce(make_policy(3))
    versions = make_versions()
    follower = VersionFollower(registry, versions, run_dir)
    assert follower.catch_up()
    assert (versions.policy.version, versions.announced.version) == (2, 3)
    assert not solving["asked"]
    assert follower.follow_once(0)
    assert (versions.policy.version, registry.aliases()["policy"]) == (3, 3)
    assert {version for version, _, _ in solving["asked"]} == {2, 3}


def test_a_pin_does_not_wait_for_the_canary(make_versions, make_policy, registry, run_dir, solving, monkeypatch):
    monkeypatch.setattr("deploy.service.engine.canary._ASK_EVERY_S", 0.0)
    solving |= {1: 8, 2: 8}
    versions = make_versions()
    follower = VersionFollower(registry, versions, run_dir)
    follower.follow_once(0)
    registry.announce(make_policy(2))
    follower._read(0)
    registry.pin(1)
    # The follower's snapshot is older than the pin. The canary notices the pin while it runs.
    assert not follower._obey()
    assert (versions.policy.version, versions.refused, versions._current.canary) == (1, (), None)
    registry.pin(None)
    assert follower.follow_once(0)
    assert versions.policy.version == 2


def test_a_version_without_a_score_stays_out_and_says_why(make_versions, make_policy, solving):
    versions = make_versions()

    def broken(sampler, still_wanted):
        raise CanaryError("a grade is missing")

    versions._canary.score = broken
    with pytest.raises(RefusedVersionError, match="the canary came to no end: a grade is missing"):
        versions.adopt(make_policy(2))


def test_one_engine_asks_for_all_and_a_pin_is_not_asked(make_versions, make_policy, registry, run_dir, solving):
    solving |= {1: 8, 2: 7, 3: 1}
    rebuild(registry, run_dir)
    first, second = make_versions(), make_versions()
    followers = [VersionFollower(registry, versions, run_dir) for versions in (first, second)]
    registry.announce(make_policy(2))
    assert all(follower.follow_once(0) for follower in followers)
    assert {version for version, _, _ in solving["asked"]} == {1, 2}
    assert len(solving["asked"]) == 2 * ASKED
    registry.announce(make_policy(3))
    assert not followers[0].follow_once(0)
    assert first.policy.version == 2
    assert "it solves 1 of the 12 canary problems" in followers[0].status.last_error
    new = make_versions()
    assert VersionFollower(registry, new, run_dir).follow_once(0)
    assert new.policy.version == 2
    registry.pin(3)
    assert followers[0].follow_once(0)
    assert first.policy.version == 3
    registry.pin(None)
    # Version 3 was refused, but it is the newest announcement still, so the engine keeps it.
    followers[0].follow_once(0)
    assert first.policy.version == 3


def test_the_score_of_the_serving_version_is_shown(host, make_policy):
    state = host.state()
    assert policy_body("tiny", [state]).canary is None
    asked = replace(state, canary=Score(num_correct=9, num_problems=12))
    shown = policy_body("tiny", [state, asked]).canary
    assert (shown.policy_version, shown.num_correct, shown.num_problems, shown.accuracy) == (1, 9, 12, 0.75)
