import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.model.checkpoint import load_policy, save_checkpoint, verify_checkpoint
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer


@pytest.fixture
def saved(policy: Transformer, tmp_path: Path) -> Path:
    tokenizer = tmp_path / "tokenizer"
    make_tokenizer(["3 7 9 = 24"], tokenizer, 300)
    save_checkpoint(
        tmp_path / "saved",
        policy.config,
        policy.state_dict(),
        tokenizer,
        learner_state={"optimizer/head.weight/step": torch.tensor(3.0)},
        trainer_state={"round": 4},
    )
    return tmp_path / "saved"


def test_a_checkpoint_comes_back_the_same(policy: Transformer, saved: Path) -> None:
    loaded = load_policy(saved)
    assert loaded.config == policy.config
    for name, tensor in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    verify_checkpoint(saved)
    assert ChatTokenizer(saved).decode(ChatTokenizer(saved).encode_completion("1 + 2")) == "1 + 2"
    assert json.loads((saved / "trainer_state.json").read_text()) == {"round": 4}


def test_tensors_have_the_names_of_the_original_code(saved: Path, shared: Path) -> None:
    original = load_file(shared / "fixtures" / "llada-tiny" / "model.safetensors")
    names = {name for name in original if ".blocks.2." not in name}
    assert set(load_file(saved / "model.safetensors")) == names


def test_nothing_is_left_of_an_earlier_checkpoint_or_a_partial_one(
    policy: Transformer, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / ".saved.partial").mkdir()
    (tmp_path / ".saved.partial" / "junk").write_text("from a crash")
    save_checkpoint(saved, policy.config, policy.state_dict(), tmp_path / "tokenizer")
    assert not (saved / "learner.safetensors").exists()
    assert not (saved / "junk").exists()
    assert not (tmp_path / ".saved.partial").exists()


def _rewrite(path: Path, change: str) -> None:
    tensors = load_file(path)
    name = "model.transformer.ln_f.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["surplus"] = torch.zeros(2)
    else:
        tensors[name] = torch.zeros(7)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("missing", "has no tensor model.transformer.ln_f.weight"),
        ("extra", "has a tensor that the model does not: surplus"),
        ("shape", r"model.transformer.ln_f.weight is \[7\]; config.json makes \[32\]"),
    ],
)
def test_a_wrong_tensor_is_named(saved: Path, change: str, sentence: str) -> None:
    _rewrite(saved / "model.safetensors", change)
    with pytest.raises(ValueError, match=sentence):
        load_policy(saved)


def test_damage_is_noticed(saved: Path) -> None:
    with (saved / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        verify_checkpoint(saved)


def test_another_family_is_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(ValueError, match="model_type 'bert'"):
        load_policy(saved)
    (saved / "config.json").write_text(json.dumps(config | {"rope": False}))
    with pytest.raises(ValueError, match="rope = False"):
        load_policy(saved)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no config\.json"):
        load_policy(tmp_path)
