"""Shipped prompts are complete and licensed; a file of one's own reads, or says why."""

import json
from collections import Counter

import pytest

from dcut_jax.prompts import DEFAULT, SETS, PromptError, load_prompts

WRAPPER = "Write a solution to the following problem and make sure that it passes"


@pytest.fixture
def write(tmp_path):
    """Writes lines (objects, or text as it is) to a file."""

    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        text = [x if isinstance(x, str) else json.dumps(x) for x in lines]
        path.write_text("".join(f"{x}\n" for x in text), encoding="utf-8")
        return path

    return write


def text(prompt):
    """What the user says in a prompt of one message."""
    [message] = prompt.messages
    assert message["role"] == "user"
    return message["content"]


class TestShipped:
    @pytest.mark.parametrize(
        ("name", "count", "license"),
        [
            ("gsm8k", 64, "MIT"),
            ("humaneval", 32, "MIT"),
            ("mt_bench", 32, "Apache-2.0"),
        ],
    )
    def test_sets(self, name, count, license):
        prompts = load_prompts(name)
        assert len(prompts) == count
        assert len({text(p) for p in prompts}) == count
        assert len({p.id for p in prompts}) == count
        assert {p.license for p in prompts} == {license}
        assert len({p.source for p in prompts}) == 1
        assert "@" in prompts[0].source

    def test_known_texts(self):
        assert text(load_prompts("gsm8k")[1]).startswith("A robe takes 2 bolts of blue")
        assert text(load_prompts("mt_bench")[0]).startswith(
            "Compose an engaging travel"
        )

    def test_humaneval_carries_the_published_wrapper(self):
        for prompt in load_prompts("humaneval"):
            head, fence, rest = text(prompt).partition("\n```python\n")
            assert head == f"{WRAPPER} the tests:"
            assert fence
            assert "def " in rest
            assert rest.endswith("\n```")
            assert rest.count("```") == 1

    def test_default_mixes_two_to_one_to_one(self):
        prompts = load_prompts(DEFAULT)
        origin = {p.id: name for name in SETS for p in load_prompts(name)}
        names = [origin[p.id] for p in prompts]
        assert Counter(names) == {"gsm8k": 64, "humaneval": 32, "mt_bench": 32}
        for start in range(0, len(names), 4):
            turn = Counter(names[start : start + 4])
            assert turn == {"gsm8k": 2, "humaneval": 1, "mt_bench": 1}
        assert len({p.id for p in prompts}) == len(prompts)

    def test_a_limit_takes_the_first(self):
        assert load_prompts(DEFAULT, 6) == load_prompts(DEFAULT)[:6]
        assert load_prompts("gsm8k", 1000) == load_prompts("gsm8k")


class TestOwnFile:
    def test_prompt_and_messages(self, write):
        talk = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why?", "name": "ada"},
        ]
        path = write(
            {"prompt": "Hello"},
            "",
            {"messages": talk, "prompt": "ignored", "id": 7, "license": "CC0-1.0"},
        )
        first, second = load_prompts(str(path))
        assert text(first) == "Hello"
        assert (first.source, first.license, first.id) == (f"{path}:1", "", "")
        assert [m["content"] for m in second.messages] == ["Be brief.", "Why?"]
        assert set(second.messages[1]) == {"role", "content"}
        assert (second.source, second.license, second.id) == (
            f"{path}:3",
            "CC0-1.0",
            "7",
        )

    def test_a_line_separator_inside_a_text_ends_no_line(self, write):
        [prompt] = load_prompts(write('{"prompt": "one\u2028two"}'))
        assert text(prompt) == "one\u2028two"

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ([], r"jsonl: expected a prompt on each line, found an empty file; add"),
            (["", "  "], "found an empty file"),
            (
                [{"prompt": "a"}, "", '{"prompt": "b"'],
                r"jsonl:3: expected a JSON object, found text that is not JSON \(.*"
                r"column 15\); correct or drop",
            ),
            (['"a"'], r"jsonl:1: expected a JSON object with `prompt` .*found str"),
            (
                [{"prompt": "a"}, {"text": "b", "id": 1}],
                r"jsonl:2: expected `prompt` or `messages`, found id, text; add",
            ),
            (["{}"], "found no field at all"),
            ([{"prompt": " "}], "found ' '; correct or drop"),
            ([{"prompt": 3}], "expected `prompt` to be a text.*found 3"),
            ([{"messages": []}], r"found \[\]"),
            ([{"messages": "hi"}], "found 'hi'"),
            ([{"messages": [{"role": "user"}]}], r"found \[\{'role': 'user'\}\]"),
            ([{"messages": ["x" * 99]}], r"found .{57}\.\.\.; correct"),
        ],
    )
    def test_a_bad_file_says_where_and_what(self, write, lines, message):
        with pytest.raises(PromptError, match=message):
            load_prompts(write(*lines))

    def test_nothing_there(self, tmp_path):
        with pytest.raises(PromptError, match="default, gsm8k.*found nothing there"):
            load_prompts("gsm9k")
        with pytest.raises(PromptError, match="found a directory"):
            load_prompts(tmp_path)

    def test_a_byte_order_mark_is_no_text(self, write):
        [prompt] = load_prompts(write('\ufeff{"prompt": "a"}'))
        assert text(prompt) == "a"

    def test_not_utf8(self, tmp_path):
        path = tmp_path / "latin.jsonl"
        path.write_bytes(b'{"prompt": "caf\xe9"}\n')
        with pytest.raises(PromptError, match=r"expected UTF-8 text, found byte 0xe9"):
            load_prompts(path)

    @pytest.mark.parametrize("limit", [0, -1])
    def test_no_prompts_wanted(self, limit):
        with pytest.raises(PromptError, match="at least 1 prompt, found"):
            load_prompts(DEFAULT, limit)
