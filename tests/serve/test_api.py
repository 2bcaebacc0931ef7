"""The API as its clients use it."""

import json
import subprocess
import threading

import httpx
import openai
import pytest

from dcut_jax.engine.requests import Request
from dcut_jax.stops import StopStrings

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS = [CHAT, COMPLETION]


@pytest.fixture(scope="module")
def live(serve, engine, text):
    """One server for all of this file: none of its tests changes it."""
    running = serve(engine, text)
    yield running
    running.settle()
    running.stop()


def events(response):
    """What a stream of server-sent events held."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class TestText:
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_a_completion_is_what_plain_decoding_gives(
        self, live, plain, text, temperature
    ):
        got = live.post(
            prompt="abc abc", max_tokens=30, temperature=temperature, seed=5
        )
        request = Request(
            tuple(text.encode("abc abc")), 30, (100,), temperature, seed=5
        )
        want = plain(request)
        body = got.json()
        assert body["choices"][0]["text"] == text.decode(want.tokens)
        assert body["choices"][0]["finish_reason"] == want.finish
        usage = body["usage"]
        assert usage["completion_tokens"] == len(want.tokens)
        assert usage["prompt_tokens"] == 7 - 2  # "ab" is one token
        assert usage["total_tokens"] == len(want.tokens) + 5

    def test_a_chat_goes_through_the_template(self, live, plain, text):
        messages = [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "hel"}] * 2},
        ]
        got = live.post(CHAT, messages=messages, max_tokens=20, temperature=0).json()
        ids = text.encode("system: be kind|user: helhel|assistant:")
        want = plain(Request(tuple(ids), 20, (100,)))
        message = got["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert message["content"] == text.decode(want.tokens)

    def test_without_a_limit_a_chat_fills_the_context(self, live, helpers):
        usage = live.post(CHAT, temperature=0, ignore_eos=True).json()["usage"]
        assert usage["total_tokens"] == helpers.MAX_LENGTH

    @pytest.mark.parametrize("seed", [9, -1])
    def test_choices_have_seeds_of_their_own(self, live, plain, text, seed):
        got = live.post(prompt=[[5, 6], [3, 4]], n=2, seed=seed, max_tokens=12).json()
        want = [
            plain(Request(ids, 12, (100,), 1.0, seed=seed + i))
            for ids in ((5, 6), (3, 4))
            for i in range(2)
        ]
        assert [c["index"] for c in got["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in got["choices"]] == [
            text.decode(w.tokens) for w in want
        ]

    def test_stop_strings(self, live, plain, text):
        whole = live.post(prompt="ab", max_tokens=40, temperature=0).json()
        whole = whole["choices"][0]["text"]
        stop = max(whole[5:].split("\ufffd"), key=len)[1:4]
        assert len(stop) == 3
        cut = whole[: whole.index(stop)]
        for body in ({"stop": stop}, {"stop": [stop, "never there"]}):
            got = live.post(prompt="ab", max_tokens=40, temperature=0, **body).json()
            assert got["choices"][0]["text"] == cut
            assert got["choices"][0]["finish_reason"] == "stop"
        halt = StopStrings(text, [stop])
        want = plain(Request(tuple(text.encode("ab")), 40, (100,), halt=halt))
        assert halt.cut(text.decode(want.tokens)) == cut

    @pytest.mark.parametrize("path", PATHS)
    def test_a_stream_joins_to_the_whole(self, live, path):
        body = {"max_tokens": 40, "seed": 3, "n": 2, "stop": ["q"]}
        whole = live.post(path, **body).json()
        got = events(
            live.post(path, stream=True, stream_options={"include_usage": True}, **body)
        )
        # How many drafts were accepted depends on the steps, which the text does not.
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert got[-1]["usage"][name] == whole["usage"][name]
        assert got[-1]["choices"] == []
        for index, choice in enumerate(whole["choices"]):
            mine = [c for e in got for c in e["choices"] if c["index"] == index]
            reasons = [c["finish_reason"] for c in mine if c["finish_reason"]]
            assert reasons == [choice["finish_reason"]]
            if path == CHAT:
                assert mine[0]["delta"]["role"] == "assistant"
                joined = "".join(c["delta"].get("content", "") for c in mine)
                assert joined == choice["message"]["content"]
            else:
                assert "".join(c["text"] for c in mine) == choice["text"]


class TestDetails:
    def test_log_probabilities(self, live, plain, text):
        want = plain(Request(tuple(text.encode("ab")), 9, (100,)))
        got = live.post(prompt="ab", max_tokens=9, temperature=0, logprobs=1).json()
        found = got["choices"][0]["logprobs"]
        assert found["token_logprobs"] == pytest.approx(want.logprobs, abs=1e-4)
        assert found["tokens"] == [text.decode([t]) for t in want.tokens]
        assert found["top_logprobs"][0] == {
            found["tokens"][0]: found["token_logprobs"][0]
        }
        assert found["text_offset"][0] == 0
        chat = live.post(CHAT, max_tokens=4, logprobs=True).json()["choices"][0]
        assert len(chat["logprobs"]["content"]) == 4
        assert all(e["logprob"] <= 0 for e in chat["logprobs"]["content"])

    def test_the_likeliest_tokens(self, live, plain, text):
        request = Request(tuple(text.encode("ab")), 6, temperature=0.9, seed=4)
        want = plain(request).likeliest
        heat = {"temperature": 0.9, "seed": 4, "ignore_eos": True, "max_tokens": 6}
        got = live.post(prompt="ab", logprobs=2, **heat).json()["choices"][0]
        found = got["logprobs"]
        for told, token, logp, some in zip(
            found["top_logprobs"],
            found["tokens"],
            found["token_logprobs"],
            want,
            strict=True,
        ):
            expected = {text.decode([t], keep_special=True): p for t, p in some}
            assert told == pytest.approx(expected | {token: logp}, abs=1e-4)
        asked = {"logprobs": True, "top_logprobs": 2}
        chat = live.post(CHAT, **asked, **heat).json()["choices"][0]["logprobs"]
        for entry in chat["content"]:
            first, second = entry["top_logprobs"]
            assert first["logprob"] >= second["logprob"]
            assert first["logprob"] >= entry["logprob"]

    def test_how_tokens_came(self, live):
        got = live.post(
            prompt="ab", max_tokens=60, temperature=0, return_origins=True
        ).json()
        choice = got["choices"][0]
        assert "".join(p["text"] for p in choice["origins"]) == choice["text"]
        drafts = sum(p["origin"] == "draft" for p in choice["origins"])
        details = got["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] >= drafts > 0
        assert details["rejected_prediction_tokens"] >= 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "param", "code"),
        [
            (COMPLETION, {"nonsense": 1}, "nonsense", "unknown_parameter"),
            (CHAT, {"prompt": "a"}, "prompt", "unknown_parameter"),
            (COMPLETION, {"max_tokens": "9"}, "max_tokens", "invalid_type"),
            (COMPLETION, {"max_tokens": True}, "max_tokens", "invalid_type"),
            (COMPLETION, {"max_tokens": 0}, "max_tokens", "invalid_value"),
            (COMPLETION, {"temperature": 3}, "temperature", "invalid_value"),
            (COMPLETION, {"prompt": ""}, "prompt", "invalid_value"),
            (COMPLETION, {"prompt": []}, "prompt", "invalid_value"),
            (COMPLETION, {"prompt": [101]}, None, "invalid_value"),
            (COMPLETION, {"prompt": {}}, "prompt", "invalid_type"),
            (COMPLETION, {"prompt": "\ud800"}, "prompt", "invalid_unicode"),
            (COMPLETION, {"prompt": "x" * 300}, "prompt", "context_length_exceeded"),
            (COMPLETION, {"max_tokens": 999}, "prompt", "context_length_exceeded"),
            (COMPLETION, {"stop": [""]}, "stop[0]", "invalid_value"),
            (COMPLETION, {"stop": ["\ufffd"]}, "stop", "invalid_value"),
            (COMPLETION, {"stop": ["a"] * 5}, "stop", "invalid_value"),
            (COMPLETION, {"n": 17}, "n", "invalid_value"),
            (COMPLETION, {"echo": True}, "echo", "unsupported_parameter"),
            (COMPLETION, {"logprobs": 3}, "logprobs", "unsupported_parameter"),
            (COMPLETION, {"logprobs": 6}, "logprobs", "invalid_value"),
            (COMPLETION, {"stream_options": {}}, None, None),
            (CHAT, {"messages": []}, "messages", "invalid_value"),
            (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", None),
            (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, None, None),
            (CHAT, {"tools": [{"type": "function"}]}, "tools", None),
            (CHAT, {"response_format": {"type": "json_object"}}, None, None),
            (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty", None),
            (CHAT, {"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
            (CHAT, {"top_logprobs": 1}, "top_logprobs", "invalid_value"),
            (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", None),
            (CHAT, {"seed": 2**40}, "seed", "invalid_value"),
            (CHAT, {"metadata": {"\ud800": 1}}, None, "invalid_type"),
            (CHAT, {"metadata": {"\ud800": "\ud800"}}, None, "invalid_unicode"),
        ],
    )
    def test_a_field_that_cannot_be(self, live, path, body, param, code):
        got = live.post(path, **body)
        if body == {"stream_options": {}}:
            assert got.status_code == 200  # nothing is asked for
            return
        error = got.json()["error"]
        assert got.status_code == 400, error
        assert error["type"] == "invalid_request_error"
        assert param is None or error["param"] == param
        assert code is None or error["code"] == code
        assert error["message"]

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b'{"a": NaN}', b"\xff\xfe", b"[" * 100_000],
    )
    @pytest.mark.parametrize("path", PATHS)
    def test_a_body_that_is_no_request(self, live, path, body):
        headers = {"content-type": "application/json"}
        got = live.http.post(path, content=body, headers=headers)
        assert got.status_code == 400
        assert got.json()["error"]["message"]

    def test_another_model(self, live):
        got = live.post(model="gpt-4")
        assert got.status_code == 404
        assert got.json()["error"]["code"] == "model_not_found"

    def test_what_is_not_said_to_be_json(self, live):
        got = live.http.post(COMPLETION, content=b"{}")
        assert got.status_code == 415

    def test_too_long_a_body(self, live):
        for body in (b"x" * (2 << 20), iter([b"x" * (1 << 19)] * 4)):
            headers = {"content-type": "application/json"}
            got = live.http.post(COMPLETION, content=body, headers=headers)
            assert got.status_code == 413

    def test_nowhere(self, live):
        assert live.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
        assert live.http.get(CHAT).status_code == 405

    def test_harmless_fields_are_taken(self, live):
        body = {
            "user": "me",
            "metadata": {"a": "b"},
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": None,
            "temperature": None,
        }
        assert live.post(**body, max_tokens=1).status_code == 200


class TestLooking:
    def test_models(self, live, helpers):
        found = live.http.get("/v1/models").json()["data"]
        assert [m["id"] for m in found] == [helpers.NAME]
        assert live.http.get(f"/v1/models/{helpers.NAME}").json() == found[0]
        assert live.http.get("/v1/models/other").status_code == 404

    def test_health(self, live):
        assert live.http.get("/health").json() == {"status": "ok"}
        assert live.http.get("/ready").json() == {"status": "ready"}

    def test_metrics_count_what_was_done(self, live):
        def read():
            text = live.http.get("/metrics").text
            lines = [x.rsplit(" ", 1) for x in text.splitlines() if x[0] != "#"]
            return {name: float(value) for name, value in lines}

        before = read()
        assert live.post(max_tokens="no").status_code == 400
        live.post(prompt="abab", max_tokens=50, ignore_eos=True, temperature=0)
        live.shown()
        after = read()

        def more(name):
            return after.get(name, 0) - before.get(name, 0)

        origins = ("plain", "draft", "bonus")
        got = sum(more(f'dcut_tokens_total{{origin="{o}"}}') for o in origins)
        assert got == 50
        assert more("dcut_prompt_tokens_total") == 2
        assert more('dcut_texts_total{end="length"}') == 1
        answers = 'dcut_http_responses_total{code="%s",path="/v1/completions"}'
        assert [more(answers % code) for code in (200, 400, 500)] == [1, 1, 0]
        assert after["dcut_slots"] == 3
        assert after["dcut_slots_used"] == after["dcut_queue_length"] == 0
        assert 1 <= after["dcut_mean_accepted_length"] <= 8
        worst = after['dcut_tpot_ms{quantile="0.99"}']
        assert 0 < after["dcut_keep_share"] <= 1
        assert 0 < after["dcut_mean_width"] <= 7
        assert after["dcut_tokens_per_second"] >= 0
        assert 0 < after['dcut_tpot_ms{quantile="0.50"}'] <= worst
        steps = sum(v for k, v in after.items() if k.startswith("dcut_steps_total"))
        tiers = sum(v for k, v in after.items() if k.startswith("dcut_tier_steps_t"))
        assert steps == tiers > 0

    def test_the_page_and_its_data(self, live):
        page = live.http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        data = live.http.get("/live").json()
        assert data["slots"] == 3
        assert len(data["survival"]) == 15 or len(data["survival"]) == 7
        assert data["costs"]["tiers"]


class TestClients:
    """What people have already."""

    @pytest.fixture
    def client(self, live):
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x") as found:
            yield found

    def test_openai(self, client, live, helpers):
        assert [m.id for m in client.models.list()] == [helpers.NAME]
        body = {"model": helpers.NAME, "max_tokens": 12, "seed": 4}
        talk = [{"role": "user", "content": "ab"}]
        whole = client.chat.completions.create(messages=talk, **body)
        stream = client.chat.completions.create(
            messages=talk,
            stream=True,
            stream_options={"include_usage": True},
            **body,
        )
        pieces = list(stream)
        said = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert said == whole.choices[0].message.content
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
        # An answer goes back as it came.
        talk += [whole.choices[0].message, {"role": "user", "content": "ab"}]
        again = client.chat.completions.create(messages=talk, **body)
        assert again.usage.prompt_tokens > whole.usage.prompt_tokens
        text = client.completions.create(prompt="ab", stream=True, **body)
        assert "".join(p.choices[0].text for p in text)
        details = whole.usage.completion_tokens_details
        assert details.accepted_prediction_tokens >= 0

    def test_openai_tells_of_errors(self, client, helpers):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=helpers.NAME, prompt="a", suffix="b")
        assert caught.value.param == "suffix"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")

    def test_curl(self, live, helpers):
        def curl(*words):
            command = ["curl", "-sS", "--noproxy", "*", *words]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            return done.stdout

        body = {"model": helpers.NAME, "prompt": "ab", "max_tokens": 5, "seed": 1}
        json_ = ("-H", "Content-Type: application/json", "-d")
        whole = json.loads(curl(f"{live.url}{COMPLETION}", *json_, json.dumps(body)))
        body["stream"] = True
        out = curl("-N", f"{live.url}{COMPLETION}", *json_, json.dumps(body))
        lines = [x.removeprefix("data: ") for x in out.splitlines() if x]
        assert lines.pop() == "[DONE]"
        said = "".join(json.loads(x)["choices"][0]["text"] for x in lines)
        assert said == whole["choices"][0]["text"]


LONG = "abcd fgh" * 18  # of 126 tokens: what follows goes over the end of a page


def mixed(i):
    """A path, and a body: everything that shapes a text, in ever other combinations."""
    prompt = "abcdefgh ijkl"[: 1 + i % 13] * (1 + i % 3)
    body = {
        "model": "tiny",
        "max_tokens": 1 + i % 23,
        "temperature": [0, 0.7, 1.0][i % 3],
        "top_p": [1, 0.8][i % 2],
        "seed": i % 29,
        "stream": i % 4 == 0,
        "n": 1 + (i % 9 == 1),
        "stop": ["m", "k"] if i % 6 == 0 else None,
        "logprobs": 2 if i % 7 == 0 else None,
    }
    if i % 10 == 3:
        prompt = LONG + prompt[:9]
    if i % 8 == 5:
        said = [{"role": "user", "content": prompt}]
        return CHAT, {**body, "messages": said, "logprobs": i % 7 == 0}
    return COMPLETION, {**body, "prompt": prompt}


def texts_of(path, body, got):
    """Of each choice."""
    texts = [""] * body["n"]
    if not body["stream"]:
        for choice in got.json()["choices"]:
            said = choice["message"]["content"] if path == CHAT else choice["text"]
            texts[choice["index"]] = said
        return texts
    for choice in (c for e in events(got) for c in e["choices"]):
        piece = choice["delta"].get("content") if path == CHAT else choice["text"]
        texts[choice["index"]] += piece or ""
    return texts


def test_two_hundred_mixed_requests_have_the_text_of_plain_decoding(live, plain, text):
    asked = [mixed(i) for i in range(200)]
    found = [None] * len(asked)
    known = live.engine.found_tokens

    def work(first):
        with httpx.Client(base_url=live.url, timeout=300) as http:
            for i in range(first, len(asked), 16):
                path, body = asked[i]
                found[i] = texts_of(path, body, http.post(path, json=body))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stopped = 0
    for (path, body), got in zip(asked, found, strict=True):
        prompt = body.get("prompt")
        if path == CHAT:
            prompt = f"user: {body['messages'][0]['content']}|assistant:"
        halt = StopStrings(text, body["stop"]) if body["stop"] else None
        for n, said in enumerate(got):
            request = Request(
                tuple(text.encode(prompt)),
                body["max_tokens"],
                (100,),
                body["temperature"],
                top_p=body["top_p"],
                seed=body["seed"] + n,
                halt=halt,
            )
            want = text.decode(plain(request).tokens)
            assert said == (halt.cut(want) if halt else want), body
            stopped += bool(halt) and halt.cut(want) != want
    assert stopped > 5
    assert live.engine.found_tokens > known
