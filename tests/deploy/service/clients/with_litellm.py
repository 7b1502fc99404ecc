"""litellm against the service: `python with_litellm.py URL [tries_again]`, key in OPENAI_API_KEY.

Prints JSON.
"""

import asyncio
import json
import sys

import litellm

URL = sys.argv[1]
MESSAGES = [{"role": "user", "content": "2 + 3"}]
CHAT = {"model": "openai/policy", "api_base": f"{URL}/v1", "messages": MESSAGES, "seed": 1, "temperature": 1}
TEXT = {"model": "text-completion-openai/policy", "api_base": f"{URL}/v1", "prompt": "2 + 3", "seed": 1}


def chat():
    answer = litellm.completion(**CHAT, n=2, max_tokens=12)
    return {
        "texts": [choice.message.content for choice in answer.choices],
        "finish_reasons": [choice.finish_reason for choice in answer.choices],
        "usage": answer.usage.total_tokens - answer.usage.prompt_tokens - answer.usage.completion_tokens,
        "version": answer._hidden_params["additional_headers"]["llm_provider-x-policy-version"],
    }


def streamed():
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = litellm.completion(**CHAT)
    return {
        "text": text,
        "whole": whole.choices[0].message.content,
        "tokens": [chunks[-1].usage.completion_tokens, whole.usage.completion_tokens],
    }


async def all_at_once():
    answers = await asyncio.gather(*[litellm.acompletion(**CHAT | {"seed": seed % 2}) for seed in range(6)])
    texts = [answer.choices[0].message.content for answer in answers]
    stream = await litellm.acompletion(**CHAT | {"seed": 0}, stream=True)
    return {"texts": texts, "streamed": "".join([chunk.choices[0].delta.content or "" async for chunk in stream])}


def completions():
    answer = litellm.text_completion(**TEXT, max_tokens=5)
    return {"text": answer.choices[0].text, "tokens": answer.usage.completion_tokens}


def refused(**change):
    try:
        litellm.completion(**CHAT | change, num_retries=0)
    except Exception as error:
        return {"error": type(error).__name__, "status": error.status_code, "message": str(error)}
    return {"error": None}


def tries_again():
    return {"text": litellm.completion(**CHAT, num_retries=3).choices[0].message.content}


def everything():
    return {
        "chat": chat(),
        "streamed": streamed(),
        "all_at_once": asyncio.run(all_at_once()),
        "completions": completions(),
        "diffusion": dict(litellm.completion(**CHAT, extra_body={"diffusion": {"steps": 2}}).usage.diffusion),
        "no_model": refused(model="openai/gpt-5"),
        "top_logprobs": refused(logprobs=True, top_logprobs=2),
        "no_key": refused(api_key="a-wrong-key-of-this-test"),
    }


if __name__ == "__main__":
    # litellm prints advice to stdout: our output is the last line.
    said = tries_again() if sys.argv[2:] == ["tries_again"] else everything()
    sys.stdout.write(json.dumps(said) + "\n")
