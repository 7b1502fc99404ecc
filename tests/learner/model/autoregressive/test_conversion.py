"""Conversion of autoregressive checkpoints to diffusion policies: equal under causal attention."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.model.autoregressive.conversion import convert_checkpoint
from learner.model.autoregressive.source import open_source
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import load_config, verify_checkpoint
from learner.model.storage.references import REFERENCES
from learner.model.storage.weights import StoredWeights
from learner.model.tokenizer import ChatTokenizer, load_tokenizer
from tests.learner.model.autoregressive.tiny_autoregressive import (
    END,
    END_OF_TURN,
    RESERVED,
    TURN,
    write_gguf,
    write_source,
)

WITHOUT_RESERVED = (END, TURN, END_OF_TURN)


def causal_logits(directory: Path, ids_BL: torch.Tensor) -> torch.Tensor:
    """Return the policy's next-token logits under causal attention."""
    policy = load_policy(directory)
    policy.config = policy.config.model_copy(update={"block_length": 1, "predicts_next": False})
    with torch.no_grad():
        return policy(ids_BL, None)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "dtype": torch.bfloat16}),
        ("qwen2", {"spare_rows": 5, "specials": WITHOUT_RESERVED}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_the_policy_equals_the_source_under_causal_attention(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = write_source(tmp_path / "source", architecture, **changes)
    mask = convert_checkpoint(open_source(str(tmp_path / "source")), tmp_path / "policy")
    ids = torch.randint(4, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.float()(ids).logits
    torch.testing.assert_close(causal_logits(tmp_path / "policy", ids), expected, rtol=0, atol=1e-4)
    config = load_config(tmp_path / "policy")
    assert config.family == f"a2d-{architecture}"
    assert (config.mask_token_id, config.block_length, config.predicts_next) == (mask.id, None, False)
    assert (config.max_sequence_length, config.vocab_size) == (512, 300 + changes.get("spare_rows", 0))
    assert StoredWeights(tmp_path / "policy").dtype == changes.get("dtype", torch.float32)
    # The weights are not copied.
    assert not (tmp_path / "policy" / "model.safetensors").exists()


def test_files_of_the_hub_cache_are_linked(tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    source = replace(open_source(str(tmp_path / "source")), is_fetched=True)
    convert_checkpoint(source, tmp_path / "policy")
    one, other = (tmp_path / place / "model.safetensors" for place in ("source", "policy"))
    assert one.samefile(other)
    assert not (tmp_path / "policy" / REFERENCES).exists()
    verify_checkpoint(tmp_path / "policy")


def test_block_length_and_shift_are_written(tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    convert_checkpoint(open_source(str(tmp_path / "source")), tmp_path / "policy", block_length=8, predicts_next=True)
    config = load_config(tmp_path / "policy")
    assert (config.block_length, config.predicts_next) == (8, True)


def test_a_gguf_file_and_its_directory_give_the_same_policy(tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "source", "F32")
    for name, place in (("source", "one"), ("tiny.gguf", "other")):
        convert_checkpoint(open_source(str(tmp_path / name)), tmp_path / place)
    one, other = (StoredWeights(tmp_path / place) for place in ("one", "other"))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name][:], one[name][:])
    assert load_config(tmp_path / "other").model_copy(update={"rms_norm_eps": 1e-6}) == load_config(tmp_path / "one")
    messages = [{"role": "user", "content": "the sky is 3 + 4"}]
    ids = [ChatTokenizer(tmp_path / place).encode_chat(messages) for place in ("one", "other")]
    assert ids[0] == ids[1]


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    write_source(tmp_path / "source")
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "source")
    monkeypatch.setattr("learner.model.checkpoint.save_file", stop)
    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(open_source(str(tmp_path / "tiny.gguf")), tmp_path / "out" / "policy")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["tied", "untied", "gguf"])
def test_a_new_embedding_row_is_the_mean_of_the_others(kind: str, tmp_path: Path) -> None:
    write_source(
        tmp_path / "source", specials=WITHOUT_RESERVED, tie_word_embeddings=kind != "untied", dtype=torch.bfloat16
    )
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "source", "F32")
    source = open_source(str(tmp_path / ("tiny.gguf" if kind == "gguf" else "source")))
    mask = convert_checkpoint(source, tmp_path / "policy", mask_token="<|hole|>")
    assert (mask.id, mask.is_new_row) == (300, True)
    assert load_config(tmp_path / "policy").mask_token_id == 300
    assert load_tokenizer(tmp_path / "policy").mask_token == "<|hole|>"
    before, after = load_file(tmp_path / "source" / "model.safetensors"), StoredWeights(tmp_path / "policy")
    matrices = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    for ours, theirs in matrices.items():
        if ours in after:
            rows = after[ours][:].float()
            assert torch.equal(rows[:300], before[theirs].float())
            torch.testing.assert_close(rows[300], before[theirs].float().mean(0), rtol=0.01, atol=1e-4)
    assert ("head.weight" in after) == (kind == "untied")
    assert after.dtype == (torch.float32 if kind == "gguf" else torch.bfloat16)


def test_ends_of_turn_and_of_text_both_end_a_completion(tmp_path: Path) -> None:
    write_source(tmp_path / "source", eos_token_id=0)
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    convert_checkpoint(open_source(str(tmp_path / "source")), tmp_path / "policy", mask_token="<|hole|>")
    # The tokenizer's own end of text comes first: SFT fills canvases with it.
    assert load_config(tmp_path / "policy").stop_ids == (2, 0, 3)
    assert ChatTokenizer(tmp_path / "policy").eos_id == 2


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "source", specials=(*WITHOUT_RESERVED, RESERVED), spare_rows=-10)
    with pytest.raises(ValueError, match="has 300 tokens, and its model embeds 290"):
        convert_checkpoint(open_source(str(tmp_path / "source")), tmp_path / "policy")
    assert not (tmp_path / "policy").exists()
