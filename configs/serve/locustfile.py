"""Load by locust (PyPI): whole answers and streams, chats and completions.

    pip install locust
    locust -f configs/serve/locustfile.py --headless --users 8 --run-time 1m \
        --host http://127.0.0.1:8000

The model's name is asked for; tokens of a text and a key come from DCUT_TOKENS (32) and
DCUT_API_KEY. Of a stream the time to its first line is reported apart.
"""

import os
import time

from locust import HttpUser, task

TOKENS = int(os.environ.get("DCUT_TOKENS", "32"))
PROMPT = "Why is the sky blue?"


class Client(HttpUser):
    """Asks one question after the other."""

    def on_start(self):
        if key := os.environ.get("DCUT_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"
        models = self.client.get("/v1/models").json()["data"]
        self.common = {"model": models[0]["id"], "max_tokens": TOKENS}
        self.chat = {"messages": [{"role": "user", "content": PROMPT}]}

    @task
    def whole_chat(self):
        body = self.common | self.chat
        path = "/v1/chat/completions"
        with self.client.post(path, json=body, catch_response=True) as answer:
            if answer.status_code == 200:
                used = answer.json()["usage"]["completion_tokens"]
                if not 0 < used <= TOKENS:
                    answer.failure(f"{used} tokens, of {TOKENS} at most")

    @task
    def streamed_chat(self):
        self._stream("/v1/chat/completions", self.common | self.chat)

    @task
    def streamed_completion(self):
        self._stream("/v1/completions", self.common | {"prompt": PROMPT})

    def _stream(self, path, body):
        begun, last = time.perf_counter(), ""
        with self.client.post(
            path,
            json=body | {"stream": True},
            name=f"{path} (stream)",
            stream=True,
            catch_response=True,
        ) as answer:
            if answer.status_code != 200:
                return
            for line in answer.iter_lines(decode_unicode=True):
                if line and not last:
                    self.environment.events.request.fire(
                        request_type="FIRST",
                        name=f"{path} (first line)",
                        response_time=(time.perf_counter() - begun) * 1e3,
                        response_length=len(line),
                        exception=None,
                        context={},
                    )
                last = line or last
            if last != "data: [DONE]":
                answer.failure(f"a stream that ends with {last!r}")
