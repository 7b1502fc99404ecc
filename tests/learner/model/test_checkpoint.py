import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.model.adapter import Adapter, read_adapter
from learner.model.checkpoint import empty_policy, load_merged, load_policy, load_weights, save_checkpoint, stored_dtype
from learner.model.checkpoint_files import chain_digest, load_config, verify_checkpoint
from learner.model.lora_config import LoraConfig
from learner.model.storage import weights as stored_weights
from learner.model.storage.reading import Extent, read_extents
from learner.model.storage.throughput import Throughput
from learner.model.storage.weights import StoredWeights
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer
from learner.parallel.sharding import ShardedPolicy


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


def test_a_checkpoint_round_trips(policy: Transformer, saved: Path) -> None:
    loaded = load_policy(saved)
    assert loaded.config == policy.config
    for name, tensor in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    verify_checkpoint(saved)
    assert ChatTokenizer(saved).decode(ChatTokenizer(saved).encode_plain("1 + 2")) == "1 + 2"
    assert json.loads((saved / "trainer_state.json").read_text()) == {"round": 4}


@pytest.fixture
def sharded(policy: Transformer, saved: Path, tmp_path: Path) -> Path:
    """The same policy in several files."""
    save_checkpoint(tmp_path / "sharded", policy.config, policy.state_dict(), saved, shard_bytes=32_000)
    return tmp_path / "sharded"


def test_shards_together_equal_a_single_file(saved: Path, sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert [path.name for path in shards] == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in (1, 2, 3)]
    assert all(path.stat().st_size < 34_000 for path in shards)
    assert not (sharded / "model.safetensors").exists()
    whole = load_file(saved / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for name, tensor in whole.items():
        assert torch.equal(load_file(sharded / index["weight_map"][name])[name], tensor), name
    first, second = (load_policy(directory).state_dict() for directory in (saved, sharded))
    assert all(torch.equal(first[name], second[name]) for name in first)
    verify_checkpoint(sharded)
    assert {path.name for path in shards} <= json.loads((sharded / "manifest.json").read_text()).keys()


def test_weights_are_cast_when_read_and_the_config_has_the_saved_dtype(
    policy: Transformer, saved: Path, tmp_path: Path
) -> None:
    half = load_policy(saved, torch.bfloat16)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor.bfloat16()), name
    save_checkpoint(tmp_path / "half", half.config, half.state_dict(), saved)
    for directory, dtype in ((saved, torch.float32), (tmp_path / "half", torch.bfloat16)):
        raw = json.loads((directory / "config.json").read_text())
        stored = {tensor.dtype for tensor in load_file(directory / "model.safetensors").values()}
        assert ({getattr(torch, raw["torch_dtype"])}, stored) == ({dtype}, {dtype})
    assert {tensor.dtype for tensor in load_policy(tmp_path / "half").state_dict().values()} == {torch.float32}


def test_a_loaded_policy_does_not_depend_on_its_file(saved: Path) -> None:
    policy = load_policy(saved)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    with (saved / "model.safetensors").open("r+b") as file:
        file.seek(-4000, 2)
        file.write(bytes(4000))
    assert all(torch.equal(policy.state_dict()[name], tensor) for name, tensor in before.items())
    for parameter in policy.parameters():
        assert parameter.requires_grad


def test_tensors_have_the_names_of_the_original_code(saved: Path, shared: Path) -> None:
    original = load_file(shared / "fixtures" / "llada-tiny" / "model.safetensors")
    names = {name for name in original if ".blocks.2." not in name}
    assert set(load_file(saved / "model.safetensors")) == names


def test_earlier_and_partial_checkpoints_are_replaced(policy: Transformer, saved: Path, tmp_path: Path) -> None:
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
        ("missing", "there is no model.transformer.ln_f.weight; config.json makes [32]"),
        ("extra", "surplus is [2]; config.json makes no such tensor"),
        ("shape", "model.transformer.ln_f.weight is [7]; config.json makes [32]"),
    ],
)
def test_a_wrong_tensor_is_named(saved: Path, change: str, sentence: str) -> None:
    _rewrite(saved / "model.safetensors", change)
    with pytest.raises(ValueError, match="do not fit") as refused:
        load_policy(saved)
    assert str(refused.value) == f"the weights in {saved} do not fit: {sentence}"


def test_many_wrong_tensors_are_counted_and_some_named(saved: Path) -> None:
    raw = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(raw | {"d_model": 64}))
    with pytest.raises(ValueError, match=r"wte.weight is \[40, 32\]; config.json makes \[40, 64\]; .*; and 18 more$"):
        load_policy(saved)


def test_headers_are_checked_before_tensors_are_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Extent] = []

    def watched(extents: Sequence[Extent], progress: Throughput | None = None) -> None:
        read.extend(extents)
        read_extents(extents, progress)

    monkeypatch.setattr(stored_weights, "read_extents", watched)
    load_policy(sharded)
    assert len({(extent.path, extent.begin) for extent in read}) == len(read) == 21
    read.clear()
    last = max(sharded.glob("model-*.safetensors"))
    save_file(load_file(last) | {"surplus": torch.zeros(2)}, last)
    with pytest.raises(ValueError, match="surplus"):
        load_policy(sharded)
    assert read == []


def _truncate(directory: Path) -> None:
    path = directory / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _list_elsewhere(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../saved/model.safetensors"}}')


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (
            lambda directory: (directory / "model-00002-of-00003.safetensors").unlink(),
            "{0}/model.safetensors.index.json lists model-00002-of-00003.safetensors, and there is no such file in "
            "{0}; get the checkpoint again",
        ),
        (_truncate, "{0}/model-00002-of-00003.safetensors cannot be read, get it again: Error while deserializing"),
        (
            lambda directory: (directory / "model-00002-of-00003.safetensors").write_bytes(b"version https://git-lfs"),
            "{0}/model-00002-of-00003.safetensors cannot be read, get it again: Error while deserializing",
        ),
        (
            lambda directory: (directory / "model.safetensors.index.json").write_text("{"),
            "{0}/model.safetensors.index.json is not an index of shards: it should be JSON with a weight_map",
        ),
        (
            lambda directory: (directory / "model.safetensors.index.json").write_text("{}"),
            "{0}/model.safetensors.index.json is not an index of shards: it should be JSON with a weight_map",
        ),
        (
            _list_elsewhere,
            "{0}/model.safetensors.index.json lists ../saved/model.safetensors, and there is no such file in {0}; get",
        ),
        (
            lambda directory: (directory / "model.safetensors.index.json").unlink(),
            "{0} is not a checkpoint: it has no model.safetensors and no model.safetensors.index.json",
        ),
    ],
)
def test_incomplete_shards_are_refused(sharded: Path, harm: Callable[[Path], object], sentence: str) -> None:
    harm(sharded)
    with pytest.raises(ValueError, match="sharded") as refused:
        load_policy(sharded)
    assert str(refused.value).startswith(sentence.format(sharded))


def test_damage_is_detected(saved: Path) -> None:
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


def test_rows_of_a_stored_tensor_can_be_read(policy: Transformer, sharded: Path) -> None:
    """For matrices and vectors, and for empty slices, since the last ranks may have no rows."""
    stored = StoredWeights(sharded)
    assert list(stored) == [name for name, _ in policy.named_parameters()]
    for name, parameter in policy.named_parameters():
        for rows in (slice(None), slice(3, 7), slice(len(parameter), len(parameter))):
            assert torch.equal(stored[name][rows], parameter[rows])


def test_an_empty_policy_needs_no_weight_files(saved: Path) -> None:
    for path in saved.glob("*.safetensors"):
        path.unlink()
    empty = empty_policy(saved, torch.bfloat16, "cpu")
    assert {parameter.dtype for parameter in empty.parameters()} == {torch.bfloat16}
    assert empty.config == load_config(saved)


LORA = LoraConfig(rank=2, alpha=4, targets=("q_proj", "down_proj"))


def _trained(policy: Transformer) -> ShardedPolicy:
    """Return the policy with a nontrivial adapter."""
    adapted = ShardedPolicy(policy, None, lora=LORA)
    random = torch.Generator().manual_seed(3)
    adapter = adapted.adapter_on_rank_0()
    adapted.load_adapter({name: torch.randn(whole.shape, generator=random) for name, whole in adapter.items()})
    return adapted


def _save_adapter(directory: Path, adapted: ShardedPolicy, base: str, matrices: dict[str, torch.Tensor]) -> None:
    adapter = Adapter(rank=LORA.rank, alpha=LORA.alpha, base=base, matrices=matrices)
    save_checkpoint(directory, adapted.config, None, directory.parent / base, adapter=adapter)


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 16_000])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_an_adapter_checkpoint_loads_the_learners_policy(
    policy: Transformer, saved: Path, tmp_path: Path, held: torch.dtype, shard_bytes: int
) -> None:
    policy = policy.to(held)
    save_checkpoint(tmp_path / "base", policy.config, policy.state_dict(), saved, shard_bytes=shard_bytes)
    adapted = _trained(policy)
    alone = tmp_path / "alone"
    _save_adapter(alone, adapted, "base", adapted.adapter_on_rank_0())
    assert sorted(path.name for path in alone.glob("*.safetensors")) == ["lora.safetensors"]
    expected = adapted.full_weights()
    merged = load_merged(alone)
    assert [name for name, whole in expected.items() if not torch.equal(merged.state_dict()[name], whole)] == []
    assert (merged.config, stored_dtype(alone)) == (policy.config, torch.float32)
    assert ChatTokenizer(alone).decode(ChatTokenizer(alone).encode_plain("1 + 2")) == "1 + 2"
    verify_checkpoint(alone)
    ids = torch.arange(36).view(3, 12)
    with torch.no_grad():
        # Bit-identical: the same product and the same weights, in the precision that they are held in.
        assert torch.equal(load_policy(alone, held)(ids), adapted.module(ids))
        torch.testing.assert_close(load_policy(alone)(ids), merged(ids), atol=1e-4, rtol=1e-4)


def test_an_adapter_that_does_not_fit_its_base_is_refused(policy: Transformer, saved: Path, tmp_path: Path) -> None:
    adapted = _trained(policy)
    matrices = adapted.adapter_on_rank_0()
    layer = "blocks.1.attn.q_proj"
    wrong = {
        "it lacks " + layer + ".lora_B.weight": {
            name: whole for name, whole in matrices.items() if name != layer + ".lora_B.weight"
        },
        rf"its matrices for {layer} are \[32, 2\] and \[2, 31\], and the weight is \[32, 32\]": matrices
        | {layer + ".lora_A.weight": torch.ones(2, 31)},
        r"it has matrices for blocks\.9\.attn\.q_proj, which is no linear layer of this policy": matrices
        | {f"blocks.9.attn.q_proj.lora_{which}.weight": torch.ones(2, 2) for which in "AB"},
    }
    for sentence, given in wrong.items():
        _save_adapter(tmp_path / "alone", adapted, "saved", given)
        with pytest.raises(ValueError, match=rf"alone cannot be used: {sentence}"):
            load_policy(tmp_path / "alone")


def test_an_adapter_with_a_changed_base_is_refused(policy: Transformer, saved: Path, tmp_path: Path) -> None:
    """As when a stage was repeated with another number of workers."""
    adapted = _trained(policy)
    digest = chain_digest(saved)
    adapter = Adapter(
        rank=LORA.rank, alpha=LORA.alpha, base="saved", base_digest=digest, matrices=adapted.adapter_on_rank_0()
    )
    save_checkpoint(tmp_path / "alone", adapted.config, None, saved, adapter=adapter)
    verify_checkpoint(tmp_path / "alone")
    assert read_adapter(tmp_path / "alone").base_digest == digest
    other = {name: tensor + 1 for name, tensor in load_weights(saved).state_dict().items()}
    save_checkpoint(saved, adapted.config, other, saved)
    for look in (load_policy, load_merged, verify_checkpoint):
        with pytest.raises(ValueError, match=r"alone was trained on another saved than .*, whose manifest differs"):
            look(tmp_path / "alone")


@pytest.mark.parametrize("base", ["nothing", "../saved", "alone", "..", "."])
def test_an_adapter_without_its_base_is_refused(policy: Transformer, saved: Path, tmp_path: Path, base: str) -> None:
    adapted = _trained(policy)
    _save_adapter(tmp_path / "alone", adapted, base, adapted.adapter_on_rank_0())
    for look in (load_policy, verify_checkpoint):
        with pytest.raises(ValueError, match=rf"alone stands on {re.escape(base)}, which is no checkpoint beside it"):
            look(tmp_path / "alone")


def test_damage_to_an_adapters_base_is_detected(policy: Transformer, saved: Path, tmp_path: Path) -> None:
    adapted = _trained(policy)
    _save_adapter(tmp_path / "alone", adapted, "saved", adapted.adapter_on_rank_0())
    verify_checkpoint(tmp_path / "alone")
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    verify_checkpoint(tmp_path / "alone", ["lora.safetensors"])
    with pytest.raises(ValueError, match=r"saved/model\.safetensors is damaged"):
        verify_checkpoint(tmp_path / "alone")
