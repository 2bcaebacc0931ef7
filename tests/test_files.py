"""Files are whole, however many write them at once."""

import threading

import pytest

from dcut_jax.files import write_text


def test_writers_at_once_leave_one_whole_text(tmp_path):
    path = tmp_path / "table.json"
    texts = [str(n) * 100_000 for n in range(4)]

    def write(text):
        for _ in range(20):
            write_text(path, text)
            assert path.read_text() in texts

    threads = [threading.Thread(target=write, args=(t,)) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "config.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
