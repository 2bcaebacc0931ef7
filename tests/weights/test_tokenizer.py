"""Tokens against stored ids, templates, and where end tokens come from."""

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from dcut_jax.weights.gguf import GgufFile
from dcut_jax.weights.tokenizer import tokenizer_from_gguf, tokenizer_from_hf

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2_tokens.json").read_text()
)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return tokenizer_from_gguf(smollm2)


def test_stored_ids(smollm2_tokenizer):
    assert len(GOLDEN["texts"]) >= 30
    got = {
        case["text"]: smollm2_tokenizer.encode(case["text"]) for case in GOLDEN["texts"]
    }
    assert got == {case["text"]: case["ids"] for case in GOLDEN["texts"]}


def test_digits_are_split_before_anything_else(smollm2_tokenizer):
    # transformers' conversion of this file gets both wrong.
    assert smollm2_tokenizer.encode("    5\n") == [289, 37, 198]
    assert smollm2_tokenizer.encode("½") == [16738]


def test_text_comes_back(smollm2_tokenizer):
    for case in GOLDEN["texts"]:
        text = smollm2_tokenizer.decode(case["ids"], keep_special=True)
        assert text == case["text"]


def test_special_tokens_are_left_out_of_text(smollm2_tokenizer):
    ids = smollm2_tokenizer.encode("Paris.<|im_end|>")
    assert ids[-1:] == list(smollm2_tokenizer.eos_ids) == [2]
    assert smollm2_tokenizer.decode(ids) == "Paris."


@pytest.mark.parametrize("chat", GOLDEN["chats"], ids=["no system line", "several"])
def test_chat(smollm2_tokenizer, chat):
    assert smollm2_tokenizer.render(chat["messages"]) == chat["rendered"]
    assert smollm2_tokenizer.chat(chat["messages"]) == chat["ids"]


def test_smollm2_vocabulary(smollm2_tokenizer):
    assert smollm2_tokenizer.vocab_size == 49152


def byte_tokens():
    """The 256 letters of byte-level BPE, as GPT-2 writes bytes."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(path, pre, merges, special=(), user=(), **ids):
    tokens = [
        *byte_tokens(),
        *(m.replace(" ", "") for m in merges),
        *special,
        *user,
    ]
    kinds = [1] * (256 + len(merges)) + [3] * len(special) + [4] * len(user)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for role, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", tokens.index(token))
    if "bos" in ids:
        writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens, tokenizer_from_gguf(GgufFile(path))


def test_qwen2_splits_like_its_pattern(tmp_path):
    # A merge applies only inside a piece: `1 2` never merges, digits being split one
    # by one; `Ġ a` merges, a blank staying with the word after it.
    merges = ["1 2", "Ġ a", "a b"]
    tokens, tokenizer = write_tokenizer(
        tmp_path / "q.gguf",
        "qwen2",
        merges,
        special=("<|im_end|>",),
        user=("<tool_call>",),
        eos="<|im_end|>",
    )
    ids = tokenizer.encode("12 ab<tool_call><|im_end|>")
    assert [tokens[i] for i in ids] == [
        "1",
        "2",
        "Ġa",
        "b",
        "<tool_call>",
        "<|im_end|>",
    ]
    assert tokenizer.decode(ids) == "12 ab<tool_call>"
    assert tokenizer.eos_ids == (tokens.index("<|im_end|>"),)


def test_begin_and_end_of_turn_tokens_of_a_gguf(tmp_path):
    tokens, tokenizer = write_tokenizer(
        tmp_path / "b.gguf",
        "smollm",
        ["a b"],
        special=("<s>", "</s>", "<eot>"),
        bos="<s>",
        eos="</s>",
        eot="<eot>",
    )
    assert [tokens[i] for i in tokenizer.encode("ab")] == ["<s>", "ab"]
    assert [tokens[i] for i in tokenizer.eos_ids] == ["</s>", "<eot>"]
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def hf_directory(tmp_path):
    """A word tokenizer that puts `<s>` in front, and a template that does so too."""
    words = ["<unk>", "<s>", "</s>", "user", "assistant", ":", "hi", "there"]
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(words[:3])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


MESSAGES = [{"role": "user", "content": "hi there"}]


def test_a_template_puts_its_own_begin_token(hf_directory):
    tokenizer = tokenizer_from_hf(hf_directory)
    assert tokenizer.encode("hi there") == [1, 6, 7]
    want = "<s>user: hi there</s>assistant: "
    assert tokenizer.render(MESSAGES) == want
    assert tokenizer.chat(MESSAGES) == [1, 3, 5, 6, 7, 2, 4, 5]
    assert tokenizer.vocab_size == 8


def test_what_a_trainer_left_in_the_file_cuts_no_prompt(hf_directory):
    path = hf_directory / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    want = tokenizer_from_hf(hf_directory).encode("hi there hi")
    for leave in (
        lambda: backend.enable_truncation(2),
        lambda: backend.enable_padding(length=9),
    ):
        leave()
        backend.save(str(path))
        tokenizer = tokenizer_from_hf(hf_directory)
        assert tokenizer.encode("hi there hi") == want == [1, 6, 7, 6]
        assert tokenizer.chat(MESSAGES) == [1, 3, 5, 6, 7, 2, 4, 5]


def test_a_template_file_comes_first(hf_directory):
    (hf_directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert tokenizer_from_hf(hf_directory).render(MESSAGES) == "hi there"


def test_the_default_of_several_templates(hf_directory):
    path = hf_directory / "tokenizer_config.json"
    templates = [
        {"name": "rag", "template": "no"},
        {"name": "default", "template": "yes"},
    ]
    path.write_text(json.dumps({"chat_template": templates}))
    assert tokenizer_from_hf(hf_directory).render(MESSAGES) == "yes"


def test_helpers_that_templates_use(hf_directory):
    (hf_directory / "chat_template.jinja").write_text(
        "{%- for m in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{- m | tojson }}\n"
        "{%- endfor %}{{ strftime_now('%Y') | length }}"
    )
    got = tokenizer_from_hf(hf_directory).render(MESSAGES * 2)
    assert got == '{"role": "user", "content": "hi there"}4'


def test_end_tokens_of_hugging_face_files(hf_directory):
    assert tokenizer_from_hf(hf_directory).eos_ids == (2,)
    (hf_directory / "config.json").write_text('{"eos_token_id": 5}')
    assert tokenizer_from_hf(hf_directory).eos_ids == (5,)
    (hf_directory / "generation_config.json").write_text('{"eos_token_id": [2, 4, 2]}')
    assert tokenizer_from_hf(hf_directory).eos_ids == (2, 4)


def test_a_tokenizer_alone_is_enough(hf_directory):
    (hf_directory / "tokenizer_config.json").unlink()
    tokenizer = tokenizer_from_hf(hf_directory)
    assert tokenizer.encode("hi") == [1, 6]
    assert tokenizer.eos_ids == ()
