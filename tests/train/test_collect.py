"""From prompts to a dataset: order, resumption, and features that are the target's."""

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import ConfigError
from dcut_jax.models.dense import forward_sequences, head_VE, logits
from dcut_jax.prompts import PromptError
from dcut_jax.train import __main__ as command
from dcut_jax.train import collect
from dcut_jax.train.data import Dataset, DatasetError
from dcut_jax.weights.load import Target

TEXTS = [f"{start} {stride}" for start in range(3, 8) for stride in (1, 3)]


@pytest.fixture
def tiny(target, tokenizer, monkeypatch):
    cfg, params = target
    made = Target(cfg, params, tokenizer, "tiny", "identity")
    monkeypatch.setattr(command, "load_target", lambda source, dtype: made)
    return made


@pytest.fixture
def no_target(monkeypatch):
    def load(*args):
        raise AssertionError("loaded a target before refusing")

    monkeypatch.setattr(command, "load_target", load)


def prompt_file(path, texts):
    path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    return str(path)


def collect_data(prompts, out, *more):
    flags = "--slots 4 --max-length 32 --max-new-tokens 6 --taps 3".split()
    return command.main(["data", prompts, "--out", str(out), *flags, *more])


@pytest.mark.slow
def test_data_from_prompts_and_again_after_a_kill(tiny, tmp_path):
    out = tmp_path / "data"
    some = prompt_file(tmp_path / "some.jsonl", TEXTS[:4])
    every = prompt_file(tmp_path / "every.jsonl", TEXTS)
    assert collect_data(some, out) == 0
    responses = out / "responses.jsonl"
    before = responses.read_text()
    assert len(before.splitlines()) == 4
    responses.write_text(before + '{"source": "every", "pro')
    assert collect_data(every, out) == 0

    assert responses.read_text().startswith(before)
    lines = collect.read_responses(responses)
    want = {tuple(tiny.text().chat([{"content": t}])) for t in TEXTS}
    assert len(lines) == len(TEXTS)
    assert {tuple(line["prompt"]) for line in lines} == want
    data = Dataset.open(out)
    assert len(data) == len(lines)
    assert data.manifest["taps"] == [1, 2, 3]

    assert {line["target"] for line in lines} == {"identity"}
    assert data.manifest.keys() == command.RESERVED

    # Greedy answers, and features of the same documents, in the order of the lines.
    @jax.jit
    def read(token_NS):
        valid_NS = jnp.ones(token_NS.shape, bool)
        rows = forward_sequences(tiny.params, tiny.cfg, token_NS, valid_NS, (1, 2, 3))
        read_of = jnp.concatenate([rows.taps, rows.hidden], -1)
        return jnp.argmax(logits(rows.hidden, head_VE(tiny.params)), -1), read_of

    token_NS = np.zeros((len(lines), 16), np.int32)
    for n, line in enumerate(lines):
        document = line["prompt"] + line["response"]
        np.testing.assert_array_equal(data.document(n).tokens, document)
        token_NS[n, : len(document)] = document
    argmax_NS, taps_NSC = map(np.asarray, read(token_NS))
    for n, line in enumerate(lines):
        document = data.document(n)
        first, size = document.prompt_len, len(document.tokens)
        assert first == len(line["prompt"]) == 8
        assert argmax_NS[n, first - 1 : size - 1].tolist() == line["response"]
        got = np.asarray(document.features, np.float32)
        error = np.linalg.norm(got - taps_NSC[n, :size])
        assert error < 0.02 * np.linalg.norm(taps_NSC[n, :size])

    # Nothing is left to do, and another dataset is refused before any answer.
    files = {p.name: p.read_bytes() for p in out.iterdir()}
    collect_data(every, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == files
    with pytest.raises(DatasetError, match="differs in licence"):
        collect_data(every, out, "--about", '{"licence": "MIT"}')
    for flag, value in [("dtype", "bfloat16"), ("max-length", 33)]:
        with pytest.raises(DatasetError, match=f"differs in {flag.replace('-', '_')}"):
            collect_data(every, out, f"--{flag}", str(value))
    with pytest.raises(DatasetError, match=r"max_new_tokens \(6 there, 5 here\)"):
        collect_data(every, out, "--max-new-tokens", "5")
    assert responses.read_bytes() == files["responses.jsonl"]


def test_a_missing_prompt_file_leaves_nothing_behind(tiny, tmp_path):
    out = tmp_path / "data"
    with pytest.raises(PromptError, match=r"no-such.*found nothing there"):
        collect_data(str(tmp_path / "no-such.jsonl"), out)
    assert not out.exists()


def test_prompts_are_deduplicated_and_shuffled_by_seed(tmp_path):
    prompt_file(tmp_path / "a.jsonl", TEXTS)
    prompt_file(tmp_path / "b.jsonl", ["new", *TEXTS])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    prompts = collect.read_prompts(paths, seed=1)

    def texts(source):
        return [p.messages[0]["content"] for p in prompts if p.source in source]

    assert sorted(texts("ab")) == sorted(["new", *TEXTS])
    assert texts("b") == ["new"]
    assert prompts == collect.read_prompts(paths, seed=1)
    assert prompts != collect.read_prompts(paths, seed=2)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 5}'])
def test_broken_prompts_are_named(no_target, tmp_path, line):
    path = tmp_path / "broken.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    for argv in (["respond"], ["data", "--no-features"]):
        with pytest.raises(PromptError, match=r"broken\.jsonl:2: expected .*; "):
            command.main([*argv, str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


BROKEN = ["{", "[]", "{}", '{"prompt": [1], "response": ["a"]}']


@pytest.mark.parametrize("line", BROKEN)
def test_broken_responses_are_named(tmp_path, line):
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps({"prompt": [1], "response": [2]}) + f"\n{line}\n")
    with pytest.raises(DatasetError, match=r"broken\.jsonl:2: expected a JSON object"):
        collect.read_responses(path)


@pytest.mark.parametrize("token", [-1, 101])
def test_answers_of_another_tokenizer(tiny, tmp_path, token):
    fine, beyond = ({"prompt": [1, 100], "response": [t]} for t in (2, token))
    path = response_file(tmp_path / "old.jsonl", fine, beyond)
    message = rf"old\.jsonl:2: expected tokens .* 0 to 100, found {token};.*tokenizer"
    with pytest.raises(DatasetError, match=message):
        command.main(["features", str(path), str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()


def test_more_taps_than_layers(tiny, tmp_path):
    some = prompt_file(tmp_path / "some.jsonl", TEXTS[:1])
    with pytest.raises(ConfigError, match="taps 4: expected at most 3, .* 6 layers"):
        collect_data(some, tmp_path / "data", "--taps", "4")
    assert not (tmp_path / "data").exists()


def test_prompts_that_are_too_long_are_left_out_and_counted(
    tiny, tmp_path, capsys, monkeypatch
):
    some = prompt_file(tmp_path / "some.jsonl", TEXTS[:2])
    prompts = collect.read_prompts([Path(some)], 0)
    options = {"slots": 4, "max_new_tokens": 6, "max_length": 13}
    seen = []
    out = tmp_path / "responses.jsonl"
    progress = {"on_progress": lambda *p: seen.append(p)}
    assert collect.respond(tiny, prompts, out, **options, **progress) == 2
    assert collect.read_responses(out) == []
    assert seen[-1] == (2, 2)

    monkeypatch.setattr(collect, "respond", lambda *_, **__: 2)
    flags = ["--max-length", "13", "--max-new-tokens", "6"]
    command.main(["respond", some, "--out", str(out), *flags])
    assert "left out 2 prompts longer than 7 tokens" in capsys.readouterr().out


def response_file(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


OLD = {"prompt": [1, 2], "response": [3]}
OURS, THEIRS = OLD | {"target": "identity"}, OLD | {"target": "other"}


def test_answers_of_different_targets_are_not_mixed(tiny, tmp_path):
    path = response_file(tmp_path / "responses.jsonl", OLD, OURS)
    assert collect.read_responses(path, tiny) == [OLD, OURS]
    assert collect.read_responses(path) == [OLD, OURS]
    response_file(path, OLD, THEIRS)
    before = path.read_bytes()
    data = tmp_path / "data"
    some = prompt_file(tmp_path / "some.jsonl", TEXTS[:1])
    for argv in (["respond", some, "--out", path], ["features", path, data]):
        message = r"responses\.jsonl:2: expected answers of target identity, .* other"
        with pytest.raises(DatasetError, match=message):
            command.main([str(word) for word in argv])
    assert path.read_bytes() == before
    assert not data.exists()


def test_packed_responses(tiny, tmp_path):
    path = tmp_path / "responses.jsonl.gz"
    text = "".join(json.dumps(line) + "\n" for line in (OLD, OURS))
    path.write_bytes(gzip.compress(text.encode()))
    assert collect.read_responses(path) == [OLD, OURS]
    options = {"slots": 4, "max_new_tokens": 6, "max_length": 32}
    with pytest.raises(DatasetError, match="is compressed.*unpack it"):
        collect.respond(tiny, [], path, **options)
    whole = path.read_bytes()
    for broken in (whole[:-9], b"no gzip", whole[:20] + b"\xff" * 20 + whole[40:]):
        path.write_bytes(broken)
        with pytest.raises(DatasetError, match=r"responses\.jsonl\.gz is damaged"):
            collect.read_responses(path)


def test_features_of_responses_that_are_not_there(tiny, tmp_path):
    data = tmp_path / "data"
    with pytest.raises(DatasetError, match=r"typo\.jsonl does not exist; .* respond"):
        command.main(["features", str(tmp_path / "typo.jsonl"), str(data)])
    empty = response_file(tmp_path / "empty.jsonl")
    with pytest.raises(DatasetError, match=r"empty\.jsonl has no responses"):
        command.main(["features", str(empty), str(data)])
    assert not data.exists()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            '{"target": "mine", "dtype": "int8", "licence": "MIT"}',
            "names dtype, target,",
        ),
        ("[1]", r"expected a JSON object, found '\[1\]'"),
        ("licence", "expected a JSON object, found 'licence'"),
    ],
)
def test_about_says_nothing_of_what_the_manifest_says_itself(tmp_path, about, message):
    out = tmp_path / "data"
    some = prompt_file(tmp_path / "some.jsonl", TEXTS[:1])
    with pytest.raises(DatasetError, match=f"--about:? {message}"):
        collect_data(some, out, "--about", about)
    with pytest.raises(DatasetError, match=f"--about:? {message}"):
        command.main(["features", some, str(out), "--about", about])
    assert not out.exists()


def test_taps_of_features_that_are_not_stored_are_refused(tiny, tmp_path):
    some, out = prompt_file(tmp_path / "some.jsonl", TEXTS[:1]), tmp_path / "data"
    with pytest.raises(DatasetError, match="--taps 3 .* leave one of them out"):
        collect_data(some, out, "--no-features")


def test_tokens_alone_make_a_dataset_without_features(tiny, tmp_path):
    some, out = prompt_file(tmp_path / "some.jsonl", TEXTS[:2]), tmp_path / "data"
    command.main(
        ["data", some, "--out", str(out), "--no-features"]
        + "--slots 4 --max-length 32 --max-new-tokens 6".split()
    )
    data = Dataset.open(out)
    assert len(data) == 2
    assert data.features is None
