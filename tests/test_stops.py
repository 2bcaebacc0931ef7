"""Stop strings against decoding the whole text after every token."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dcut_jax.engine.requests import halted_after
from dcut_jax.stops import StopStrings
from dcut_jax.weights.tokenizer import TextTokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def text_tokenizer(backend):
    return TextTokenizer(backend, (), None, {}, "here")


def byte_level():
    """GPT-2's form: tokens are runs of bytes, characters cut in two among them."""
    merges = ["a b", "ab c", "Ġ a", "Ġa b", "ä ½", "ð Ł", "b ä"]
    tokens = [*BYTES, *(m.replace(" ", "") for m in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [tuple(m.split()) for m in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return text_tokenizer(backend)


def byte_fallback():
    """Llama 2's form: words, and a token for each byte of what is no word."""
    spelled = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", *spelled, *"▁abc", "▁a", "▁ab", "ab", "abc"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b"), ("ab", "c")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    return text_tokenizer(backend)


def words():
    """Whole words with a blank between them, which no token holds."""
    vocab = {"<unk>": 0, **{w: i + 1 for i, w in enumerate(["a", "b", "c", "abc"])}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return text_tokenizer(backend)


FORMS = {f.__name__: f() for f in (byte_level, byte_fallback, words)}


@pytest.fixture(params=FORMS)
def text(request):
    return FORMS[request.param]


@pytest.fixture
def plain():
    return FORMS["byte_level"]


def by_definition(text, strings, tokens):
    """First token by which the text, decoded from its start, holds a string."""
    lengths = range(1, len(tokens) + 1)
    decoded = ((n, text.decode(tokens[:n])) for n in lengths)
    return next((n for n, t in decoded if any(s in t for s in strings)), None)


def end_of(text, strings, tokens):
    return halted_after(StopStrings(text, strings)(), tokens)


class TestEnd:
    def test_in_the_middle_of_a_token(self, plain):
        tokens = plain.encode("xabcx")
        assert [plain.decode([t]) for t in tokens] == ["x", "abc", "x"]
        assert end_of(plain, ["b"], tokens) == 2

    def test_across_tokens(self, plain):
        tokens = plain.encode("xabcabc")
        assert len(tokens) == 3
        assert end_of(plain, ["ca"], tokens) == 3
        assert end_of(plain, ["abcabc"], tokens) == 3
        assert end_of(plain, ["abcabcx"], tokens) is None

    def test_a_character_of_several_tokens(self, plain):
        tokens = plain.encode("x🙂y")
        assert len(tokens) == 5  # two of the four bytes are one token
        assert end_of(plain, ["🙂"], tokens) == 4
        assert end_of(plain, ["🙂y"], tokens) == 5
        assert end_of(plain, ["x"], tokens) == 1

    def test_a_character_that_has_begun_hides_nothing_before_it(self, plain):
        begun = plain.backend.token_to_id("bä")
        assert plain.decode([begun]) == "b\ufffd"
        assert end_of(plain, ["b"], [begun]) == 1

    def test_the_first_to_end_wins(self, plain):
        tokens = plain.encode("a b c a")
        assert end_of(plain, ["b c a", "c"], tokens) == end_of(plain, ["c"], tokens)
        assert end_of(plain, ["z", "b"], tokens) == end_of(plain, ["b"], tokens)

    def test_special_and_unknown_tokens_have_no_text(self, plain):
        special = plain.backend.token_to_id("<end>")
        a, b = plain.encode("x")[0], plain.encode("y")[0]
        assert [plain.has_text(t) for t in (a, special, 9999)] == [True, False, False]
        assert end_of(plain, ["xy"], [a, special, 9999, b]) == 4
        assert end_of(plain, ["<end>"], [a, special, b]) is None

    def test_a_blank_that_decoding_strips(self):
        text = FORMS["byte_fallback"]
        tokens = text.encode("a a")
        assert text.decode(tokens) == "a a"
        assert end_of(text, [" a"], tokens) == len(tokens)

    def test_a_long_run_of_characters_spelled_in_bytes(self):
        # Such a decoder takes the whole run for broken where one byte of it is.
        text = FORMS["byte_fallback"]
        tokens = text.encode("你" * 50 + "🙂你")
        assert text.decode(tokens[-5:]) == "\ufffd" * 5
        assert end_of(text, ["🙂你"], tokens) == len(tokens) == 158

    def test_each_text_has_its_own(self, plain):
        stops, tokens = StopStrings(plain, ["xy"]), plain.encode("xy")
        first, second = stops(), stops()
        assert not first(tokens[0])
        assert not second(tokens[1])
        assert first(tokens[1])
        assert not stops()(tokens[1])


PIECES = ["a ", "b", "c ", "abc ", "ab", " ", " a", "é", "你", "🙂"]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_chunks_end_where_the_whole_text_does(form, data):
    text = FORMS[form]
    written = st.lists(st.sampled_from(PIECES)).map("".join).map(text.encode)
    any_tokens = st.lists(st.integers(0, text.vocab_size + 1), max_size=20)
    parts = data.draw(st.lists(st.one_of(written, any_tokens)))
    tokens = [t for part in parts for t in part][:60]
    string = st.text("abcé你🙂 ", min_size=1, max_size=4)
    strings = data.draw(st.lists(string, min_size=1, max_size=3))
    want = by_definition(text, strings, tokens)

    halt, done = StopStrings(text, strings)(), 0
    while done < len(tokens):
        size = data.draw(st.integers(1, len(tokens) - done))
        end = halted_after(halt, tokens[done : done + size])
        if end is not None:
            assert done + end == want
            return
        done += size
    assert want is None


@pytest.mark.parametrize("broken", [False, True], ids=["text", "any bytes"])
def test_long_texts(text, broken):
    rng = random.Random(0)
    for case in range(20):
        if broken:
            tokens = [rng.randrange(text.vocab_size) for _ in range(400)]
        else:
            tokens = text.encode("".join(rng.choices(PIECES, k=300)))
        whole = text.decode(tokens)
        for size in (1, 3, 12):
            at = rng.randrange(len(whole) - size)
            string = whole[at : at + size].replace("\ufffd", "a")
            want = by_definition(text, [string], tokens)
            assert end_of(text, [string], tokens) == want, (case, string)


class Counting:
    """A tokenizer that notes how many tokens are decoded at a time."""

    def __init__(self, text):
        self.text, self.sizes = text, []

    def decode(self, tokens):
        self.sizes.append(len(tokens))
        return self.text.decode(tokens)

    def has_text(self, token):
        return self.text.has_text(token)


@pytest.mark.parametrize("kind", ["text", "half a character", "special", "unknown"])
def test_a_token_costs_the_same_however_long_the_text(plain, kind):
    tokens = {
        "text": plain.encode("你 a b 🙂 " * 300),
        "half a character": [plain.encode("你")[-1]] * 3000,
        "special": [plain.backend.token_to_id("<end>")] * 3000,
        "unknown": [9999] * 3000,
    }[kind]
    counting = Counting(plain)
    assert end_of(counting, ["never", "at all"], tokens) is None
    assert max(counting.sizes, default=0) < 200
    assert len(counting.sizes) < 1.2 * len(tokens)


class TestCut:
    @pytest.mark.parametrize(
        ("strings", "want"),
        [
            (["c"], "ab"),
            (["zz"], "abcabc"),
            (["abc"], ""),
            (["cab", "bc"], "a"),  # ends first
            (["c", "bc", "zz"], "a"),  # end together: the longest
            (["ca", "bcab"], "ab"),
        ],
    )
    def test_before_the_string(self, plain, strings, want):
        assert StopStrings(plain, strings).cut("abcabc") == want


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ([], "at least one character"),
        (["a", ""], "at least one character"),
        (["a\ufffd"], "without U.FFFD"),
    ],
)
def test_strings_that_end_nothing(plain, strings, message):
    with pytest.raises(ValueError, match=message):
        StopStrings(plain, strings)
