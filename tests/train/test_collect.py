"""From prompts to a dataset: order, resumption, and features that are the target's."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models.dense import forward_sequences, head_VE, logits
from dcut_jax.train import __main__ as command
from dcut_jax.train import collect
from dcut_jax.train.data import Dataset, DatasetError
from dcut_jax.weights.load import Target

TEXTS = [f"{start} {stride}" for start in range(3, 8) for stride in (1, 3)]


class Progressions:
    """A tokenizer that reads "start stride" as the beginning of a progression."""

    eos_ids = (0,)

    def chat(self, messages):
        start, stride = map(int, messages[0]["content"].split())
        return [start + stride * i for i in range(8)]


@pytest.fixture
def tiny(target, monkeypatch):
    cfg, params = target
    made = Target(cfg, params, Progressions(), "tiny", "identity")
    monkeypatch.setattr(command, "load_target", lambda source, dtype: made)
    return made


def prompt_file(path, texts):
    path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    return str(path)


def collect_data(prompts, out, *more):
    flags = "--slots 4 --max-length 32 --max-new-tokens 6 --taps 3".split()
    return command.main(["data", prompts, "--out", str(out), *flags, *more])


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
    want = {tuple(Progressions().chat([{"content": t}])) for t in TEXTS}
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
    with pytest.raises(FileNotFoundError, match="no-such"):
        collect_data(str(tmp_path / "no-such.jsonl"), out)
    assert not out.exists()


def test_prompts_are_deduplicated_and_shuffled_by_seed(tmp_path):
    prompt_file(tmp_path / "a.jsonl", TEXTS)
    prompt_file(tmp_path / "b.jsonl", ["new", *TEXTS])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    prompts = collect.read_prompts(paths, seed=1)
    assert sorted(p.text for p in prompts) == sorted(["new", *TEXTS])
    assert {p.text for p in prompts if p.source == "b"} == {"new"}
    assert prompts == collect.read_prompts(paths, seed=1)
    assert prompts != collect.read_prompts(paths, seed=2)


@pytest.mark.parametrize("line", ["{", "[]", "{}"])
@pytest.mark.parametrize("what", ["prompts", "responses"])
def test_broken_lines_are_named(tmp_path, what, line):
    path = tmp_path / "broken.jsonl"
    good = {"prompt": [1], "response": [2]} if what == "responses" else {"prompt": "a"}
    path.write_text(json.dumps(good) + f"\n{line}\n")
    readers = {
        "prompts": lambda: collect.read_prompts([path], 0),
        "responses": lambda: collect.read_responses(path),
    }
    with pytest.raises(DatasetError, match=r"broken\.jsonl:2: expected a JSON object"):
        readers[what]()


def test_prompts_that_are_too_long_are_left_out_and_counted(
    tiny, tmp_path, capsys, monkeypatch
):
    prompts = [collect.Prompt(t, "here") for t in TEXTS[:2]]
    options = {"slots": 4, "max_new_tokens": 6, "max_length": 13}
    seen = []
    out = tmp_path / "responses.jsonl"
    progress = {"on_progress": lambda *p: seen.append(p)}
    assert collect.respond(tiny, prompts, out, **options, **progress) == 2
    assert collect.read_responses(out) == []
    assert seen[-1] == (2, 2)

    monkeypatch.setattr(collect, "respond", lambda *_, **__: 2)
    some = prompt_file(tmp_path / "some.jsonl", TEXTS[:2])
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
    assert collect.read_responses(path, "identity") == [OLD, OURS]
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
