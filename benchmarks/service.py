"""The service against its own sampler: what HTTP, Ray Serve and batching cost and bring, on loopback.

    python -m benchmarks.service [--seconds 20] [--clients 16]

A random policy of LLaDA's architecture answers 32 tokens in 32 denoise steps. Closed loop: so many clients, each asks
again when it is answered. Open loop: requests at a fixed rate, whatever the answers do; a request's time counts from
when it was due.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import torch

from deploy.service.keys import TOKEN_VARIABLE
from deploy.service.launch import deploy_source
from deploy.service.source import Source
from learner.model.checkpoint import save_checkpoint
from learner.model.tokenizer import EOS, MASK, ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, TransformerConfig, init_weights
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler

KEY = "benchmark-" + "0" * 16
SHAPE = {"gen_length": 32, "block_length": 8, "steps": 32}
_TIMEOUT_S = 120.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory) / "policy")
        direct_s = measure_sampler(checkpoint, options.seconds / 2)
        print(f"sampler alone, one at a time: p50 {1e3 * statistics.median(direct_s):.1f} ms, n {len(direct_s)}")
        url = start(checkpoint)
        asyncio.run(measure_service(url, direct_s, options.seconds, options.clients))


def make_checkpoint(directory: Path) -> Path:
    """A policy with random weights, and a tokenizer."""
    tokenizer_dir = directory.parent / "tokenizer"
    make_tokenizer(["What is 1 + 2?", "The sum is 3."], tokenizer_dir, 320)
    tokenizer = ChatTokenizer(tokenizer_dir)
    config = TransformerConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        mlp_hidden_size=352,
        max_sequence_length=256,
        mask_token_id=tokenizer.token_id(MASK),
        eos_token_id=tokenizer.token_id(EOS),
        pad_token_id=tokenizer.token_id(EOS),
    )
    model = Transformer(config)
    init_weights(model, seed=0)
    save_checkpoint(directory, config, model.state_dict(), tokenizer_dir)
    return directory


def measure_sampler(checkpoint: Path, seconds: float) -> list[float]:
    """Times of single requests to the sampler in this process."""
    from learner.model.checkpoint import load_policy

    sampler = Sampler(load_policy(checkpoint, torch.float32), 0)
    ids = tuple(ChatTokenizer(checkpoint).encode_chat([{"role": "user", "content": "What is 2 + 3?"}]))
    params = SamplingParams(gen_length=32, block_length=8, num_denoise_steps=32, temperature=0, stop_ids=())
    taken, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        sampler.generate([Request(prompt_ids=ids, params=params, seed=len(taken))])
        taken.append(time.perf_counter() - began)
    return taken


def start(checkpoint: Path) -> str:
    """The service, with one engine. Returns its URL."""
    import ray

    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", TOKEN_VARIABLE: KEY}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    source = Source(directory=str(checkpoint), is_run=False, registry_url=None)
    return deploy_source(source, "127.0.0.1", port, 1, num_gpus=0)


async def measure_service(url: str, direct_s: list[float], seconds: float, num_clients: int) -> None:
    """Print what clients see."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=_TIMEOUT_S) as client:

        async def ask() -> None:
            # Forbidding the end of text makes every completion as long.
            body = {"prompt": "What is 2 + 3?", "diffusion": SHAPE | {"constraints": {"forbidden_ids": [1]}}}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        await ask()
        alone_s, rate_alone = await closed_loop(ask, 1, seconds)
        report("closed loop, 1 client", alone_s, rate_alone)
        print(
            f"  over the sampler alone: {1e3 * (statistics.median(alone_s) - statistics.median(direct_s)):.1f} ms p50"
        )
        many_s, rate_many = await closed_loop(ask, num_clients, seconds)
        report(f"closed loop, {num_clients} clients", many_s, rate_many)
        print(f"  {rate_many / rate_alone:.2f} times the throughput of one client")
        for share in (0.5, 0.8):
            due_s = await open_loop(ask, share * rate_many, seconds)
            report(f"open loop at {100 * share:.0f} % of that rate", due_s, len(due_s) / seconds)


async def closed_loop(
    ask: Callable[[], Awaitable[None]], num_clients: int, seconds: float
) -> tuple[list[float], float]:
    """Times of requests, and requests per second."""
    taken: list[float] = []
    began = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - began < seconds:
            start_s = time.perf_counter()
            await ask()
            taken.append(time.perf_counter() - start_s)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return taken, len(taken) / (time.perf_counter() - began)


async def open_loop(ask: Callable[[], Awaitable[None]], rate: float, seconds: float) -> list[float]:
    """Times from when each request was due."""
    began, tasks = time.perf_counter(), []

    async def one(due: float) -> float:
        await ask()
        return time.perf_counter() - due

    for index in range(int(rate * seconds)):
        due = began + index / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    return list(await asyncio.gather(*tasks))


def report(what: str, taken: list[float], rate: float) -> None:
    """One line."""
    ordered = sorted(taken)
    p50, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"{what}: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, {rate:.2f} requests/s, n {len(taken)}")


if __name__ == "__main__":
    main()
