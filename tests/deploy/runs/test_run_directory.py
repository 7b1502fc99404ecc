"""What a run starts from: policy version 0, as it is."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.checkpoints.selection import read_position
from actors.weights.tensors import make_manifest
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.run_directory import check_creatable, create_run_dir, make_spec
from learner.model.checkpoint import load_policy, save_checkpoint, stored_dtype
from learner.model.tokenizer import TOKENIZER_FILES


def _initial(recipe_file: Path, *overrides: str) -> Path:
    recipe = load_recipe(recipe_file, overrides)
    spec = make_spec(recipe, Stages.ALL)
    create_run_dir(recipe, spec, start_from=None).close()
    return spec.initial_checkpoint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_copy_of_a_checkpoint_is_as_large_as_it_and_says_the_same(recipe_file: Path, dtype: torch.dtype) -> None:
    """In bfloat16 where that is all of it; anything else needs float32 to be what it is."""
    scratch = _initial(recipe_file, "name=scratch")
    given = recipe_file.parent / "given"
    policy = load_policy(scratch, dtype)
    save_checkpoint(given, policy.config, policy.state_dict(), scratch)
    copied = _initial(recipe_file, "name=copied", f"model.checkpoint={given}")
    expected = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    assert stored_dtype(copied) is expected
    assert json.loads((copied / "config.json").read_text())["torch_dtype"] == str(expected).removeprefix("torch.")
    ours, theirs = ((one / "model.safetensors").stat().st_size for one in (copied, scratch))
    assert ours / theirs == pytest.approx(expected.itemsize / 4, rel=0.05)
    weights = dict(load_policy(given).named_parameters())
    assert [name for name, tensor in load_policy(copied).named_parameters() if not tensor.equal(weights[name])] == []
    # The learner publishes them in float32, under the same digest.
    assert read_position(copied).manifest_digest == make_manifest(0, weights).digest


def test_examples_that_are_all_too_long_are_refused_before_weights_are_fetched_or_copied(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of the hub by its tokenizer, which is small."""
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
