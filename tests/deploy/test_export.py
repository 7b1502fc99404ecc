"""`d1 export`: the same policy in code that knows nothing of d1, the original's and peft's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.model.adapter import Adapter
from learner.model.checkpoint import load_merged, load_policy, partial_directory, save_checkpoint
from learner.model.checkpoint_files import ADAPTER, MODEL, load_config, shard_name
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.lora_config import TARGETS, LoraConfig
from learner.model.networks import make_model
from learner.model.storage.hashing import checksum
from learner.model.storage.weights import StoredWeights
from learner.model.tokenizer import make_tokenizer
from learner.model.transformer import init_weights
from learner.parallel.sharding import ShardedPolicy
from tests.deploy.conftest import RECIPE
from tests.learner.model.on_disk.original import Original

LORA = LoraConfig(rank=3, alpha=6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run directory whose policy had two stages under LoRA."""

    directory: Path
    merged: dict[str, dict[str, Tensor]]
    """Weights of each checkpoint with its adapters merged, by our names."""

    def checkpoint(self, name: str) -> Path:
        return self.directory / "checkpoints" / name


def _state(phase: str, version: int) -> dict[str, object]:
    return {"phase": phase, "round": 0, "policy_version": version, "rl_seconds": 0.0}


def _train(policy: ShardedPolicy, seed: int) -> None:
    """Change the adapter at random, in place of training."""
    generator = torch.Generator().manual_seed(seed)
    matrices = policy.adapter_on_rank_0()
    policy.load_adapter(
        {name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in matrices.items()}
    )


def _save(run: Run, name: str, policy: ShardedPolicy, base: str, version: int) -> Adapter:
    adapter = Adapter(rank=LORA.rank, alpha=LORA.alpha, base=base, matrices=policy.adapter_on_rank_0())
    state, source = _state("sft" if version == 1 else "rl", version), run.checkpoint("initial")
    save_checkpoint(run.checkpoint(name), policy.config, None, source, adapter=adapter, trainer_state=state)
    run.merged[name] = policy.full_weights()
    return adapter


SHAPES: dict[str, dict[str, object]] = {
    "llada": {},
    "dream": {"predicts_next": True, "qkv_bias": True},
    "a2d-llama": {"predicts_next": True, "block_length": 4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


@pytest.fixture(params=SHAPES)
def run(request: pytest.FixtureRequest, config: TransformerConfig, workdir: Path) -> Run:
    shape = TransformerConfig(**config.model_dump() | {"family": request.param} | SHAPES[request.param])
    model = make_model(shape)
    init_weights(model, seed=0)
    make_tokenizer(["3 7 9 = 24"], workdir / "tokenizer", 300)
    run = Run(directory=workdir / "runs" / "tiny", merged={})
    initial = run.checkpoint("initial")
    state = _state("untrained", 0)
    save_checkpoint(initial, shape, model.state_dict(), workdir / "tokenizer", trainer_state=state)
    (run.directory / "recipe.yaml").write_text(f"name: tiny\n{RECIPE}")
    policy = ShardedPolicy(model, None, lora=LORA)
    _train(policy, seed=1)
    policy.reset_adapter(_save(run, "sft", policy, "initial", 1))
    _train(policy, seed=2)
    _save(run, "rl-000001", policy, "sft", 2)
    return run


def _in_original_names(run: Run, name: str) -> dict[str, Tensor]:
    config = load_policy(run.checkpoint("initial")).config
    layout = FAMILIES[config.family].layout({ours: tensor.shape for ours, tensor in run.merged[name].items()})
    return {theirs: layout.stored(theirs, run.merged[name]) for theirs in layout.stored_shapes}


def test_an_export_has_the_files_of_the_original_code_only(run: Run, d1: Callable, workdir: Path) -> None:
    newest = run.checkpoint("rl-000001")
    ended = d1("export", "runs/tiny", "out")
    assert ended.out == "out is the policy of runs/tiny/checkpoints/rl-000001\n"
    names = {path.name for path in (workdir / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert names.isdisjoint({"manifest.json", "trainer_state.json", "learner.safetensors", ADAPTER})
    # transformers would apply an adapter to weights that already include it.
    assert not any("adapter" in name for name in names | {path.name for path in newest.iterdir()})
    for name in names - {"model.safetensors"}:
        assert (workdir / "out" / name).read_bytes() == (newest / name).read_bytes(), name
    written = load_file(workdir / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    for name, tensor in _in_original_names(run, "rl-000001").items():
        assert torch.equal(written[name], tensor), name
    assert not list(workdir.glob(".out*"))


def test_a_policy_without_an_adapter_is_exported_byte_for_byte(run: Run, d1: Callable, workdir: Path) -> None:
    assert d1("export", "runs/tiny/checkpoints/initial", "out").status == 0
    written = {path.name: path.read_bytes() for path in (workdir / "out").iterdir()}
    assert "model.safetensors" in written
    assert written == {name: (run.checkpoint("initial") / name).read_bytes() for name in written}


def _write_in_shards(directory: Path, source: Path) -> None:
    """Write the policy of another checkpoint as two ranks of a learner do."""
    weights, digests = load_policy(source).state_dict(), {}
    partial_directory(directory).mkdir()
    for rank in (0, 1):
        rows, offsets = {}, {}
        for name, tensor in weights.items():
            half = -(-len(tensor) // 2)
            rows[name] = tensor[rank * half : (rank + 1) * half].clone()
            offsets[name] = {"saved_offsets": [rank * half, *(0 for _ in tensor.shape[1:])]}
        path = partial_directory(directory) / shard_name(MODEL, rank, 2)
        save_file(rows, path, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
        digests[path.name] = checksum(path)
    save_checkpoint(directory, load_config(source), None, source, trainer_state=_state("rl", 3), shards=digests)


def test_a_policy_in_the_shards_of_two_ranks_is_exported_whole(run: Run, d1: Callable, workdir: Path) -> None:
    _write_in_shards(run.checkpoint("rl-000002"), run.checkpoint("initial"))
    assert d1("export", "runs/tiny", "out").out == "out is the policy of runs/tiny/checkpoints/rl-000002\n"
    written = {path.name: path.read_bytes() for path in (workdir / "out").iterdir()}
    assert "model.safetensors" in written
    assert written == {name: (run.checkpoint("initial") / name).read_bytes() for name in written}
    shard = run.checkpoint("rl-000002") / shard_name(MODEL, 1, 2)
    shard.write_bytes(shard.read_bytes()[:-1])
    d1("export", "runs/tiny/checkpoints/rl-000002", "out2").assert_refused(f"{shard.name} is damaged: it is not what")
    shard.unlink()
    with pytest.raises(ValueError, match=r"rl-000002 do not fit: \S+ is \[\d+\D"):
        load_policy(run.checkpoint("rl-000002"))


def test_an_adapter_with_a_damaged_or_missing_base_is_refused(run: Run, d1: Callable) -> None:
    weights = run.checkpoint("initial") / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    last = "runs/tiny/checkpoints/rl-000001"
    d1("export", last, "out").assert_refused("initial/model.safetensors is damaged")
    weights.unlink()
    d1("export", last, "out").assert_refused("initial is not a checkpoint: it has no model.saf")
    run.checkpoint("sft").rename(run.checkpoint("away"))
    d1("export", last, "out").assert_refused(
        "the adapter in runs/tiny/checkpoints/rl-000001 stands on sft, which is no checkpoint beside it"
    )


@pytest.mark.parametrize(("name", "num_stages"), [("sft", 1), ("rl-000001", 2)])
def test_peft_merges_the_exported_adapter_to_our_weights(
    run: Run, d1: Callable, workdir: Path, name: str, num_stages: int
) -> None:
    ended = d1("export", f"runs/tiny/checkpoints/{name}", "out", "--lora", "apart")
    assert ended.out == f"out is the adapter of runs/tiny/checkpoints/{name}, on the policy of " + (
        "runs/tiny/checkpoints/initial\n"
    )
    about = json.loads((workdir / "out" / "adapter_config.json").read_text())
    assert (about["peft_type"], about["r"], about["lora_alpha"]) == ("LORA", 3 * num_stages, 6 * num_stages)
    assert about["base_model_name_or_path"] == str(run.checkpoint("initial"))
    from peft import PeftModel

    model = PeftModel.from_pretrained(Original(run.checkpoint("initial")), workdir / "out")
    adapted = [module for module, part in model.named_modules() if hasattr(part, "lora_A")]
    # Only the blocks' layers: LLaDA's head has the same name as one of them.
    assert len(adapted) == len(TARGETS) * load_policy(run.checkpoint(name)).config.num_layers
    merged = dict(model.merge_and_unload().named_parameters())
    expected = _in_original_names(run, name)
    compared = [tensor for tensor in expected if tensor in merged]
    assert len(compared) >= len(adapted) + 1
    for tensor in compared:
        torch.testing.assert_close(merged[tensor].detach(), expected[tensor], msg=tensor)


def test_an_adapter_can_be_exported_in_half_precision(run: Run, d1: Callable, workdir: Path) -> None:
    assert d1("export", "runs/tiny/checkpoints/sft", "whole", "--lora", "apart").status == 0
    assert d1("export", "runs/tiny/checkpoints/sft", "half", "--lora", "apart", "--half").status == 0
    whole, half = (load_file(workdir / name / "adapter_model.safetensors") for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    for name, matrix in half.items():
        assert torch.equal(matrix, whole[name].to(torch.bfloat16)), name
    assert any(matrix.any() for matrix in half.values())
    policy, exact = load_merged(workdir / "half"), load_merged(workdir / "whole")
    torch.testing.assert_close(policy.state_dict(), exact.state_dict(), atol=1e-2, rtol=1e-2)
    d1("export", "runs/tiny/checkpoints/sft", "out", "--half").assert_refused(
        "--half is for an adapter that is written alone; add --lora apart, or leave it out"
    )


def test_an_adapter_of_experts_is_exported_unless_it_adapts_part_of_a_matrix(
    moe_config: TransformerConfig, workdir: Path, d1: Callable
) -> None:
    """LLaDA2 has query, key and value in one matrix, which peft could only adapt as a whole."""
    make_tokenizer(["3 7 9 = 24"], workdir / "tokenizer", 300)
    for name, targets in (("whole", TARGETS), ("others", ("out_proj", "up_proj"))):
        run = Run(directory=workdir / "runs" / name, merged={})
        model = make_model(moe_config)
        init_weights(model, seed=0)
        initial = run.checkpoint("initial")
        save_checkpoint(initial, moe_config, model.state_dict(), workdir / "tokenizer", trainer_state=_state("sft", 0))
        (run.directory / "recipe.yaml").write_text(f"name: {name}\n")
        policy = ShardedPolicy(model, None, lora=LORA.model_copy(update={"targets": targets}))
        _train(policy, seed=1)
        _save(run, "sft", policy, "initial", 1)
    d1("export", "runs/whole", "out", "--lora", "apart").assert_refused(
        "k_proj is a part of attention.query_key_value in the original code of llada2_moe, and peft adapts that whole; "
        "export the policy with its adapter merged"
    )
    assert not (workdir / "out").exists()
    assert d1("export", "runs/others", "out", "--lora", "apart").status == 0
    from peft import PeftModel

    peft = PeftModel.from_pretrained(Original(initial), workdir / "out")
    assert len([module for module, part in peft.named_modules() if hasattr(part, "lora_A")]) == 4
    merged = dict(peft.merge_and_unload().named_parameters())
    for tensor, expected in _in_original_names(run, "sft").items():
        if tensor in merged:
            torch.testing.assert_close(merged[tensor].detach(), expected, msg=tensor)


def test_the_newest_intact_checkpoint_is_exported(run: Run, d1: Callable) -> None:
    path = run.checkpoint("rl-000001") / ADAPTER
    path.write_bytes(path.read_bytes()[:-1])
    ended = d1("export", "runs/tiny", "out")
    assert ended.out == "out is the policy of runs/tiny/checkpoints/sft\n"
    assert ended.err.startswith(f"d1: runs/tiny/checkpoints/rl-000001/{ADAPTER} is damaged")
    assert ended.err.endswith("; going on with checkpoint sft\n")
    d1("export", "runs/tiny/checkpoints/rl-000001", "other").assert_refused(f"{ADAPTER} is damaged")


def test_unsupported_exports_are_refused_in_one_sentence(run: Run, d1: Callable, workdir: Path) -> None:
    d1("export", "nowhere at all", "out").assert_refused("nowhere at all is no directory, and no hub id either")
    d1("export", "runs/tiny/checkpoints", "out").assert_refused("has no config.json")
    d1("export", "runs/tiny/checkpoints/initial", "out", "--lora", "apart").assert_refused(
        "was trained whole: it has no lora.safetensors; leave out --lora apart"
    )
    run.checkpoint("sft").rename(workdir / "away")
    d1("export", "runs/tiny/checkpoints/rl-000001", "out", "--lora", "apart").assert_refused(
        "stands on sft, which is no checkpoint beside it"
    )
    (workdir / "away").rename(run.checkpoint("sft"))
    assert not (workdir / "out").exists()
    (workdir / "out").mkdir()
    assert d1("export", "runs/tiny", "out").status == 0
    kept = (workdir / "out" / "config.json").read_bytes()
    d1("export", "runs/tiny/checkpoints/initial", "out").assert_refused("exists and is not an empty directory")
    assert (workdir / "out" / "config.json").read_bytes() == kept
    (workdir / "file").write_text("")
    d1("export", "runs/tiny", "file").assert_refused("exists and is not an empty directory")
    d1("export", "runs/tiny", "file/out").assert_refused("cannot write")


def test_referenced_weights_are_exported_and_named_in_peft_config(run: Run, d1: Callable, workdir: Path) -> None:
    initial, original = run.checkpoint("initial"), workdir / "original"
    shutil.copytree(initial, original)
    stored = StoredWeights(original)
    save_checkpoint(initial, stored.config, stored, original, trainer_state=_state("untrained", 0))
    assert d1("export", "runs/tiny/checkpoints/initial", "out").status == 0
    assert (workdir / "out" / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert d1("export", "runs/tiny/checkpoints/sft", "apart", "--lora", "apart").status == 0
    about = json.loads((workdir / "apart" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(original)
    (original / "model.safetensors").unlink()
    d1("export", "runs/tiny/checkpoints/initial", "none").assert_refused("this machine has no such file; put it back")
    d1("sample", "runs/tiny/checkpoints/initial", "1 + 2").assert_refused("this machine has no such file; put it back")
    d1("eval", "runs/tiny/checkpoints/initial").assert_refused("this machine has no such file; put it back")
