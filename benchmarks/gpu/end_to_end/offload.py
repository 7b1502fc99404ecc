"""Time the offloading of a learner of LLaDA-8B's shape: `python -m benchmarks.gpu.end_to_end.offload`."""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.gpu.setting import full, random_policy, tiny
from learner.model.lora_config import LoraConfig
from learner.parallel.offload import offloaded
from learner.parallel.sharding import ShardedPolicy


def main() -> None:
    """Print a row for each turn. Only the first turn has to allocate pinned host memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    setting = (tiny if args.tiny else full)(args.device)
    policy = ShardedPolicy(
        random_policy(setting, torch.bfloat16), None, lora=LoraConfig(rank=setting.rank, alpha=setting.rank)
    )
    num_bytes = sum(tensor.nbytes for tensor in policy.tensors())
    for turn in range(2):
        _finish(args.device)
        began = time.monotonic()
        with offloaded(policy.tensors(), policy.device):
            slept = time.monotonic()
        _finish(args.device)
        seconds = f"{slept - began:.2f} s to give back, {time.monotonic() - slept:.2f} s to take again"
        print(json.dumps({"what": f"turn {turn} of {num_bytes / 1e9:.2f} GB", "measured": seconds}), flush=True)


def _finish(device: str) -> None:
    """Wait until the GPU has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
