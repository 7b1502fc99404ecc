"""Recipe parsing and overrides: values are read as meant, or refused with a helpful sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from actors.spec import sampler_facts
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe, resolved_yaml
from learner.algorithms import ALGORITHMS
from learner.estimators import OneStepConfig
from tests.deploy.conftest import RECIPE


def test_a_recipe_without_a_name_is_named_after_its_file(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, []).name == "tiny"
    recipe_file.write_text("name: other\n" + recipe_file.read_text())
    assert load_recipe(recipe_file, []).name == "other"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_recipe_can_begin_with_a_byte_order_mark(recipe_file: Path, encoding: str) -> None:
    found = load_recipe(recipe_file, [])
    recipe_file.write_bytes(recipe_file.read_text().replace("\n", "\r\n").encode(encoding))
    assert load_recipe(recipe_file, []) == found


def test_a_recipe_in_another_encoding_is_refused_by_line_and_byte(recipe_file: Path) -> None:
    recipe_file.write_bytes(recipe_file.read_bytes() + "# für\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"tiny.yaml is not YAML: line 8: byte 4 is not UTF-8; save the file as UTF-8$"):
        load_recipe(recipe_file, [])


def test_floats_in_scientific_notation_work_in_the_file_and_in_overrides(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["rollout.sampling.temperature=5e-1", "learner.betas=[9e-1, 0.99]"])
    assert recipe.sft.lr == 1e-3
    assert recipe.rollout.sampling.temperature == 0.5
    assert recipe.learner.betas == (0.9, 0.99)


def test_overrides_reach_missing_and_empty_sections(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "grading:\n")
    recipe = load_recipe(recipe_file, ["grading.num_graders=3", "control.enabled=false"])
    assert recipe.grading.num_graders == 3
    assert not recipe.control.enabled


def test_the_last_override_of_a_key_counts(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["seed=1", "seed=2"]).seed == 2


RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid(path: Path) -> None:
    recipe = load_recipe(path, [])
    assert recipe.learner.incompatibility(sampler_facts(recipe.rollout.sampling)) is None


NEEDS = {
    "justgrpo": [
        "rollout.sampling.block_length=1",
        "rollout.sampling.num_denoise_steps=18",
        "evaluation.schedules=null",
    ],
    "forkgrpo": ["rollout.sampling.schedule=left_to_right", "rollout.sampling.threshold=0.8"],
    "d-opsd": [
        "rollout.sampling.block_length=6",
        "rollout.sampling.num_denoise_steps=6",
        "evaluation.schedules=null",
    ],
    "d-treerpo": ["rollout.sampling.num_denoise_steps=6"],
    "lightningrl": ["rollout.sampling.threshold=0.9", "reward.terms.fast={kind: speed}"],
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_override_switches_a_shipped_recipe_to_any_algorithm(name: str) -> None:
    path = next(path for path in RECIPES if path.stem == "tiny")
    recipe = load_recipe(path, [f"learner.algorithm={name}"])
    facts = sampler_facts(recipe.rollout.sampling)
    assert bool(recipe.learner.incompatibility(facts)) is (name in NEEDS)
    fitting = load_recipe(path, [f"learner.algorithm={name}", *NEEDS.get(name, [])])
    assert fitting.learner.incompatibility(sampler_facts(fitting.rollout.sampling)) is None


def test_an_algorithm_override_replaces_only_the_files_method(recipe_file: Path) -> None:
    method = "advantage: round_z, estimator: {p_mask_prompt: 0.0}, objective: {kl_coef: 0.5}"
    text = recipe_file.read_text()
    recipe_file.write_text(text.replace("learner: {", f"learner: {{inner_updates: 3, {method}, "))
    own = load_recipe(recipe_file, ["learner.algorithm=diffu-grpo"]).learner
    assert own == load_recipe(recipe_file, []).learner
    assert (own.advantage, own.estimator, own.inner_updates) == ("round_z", OneStepConfig(p_mask_prompt=0.0), 3)
    # The order of overrides does not matter.
    other = load_recipe(recipe_file, ["learner.estimator.p_mask_prompt=0.3", "learner.algorithm=wd1"]).learner
    assert (other.advantage, other.estimator, other.inner_updates) == (
        "softmax_pair",
        OneStepConfig(p_mask_prompt=0.3),
        3,
    )
    assert other.objective.name == "weighted_likelihood"


def test_the_resolved_yaml_loads_to_the_same_recipe(recipe_file: Path, workdir: Path) -> None:
    recipe = load_recipe(recipe_file, ["task.name=countdown", "learner.advantage=group_z", "name=2024-01-01"])
    text = resolved_yaml(recipe)
    resolved = workdir / "resolved.yaml"
    resolved.write_text(text)
    assert load_recipe(resolved, []) == recipe
    assert resolved_yaml(load_recipe(resolved, [])) == text
    # Other programs read it with plain PyYAML.
    assert yaml.safe_load(text)["name"] == "2024-01-01"


def test_loading_resolves_all_defaults(recipe_file: Path) -> None:
    resolved = yaml.safe_load(resolved_yaml(load_recipe(recipe_file, [])))
    assert resolved["rollout"]["max_attempts"] == 3
    assert resolved["device"] == "cpu"


def test_reference_sync_is_refused_with_lora(recipe_file: Path) -> None:
    with pytest.raises(
        UserError, match=r"learner\.reference_sync_rounds 5 moves the KL reference, which with model\.lora"
    ):
        load_recipe(recipe_file, ["learner.reference_sync_rounds=5", "model.lora.rank=8"])


def test_a_value_model_of_4_bit_weights_is_refused(recipe_file: Path) -> None:
    words = ["learner.algorithm=cj-grpo", "learner.value={}", "model.lora={rank: 4, base_weights: nf4}"]
    with pytest.raises(UserError, match=r"4-bit weights cannot be copied: take model\.lora\.base_weights=full"):
        load_recipe(recipe_file, words)


def test_sft_samples_need_the_policy_on_its_device(recipe_file: Path) -> None:
    samples = ["device=cuda", "sft.num_eval=3", "sft.num_samples=2"]
    with pytest.raises(UserError, match=r"sft\.num_samples is 2, and with sharding\.cpu_offload the learner has no"):
        load_recipe(recipe_file, [*samples, "sharding.cpu_offload=true"])
    assert load_recipe(recipe_file, samples).sft.num_samples == 2


def test_fields_of_another_task_are_named_with_alternatives(workdir: Path, d1: Callable) -> None:
    sudoku = "task: {name: sudoku, prompt: compact, min_empty: 4, max_empty: 9}"
    (workdir / "tiny.yaml").write_text(RECIPE.replace("task: {name: sums}", sudoku))
    words = ("train", "tiny.yaml", "task.name=countdown", "task.num_numbers=4", "--dry-run")
    d1(*words).assert_refused(
        "task.name=countdown: tiny.yaml sets task.min_empty, task.max_empty, which countdown does not have",
        "'task={name: countdown, prompt: compact, num_numbers: 4}'",
    )
    whole = load_recipe(workdir / "tiny.yaml", ["task={name: countdown, prompt: compact, num_numbers: 4}"])
    assert whole.task.name == "countdown"


REFUSED_OVERRIDES = {
    "model.lora.targets=[ff_out]": (
        "model.lora.targets: it names ff_out, which no block has; the linear layers of a block are q_proj, k_proj",
    ),
    "model.lora.dropout=0.05": (
        "model.lora.dropout is no key of this model.lora, which has alpha, base_weights, rank, targets",
    ),
    "gpus.sampler=0.5": ("gpus is for device cuda; with device cpu nothing has a GPU",),
    "gpus.engine=1.5": ("gpus.engine is 1.5",),
    "placement.learner=STRICT": ("placement.learner is 'STRICT'; it should be 'PACK' or 'SPREAD'",),
    "placement.samplers=PACK": ("placement.samplers is 'PACK'; it should be 'DEFAULT' or 'SPREAD'",),
    "sharding.cpu_offload=true": ("sharding.cpu_offload is for device cuda; with device cpu everything is in main",),
    "sharding.workers_per_copy=3": (
        "sharding.workers_per_copy 3 does not divide learner.num_workers 2, and every copy has as many; take",
    ),
    "learner.value={}": ("value needs estimator trajectory, which keeps the record of denoise steps, not one_step",),
    "learner.value={lam: 1.1}": ("learner.value.lam is 1.1; it should be at most 1",),
    "learner={num_rounds: 1, algorithm: cj-grpo, value: {lr: 0}}": ("value.lr is 0; it should be greater than 0",),
    "learner.groupsize=4": ("learner.groupsize is no key of a recipe", "did you mean learner.group_size?"),
    "lerner.lr=1": ("lerner is no key of a recipe", "did you mean learner?"),
    "lr=3": ("did you mean sft.lr or learner.lr or learner.value.lr?",),
    "task.prompt=d1": ("task.prompt is no key of this task, which has heldout_fraction, modulus, name, num_terms",),
    "blabla=3": ("blabla is no key of a recipe, which has checkpoint_every_rounds,",),
    "seed=x": ("override seed=x", "seed is 'x'; it should be a whole number"),
    "seed=3.5": ("seed is 3.5; it should be a whole number",),
    "seed=true": ("seed is true; it should be a number",),
    "seed=-1": ("seed is -1; it should be at least 0",),
    "learner.lr=-1": ("override learner.lr=-1", "learner.lr is -1; it should be greater than 0"),
    "learner.lr=fast": ("learner.lr is 'fast'; it should be a number",),
    "learner.lr=.inf": ("learner.lr is inf; it should be a finite number",),
    "learner.lr.x=3": ("needs learner.lr to be a section, and it is 0.0001",),
    "learner.group_size=1": ("learner.group_size is 1; it should be at least 2",),
    "learner.betas=[1, 2, 3]": ("learner.betas is [1, 2, 3]; it should have at most 2 values",),
    "learner.betas=[0.9, x]": ("learner.betas[1] is 'x'; it should be a number",),
    "learner=3": ("learner is 3; it should be a section of keys and values",),
    "learner=": ("learner is empty; it should be a section",),
    "task.name=chess": (
        "override task.name=chess",
        "task.name is 'chess'; it should be one of countdown, gsm8k, humaneval, ",
    ),
    "task={}": ("task.name is missing; it should be one of countdown, gsm8k, humaneval, ",),
    "task=sums": ("task is 'sums'; it should be a section",),
    "task.num_terms=9": ("task.num_terms is 9; it should be at most 5",),
    "device=gpu": ("device is 'gpu'; it should be 'cpu' or 'cuda'",),
    "control.enabled=3": ("control.enabled is 3; it should be true or false",),
    "service.port=99999": ("service.port is 99999; it should be at most 65535",),
    "runs_dir=3": ("runs_dir is 3; it should be a path",),
    "name=5": ("name is 5; it should be text: put it in quotes",),
    "name=../up": ("name is '../up'; it should be up to 80 letters, digits, dots",),
    "rollout.sampling.block_length=12": (
        "override rollout.sampling.block_length=12",
        "rollout.sampling: block_length 12 does not divide gen_length 32; take a divisor of 32",
    ),
    "rollout.schedules=[]": ("rollout: schedules is empty; name one, or leave it out",),
    "rollout.schedules=[{num_denoise_steps: 33}]": (
        "rollout: schedules[0]: num_denoise_steps 33 must be a multiple of the 4 blocks and at most gen_length 32",
    ),
    "evaluation.schedules=[{threshold: 0.9}, {num_denoise_steps: 33}]": (
        "evaluation.schedules[1]: num_denoise_steps 33 must be a multiple of the 4 blocks and at most gen_length 32",
    ),
    "evaluation.schedules=[{threshold: 1.2}]": ("evaluation.schedules[0].threshold is 1.2; it should be at most 1\n",),
    "evaluation.schedules=[{steps: 3}]": (
        "evaluation.schedules[0].steps is no key of this evaluation.schedules[0], which has ent",
    ),
    "model.num_heads=3": ("model: num_heads 3 does not split d_model 128 into heads of even width",),
    "sft.num_labels=400": ("tiny.yaml: sft.num_labels 400 exceeds num_train_problems 40",),
    "sft.num_eval=30": ("sft.num_eval 30 exceeds evaluation.num_problems 20, the held-out problems",),
    "evaluation.num_validation=5": (
        "evaluation.num_validation is 5, and task.validation_fraction 0 keeps no problem for validation",
    ),
    "evaluation={num_problems: 20, num_validation: -1}": ("evaluation.num_validation is -1; it should be at least 0",),
    "task.validation_fraction=0.7": ("task.validation_fraction is 0.7; it should be at most 0.5",),
    "sft.packing=true": ("sft: packing is true and eos_padding is trained", "take eos_padding: ignored"),
    "sft.num_samples=2": ("sft: num_samples is 2 and num_eval is 0: samples complete the prompts of held-out",),
    "sft.attention_annealing_steps=21": ("sft: attention_annealing_steps is 21 and num_steps is 20: the stage",),
    "sft.max_tokens=64": ("sft: max_tokens is 64 and data is missing",),
    "sft={num_steps: 3}": ("sft: num_labels is missing; without data it is needed",),
    "learner.groups_per_round=50": ("learner.groups_per_round 50 exceeds num_train_problems 40",),
    "rollout.max_oversampling=0.5": ("rollout.max_oversampling is 0.5; it should be at least 1\n",),
    "rollout.max_oversampling=30": (
        "rollout.max_oversampling 30 exceeds num_train_problems 40: a round asks each problem once",
    ),
    "learner.algorithm=ppo": (
        "override learner.algorithm=ppo: learner: there is no algorithm 'ppo'; there are diffu-",
    ),
    "learner.algorithm=[spg]": ("learner.algorithm is ['spg']; it should be text",),
    "learner.estimator.p_mask_promt=0": ("did you mean learner.estimator.p_mask_prompt?",),
    "reward.terms.a={kind: charm}": ("reward.terms.a.kind is 'charm'; it should be one of function, http, judge, len",),
    "reward.terms.a={weight: 1}": ("reward.terms.a.kind is missing; it should be one of function, http, judge",),
    "reward.terms.a={kind: speed, wieght: 1}": ("did you mean reward.terms.a.weight?",),
    "reward.terms.a-b={kind: speed}": ("reward.terms.a-b should be named with letters, digits and underscores",),
    "reward.terms=[3]": ("reward.terms is [3]; it should be an object of keys and values",),
    "reward.terms.a={kind: length_penalty, buffer_tokens: 33}": (
        "reward.terms.a.buffer_tokens 33 exceeds rollout.sampling.gen_length 32",
    ),
    "reward.terms.a={kind: http, url: 'http://u:p@h/'}": ("reward.terms.a.url: the URL of h has a user or a password",),
    "reward.terms.a={kind: http, url: 'http://h/', timeout_s: 30}": (
        "reward.terms.a may wait 106 s for a server that does not answer, and a grader is restarted after grading.time",
    ),
    "reward.terms.a={kind: judge, model: m, criteria: c, base_url: 'http://h/v1', requests_per_minute: 30}": (
        "requests_per_minute 30 needs 128 s for the 64 completions of rollout.batch_size",
    ),
    "reward.terms.a={kind: judge, model: m, criteria: c, base_url: 'http://h/v1', vllm: {exe: 3}}": (
        "reward.terms.a.vllm.exe is no key of this reward.terms.a.vllm, which has arguments, command, environment",
    ),
    "reward.terms={a: {kind: judge, model: m, criteria: c, base_url: 'http://127.0.0.1:8001/v1', vllm: {}}, "
    "b: {kind: judge, model: n, criteria: c, base_url: 'http://127.0.0.1:8001/v1', vllm: {}}}": (
        "reward.terms.b and reward.terms.a start different servers at http://127.0.0.1:8001/v1; take another port",
    ),
    "learner": ("the override 'learner' should have the form key=value, for example learner.lr=1e-4",),
    "=3": ("should have the form key=value",),
    "a..b=3": ("should have the form key=value",),
    "seed=[1": ("the value of the override 'seed=[1' is not YAML",),
    "rollout={num_samplers: 1, num_samplers: 2}": ("the key num_samplers comes twice",),
    "seed=!!python/object/apply:os.getcwd []": ("is not YAML: could not determine a constructor",),
    "learner.lr=!!bool maybe": ("is not YAML: 'maybe' cannot be read as !!bool in line 1",),
    "seed=" + "[" * 2000: ("it is nested too deeply",),
}


@pytest.mark.parametrize(("override", "parts"), REFUSED_OVERRIDES.items(), ids=[key[:40] for key in REFUSED_OVERRIDES])
def test_a_bad_override_is_refused_in_one_sentence(
    override: str, parts: tuple[str, ...], recipe_file: Path, d1: Callable
) -> None:
    before = set(recipe_file.parent.iterdir())
    d1("train", "tiny.yaml", override).assert_refused(*parts)
    assert set(recipe_file.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "sft.num_eval=6",
            "sft.num_eval 6 exceeds evaluation.num_validation 5, the validation problems, of which they",
        ),
    ],
)
def test_validation_settings_must_be_consistent(override: str, sentence: str, recipe_file: Path, d1: Callable) -> None:
    words = ("evaluation.num_validation=5", "task.validation_fraction=0.2")
    d1("train", "tiny.yaml", *words, override).assert_refused(sentence)


REFUSED_FILES = {
    "": ("is not a recipe: it should be a mapping",),
    "- a\n- b\n": ("is not a recipe: it should be a mapping",),
    "task: [\n": ("bad.yaml is not YAML:", "line 2"),
    "seed: 1\nseed: 2\n": ("bad.yaml is not YAML: the key seed comes twice in line 2",),
    "seed: 1\nlearner: {lr: 1, lr: 2}\n": ("the key lr comes twice in line 2",),
    "? [a, b]\n: 1\n": ("a key must be plain text",),
    "task: {name: sums}\nsft: {num_labels: 8, num_steps: 1}\n": (
        "bad.yaml: learner is missing; it is needed: stage 2",
    ),
    "task: {name: sums}\nlerner: {num_rounds: 1}\n": ("lerner is no key", "did you mean learner?", "(2 more problems"),
    "1: 2\n": ("bad.yaml",),
    "a: *b\n": ("found undefined alias",),
    "seed: 1\n\tx: 2\n": ("is not YAML",),
    "a: b\x07\n": ("is not YAML",),
}


@pytest.mark.parametrize(("text", "parts"), REFUSED_FILES.items())
def test_a_bad_file_is_refused_in_one_sentence(text: str, parts: tuple[str, ...], workdir: Path, d1: Callable) -> None:
    (workdir / "bad.yaml").write_text(text)
    d1("train", "bad.yaml").assert_refused(*parts)


def test_a_missing_or_binary_file_is_refused(workdir: Path, d1: Callable) -> None:
    d1("train", "none.yaml").assert_refused("cannot read the recipe none.yaml: no such file or directory")
    d1("train", ".").assert_refused("cannot read the recipe .: is a directory")
    (workdir / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    d1("train", "binary.yaml").assert_refused("binary.yaml is not YAML")


def test_an_error_of_file_and_overrides_together_names_both(recipe_file: Path) -> None:
    overrides = ["task.name=countdown", "task.min_number=9", "task.max_number=3"]
    with pytest.raises(UserError, match=r"tiny.yaml with its overrides: task: max_number is 3; it must be at least"):
        load_recipe(recipe_file, overrides)


def test_control_characters_of_a_file_do_not_reach_the_terminal(workdir: Path, d1: Callable) -> None:
    (workdir / "bad.yaml").write_text('"\\e[2Jseed": 1\n')
    ended = d1("train", "bad.yaml")
    ended.assert_refused("\\u001b[2Jseed")
    assert "\x1b" not in ended.err


def test_mdpo_needs_schedules_of_equally_many_steps(recipe_file: Path) -> None:
    words = ["learner.algorithm=mdpo", "rollout.schedules=[{num_denoise_steps: 8}, {num_denoise_steps: 16}]"]
    with pytest.raises(UserError, match=r"rollout\.schedules have different numbers of denoise steps"):
        load_recipe(recipe_file, words)
    load_recipe(recipe_file, ["learner.algorithm=mdpo", "rollout.schedules=[{num_denoise_steps: 8}]"])
