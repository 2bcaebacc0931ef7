"""Text as it streams against decoding all of it at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dcut_jax.engine.requests import halted_after
from dcut_jax.serve.text import TextStream
from dcut_jax.stops import StopStrings
from dcut_jax.weights.tokenizer import TextTokenizer


def byte_level():
    merges = ["a b", "ab c", "Ġ a", "Ġa b", "ä ½", "ð Ł", "b ä"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(m.replace(" ", "") for m in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [tuple(m.split()) for m in merges]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return backend


def byte_fallback():
    spelled = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", *spelled, *"▁abc", "▁a", "▁ab", "ab", "abc"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    return backend


FORMS = {
    f.__name__: TextTokenizer(f(), (), None, {}, "here")
    for f in (byte_level, byte_fallback)
}
CHARACTERS = ["a", "b", "abc", " ", "你", "é", "🙂", "\ufffd", "c"]


def spelled(text, characters):
    """Tokens of characters, one by one, bytes where there is no other."""
    known = text.backend.get_vocab()
    if "<0x00>" in known:
        return [
            known.get(c.replace(" ", "▁"), None) or known[f"<0x{b:02X}>"]
            for c in characters
            for b in ([0] if c.replace(" ", "▁") in known else c.encode())
        ]
    table = bytes_to_unicode()
    return [known[table[b]] for c in characters for b in c.encode()]


def bytes_to_unicode():
    """GPT-2's letters for bytes."""
    fine = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in fine]
    letters = {b: chr(b) for b in fine}
    return letters | {b: chr(256 + i) for i, b in enumerate(others)}


def streamed(stream, tokens):
    return [*(stream.add(t) for t in tokens), stream.end()]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_text(form, data):
    text = FORMS[form]
    if data.draw(st.booleans()):
        few = st.lists(st.sampled_from(CHARACTERS), max_size=60)
        tokens = spelled(text, data.draw(few))
    else:
        any_token = st.integers(0, text.vocab_size - 1)
        tokens = data.draw(st.lists(any_token, max_size=60))
    pieces = streamed(TextStream(text), tokens)
    assert "".join(pieces) == text.decode(tokens)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_of_a_stop_string_is_ever_sent(form, data):
    text = FORMS[form]
    tokens = spelled(text, data.draw(st.lists(st.sampled_from(CHARACTERS[:7]))))
    letters = st.text(alphabet="abc 你", min_size=1, max_size=4)
    strings = data.draw(st.lists(letters, min_size=1, max_size=3))
    stops = StopStrings(text, strings)
    tokens = tokens[: halted_after(stops(), tokens)]
    pieces = streamed(TextStream(text, stops), tokens)
    assert "".join(pieces) == stops.cut(text.decode(tokens))


def test_a_character_comes_whole_and_at_once():
    text = FORMS["byte_level"]
    tokens = spelled(text, ["a", "🙂", "b"])
    assert streamed(TextStream(text), tokens) == ["a", "", "", "", "🙂", "b", ""]


def test_each_token_has_its_place_though_its_text_is_held_back():
    text = FORMS["byte_level"]
    stream = TextStream(text, StopStrings(text, ["abc"]))
    places = []
    for token in spelled(text, ["a", "b", "🙂", "a", "x"]):
        places.append(stream.length)
        stream.add(token)
    assert places == [0, 1, 2, 2, 2, 2, 3, 4]


def test_what_may_be_a_stop_string_waits_until_it_is_known():
    text = FORMS["byte_level"]
    stream = TextStream(text, StopStrings(text, ["abc"]))
    assert streamed(stream, spelled(text, list("abab c"))) == [
        *("", "", "ab", "", "ab ", "c"),
        "",
    ]
