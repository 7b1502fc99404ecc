"""Config spellings in published checkpoints: rotary positions and token ids of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.model.checkpoint import save_checkpoint
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.moe.config import MoEConfig
from learner.model.networks import make_model

_BLOCKS = {"block_length": 4, "qk_norm": True, "head_width": 16}
_ROUTED = {"num_experts": 4, "experts_per_token": 2, "expert_width": 16}
_SIGMOID = {"num_groups": 2, "kept_groups": 1, "scale": 2.5, "shared_width": 16, "router": "sigmoid"}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llada": {},
    "dream": {"predicts_next": True, "qkv_bias": True},
    "sdar": _BLOCKS,
    "sdar_moe": _BLOCKS | {"moe": MoEConfig(router="softmax", **_ROUTED)},
    "a2d-llama": {},
    "a2d-qwen2": {"predicts_next": True, "qkv_bias": True},
    "a2d-qwen3": _BLOCKS,
    "llada2_moe": _BLOCKS | {"rotary_width": 8, "moe": MoEConfig(**_ROUTED | _SIGMOID)},
    "illada": {},
    "llada_moe": {"qk_norm": True, "moe": MoEConfig(router="softmax", is_normalised=False, **_ROUTED)},
    "fast_dllm": {"block_length": 4, "predicts_next": True, "qkv_bias": True},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
families = pytest.mark.parametrize("family", OF_FAMILY)
unscaled = pytest.mark.parametrize("family", [family for family in OF_FAMILY if not family.startswith("a2d")])


def _shape(config: TransformerConfig, family: str) -> TransformerConfig:
    return TransformerConfig(**config.model_dump() | {"family": family, "rope_theta": 1e6} | OF_FAMILY[family])


def _raw(config: TransformerConfig, family: str) -> dict[str, Any]:
    """Return a config as d1 writes it, without its `rope_` settings except the full-precision flag."""
    shape = _shape(config, family)
    raw = FAMILIES[shape.family].write_config(shape)
    return {key: value for key, value in raw.items() if not key.startswith("rope_") or key == "rope_full_precision"}


def _load(directory: Path, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> TransformerConfig:
    (directory / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_config(directory)


def _refusal(directory: Path, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    with pytest.raises(ValueError, match=r"config\.json") as refused:
        _load(directory, raw, generation)
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix(f"{directory}/")


@families
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1_000_000, "rope_scaling": None, "rope_parameters": None},
        {"rope_theta": 1e6, "rope_scaling": False},
        {"rope_theta": 1e6, "rope_scaling": {}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "factor": None, "mscale": None}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 64}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "factor": 1}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": None, "rope_type": "default"}},
    ],
)
def test_unscaled_positions_are_accepted_in_every_spelling(
    config: TransformerConfig, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    assert _load(tmp_path, _raw(config, family) | settings) == _shape(config, family)


def test_a_config_may_begin_with_a_byte_order_mark(config: TransformerConfig, tmp_path: Path) -> None:
    raw = json.dumps(_raw(config, "sdar") | {"rope_theta": 1e6})
    (tmp_path / "config.json").write_text(f"\ufeff{raw}", encoding="utf-8")
    assert load_config(tmp_path) == _shape(config, "sdar")


@unscaled
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rope_parameters": YARN | {"rope_theta": 1e6}}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_parameters": YARN}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_scaling": YARN}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_scaling": {"factor": 4.0, "type": "yarn"}}, "rope_scaling.type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type = 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type = 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1.0}}, "rope_scaling.type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope_scaling.type = 'yarn'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "rope_scaling.type = 'mrope'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section = [2, 3, 3]"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor = 4.0"),
        ({"rope_scaling": {"factor": True}}, "rope_scaling.factor = True"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.rope_type = 'llama3'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type = 'longrope'"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type = 3"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention.rope_type = 'yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": YARN}},
            "rope_parameters.sliding_attention.rope_type = 'yarn'",
        ),
        ({"rope_parameters": {"full_attention": None}}, "rope_parameters.full_attention = None"),
        ({"rope_type": "yarn"}, "has rope_type = 'yarn'"),
        ({"rope_scaling_factor": 4.0}, "has rope_scaling_factor = 4.0"),
        ({"rotary_pct": 0.5}, "has rotary_pct = 0.5"),
    ],
)
def test_unsupported_position_scaling_is_refused_by_name(
    config: TransformerConfig, tmp_path: Path, family: str, settings: dict[str, Any], sentence: str
) -> None:
    said = _refusal(tmp_path, _raw(config, family) | {"rope_theta": 1e6} | settings)
    assert said.startswith("config.json has ")
    assert f"{sentence}; d1 computes unscaled rotary positions only" in said


@families
@pytest.mark.parametrize("settings", [{}, {"rope_theta": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_rotary_base_is_required_unless_the_architecture_has_a_default(
    config: TransformerConfig, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    raw = _raw(config, family) | settings
    if family.startswith("a2d"):
        assert _load(tmp_path, raw).rope_theta == 1e4
    else:
        assert _refusal(tmp_path, raw) == "config.json has no rope_theta"


@families
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"rope_theta": 10_000, "rope_parameters": {"rope_theta": 1e6}},
            "config.json has rope_theta = 10000 and rope_parameters.rope_theta = 1000000.0; they should be equal",
        ),
        (
            {"rope_scaling": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e6}},
            "config.json has rope_scaling.rope_theta = 500000.0 and rope_parameters.rope_theta = 1000000.0; they",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "config.json has rope_parameters.full_attention.rope_theta = 1000000.0 and "
            "rope_parameters.sliding_attention.rope_theta = 10000.0; they should be equal",
        ),
        ({"rope_theta": "1e6"}, "config.json has rope_theta = '1e6'; it should be a number above 0"),
        ({"rope_theta": True}, "config.json has rope_theta = True; it should be a number above 0"),
        ({"rope_theta": -1e6}, "config.json has rope_theta = -1000000.0; it should be a number above 0"),
        ({"rope_theta": float("nan")}, "config.json has rope_theta = nan; it should be a number above 0"),
        ({"rope_parameters": {"rope_theta": [1e6]}}, "config.json has rope_parameters.rope_theta = [1000000.0]; it"),
        ({"rope_theta": 1e6, "rope_scaling": "yarn"}, "config.json has rope_scaling = 'yarn'; it should be an object"),
        ({"rope_theta": 1e6, "rope_scaling": 2.0}, "config.json has rope_scaling = 2.0; it should be an object"),
        ({"rope_theta": 1e6, "rope_parameters": True}, "config.json has rope_parameters = True; it should be an obj"),
        ({"rope_theta": 1e6, "rope_parameters": [YARN]}, "config.json has rope_parameters = [{"),
    ],
)
def test_missing_or_contradictory_settings_are_named(
    config: TransformerConfig, tmp_path: Path, family: str, settings: dict[str, Any], sentence: str
) -> None:
    assert _refusal(tmp_path, _raw(config, family) | settings).startswith(sentence)


@families
def test_layers_of_another_kind_are_refused(config: TransformerConfig, tmp_path: Path, family: str) -> None:
    raw = _raw(config, family) | {"rope_theta": 1e6}
    assert _load(tmp_path, raw | {"layer_types": ["full_attention"] * 2}) == _shape(config, family)
    said = _refusal(tmp_path, raw | {"layer_types": ["full_attention", "sliding_attention"]})
    assert said == "config.json has 'sliding_attention' in layer_types; d1 computes 'full_attention' only"


@pytest.mark.parametrize("family", [family for family in OF_FAMILY if family != "llada2_moe"])
def test_partial_rotation_is_refused_where_unsupported(config: TransformerConfig, tmp_path: Path, family: str) -> None:
    raw = _raw(config, family) | {"rope_theta": 1e6}
    raw.pop("partial_rotary_factor", None)
    for whole in ({"partial_rotary_factor": 1.0}, {"rope_parameters": {"partial_rotary_factor": 1}}):
        assert _load(tmp_path, raw | whole) == _shape(config, family)
    for part in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        assert "has partial_rotary_factor = 0.5; of" in _refusal(tmp_path, raw | part)
    assert "has rotary_dim = 3; of" in _refusal(tmp_path, raw | {"rotary_dim": 3})


def test_partial_rotation_is_read_in_every_spelling(config: TransformerConfig, tmp_path: Path) -> None:
    raw = _raw(config, "llada2_moe") | {"rope_theta": 1e6}
    without = {key: value for key, value in raw.items() if key not in ("partial_rotary_factor", "rotary_dim")}
    half = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}}
    for settings in (raw, without | half, raw | half, without | {"partial_rotary_factor": 0.5}):
        assert _load(tmp_path, settings).rotary_dim == 8
    assert _load(tmp_path, without).rotary_dim == 16
    for settings, sentence in (
        (raw | {"rotary_dim": 16}, "has rotary_dim = 16, and partial_rotary_factor = 0.5 rotates 8 of a head's 16"),
        (without | {"rotary_dim": 8}, "has rotary_dim = 8, and partial_rotary_factor = None rotates 16 of a head's 16"),
        (half | raw | {"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25 and rope_parameters.partial_rot"),
        (without | {"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4, which rotates 6.4 of a head's 16"),
        (without | {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5, which rotates 24 of a head's 16"),
        (without | {"partial_rotary_factor": "0.5"}, "partial_rotary_factor = '0.5'; it should be a number above 0"),
    ):
        assert sentence in _refusal(tmp_path, settings)


def test_configs_rewritten_by_transformers_are_read(config: TransformerConfig, tmp_path: Path) -> None:
    """SDAR's config class equals Qwen3's under another name."""
    from transformers import Qwen3Config

    shape = _shape(config, "sdar")
    raw = FAMILIES["sdar"].write_config(shape) | {"max_window_layers": 2}
    theirs = Qwen3Config(**raw)
    assert theirs.rope_parameters == {"rope_theta": 1e6, "rope_type": "default"}
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written
    assert _load(tmp_path, written | {"model_type": "sdar", "architectures": ["SDARForCausalLM"]}) == shape
    scaled = Qwen3Config(**raw | {"rope_scaling": YARN | {"factor": 2.0}}).to_dict()
    said = _refusal(tmp_path, scaled | {"model_type": "sdar", "architectures": ["SDARForCausalLM"]})
    assert "rope_parameters.rope_type = 'yarn'" in said


@families
@pytest.mark.parametrize(
    ("ids", "generation", "stops", "pad"),
    [
        ({"eos_token_id": 39}, None, (39,), 39),
        ({"eos_token_id": [2, 7]}, None, (2, 7), 39),
        ({"eos_token_id": [2]}, {"eos_token_id": 7}, (2, 7), 39),
        ({"eos_token_id": [2, 7, 2]}, {"eos_token_id": [7, 9, 2]}, (2, 7, 9), 39),
        ({"eos_token_id": 2}, {"eos_token_id": None, "top_k": 3}, (2,), 39),
        ({"eos_token_id": [7, 2], "pad_token_id": None}, None, (7, 2), 7),
        ({"eos_token_id": 2, "pad_token_id": -1}, None, (2,), 2),
        ({"eos_token_id": 2, "pad_token_id": [5, 6]}, None, (2,), 5),
        ({"eos_token_id": 2, "pad_token_id": []}, None, (2,), 2),
        ({"eos_token_id": None, "pad_token_id": None}, {"eos_token_id": [3, 4]}, (3, 4), 3),
        ({"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": [1, 2]}, None, (0,), 0),
    ],
)
def test_all_listed_eos_ids_end_a_text(
    config: TransformerConfig,
    tmp_path: Path,
    family: str,
    ids: dict[str, Any],
    generation: dict[str, Any] | None,
    stops: tuple[int, ...],
    pad: int,
) -> None:
    raw = _raw(config, family) | {"rope_theta": 1e6}
    found = _load(tmp_path, raw | ids, generation)
    assert (found.stop_ids, found.eos_token_id, found.pad_token_id, found.mask_token_id) == (stops, stops[0], pad, 38)
    save_checkpoint(tmp_path / "saved", found, make_model(found).state_dict(), tmp_path)
    assert load_config(tmp_path / "saved") == found


def test_padding_ends_a_text_in_families_without_eos_id(config: TransformerConfig, tmp_path: Path) -> None:
    for family in OF_FAMILY:
        raw = {key: value for key, value in _raw(config, family).items() if key != "eos_token_id"}
        raw |= {"rope_theta": 1e6, "pad_token_id": 7}
        if family in ("dream", "llada2_moe", "llada_moe"):
            assert _load(tmp_path, raw).stop_ids == (7,)
            assert _refusal(tmp_path, raw | {"pad_token_id": None}) == "config.json has no eos_token_id"
        else:
            assert _refusal(tmp_path, raw) == "config.json has no eos_token_id"


@families
@pytest.mark.parametrize(
    ("ids", "generation", "sentence"),
    [
        ({"eos_token_id": "2"}, None, "config.json has eos_token_id = '2'; it should be an id or a list of ids"),
        ({"eos_token_id": ["</s>"]}, None, "config.json has eos_token_id = ['</s>']; it should be an id or a list"),
        ({"eos_token_id": [[2]]}, None, "config.json has eos_token_id = [[2]]; it should be an id or a list of ids"),
        ({"eos_token_id": {"a": 2}}, None, "config.json has eos_token_id = {'a': 2}; it should be an id or a list"),
        ({"eos_token_id": True}, None, "config.json has eos_token_id = True; it should be an id or a list of ids"),
        ({"eos_token_id": 2.5}, None, "config.json has eos_token_id = 2.5; it should be an id or a list of ids"),
        ({"eos_token_id": [2, 40]}, None, "config.json has eos_token_id = [2, 40]; 40 is no id of a vocabulary of 40"),
        ({"eos_token_id": -1}, None, "config.json has eos_token_id = -1; -1 is no id of a vocabulary of 40"),
        ({"pad_token_id": 40}, None, "config.json has pad_token_id = 40; 40 is no id of a vocabulary of 40"),
        ({"pad_token_id": "<pad>"}, None, "config.json has pad_token_id = '<pad>'; it should be an id or a list"),
        ({}, {"eos_token_id": [2, 99]}, "generation_config.json has eos_token_id = [2, 99]; 99 is no id of a vocab"),
        ({}, {"eos_token_id": "2"}, "generation_config.json has eos_token_id = '2'; it should be an id or a list"),
        ({"mask_token_id": [38]}, None, "config.json has mask_token_id = [38]; it should be an id"),
        ({"eos_token_id": [2, 38]}, None, "config.json makes no policy: mask_token_id and one of other_stop_ids are"),
    ],
)
def test_invalid_ids_are_named_with_their_file(
    config: TransformerConfig,
    tmp_path: Path,
    family: str,
    ids: dict[str, Any],
    generation: dict[str, Any] | None,
    sentence: str,
) -> None:
    raw = _raw(config, family) | {"rope_theta": 1e6}
    assert _refusal(tmp_path, raw | ids, generation).startswith(sentence)
