"""Samplers and training update of d1 against those of other projects, in one process.

    python -m benchmarks.gpu.peers --d1 DIR --fast-dllm DIR [sampling updating] [--device cpu] [--tiny] [--out FILE]

DIR are checkouts of github.com/dllm-reasoning/d1 and github.com/NVlabs/Fast-dLLM; none of their code is in this
repository. LLaDA's modeling code is Fast-dLLM's copy, which needs `pip install einops`. All sides have the same random
weights, in memory once, and take turns: LLaDA-8B's shape in bfloat16 on a GPU, a small network in float32 on a CPU. A
speed-up is the median of pairs, with minimum and maximum.

- `sampling`: the first d1's `generate`, and Fast-dLLM's samplers without a cache, with prefix and with dual cache.
- `updating`: a round of the first d1's `compute_loss` on an adapter, with 12 inner updates. On a GPU also the memory
  that the first round adds to weights and adapters.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu.peers import sampling, updating
from benchmarks.gpu.peers.checkouts import load_peers
from benchmarks.gpu.setting import Row, Setting, full, tiny
from benchmarks.models import CASES
from benchmarks.sampler import table

_COLUMNS = {
    "sampling": {
        "what": "peer and schedule",
        "rows": "rows",
        "peer_tokens_per_s": "peer, tokens/s",
        "tokens_per_s": "d1, tokens/s",
        "speed_up": "times as fast",
        "same": "equal tokens",
    },
    "updating": {
        "what": "peer and round",
        "rows": "rows",
        "peer_seconds": "peer, s",
        "seconds": "d1, s",
        "speed_up": "times as fast",
        "distance": "relative distance of the updates",
        "peer_gigabytes": "peer adds, GB",
        "gigabytes": "d1 adds, GB",
    },
}


def main() -> None:
    """Measure the parts, print a table of each, and append rows to `--out` as they are measured."""
    args = _arguments()
    try:
        peers = load_peers(args.d1, args.fast_dllm)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    is_on_cpu = args.device == "cpu"
    setting = tiny(args.device) if args.tiny else _small() if is_on_cpu else full(args.device)
    dtype = torch.float32 if is_on_cpu else torch.bfloat16
    if is_on_cpu:
        torch.set_num_threads(1)
    # Peers use what newer versions of their dependencies deprecate.
    warnings.simplefilter("ignore")
    console = Console(width=160)
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "sampling": partial(sampling.compare, setting, dtype, peers, args.rounds, is_compiled=not is_on_cpu),
        "updating": partial(updating.compare, setting, dtype, peers, args.rounds),
    }
    for name in args.parts or parts:
        rows = []
        for row in parts[name]():
            rows.append(row)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"part": name, **row}, default=asdict) + "\n")
        console.print(table(name, [_shown(row) for row in rows], _COLUMNS[name]))


def _small() -> Setting:
    """Make the setting for a CPU: large enough that products take most of the time."""
    return replace(
        tiny("cpu"),
        shape=CASES["d 256, 6 layers, V 1,536"].with_vocabulary(8192),
        prompt_tokens=64,
        gen_length=128,
        block_length=32,
        num_steps=64,
        slots=(1, 8),
        rank=8,
    )


def _shown(row: Row) -> Row:
    return {**row, "distance": f"{row['distance']:.1e}"} if "distance" in row else row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *_COLUMNS], metavar="PART", help=", ".join(_COLUMNS))
    parser.add_argument("--d1", type=Path, required=True, metavar="DIR", help="checkout of the first d1")
    parser.add_argument("--fast-dllm", type=Path, required=True, metavar="DIR", help="checkout of Fast-dLLM")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy instead of LLaDA-8B's shape")
    parser.add_argument("--rounds", type=int, default=3, help="number of pairs")
    parser.add_argument("--out", type=Path, help="gets a line of JSON for each row, after what it has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
