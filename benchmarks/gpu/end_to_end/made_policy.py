"""Write a random checkpoint of LLaDA-8B's shape: `python -m benchmarks.gpu.end_to_end.made_policy DIR`."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.setting import full, random_policy, tiny
from learner.model.checkpoint import save_checkpoint
from learner.model.tokenizer import make_tokenizer
from rewards import CountdownConfig, Split, make_task

_TOKENS = 1000


def main() -> None:
    """Make the policy directly on its device, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    setting = (tiny if args.tiny else full)(args.device)
    model = random_policy(setting, torch.bfloat16)
    config = model.config.model_copy(update={"max_sequence_length": 1024})
    problems = make_task(CountdownConfig()).problems(Split.TRAIN, 100, seed=0)
    with tempfile.TemporaryDirectory() as tokenizer:
        texts = [message.content for problem in problems for message in problem.messages]
        make_tokenizer(texts, Path(tokenizer), min(_TOKENS, setting.shape.vocab_size))
        save_checkpoint(args.directory, config, model.state_dict(), Path(tokenizer))
    num_bytes = sum(path.stat().st_size for path in args.directory.iterdir())
    words = f"{time.monotonic() - began:.1f} s, {num_bytes / 1e9:.2f} GB"
    print(json.dumps({"what": "a checkpoint of LLaDA-8B's shape is made", "measured": words}))


if __name__ == "__main__":
    main()
