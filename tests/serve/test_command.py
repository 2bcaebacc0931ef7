"""The command's flags; what it serves is tested with SmolLM2 (tests/slow)."""

import socket
import sys
from types import SimpleNamespace

import pytest

from dcut_jax.config import ConfigError
from dcut_jax.serve import __main__ as command
from dcut_jax.serve.scheduler import Limits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "dcut", "--drafter", "none"], "needs a drafter"),
        (["--width", "3"], "--width belongs to --mode fixed"),
        (["--mode", "ar", "--cost-dir", "."], "--cost-dir belongs to --mode dcut"),
        (["--port", "70000"], "0 to 65535"),
        (["--drain-s", "-1"], "at least 0"),
        (["--slots", "0"], ">= 1"),
        (["--api-key", ""], "empty"),
        (["--queue", "4", "--choices", "5"], "never finds room in a queue of 4"),
        (
            ["--processes", "2", "--costs", "roofline"],
            "rates of its own",
        ),
    ],
)
def test_flags_that_cannot_be(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        command.parse(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults(monkeypatch):
    monkeypatch.setenv(command.API_KEY, "secret")
    args = command.parse(["--api-key", "one"])
    assert args.host == "127.0.0.1"
    assert args.mode == "dcut"
    assert args.api_key == ["one", "secret"]
    args = command.parse(["--target", "elsewhere"])
    assert (args.mode, args.drafter) == ("ar", "none")


def test_no_more_choices_than_may_wait():
    assert command.parse(["--queue", "4"]).choices == 4
    assert command.parse([]).choices == command.CHOICES


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(command, "make_engine", lambda args: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match="another --host or --port"):
            command.main(["--port", str(taken.getsockname()[1])])


def test_a_port_is_taken_though_nobody_listens_yet():
    with command.bound("127.0.0.1", 0) as first:
        with pytest.raises(OSError, match="another --host or --port"):
            command.bound("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(("most", "chunks"), [(32, (32,)), (128, (32, 128))])
def test_chunks_are_no_longer_than_asked(most, chunks):
    alone = SimpleNamespace(dealt=lambda *, rows: None)
    assert command.shared_chunks(alone, most) == chunks


def test_where_rows_travel_no_chunk_can_be_short():
    dealt = SimpleNamespace(dealt=lambda *, rows: "somehow")
    assert command.shared_chunks(dealt, 128) == ()
    with pytest.raises(ConfigError, match="128 tokens at a time"):
        command.shared_chunks(dealt, 32)


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r"dcut-jax\[serve\]"):
        command.main([])


@pytest.mark.parametrize("name", vars(Limits()))
def test_limits_of_nothing(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Limits(**{name: 0})
