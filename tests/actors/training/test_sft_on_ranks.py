"""SFT examples on several machines: rank 0 reads them, and the others receive them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pytest
import torch
import torch.distributed as dist

from actors.spec import RunSpec
from actors.training.context import RunContext
from actors.training.sft.stage import labels
from learner.parallel.consensus import LeaderFailedError, Ranks
from tests.ranks import run_ranks

ROWS = [{"prompt": f"{index} ?", "completion": f"{index}"} for index in range(6)]


def _with_data(spec: RunSpec, data: Path) -> RunSpec:
    sft = spec.sft.model_copy(update={"data": data, "num_labels": None, "num_eval": 2, "max_tokens": 12})
    return spec.model_copy(update={"sft": sft})


def _labels(spec: RunSpec) -> dict[str, Any]:
    """Return this rank's examples, or the error that it ends with."""
    try:
        data = labels(cast(RunContext, SimpleNamespace(spec=spec, ranks=Ranks())))
    except (ValueError, LeaderFailedError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"facts": data.facts, "tensors": data.tensors()}


def _rank(rank: int, meeting: str, specs: list[list[RunSpec]], out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.save([_labels(of_ranks[rank]) for of_ranks in specs], out / f"{rank}.pt")
    dist.destroy_process_group()


def test_only_rank_0_needs_the_examples(spec: RunSpec, tmp_path: Path) -> None:
    """With a file that only one machine has; where that is not rank 0's, rank 0 says so and the others end with it."""
    there, missing = tmp_path / "data.jsonl", tmp_path / "no" / "data.jsonl"
    there.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    here, elsewhere = (_with_data(spec, path) for path in (there, missing))
    run_ranks(_rank, str(tmp_path / "meeting"), [[here, elsewhere], [elsewhere, here]], tmp_path, num=2)
    (first, refused), (second, followed) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["facts"] == second["facts"]
    assert (first["facts"]["num_examples"], first["facts"]["num_held_out"]) == (4, 2)
    assert first["tensors"].keys() == second["tensors"].keys()
    assert all(torch.equal(second["tensors"][name], tensor) for name, tensor in first["tensors"].items())
    assert refused["error"].startswith("ValueError: ")
    assert str(missing) in refused["error"]
    assert followed["error"] == "LeaderFailedError: rank 0 of the learner failed"


def _cache_dataset(home: Path) -> None:
    """Write the cache that `datasets` leaves after it has downloaded org/name from the hub."""
    directory = home / "datasets" / "org___name" / "default" / "0.0.0" / ("0" * 40)
    table = datasets.Dataset.from_list(ROWS)
    directory.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(path=str(directory / "name-train.arrow"), features=table.features) as writer:
        writer.write_table(table.data.table)
        num_examples, num_bytes = writer.finalize()
    split = {"name": "train", "num_bytes": num_bytes, "num_examples": num_examples, "dataset_name": "name"}
    datasets.DatasetInfo(
        features=table.features,
        builder_name="parquet",
        dataset_name="name",
        config_name="default",
        version="0.0.0",
        splits={"train": split},
    ).write_to_directory(str(directory))


@pytest.mark.nightly
def test_only_rank_0_needs_a_dataset_of_the_hub_in_its_cache(spec: RunSpec, tmp_path: Path) -> None:
    """Two processes with caches of their own, as on two machines, which do not ask the hub."""
    homes = [tmp_path / "home 0", tmp_path / "home 1"]
    _cache_dataset(homes[0])
    (tmp_path / "spec.json").write_text(_with_data(spec, Path("org/name")).model_dump_json())
    program = (
        "import sys; from pathlib import Path; from actors.spec import RunSpec\n"
        "from tests.actors.training.test_sft_on_ranks import _rank\n"
        "at = Path(sys.argv[2]); spec = RunSpec.model_validate_json((at / 'spec.json').read_text())\n"
        "_rank(int(sys.argv[1]), str(at / 'meeting'), [[spec, spec]], at)\n"
    )
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path)],
            env=os.environ | offline | {"HF_HOME": str(home)},
        )
        for rank, home in enumerate(homes)
    ]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    (first,), (second,) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["facts"]["num_examples"] == 4
    assert all(torch.equal(second["tensors"][name], tensor) for name, tensor in first["tensors"].items())
