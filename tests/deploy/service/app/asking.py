"""Requests of the application tests, and parsing of the responses."""

import json

TOKEN = "a-token-of-this-test"
OTHER = "another-token-of-this-test"
ASK = {"prompt": "2 + 3", "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "2 + 3"}], "seed": 1}
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def events_of(response):
    """Return the objects of an event stream, and whether it ended with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"], lines[-1] == "[DONE]"


def assert_error(response, status, code=None):
    """Assert an OpenAI error object that reveals nothing of the server."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    assert "Traceback" not in response.text
    if code is not None:
        assert error["code"] == code
    return error
