"""Adapted autoregressive families against transformers' own Llama, Qwen2 and Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from learner.model.attention.rotary import rope_frequencies, rope_tables
from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler

ORIGINALS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "a2d-llama": (LlamaConfig, LlamaForCausalLM),
    "a2d-qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "a2d-qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LENGTH, VOCABULARY = 23, 40
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, of the whole": {"rope_type": "yarn", "factor": 4.0},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7},
    "yarn, below": {"rope_type": "yarn", "factor": 0.5, "attention_factor": None},
    "yarn, all": {
        "rope_type": "yarn",
        "factor": 3,
        "original_max_position_embeddings": 24,
        "attention_factor": 1.25,
        "beta_fast": 4,
        "beta_slow": 0.5,
        "truncate": False,
    },
}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 39,
    "pad_token_id": 39,
    "attn_implementation": "eager",
}
CPU = torch.device("cpu")
families = pytest.mark.parametrize("family", ORIGINALS)


def _original(family: str, *, is_tied: bool = False, **changes: Any) -> PreTrainedModel:
    """A random model with nontrivial biases and norms."""
    of_config, of_model = ORIGINALS[family]
    widths = {"head_dim": 16} if family == "a2d-qwen3" else {}
    torch.manual_seed(0)
    model = of_model(of_config(**SHAPE | widths | {"tie_word_embeddings": is_tied} | changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.1 * torch.randn_like(weight))
    return model


def _saved(model: PreTrainedModel, directory: Path, family: str, **keys: Any) -> Path:
    """Save as dllm does: transformers' files, under another model type."""
    model.save_pretrained(directory)
    _rewrite(directory, {"model_type": family, "mask_token_id": 38} | keys)
    return directory


def _rewrite(directory: Path, keys: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def _ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _expected(model: PreTrainedModel, block: int) -> Tensor:
    """Return the original's logits where a slot attends to its block and to those before it."""
    blocks = torch.arange(LENGTH) // block
    is_hidden = blocks[None, :] > blocks[:, None]
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(is_hidden, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        return model(_ids(), attention_mask=mask).logits


@families
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied"])
def test_logits_equal_the_original_without_its_causal_mask(tmp_path: Path, family: str, is_tied: bool) -> None:
    original = _original(family, is_tied=is_tied)
    policy = load_policy(_saved(original, tmp_path, family))
    assert (policy.head is None) == is_tied
    assert not policy.is_cache_exact
    with torch.inference_mode():
        torch.testing.assert_close(policy(_ids()), _expected(original, LENGTH), atol=1e-4, rtol=0)


@families
def test_block_and_shifted_logits_equal_the_original_with_their_mask(tmp_path: Path, family: str) -> None:
    original = _original(family)
    for block in (None, 4, 1):
        expected = _expected(original, block or LENGTH)
        for is_shifted in (False, True):
            policy = load_policy(_saved(original, tmp_path, family, block_size=block, right_shift_logits=is_shifted))
            assert policy.is_cache_exact == (block is not None)
            with torch.inference_mode():
                found = policy(_ids())
            # The first slot has no predecessor and predicts itself.
            shifted = torch.cat((expected[:, :1], expected[:, :-1]), dim=1) if is_shifted else expected
            torch.testing.assert_close(found, shifted, atol=1e-4, rtol=0)
    # With shifted outputs and blocks of one slot it is the autoregressive model, as transformers runs it.
    with torch.inference_mode():
        torch.testing.assert_close(found[:, 1:], original(_ids()).logits[:, :-1], atol=1e-4, rtol=0)


def test_shifted_blocks_of_one_sample_like_the_original(tmp_path: Path) -> None:
    original = _original("a2d-qwen2")
    policy = load_policy(_saved(original, tmp_path, "a2d-qwen2", block_size=1, right_shift_logits=True))
    params = SamplingParams(gen_length=12, block_length=1, steps_per_block=1, temperature=0.0, stop_ids=())
    requests = [
        Request(prompt_ids=tuple(row[:length].tolist()), params=params, seed=0) for length in (9, 4) for row in _ids()
    ]
    for request, completion in zip(requests, Sampler(policy, 0).generate(requests), strict=True):
        prompt = torch.tensor([request.prompt_ids])
        # A policy never samples its mask.
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "suppress_tokens": [38]}
        ids = original.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :]
        assert completion.token_ids.tolist() == ids.tolist()
        assert completion.exact


@pytest.mark.parametrize(
    ("family", "name"), [("a2d-llama", "llama3"), ("a2d-qwen2", "yarn, all"), ("a2d-qwen3", "linear")]
)
def test_a_saved_policy_loads_here_and_in_transformers(tmp_path: Path, family: str, name: str) -> None:
    original = _original(family, rope_parameters=SCALINGS[name] | {"rope_theta": 1e4})
    directory = _saved(original, tmp_path / "original", family, block_size=4, right_shift_logits=True)
    policy, expected = load_policy(directory), _expected(original, 4)
    assert (policy.config.block_length, policy.config.predicts_next) == (4, True)
    with torch.inference_mode():
        torch.testing.assert_close(policy(_ids())[:, 1:], expected[:, :-1], atol=1e-4, rtol=0)
    save_checkpoint(tmp_path / "saved", policy.config, policy.state_dict(), directory)
    assert load_config(tmp_path / "saved") == policy.config
    _rewrite(tmp_path / "saved", {"model_type": family.removeprefix("a2d-")})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert type(theirs) is ORIGINALS[family][1]
    torch.testing.assert_close(_expected(theirs, 4), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_positions_equal_transformers(tmp_path: Path, name: str) -> None:
    theirs = LlamaConfig(**SHAPE, rope_parameters=SCALINGS[name] | {"rope_theta": 1e4})
    expected, magnitude = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](theirs, CPU)
    for settings in (
        {"rope_theta": 1e4, "rope_scaling": SCALINGS[name]},
        {"rope_parameters": SCALINGS[name] | {"rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": SCALINGS[name] | {"rope_theta": 1e4}}},
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": SCALINGS[name]},
    ):
        _written(tmp_path, "a2d-llama", settings)
        found = load_config(tmp_path)
        torch.testing.assert_close(rope_frequencies(found, CPU), expected, atol=1e-6, rtol=1e-6)
        assert float(rope_tables(1, found, CPU)[0][0, 0]) == pytest.approx(magnitude, abs=1e-6)


@families
def test_inert_settings_of_published_configs_are_ignored(tmp_path: Path, family: str) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16}
    _written(tmp_path, family, {"rope_theta": 1e4, "rope_scaling": yarn | {"rope_type": "yarn"}})
    expected = load_config(tmp_path)
    inert = {"layer_types": ["full_attention"] * 2, "max_window_layers": 1, "partial_rotary_factor": 1.0}
    inert |= {"pretraining_tp": 1, "rope_interleaved": False, "sliding_window": 32, "use_sliding_window": False}
    both = yarn | {"rope_type": "yarn", "type": "yarn", "finetuned": True}
    _written(tmp_path, family, inert | {"rope_scaling": both, "original_max_position_embeddings": 16})
    # Llama 2's configs lack a rotary base; the architecture's default is 10,000.
    assert load_config(tmp_path) == expected


@pytest.mark.parametrize("family", ["a2d-llama", "a2d-qwen3"])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "has rope_scaling.rope_type = 'dynamic'; of"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "has rope_scaling.rope_type = 'longrope'; of"),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "has rope_scaling.type = 'yarn'; of"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "has no rope_scaling.factor; of rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "has rope_scaling.factor = '2'; of rope_type 'lin"),
        ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "has rope_scaling.factor = True; of rope_type"),
        ({"rope_scaling": SCALINGS["yarn"] | {"mscales": 1}}, "has rope_scaling.mscales = 1; of rope_type 'yarn'"),
        ({"rope_scaling": SCALINGS["llama3"] | {"high_freq_factor": 1.0}}, "high_freq_factor 1.0 must be above low"),
        (
            {"rope_scaling": SCALINGS["yarn"], "rope_parameters": SCALINGS["linear"] | {"rope_theta": 1e4}},
            "has rope_scaling and rope_parameters, which scale positions differently; they should be equal",
        ),
        (
            {"rope_scaling": SCALINGS["yarn"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "has rope_scaling and rope_parameters, which scale positions differently; they should be equal",
        ),
        ({"attention_bias": True}, "has attention_bias = True; d1 computes attention_bias = False only"),
        ({"hidden_act": "gelu"}, "has hidden_act = 'gelu'; d1 computes hidden_act = 'silu' only"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "has 'LlamaForSequenceClassification' in architect"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has 'sliding_attention' in layer_types; d1"),
        ({"mask_token_id": None}, "has no token <|mask|> or <|MASK|> or <|mdm_mask|>"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, family: str, settings: dict[str, Any], sentence: str
) -> None:
    _written(tmp_path, family, {"rope_theta": 1e4} | settings)
    with pytest.raises(ValueError, match=r"config\.json") as refused:
        load_config(tmp_path)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def _written(directory: Path, family: str, keys: dict[str, Any]) -> None:
    of_config, _ = ORIGINALS[family]
    raw = of_config(**SHAPE).to_dict()
    del raw["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(raw | {"model_type": family, "mask_token_id": 38} | keys))


def test_unsupported_biases_and_windows_are_refused(tmp_path: Path) -> None:
    for family, key in (("a2d-llama", "mlp_bias"), ("a2d-qwen2", "use_sliding_window")):
        _written(tmp_path, family, {"rope_theta": 1e4, key: True})
        with pytest.raises(ValueError, match=f"has {key} = True; d1 computes {key} = False only"):
            load_config(tmp_path)


@pytest.mark.parametrize(
    ("declared", "tokens", "expected"),
    [
        (None, {"<|mask|>": 30, "<|MASK|>": 31}, 30),
        (None, {"<|MASK|>": 31}, 31),
        (None, {"<|mdm_mask|>": 32}, 32),
        ("<|MASK|>", {"<|mask|>": 30, "<|MASK|>": 31}, 31),
        ({"content": "<mine>", "special": True}, {"<|mask|>": 30, "<mine>": 33}, 33),
    ],
)
def test_a_missing_mask_id_is_taken_from_the_tokenizer(
    tmp_path: Path, declared: object, tokens: dict[str, int], expected: int
) -> None:
    _written(tmp_path, "a2d-qwen3", {"rope_theta": 1e4, "mask_token_id": None})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": declared}))
    added = [{"id": token, "content": content} for content, token in tokens.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert load_config(tmp_path).mask_token_id == expected
    by_id = {str(token): {"content": content} for content, token in tokens.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": declared, "added_tokens_decoder": by_id}))
    (tmp_path / "tokenizer.json").unlink()
    assert load_config(tmp_path).mask_token_id == expected


@families
def test_a_config_that_contradicts_its_family_is_refused(tmp_path: Path, family: str) -> None:
    config = load_policy(_saved(_original(family), tmp_path, family)).config
    for field in ("qkv_bias", "qk_norm"):
        other = not getattr(config, field)
        with pytest.raises(ValueError, match=f"{field} is {other}; a policy of the family {family}"):
            TransformerConfig(**config.model_dump() | {field: other})
