"""peft adapter directories: every command accepts one in place of a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.errors import UserError
from deploy.offline.worker import Worker
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.references import find, find_run, is_run
from deploy.runs.run_directory import check_creatable, create_run_dir, make_spec
from deploy.service.checkpoints import plain_checkpoint
from deploy.service.engine.loading import VersionLoader
from deploy.service.on_ray import launch
from learner.model.checkpoint import load_merged, load_policy, save_checkpoint
from learner.model.checkpoint_files import verify_checkpoint
from learner.model.storage.fingerprint import fingerprint
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from tests.learner.model.on_disk.original import change_config, make_adapter, merged_by_peft
from tests.tiny_policy import config_of

IDS = torch.arange(36).view(3, 12)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapter(workdir: Path) -> Path:
    """`adapter`, an adapter directory for LLaDA's `base`."""
    make_tokenizer(["What is 2 + 3? The answer is five."] * 5, workdir / "base", 320)
    shape = config_of(ChatTokenizer(workdir / "base"), max_sequence_length=128)
    model = Transformer(shape)
    init_weights(model, seed=0)
    save_checkpoint(workdir / "made", shape, model.state_dict(), workdir / "base")
    shutil.copytree(workdir / "made", workdir / "base", dirs_exist_ok=True)
    make_adapter(Path("base"), workdir / "adapter", r=4, std=0.3, target_modules=["q_proj", "v_proj", "ff_out"])
    return Path("adapter")


def _answer(d1: Callable, checkpoint: str) -> str:
    ended = d1("sample", checkpoint, "What is 2 + 3?", "--json", "gen_length=16")
    assert ended.status == 0, ended.err
    return str(json.loads(ended.out)["text"])


def test_sample_and_export_have_the_adapter_on_its_base(adapter: Path, d1: Callable, workdir: Path) -> None:
    answer = _answer(d1, "adapter")
    assert answer != _answer(d1, "base")
    ended = d1("export", "adapter", "merged")
    assert (ended.status, ended.out) == (0, "merged is the policy of adapter\n")
    names = {path.name for path in (workdir / "merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any("adapter" in name for name in names)
    ended = d1("export", "adapter", "apart", "--lora", "apart")
    assert ended.out == "apart is the adapter of adapter, on the policy of base\n"
    assert _answer(d1, "merged") == _answer(d1, "apart") == answer
    expected = merged_by_peft(Path("base"), adapter)
    for name, tensor in merged_by_peft(Path("base"), workdir / "apart").items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def test_eval_tells_adapters_apart(adapter: Path, d1: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    # One worker in this process, since another takes seconds to start.
    monkeypatch.setattr(
        "deploy.offline.evaluation.evaluate.answer_batches", lambda config, _, some: map(Worker(config).answer, some)
    )
    asked = ("eval", "adapter", "--tasks", "sums", "--problems", "2", "--lengths", "16", "--json")
    ended = d1(*asked)
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["checkpoint"]["name"] == "adapter"
    before = fingerprint(adapter)
    change_config(adapter, lora_alpha=32)
    assert fingerprint(adapter) != before
    d1(*asked).assert_refused("has answers to something else: checkpoint.fingerprint was")


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_run_starts_from_the_merged_policy_with_the_adapters_tokenizer_or_the_bases(
    adapter: Path, recipe_file: Path, *, has_tokenizer: bool
) -> None:
    template = (Path("base") / "chat_template.jinja").read_text()
    if has_tokenizer:
        template += "{# changed #}"
        for path in Path("base").glob("*token*"):
            shutil.copyfile(path, adapter / path.name)
        (adapter / "chat_template.jinja").write_text(template)
    recipe = load_recipe(recipe_file, ["name=given", "rollout.max_prompt_tokens=64"])
    spec = make_spec(recipe, Stages.ALL)
    check_creatable(recipe, spec, adapter, max_problems=10)
    create_run_dir(recipe, spec, start_from=adapter).close()
    verify_checkpoint(spec.initial_checkpoint)
    assert (spec.initial_checkpoint / "chat_template.jinja").read_text() == template
    expected = load_merged(adapter).state_dict()
    for name, weight in load_policy(spec.initial_checkpoint).state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_the_service_loads_it(adapter: Path) -> None:
    loaded = VersionLoader(adapter, EngineConfig()).load(plain_checkpoint(adapter))
    with torch.no_grad():
        assert torch.equal(loaded.model(IDS), load_policy(adapter)(IDS))


def test_it_is_found_among_the_runs_and_is_none(adapter: Path, workdir: Path) -> None:
    (workdir / "runs").mkdir()
    shutil.move(adapter, workdir / "runs" / "mine")
    (workdir / "runs" / "mine" / "recipe.yaml").write_text("of another tool")
    assert not is_run(find("mine", Path("runs")))
    with pytest.raises(UserError, match="mine is a checkpoint by itself, not one of a run"):
        find_run("mine", Path("runs"))


def _add(adapter: Path, name: str) -> None:
    save_file(load_file(adapter / WEIGHTS) | {name: torch.zeros(1, 1)}, adapter / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda adapter: change_config(adapter, base_model_name_or_path="/gone"), "the base /gone of the adapter in"),
        (lambda adapter: change_config(adapter, r=3), "make it [3, "),
        (lambda adapter: (adapter / WEIGHTS).rename(adapter / "adapter_model.bin"), "is pickled"),
        (lambda adapter: _add(adapter, "base_model.model.model.transformer.ff_out.weight"), "not that of the base"),
    ],
)
def test_every_command_says_what_is_wrong_with_it(
    adapter: Path, recipe_file: Path, d1: Callable, damage: Callable[[Path], object], what: str
) -> None:
    damage(adapter)
    d1("sample", "adapter", "hi").assert_refused(what)
    d1("export", "adapter", "out").assert_refused(what)
    d1("export", "adapter", "out", "--lora", "apart").assert_refused(what)
    d1("eval", "adapter", "--tasks", "sums", "--problems", "1", "--lengths", "16").assert_refused(what)
    with pytest.raises(UserError, match="cannot serve") as refused:
        launch.serve_checkpoint(adapter, None, None)
    assert what in str(refused.value)
    recipe = load_recipe(recipe_file, ["name=given", "rollout.max_prompt_tokens=64"])
    with pytest.raises(UserError, match="adapter") as refused:
        create_run_dir(recipe, make_spec(recipe, Stages.ALL), start_from=adapter)
    assert what in str(refused.value)


def test_a_tokenizer_that_does_not_fit_the_base_is_refused(adapter: Path, d1: Callable) -> None:
    make_tokenizer(["What is 2 + 3? The answer is five."] * 5 + [f"{word}x" * 9 for word in "abcdefgh"], adapter, 400)
    for command in (("sample", "adapter", "hi"), ("export", "adapter", "out")):
        d1(*command).assert_refused("the tokenizer in adapter has", "and the base of the adapter there embeds")
