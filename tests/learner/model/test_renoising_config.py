"""DiffusionGemma configs are read as transformers reads them, including defaults of missing keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.model.renoising.config import RenoisingConfig, read_renoising_config


def _of_transformers(directory: Path) -> RenoisingConfig:
    from transformers import DiffusionGemmaConfig

    config = DiffusionGemmaConfig.from_pretrained(directory)
    text = config.get_text_config(decoder=True)
    ids = text.eos_token_id
    return RenoisingConfig(
        vocab_size=text.vocab_size,
        canvas_length=config.canvas_length,
        stop_ids=tuple(ids) if isinstance(ids, list) else (ids,),
        pad_token_id=text.pad_token_id,
        max_sequence_length=text.max_position_embeddings,
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"canvas_length": 4, "text_config": {"vocab_size": 50, "eos_token_id": [1, 7], "pad_token_id": 3}},
        {"text_config": {"max_position_embeddings": 99}},
    ],
)
def test_a_config_is_read_like_in_transformers(tmp_path: Path, config: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "diffusion_gemma"} | config))
    assert read_renoising_config(tmp_path) == _of_transformers(tmp_path)


def test_the_generation_config_takes_precedence(shared: Path, tmp_path: Path) -> None:
    directory = shared / "fixtures" / "diffusiongemma-tiny"
    found = read_renoising_config(directory)
    assert (found.canvas_length, found.vocab_size, found.max_sequence_length) == (16, 384, 1024)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6], "pad_token_id": 7}')
    assert (read_renoising_config(tmp_path).stop_ids, read_renoising_config(tmp_path).pad_token_id) == ((5, 6), 7)


@pytest.mark.parametrize("nothing", [None, []])
def test_a_file_without_ids_falls_back_to_the_others(tmp_path: Path, nothing: object) -> None:
    text = {"eos_token_id": [5, 6], "pad_token_id": -1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "diffusion_gemma", "text_config": text}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": nothing, "pad_token_id": nothing}))
    assert (read_renoising_config(tmp_path).stop_ids, read_renoising_config(tmp_path).pad_token_id) == ((5, 6), 5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"text_config": {"eos_token_id": null}}', "config.json has no eos_token_id"),
        ('{"text_config": {"eos_token_id": [1, 262144]}}', "has eos_token_id = .*; 262144 is no id of a vocabulary of"),
        ('{"text_config": {"pad_token_id": "x"}}', "has pad_token_id = 'x'; it should be an id"),
        ('{"canvas_length": "8"}', "canvas_length, vocab_size and .* should be whole"),
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_invalid_configs_are_refused_in_one_sentence(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=said):
        read_renoising_config(tmp_path)
