"""Tensor names, duplicates and buffers as training frameworks save them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.errors import UserError
from deploy.export import export_policy
from learner.model.attention.rotary import rope_frequencies
from learner.model.checkpoint import load_policy, save_checkpoint, stored_dtype
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.networks import make_model
from learner.model.storage.weights import StoredWeights
from learner.model.transformer import init_weights

Tensors = dict[str, Tensor]
SDAR: dict[str, Any] = {"family": "sdar", "block_length": 4, "qk_norm": True, "head_width": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "llada": {},
    "dream": {"family": "dream", "predicts_next": True, "qkv_bias": True},
    "sdar": SDAR,
    "a2d-qwen3": SDAR | {"family": "a2d-qwen3"},
    "illada": {"family": "illada"},
}


def _saved(config: TransformerConfig, directory: Path, family: str, *, is_tied: bool) -> Path:
    shape = TransformerConfig(**config.model_dump() | SHAPES[family] | {"tied_embeddings": is_tied})
    model = make_model(shape)
    init_weights(model, seed=0)
    save_checkpoint(directory / "saved", shape, model.state_dict(), directory)
    # Other frameworks do not rewrite d1's own checkpoints.
    (directory / "saved" / "manifest.json").unlink()
    return directory / "saved"


def _change(directory: Path, change: Callable[[Tensors], Tensors]) -> Tensors:
    """Replace a checkpoint's tensors; return the policy's weights from before."""
    before, path = load_policy(directory).state_dict(), directory / "model.safetensors"
    save_file(change(load_file(path)), path)
    return before


def _same(directory: Path, weights: Tensors) -> bool:
    found = load_policy(directory).state_dict()
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def _names(directory: Path) -> tuple[str, str]:
    names = FAMILIES[StoredWeights(directory).config.family].outer_names
    return names["embed.weight"], names["head.weight"]


families = pytest.mark.parametrize("family", SHAPES)


@families
def test_a_stored_tied_head_must_equal_the_embedding(config: TransformerConfig, tmp_path: Path, family: str) -> None:
    directory = _saved(config, tmp_path, family, is_tied=True)
    embed, head = _names(directory)
    weights = _change(directory, lambda tensors: tensors | {head: tensors[embed].clone()})
    assert _same(directory, weights)
    assert stored_dtype(directory) is torch.float32
    # With another dtype, and as the head alone.
    _change(directory, lambda tensors: tensors | {head: tensors[embed].double()})
    assert _same(directory, weights)
    _change(directory, lambda tensors: tensors | {head: tensors[embed].clone()})
    _change(directory, lambda tensors: {name: held for name, held in tensors.items() if name != embed})
    assert _same(directory, weights)
    export_policy(str(directory), tmp_path / "out")
    assert embed in load_file(tmp_path / "out" / "model.safetensors")
    assert head not in load_file(tmp_path / "out" / "model.safetensors")


@families
def test_a_tied_head_that_is_not_the_embedding_is_refused(
    config: TransformerConfig, tmp_path: Path, family: str
) -> None:
    directory = _saved(config, tmp_path, family, is_tied=True)
    embed, head = _names(directory)

    def other(tensors: Tensors) -> Tensors:
        changed = tensors[embed].clone()
        changed[-1, -1] += 1e-3
        return tensors | {head: changed}

    _change(directory, other)
    for load in (load_policy, lambda path: export_policy(str(path), tmp_path / "out")):
        with pytest.raises((ValueError, UserError)) as refused:
            load(directory)
        assert str(refused.value).startswith(f"{head} in {directory}/model.safetensors is not {embed}, and config.json")
    _change_raw(directory, lambda tensors: tensors | {head: tensors[embed][:-1].clone()})
    with pytest.raises(ValueError, match="says that they are one tensor"):
        load_policy(directory)


def _change_raw(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_an_untied_head_is_required_and_kept(config: TransformerConfig, tmp_path: Path) -> None:
    directory = _saved(config, tmp_path, "dream", is_tied=False)
    weights = _change(directory, lambda tensors: tensors)
    assert not torch.equal(weights["head.weight"], weights["embed.weight"])
    _change_raw(directory, lambda tensors: {name: held for name, held in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"there is no lm_head\.weight"):
        load_policy(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "name", ["model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
)
def test_stored_rotary_frequencies_must_equal_ours(
    config: TransformerConfig, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    shape = config.model_copy(update={"rope_theta": 1e6})
    directory = _saved(shape, tmp_path, "sdar", is_tied=False)
    ours = rope_frequencies(load_policy(directory).config, torch.device("cpu"))
    buffers = {name.format(layer): ours.to(dtype, copy=True) for layer in range(2)}
    weights = _change(directory, lambda tensors: tensors | buffers)
    assert _same(directory, weights)
    assert stored_dtype(directory) is torch.float32
    scaled = {name: frequencies / 2 for name, frequencies in buffers.items()}
    for other in (scaled, {name: held[:-1].clone() for name, held in buffers.items()}):
        _change_raw(directory, lambda tensors, other=other: tensors | other)
        with pytest.raises(ValueError, match=r"inv_freq in .*/model\.safetensors holds other rotary frequencies"):
            load_policy(directory)


WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DistributedDataParallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "inside": lambda name: name.replace("model.", "model._orig_mod.", 1),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}".replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "a trainer": lambda name: f"policy.{name}",
    "peft": lambda name: f"base_model.model.{name}",
    "model": lambda name: f"model.{name}",
    "the inner model": lambda name: name.removeprefix("model."),
}


@families
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_within_a_wrapper_are_read(config: TransformerConfig, tmp_path: Path, family: str, wrapper: str) -> None:
    directory = _saved(config, tmp_path, family, is_tied=False)
    plain = load_file(directory / "model.safetensors")
    rename = WRAPPED[wrapper]
    weights = _change(directory, lambda tensors: {rename(name): held for name, held in tensors.items()})
    assert _same(directory, weights)
    export_policy(str(directory), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == plain.keys()
    assert _same(tmp_path / "out", weights)


def test_duplicate_tensors_must_be_equal(config: TransformerConfig, tmp_path: Path) -> None:
    directory = _saved(config, tmp_path, "dream", is_tied=False)
    weights, plain = load_policy(directory).state_dict(), load_file(directory / "model.safetensors")
    norm = {"model.norm.weight": plain["model.norm.weight"]}
    save_file(plain | {f"module.{name}": held.clone() for name, held in norm.items()}, directory / "model.safetensors")
    assert _same(directory, weights)
    # In two shards.
    (directory / "model.safetensors").unlink()
    for name, tensors in (("1.safetensors", plain), ("2.safetensors", norm)):
        save_file(tensors, directory / name)
    places = dict.fromkeys(plain, "1.safetensors") | dict.fromkeys(norm, "2.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert _same(directory, weights)
    save_file({name: held + 1 for name, held in norm.items()}, directory / "2.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight is in .* and in .*; one of them is of another checkpoint"
    ):
        load_policy(directory)


def test_ambiguous_and_unknown_names_are_refused(config: TransformerConfig, tmp_path: Path) -> None:
    directory = _saved(config, tmp_path, "dream", is_tied=False)
    plain = load_file(directory / "model.safetensors")
    twice = plain | {"module.model.norm.weight": torch.zeros(32)}
    unknown = {f"module.{name}": held for name, held in plain.items()} | {"module.value_head.weight": torch.zeros(2)}
    bias = plain | {"model.layers.0.self_attn.masked_bias": torch.zeros(1)}
    for tensors, sentence in (
        (
            twice,
            r"model\.norm\.weight is in .* and, as (module\.)?model\.norm\.weight, in .*; one of them is of another",
        ),
        (unknown, r"do not fit: value_head\.weight is \[2\]; config\.json makes no such tensor"),
        (bias, r"do not fit: model\.layers\.0\.self_attn\.masked_bias is \[1\]; config\.json makes no such tensor"),
    ):
        save_file(tensors, directory / "model.safetensors")
        with pytest.raises(ValueError, match=sentence):
            load_policy(directory)
