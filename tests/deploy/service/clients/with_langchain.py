"""langchain-openai against the service: `python with_langchain.py URL`, key in OPENAI_API_KEY.

Prints JSON.
"""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

URL = sys.argv[1]
PROMPT = "2 + 3"


def model(**more):
    return ChatOpenAI(base_url=f"{URL}/v1", model="policy", seed=1, temperature=1, **more)


def chat():
    answer = model(max_tokens=12).invoke([("system", "Be brief."), ("human", PROMPT)])
    return {"text": answer.content, "usage": answer.usage_metadata, "metadata": answer.response_metadata}


def streamed():
    chunks = list(model().stream(PROMPT))
    return {
        "text": "".join(chunk.content for chunk in chunks),
        "whole": model().invoke(PROMPT).content,
        "finish_reason": [chunk.response_metadata.get("finish_reason") for chunk in chunks],
    }


async def asynchronously():
    answers = await model().abatch([PROMPT] * 3)
    text = "".join([chunk.content async for chunk in model().astream(PROMPT)])
    return {"texts": [answer.content for answer in answers], "streamed": text}


def completions():
    several = OpenAI(base_url=f"{URL}/v1", model="policy", seed=1, temperature=1, max_tokens=5)
    return {
        "texts": several.batch([PROMPT, "4"]),
        "streamed": "".join(several.stream(PROMPT)),
        "whole": several.invoke(PROMPT),
    }


def refused(ask):
    try:
        ask()
    except Exception as error:
        return {"error": type(error).__name__, "status": error.status_code, "message": str(error)}
    return {"error": None}


def everything():
    tools = model(max_retries=0).bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    return {
        "chat": chat(),
        "streamed": streamed(),
        "asynchronously": asyncio.run(asynchronously()),
        "completions": completions(),
        "diffusion": model(extra_body={"diffusion": {"steps": 2}}).invoke(PROMPT).response_metadata,
        "tools": refused(lambda: tools.invoke(PROMPT)),
        "no_key": refused(lambda: model(max_retries=0, api_key="a-wrong-key-of-this-test").invoke(PROMPT)),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(everything()) + "\n")
