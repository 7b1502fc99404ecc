"""litellm, langchain-openai and lm-evaluation-harness, from a separate environment."""

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.service.api.app import create_app
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.source import Source
from learner.model.checkpoint import save_checkpoint
from learner.model.tokenizer import ChatTokenizer
from learner.model.transformer import Transformer, init_weights
from tests.tiny_policy import config_of

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".venv-clients"
PYTHON = VENV / "bin" / "python"
SCRIPTS = Path(__file__).parent / "clients"
TOKEN = "a-token-of-this-test"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not (VENV / ".installed").is_file(), reason="needs the clients that make test-clients installs"),
]


@pytest.fixture
def url(app, listen):
    return listen(app, TOKEN)


@pytest.fixture
def run(tmp_path):
    """Run a command in the clients' environment, without network beyond this machine."""
    environment = {
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OPENAI_API_KEY": TOKEN,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        # Requests to any other host fail, and at once.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }

    def run(script, *words):
        done = command(str(SCRIPTS / script), *words)
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    def command(*words):
        done = subprocess.run(
            [str(PYTHON), *map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    run.command = command
    return run


@pytest.fixture
def ask(url):
    """The service's own answer, without a client library."""

    return partial(ask_at, url)


def ask_at(url, path, **body):
    response = httpx.post(f"{url}{path}", json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
    response.raise_for_status()
    return response.json()


@pytest.fixture
def text(ask):
    """The reply to the prompt that the scripts send."""
    body = {"messages": [{"role": "user", "content": "2 + 3"}], "seed": 1, "temperature": 1}
    return ask("/v1/chat/completions", **body)["choices"][0]["message"]["content"]


def test_litellm_completes_streams_and_raises_its_own_errors(url, run, ask, text):
    said, _ = run("with_litellm.py", url)
    assert said["chat"]["texts"][0] == text[: len(said["chat"]["texts"][0])]
    assert said["chat"]["texts"][0] != said["chat"]["texts"][1]
    assert said["chat"]["finish_reasons"] == ["length", "length"]
    assert (said["chat"]["usage"], said["chat"]["version"]) == (0, "1")
    assert said["streamed"]["text"] == said["streamed"]["whole"] == text
    assert said["streamed"]["tokens"] == [16, 16]
    assert said["all_at_once"]["texts"] == said["all_at_once"]["texts"][:2] * 3
    assert said["all_at_once"]["texts"][0] == said["all_at_once"]["streamed"] != text
    assert said["completions"] == {
        "text": ask("/v1/completions", prompt="2 + 3", seed=1, max_tokens=5)["choices"][0]["text"],
        "tokens": 5,
    }
    assert said["diffusion"]["num_forwards"] == 2
    assert (said["no_model"]["error"], said["no_model"]["status"]) == ("NotFoundError", 404)
    assert (said["top_logprobs"]["error"], said["top_logprobs"]["status"]) == ("BadRequestError", 400)
    assert "only the log-probability of each committed token" in said["top_logprobs"]["message"]
    assert (said["no_key"]["error"], said["no_key"]["status"]) == ("AuthenticationError", 401)


def test_litellm_retries_after_retry_after(url, run, full_until, text):
    tries = full_until(2)
    said, _ = run("with_litellm.py", url, "tries_again")
    assert (said["text"], len(tries)) == (text, 2)


def test_langchain_completes_streams_and_raises_its_own_errors(url, run, ask, text):
    said, _ = run("with_langchain.py", url)
    usage = said["chat"]["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (12, usage["input_tokens"] + 12)
    assert said["chat"]["metadata"]["finish_reason"] == "length"
    assert said["streamed"]["text"] == said["streamed"]["whole"] == text
    assert [reason for reason in said["streamed"]["finish_reason"] if reason] == ["length"]
    assert said["asynchronously"] == {"texts": [text] * 3, "streamed": text}
    answer = ask("/v1/completions", prompt=["2 + 3"], seed=1, temperature=1, max_tokens=5)["choices"][0]["text"]
    assert said["completions"]["whole"] == said["completions"]["streamed"] == said["completions"]["texts"][0] == answer
    assert said["completions"]["texts"][1] != answer
    assert said["diffusion"]["token_usage"]["diffusion"]["num_forwards"] == 2
    assert said["tools"]["status"] == 400
    assert "`tools` is not supported" in said["tools"]["message"]
    assert said["no_key"]["status"] == 401


def test_lm_eval_generates_and_loglikelihood_is_refused(url, run, ask, tmp_path, tokenizer_dir):
    questions = [f"What is {n} + 1?" for n in range(6)]
    tokens = [ask("/tokenize", prompt=question)["tokens"] for question in questions]
    greedy = {"max_tokens": 12, "temperature": 0, "stop": ["\n\n"]}
    by_ids = [choice["text"] for choice in ask("/v1/completions", prompt=tokens, **greedy)["choices"]]
    turns = [[{"role": "user", "content": question}] for question in questions]
    chats = [ask("/v1/chat/completions", messages=turn, **greedy)["choices"][0]["message"] for turn in turns]
    by_turn = [message["content"] for message in chats]
    assert by_turn != by_ids
    docs = tmp_path / "docs.jsonl"
    # Half of the targets are right.
    pairs = zip(questions, [*by_ids[:3], "x", "y", "z"], strict=True)
    docs.write_text("".join(json.dumps({"question": ask, "target": target}) + "\n" for ask, target in pairs))

    said, log = run("with_lm_eval.py", url, docs, tokenizer_dir)
    assert said["text"] == said["ids"] == {"exact_match": 0.5, "answers": by_ids}
    assert said["chat"]["answers"] == by_turn
    assert said["loglikelihood"] == {"error": "ClientResponseError", "status": 400}
    assert "log-probabilities of the prompt, which a diffusion policy does not have" in log


GSM8K = [("Tom has 2 pens and buys 3.", 5), ("Ann had 7 figs and ate 1.", 6), ("6 cars have 4 wheels each.", 24)]
HUMANEVAL = [("add", "a, b"), ("twice", "a"), ("negative", "a")]


@pytest.fixture
def data_sets(tmp_path):
    """Our rows in the layout of openai/gsm8k and openai/openai_humaneval, where `datasets` looks first.

    Also a metric named code_eval, which executes nothing: a program passes if its test contains it.
    """
    gsm8k = tmp_path / "openai" / "gsm8k"
    rows = [{"question": f"{text} How many?", "answer": f"It is {count}.\n#### {count}"} for text, count in GSM8K]
    for split, part in (("train", rows * 2), ("test", rows)):
        write_lines(gsm8k / "main" / f"{split}.jsonl", part)
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    write_card(gsm8k, [{"config_name": "main", "data_files": files}])
    tasks = [
        {
            "task_id": f"ours/{index}",
            "prompt": f"def {name}({arguments}):\n",
            "canonical_solution": "    return 5\n",
            "test": f"def {name}({arguments}):\n    return 5\n",
            "entry_point": name,
        }
        for index, (name, arguments) in enumerate(HUMANEVAL)
    ]
    write_lines(tmp_path / "openai" / "openai_humaneval" / "test.jsonl", tasks)
    write_card(
        tmp_path / "openai" / "openai_humaneval",
        [{"config_name": "openai_humaneval", "data_files": [{"split": "test", "path": "test.jsonl"}]}],
    )
    shutil.copytree(SCRIPTS / "code_eval", tmp_path / "code_eval")


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_card(directory, configs):
    (directory / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


@pytest.fixture
def long_url(tmp_path, tokenizer_dir, listen):
    """A service whose policy has room for prompts of five examples."""
    tokenizer, checkpoint = ChatTokenizer(tokenizer_dir), tmp_path / "long"
    config = config_of(tokenizer, max_sequence_length=640, mlp_hidden_size=32)
    model = Transformer(config)
    init_weights(model, seed=1)
    save_checkpoint(checkpoint, config, model.state_dict(), tokenizer_dir)
    source = Source(directory=str(checkpoint), is_run=False, registry_url=None)
    versions = source.versions("cpu")
    engine = Engine(versions)
    yield listen(create_app(source.service(EngineHost(versions, engine))), TOKEN)
    engine.close()


@pytest.mark.parametrize(
    ("model", "path", "options"),
    [
        ("local-completions", "/v1/completions", []),
        ("local-chat-completions", "/v1/chat/completions", ["--apply_chat_template"]),
    ],
)
def test_lm_evals_gsm8k_and_humaneval_run_unchanged(long_url, run, data_sets, tmp_path, model, path, options):
    """A policy of random weights solves nothing, but its prompts and answers arrive."""
    arguments = f"model=policy,base_url={long_url}{path},tokenizer_backend=None,num_concurrent=2,max_retries=1"
    run.command(
        *("-m", "lm_eval", "run", "--model", model, "--tasks", "gsm8k,humaneval", "--model_args", arguments),
        *("--confirm_run_unsafe_code", "--log_samples", "--output_path", "out", *options),
    )
    (results,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    assert set(scores["gsm8k"]) >= {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert scores["humaneval"]["pass@1,create_test"] == 0
    for task, count in (("gsm8k", 2 * len(GSM8K)), ("humaneval", len(HUMANEVAL))):
        (log,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in log.read_text().splitlines()]
        # gsm8k applies two filters to each answer.
        assert len(samples) == count
        for sample in samples:
            asked = sample["arguments"]["gen_args_0"]
            stops = asked["arg_1"]["until"]
            assert len(stops) == {"gsm8k": 3, "humaneval": 5}[task]
            said = sample["resps"][0][0]
            assert said
            assert not any(stop in said for stop in stops)
            if not options:
                body = {"prompt": asked["arg_0"], "max_tokens": asked["arg_1"].get("max_gen_toks", 256), "stop": stops}
                assert said == ask_at(long_url, path, **body)["choices"][0]["text"]
