"""lm-evaluation-harness against the service: `python with_lm_eval.py URL DOCS TOKENIZER`.

The key is in OPENAI_API_KEY. DOCS is a JSONL file of `question` and `target`, TOKENIZER the policy's directory.
Prints JSON.
"""

import json
import sys

import lm_eval
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

URL, DOCS, TOKENIZER = sys.argv[1:]
DATA = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": DOCS}}, "test_split": "test"}
GENERATES = {
    "task": "sums",
    **DATA,
    "output_type": "generate_until",
    "doc_to_text": "question",
    "doc_to_target": "target",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
CHOOSES = {
    "task": "sums_by_choice",
    **DATA,
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": ["1", "2"],
    "doc_to_target": 0,
}


def evaluate(model, path, task, **more):
    evaluated = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": "policy", "base_url": URL + path, "max_retries": 1} | more,
        tasks=[ConfigurableTask(config=task)],
        # Loading all of the harness's own tasks takes long.
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
    )
    name = task["task"]
    return {
        "exact_match": evaluated["results"][name]["exact_match,none"],
        "answers": [sample["resps"][0][0] for sample in evaluated["samples"][name]],
    }


def completions(task=GENERATES, **more):
    return evaluate("local-completions", "/v1/completions", task, **more)


def failure(**more):
    try:
        return completions(CHOOSES, **more)
    except Exception as error:
        return {"error": type(error).__name__, "status": getattr(error, "status", None)}


def everything():
    text = {"tokenizer_backend": None}
    ids = {"tokenizer_backend": "huggingface", "tokenizer": TOKENIZER, "max_length": 64}
    return {
        "text": completions(**text, batch_size=2, num_concurrent=2),
        "ids": completions(**ids, max_gen_toks=12),
        "chat": evaluate("local-chat-completions", "/v1/chat/completions", GENERATES, **text, num_concurrent=3),
        "loglikelihood": failure(**ids, num_concurrent=2),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(everything()) + "\n")
