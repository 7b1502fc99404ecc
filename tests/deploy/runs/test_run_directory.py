"""Initial checkpoint of a run (policy version 0): its contents and its location."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.checkpoints.selection import Position, read_position
from actors.spec import Phase
from actors.weights.tensors import make_manifest
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs import run_directory
from deploy.runs.run_directory import check_creatable, check_resumable, create_run_dir, make_spec
from learner.model.checkpoint import load_policy, save_checkpoint, stored_dtype
from learner.model.checkpoint_files import verify_checkpoint, weight_files
from learner.model.storage.references import REFERENCES
from learner.model.tokenizer import TOKENIZER_FILES
from rewards import JsonlConfig


def _initial(recipe_file: Path, *overrides: str) -> Path:
    recipe = load_recipe(recipe_file, overrides)
    spec = make_spec(recipe, Stages.ALL)
    create_run_dir(recipe, spec, start_from=None).close()
    return spec.initial_checkpoint


def _given(recipe_file: Path, dtype: torch.dtype, name: str = "given") -> Path:
    """A checkpoint that a run can start from."""
    scratch = _initial(recipe_file, "name=scratch")
    policy, given = load_policy(scratch, dtype), recipe_file.parent / name
    position = Position(phase=Phase.RL, round=1, policy_version=1, rl_seconds=0.0)
    save_checkpoint(given, policy.config, policy.state_dict(), scratch, trainer_state=asdict(position))
    return given


def _check_the_same(initial: Path, given: Path) -> None:
    weights = dict(load_policy(given).named_parameters())
    assert [name for name, tensor in load_policy(initial).named_parameters() if not tensor.equal(weights[name])] == []
    # The learner publishes them in float32, under the same digest.
    assert read_position(initial).manifest_digest == make_manifest(0, weights).digest
    verify_checkpoint(initial)


def test_actors_find_files_that_are_named_from_the_current_directory(recipe_file: Path) -> None:
    (recipe_file.parent / "x.jsonl").write_text("")
    task = "task={name: jsonl, grader: exact, train_data: x.jsonl, heldout_data: 'org/name:test'}"
    spec = make_spec(load_recipe(recipe_file, [task, "sft.data=x.jsonl", "sft.num_labels=null"]), Stages.ALL)
    assert isinstance(spec.task, JsonlConfig)
    assert (spec.task.train_data, spec.task.heldout_data) == (recipe_file.parent / "x.jsonl", Path("org/name:test"))
    assert spec.sft.data == recipe_file.parent / "x.jsonl"


def test_a_run_s_recipe_says_in_every_directory_where_its_data_are(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"question": f"{first} + {first} is", "answer": str(2 * first)} for first in range(40)]
    (recipe_file.parent / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = ["task={name: jsonl, grader: exact, train_data: x.jsonl}", "num_train_problems=8", "sft.num_labels=8"]
    recipe = load_recipe(recipe_file, [*changes, "evaluation.num_problems=2", "rollout.max_prompt_tokens=64"])
    spec = make_spec(recipe, Stages.ALL)
    create_run_dir(recipe, spec, start_from=None).close()
    # The same options with the same files are resumable.
    check_resumable(recipe, spec)
    run_dir = spec.run_dir.absolute()
    monkeypatch.chdir(tmp_path.parent)
    kept = load_recipe(run_dir / "recipe.yaml", [])
    assert isinstance(kept.task, JsonlConfig)
    assert kept.task.train_data == recipe_file.parent / "x.jsonl"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_run_refers_to_the_checkpoint_that_it_starts_from(recipe_file: Path, dtype: torch.dtype) -> None:
    given = _given(recipe_file, dtype)
    initial = _initial(recipe_file, "name=referring", f"model.checkpoint={given}")
    assert list(initial.glob("*.safetensors")) == []
    assert weight_files(initial) == [given / "model.safetensors"]
    expected = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    assert stored_dtype(initial) is expected
    assert json.loads((initial / "config.json").read_text())["torch_dtype"] == str(expected).removeprefix("torch.")
    _check_the_same(initial, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_checkpoint_that_may_be_deleted_is_copied(recipe_file: Path, dtype: torch.dtype) -> None:
    """bfloat16 is kept. Any other dtype needs float32 to be exact."""
    given = _given(recipe_file, dtype, "rl-000001")
    initial = _initial(recipe_file, "name=copied", f"model.checkpoint={given}")
    assert not (initial / REFERENCES).exists()
    expected = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    assert stored_dtype(initial) is expected
    ours, theirs = ((one / "model.safetensors").stat().st_size for one in (initial, given))
    assert ours / theirs == pytest.approx(expected.itemsize / dtype.itemsize, rel=0.05)
    _check_the_same(initial, given)


@pytest.mark.parametrize(("cluster", "is_copied"), [(True, True), (False, False)])
def test_hub_weights_are_copied_on_a_cluster(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, *, cluster: bool, is_copied: bool
) -> None:
    given = _given(recipe_file, torch.float32)
    for find in ("find_checkpoint", "find_tokenizer"):
        monkeypatch.setattr(run_directory, find, lambda reference, **_: given)
    if cluster:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    initial = _initial(recipe_file, "name=of-the-hub", "model.checkpoint=org/name")
    assert (initial / "model.safetensors").exists() == is_copied
    _check_the_same(initial, given)


def test_a_link_of_the_hub_s_cache_keeps_its_name(recipe_file: Path) -> None:
    """The link's target is named by a hash of its content."""
    given = _given(recipe_file, torch.float32)
    blob, snapshot = given.parent / "blob", given.parent / "snapshot"
    (given / "model.safetensors").rename(blob)
    (given / "model.safetensors").symlink_to(blob)
    snapshot.symlink_to(given)
    initial = _initial(recipe_file, "name=linked", f"model.checkpoint={snapshot}")
    assert weight_files(initial) == [given / "model.safetensors"]


@pytest.mark.parametrize("harm", ["gone", "changed"])
def test_a_run_with_changed_weights_is_not_resumed(recipe_file: Path, harm: str) -> None:
    given = _given(recipe_file, torch.float32)
    recipe = load_recipe(recipe_file, ["name=referring", f"model.checkpoint={given}"])
    spec = make_spec(recipe, Stages.ALL)
    create_run_dir(recipe, spec, start_from=None).close()
    check_resumable(recipe, spec)
    path = given / "model.safetensors"
    whole = path.read_bytes()
    path.unlink() if harm == "gone" else path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=str(path)) as refused:
        check_resumable(recipe, spec)
    assert str(refused.value).endswith(("put it back, or start a new run", "file back, or start a new run"))


def test_the_throughput_of_creating_a_run_is_reported(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, said = _given(recipe_file, torch.float32), list[str]()
    monkeypatch.setattr("learner.model.storage.throughput._EVERY_S", 0.0)
    recipe = load_recipe(recipe_file, ["name=said", f"model.checkpoint={given}"])
    create_run_dir(recipe, make_spec(recipe, Stages.ALL), None, said.append).close()
    begun = [line.partition(":")[0] for line in said]
    assert list(dict.fromkeys(begun)) == ["computing the checksum of version 0", "hashing the checkpoint"]
    assert said[-1].endswith("GB/s")


def test_examples_that_are_all_too_long_are_refused_before_weights_are_fetched_or_copied(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model of the hub, its tokenizer is enough, which is small."""
    cached = recipe_file.parent / "cache" / "models--org--name"
    snapshot = cached / "snapshots" / ("0" * 40)
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    initial = _initial(recipe_file, "name=scratch")
    shutil.copytree(initial, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    assert {path.name for path in snapshot.iterdir()} & set(TOKENIZER_FILES)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = recipe_file.parent / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1", "completion": "1 " * 1000}) + "\n")
    for checkpoint in ("org/name", initial):
        given = (f"model.checkpoint={checkpoint}", f"sft.data={data}", "sft.num_labels=null", "name=long")
        recipe = load_recipe(recipe_file, given)
        spec = make_spec(recipe, Stages.ALL)
        for refuse in (create_run_dir, partial(check_creatable, max_problems=100)):
            with pytest.raises(UserError, match=r"sft\.data .* leaves 0 to train on: 1 .* raise sft\.max_tokens, take"):
                refuse(recipe, spec, start_from=None)
        assert not spec.run_dir.exists()
