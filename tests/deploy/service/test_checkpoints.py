"""Checkpoints of a run: which versions it has, without a look at the disk for each question."""

import math

from actors.checkpoints.selection import servable_checkpoints
from deploy.service import checkpoints
from deploy.service.checkpoints import Checkpoints


def test_the_checkpoint_list_is_cached(run_dir, add_checkpoint, monkeypatch):
    found = Checkpoints(run_dir)
    assert found.versions() == (1,)
    assert found.find(1).phase == "sft"
    read = []
    look = servable_checkpoints
    monkeypatch.setattr(checkpoints, "servable_checkpoints", lambda path: read.append(path) or look(path))
    add_checkpoint(run_dir, 2)
    assert found.versions() == (1,)
    assert found.find(2) is None
    assert read == []
    found._read_at_s = -math.inf
    assert found.versions() == (1, 2)
    assert len(read) == 1
    assert found.find(2).version == 2
