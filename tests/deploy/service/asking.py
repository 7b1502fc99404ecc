"""HTTP requests to a service, also from threads."""

import json
import threading
import time
import urllib.error
import urllib.request

from benchmarks.service.deployment import KEY

TOKEN = KEY
_TIMEOUT_S = 240.0
"""Longer than a slow machine takes to replace an engine, for which requests wait."""
ASK = {"prompt": "2 + 3", "seed": 1, "temperature": 1.0}


def call(url, body=None, token=TOKEN):
    """Return status and JSON of one request."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def is_up(url):
    """Whether the service there is ready."""
    try:
        return call(f"{url}/health/ready")[0] == 200
    except (OSError, ValueError):
        # Serve's proxy answers with plain text before the application is deployed.
        return False


def wait_until(condition, what, timeout_s=180):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


class Asker:
    """Threads that send requests continuously, with pauses that leave CPU time on a small machine."""

    def __init__(self, url, num_threads, ask=ASK, pause_s=0.1):
        self._pause_s = pause_s
        self.answers, self.longest_s, self._done = [], 0.0, threading.Event()
        self._url, self._body = url, ask
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self):
        while not self._done.wait(self._pause_s):
            began = time.monotonic()
            try:
                self.answers.append(call(f"{self._url}/v1/completions", self._body))
            except Exception as error:
                self.answers.append((type(error).__name__, {"error": str(error)}))
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def stop(self):
        self._done.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
