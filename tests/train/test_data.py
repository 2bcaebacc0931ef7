"""Datasets on disk: what is written is read, and a killed writer leaves no trace."""

import ml_dtypes
import numpy as np
import pytest

from dcut_jax.train.data import (
    Dataset,
    DatasetError,
    DatasetWriter,
    Order,
    draw_blocks,
)

ABOUT = {"target": "tiny", "taps": [1, 2]}


def documents(count, channels=6, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        size = int(rng.integers(5, 30))
        features = rng.normal(size=(size, channels)).astype(ml_dtypes.bfloat16)
        out.append((rng.integers(0, 50, size), int(rng.integers(1, size)), features))
    return out


def write(path, docs, **options):
    with DatasetWriter(path, ABOUT, channels=6, **options) as writer:
        for tokens, prompt_len, features in docs:
            writer.append(tokens, prompt_len, features)


def draws(path, docs, seed=0):
    write(path, docs)
    return Dataset.open(path).draws(seed)


def same(path, docs):
    data = Dataset.open(path)
    assert len(data) == len(docs)
    for i, (tokens, prompt_len, features) in enumerate(docs):
        doc = data.document(i)
        np.testing.assert_array_equal(doc.tokens, tokens)
        assert doc.prompt_len == prompt_len
        np.testing.assert_array_equal(doc.features, features)


def test_round_trip(tmp_path):
    docs = documents(12)
    write(tmp_path, docs)
    same(tmp_path, docs)
    manifest = Dataset.open(tmp_path).manifest
    assert manifest.items() >= ABOUT.items()
    assert (manifest["channels"], manifest["feature_dtype"]) == (6, "bfloat16")


def test_float16_features(tmp_path):
    docs = [(t, p, f.astype(np.float16)) for t, p, f in documents(3)]
    write(tmp_path, docs, feature_dtype="float16")
    same(tmp_path, docs)


def test_tokens_alone(tmp_path):
    with DatasetWriter(tmp_path, ABOUT) as writer:
        writer.append([1, 2, 3], 1)
        with pytest.raises(DatasetError, match="0 channels"):
            writer.append([1, 2, 3], 1, np.ones((3, 6)))
    data = Dataset.open(tmp_path)
    assert data.document(0).features is None
    blocks = draw_blocks(data, np.array([0]), 2, 8, np.random.default_rng(0))
    assert blocks.taps_NSC is None
    assert blocks.hidden_NSE is None


def test_a_killed_writer_is_continued_after_its_last_document(tmp_path):
    docs = documents(8)
    write(tmp_path, docs[:5])
    # Killed in the middle of a document: each file has a part of it.
    for name, part in [("tokens.bin", 12), ("features.bin", 7), ("index.bin", 8)]:
        with open(tmp_path / name, "ab") as file:
            file.write(b"\x01" * part)
    same(tmp_path, docs[:5])  # a reader passes over it
    writer = DatasetWriter(tmp_path, ABOUT, channels=6)
    assert writer.documents == 5
    writer.close()
    write(tmp_path, docs[5:])
    same(tmp_path, docs)


def test_only_its_own_documents_are_gone_on_with(tmp_path):
    docs = documents(4)
    write(tmp_path, docs[:2])
    wanted = [(tokens, prompt) for tokens, prompt, _ in docs]
    with DatasetWriter(tmp_path, ABOUT, channels=6) as writer:
        writer.require(wanted)
        for others in (wanted[1:], wanted[:1], [(wanted[0][0], 1 + docs[0][1])]):
            with pytest.raises(DatasetError, match="to be that of the responses"):
                writer.require(others)


def test_what_is_appended_is_readable_before_close(tmp_path):
    docs = documents(2)
    writer = DatasetWriter(tmp_path, ABOUT, channels=6)
    writer.append(*docs[0])
    same(tmp_path, docs[:1])
    writer.close()


def test_refusals(tmp_path):
    docs = documents(2)
    write(tmp_path, docs)
    other = ABOUT | {"target": "other", "dtype": "float32"}
    message = r'in dtype \(absent there, "float32" here\), target \("tiny" there, "oth'
    with pytest.raises(DatasetError, match=message):
        DatasetWriter(tmp_path, other, channels=6)
    with pytest.raises(DatasetError, match="differs in channels"):
        DatasetWriter(tmp_path, ABOUT, channels=5)
    with DatasetWriter(tmp_path, ABOUT, channels=6) as writer:
        with pytest.raises(DatasetError, match=r"\[2, 6\], expected \[3, 6\]"):
            writer.append([1, 2, 3], 1, np.ones((2, 6)))
        with pytest.raises(DatasetError, match="prompt of 4 tokens in a document of 3"):
            writer.append([1, 2, 3], 4, np.ones((3, 6)))
        with pytest.raises(DatasetError, match="the document none"):
            writer.append([1, 2, 3], 1)
    same(tmp_path, docs)
    with pytest.raises(DatasetError, match="is this a dataset"):
        Dataset.open(tmp_path / "elsewhere")
    (tmp_path / "features.bin").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"features\.bin is shorter"):
        Dataset.open(tmp_path)
    with pytest.raises(DatasetError, match=r"features\.bin has 0 bytes"):
        DatasetWriter(tmp_path, ABOUT, channels=6)


def test_anchors_are_legal(tmp_path):
    docs = documents(20)
    write(tmp_path, docs)
    data = Dataset.open(tmp_path)
    usable = data.usable(16)
    legal = [i for i, (t, p, _) in enumerate(docs) if min(len(t), 16) - 1 > p]
    assert usable.tolist() == legal
    blocks = draw_blocks(data, usable, 6, 16, np.random.default_rng(3))
    for n, i in enumerate(usable):
        tokens, prompt_len, features = docs[i]
        size = min(len(tokens), 16)
        assert blocks.length_N[n] == size
        np.testing.assert_array_equal(blocks.token_NS[n, :size], tokens[:size])
        np.testing.assert_array_equal(blocks.taps_NSC[n, :size], features[:size])
        anchors = blocks.anchor_NA[n][blocks.valid_NA[n]].tolist()
        # From the response's first token to the last that has a successor.
        assert set(anchors) <= set(range(prompt_len, size - 1))
        assert len(set(anchors)) == len(anchors) == min(6, size - 1 - prompt_len)


def test_a_draw_depends_on_seed_and_prompt_alone(tmp_path):
    docs = documents(300)
    docs = [(np.r_[i, t], p + 1, np.r_[f[:1], f]) for i, (t, p, f) in enumerate(docs)]
    drawn = draws(tmp_path / "some", docs[:200])
    assert np.all((drawn >= 0) & (drawn < 1))
    # Uniform: within four standard deviations of the mean of 200.
    assert abs(drawn.mean() - 0.5) < 4 * (1 / 12 / 200) ** 0.5
    # Neither more documents nor another order changes it, nor another response.
    np.testing.assert_array_equal(draws(tmp_path / "more", docs)[:200], drawn)
    back = draws(tmp_path / "back", docs[199::-1])
    np.testing.assert_array_equal(back[::-1], drawn)
    tokens, prompt_len, features = docs[0]
    longer = [(np.r_[tokens, 7], prompt_len, np.r_[features, features[:1]])]
    assert draws(tmp_path / "longer", longer)[0] == drawn[0]
    assert not np.any(draws(tmp_path / "seed", docs[:200], seed=1) == drawn)


def test_an_epoch_visits_every_document_but_those_left_over_once():
    index, size = np.array([3, 5, 8, 9, 11]), np.full(5, 10)
    order = Order(index, size, 2, (16,), seed=1)
    assert order.steps_per_epoch == 2
    steps = [order.of_step(s)[0] for s in range(20)]
    epochs = np.concatenate(steps).reshape(10, 4)
    assert all(len(set(e)) == 4 for e in epochs.tolist())
    assert set(epochs.ravel().tolist()) == set(index.tolist())
    assert len({tuple(e) for e in epochs.tolist()}) > 1
    again = Order(index, size, 2, (16,), seed=1).of_step(7)[0]
    np.testing.assert_array_equal(steps[7], again)


def test_documents_of_a_step_share_the_shortest_length_that_holds_them():
    size = np.array([4, 5, 6, 7, 12, 13, 14, 30, 31])
    order = Order(np.arange(9), size, 2, (8, 16, 24), seed=0)
    for step in range(40):
        documents, length = order.of_step(step)
        held = np.minimum(size[documents], 24)
        assert length >= held.max()
        # At most one was left over by a shorter length.
        shorter = [8, 16, 24][: [8, 16, 24].index(length)]
        assert sum(any(h <= s for s in shorter) for h in held) <= 1


def test_few_documents_fill_a_step_more_than_once():
    order = Order(np.array([4, 6]), np.array([9, 9]), 5, (16,), seed=0)
    assert set(order.of_step(0)[0].tolist()) == {4, 6}


def test_an_order_of_nothing_is_refused():
    with pytest.raises(DatasetError, match="no documents"):
        Order(np.array([], int), np.array([], int), 2, (16,), seed=0)


def test_hidden_states_lie_behind_the_taps(tmp_path):
    about = ABOUT | {"hidden_channels": 2}
    features = np.arange(24, dtype=np.float32).reshape(4, 6)
    with DatasetWriter(tmp_path, about, channels=6) as writer:
        writer.append([1, 2, 3, 4], 1, features)
    data = Dataset.open(tmp_path)
    blocks = draw_blocks(data, np.array([0]), 1, 4, np.random.default_rng(0))
    np.testing.assert_array_equal(blocks.taps_NSC[0], features[:, :4])
    np.testing.assert_array_equal(blocks.hidden_NSE[0], features[:, 4:])
