"""Counting targets and their synthetic drafters, from a file to whole texts."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.bench.published import load_published
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine import dispatch, synthetic
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import load_pair
from dcut_jax.engine.policy import FixedPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.engine.synthetic import read_synthetic
from dcut_jax.models import dense

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "configs" / "synthetic" / "dflash-published.json"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SURVIVAL = (0.8, 0.6, 0.5)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("synthetic")
    config, survival = place / "config.json", place / "curve.json"
    config.write_text(json.dumps(CONFIG))
    survival.write_text(json.dumps({"source": "made up", "survival": SURVIVAL}))
    return config, survival


@pytest.fixture(scope="module")
def pair(files):
    """With a drafter of one layer, which compiles sooner."""
    config, survival = files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "DRAFTER_LAYERS", 1)
        return load_pair(
            f"random:{config}", f"synthetic:{survival}", "bfloat16", "bfloat16"
        )


def said(target, tokens):
    """What the target says after each of these tokens, and all before it."""

    @jax.jit
    def run(params, token):
        valid = jnp.ones(token.shape, bool)
        rows = dense.forward_sequences(params, target.cfg, token, valid)
        logits = dense.logits(rows.hidden, dense.head_VE(params))
        return jnp.argmax(logits[0], axis=-1)

    return run(target.params, jnp.asarray([tokens])).tolist()


@pytest.fixture(scope="module")
def texts(pair):
    """Requests, and what an engine that drafts makes of them."""
    config = EngineConfig(8, 100)
    requests = [Request((3 * i % 200, 7, 11 * i % 200), 80) for i in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "PREFILL_CHUNKS", (32,))  # one to compile
        drafting = Engine(pair.models, config, FixedPolicy(3))
        return requests, drafting.generate(requests), drafting


def test_the_target_counts_also_in_bfloat16(pair):
    assert pair.target.params["embed_VE"].dtype == jnp.bfloat16
    text = [*(n % 200 for n in range(150, 250)), 7, 190, 3]
    assert said(pair.target, text) == [(token + 1) % 200 for token in text]


@pytest.mark.slow
def test_the_text_is_the_targets(texts, pair):
    requests, found, _ = texts
    for request, done in zip(requests, found, strict=True):
        last = request.prompt[-1]
        assert done.tokens == [(last + 1 + n) % 200 for n in range(80)]
    first = [*requests[0].prompt, *found[0].tokens]
    assert said(pair.target, first)[len(requests[0].prompt) - 1 : -1] == found[0].tokens


@pytest.mark.slow
def test_drafts_are_accepted_as_often_as_stated(texts):
    _, found, drafting = texts
    steps = sum(done.steps for done in found)
    # The last step of a text may have more accepted than there was room for.
    mean = sum(record.accepted for record in drafting.records) / steps
    assert mean == pytest.approx(sum(SURVIVAL), abs=4 * 1.2 / np.sqrt(steps))


def test_the_drafters_own_pass_is_paid_for(pair):
    """What XLA counts of a draft is what it counts of the drafter's own drafts."""
    shapes = EngineConfig(4, 100, cache_dtype="bfloat16").shapes(pair.models)

    def flops(models):
        compiler = Compiler(models, "bfloat16")
        compiler.prepare([lambda: compiler.draft(shapes, 3)])
        found = compiler.draft(shapes, 3).cost_analysis()
        return (found[0] if isinstance(found, list) else found)["flops"]

    own = flops(replace(pair.models, synthetic=None))
    assert flops(pair.models) >= own


def test_models_with_other_drafts_are_other_models(pair):
    compiler = Compiler(pair.models, "bfloat16")
    with pytest.raises(ValueError, match="expected the models"):
        compiler.require(replace(pair.models, synthetic=None), "bfloat16")


def test_it_is_told_apart_and_labelled(pair, files, tmp_path):
    config, survival = files
    assert pair.drafter == "synthetic drafts (curve)"
    assert pair.models.synthetic.source == "made up"
    other = tmp_path / "curve.json"
    other.write_text(json.dumps({"source": "made up", "survival": (0.8, 0.6, 0.4)}))
    again = load_pair(f"random:{config}", f"synthetic:{other}", "bfloat16", "bfloat16")
    assert again.drafter_identity != pair.drafter_identity


def test_a_head_that_is_the_embedding_repeats(files, tmp_path):
    tied = tmp_path / "tied.json"
    tied.write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    found = load_pair(f"random:{tied}", f"synthetic:{files[1]}", "float32", "float32")
    assert found.models.synthetic.advance == 0
    assert said(found.target, [3, 150, 8, 8]) == [3, 150, 8, 8]


def test_a_target_with_weights_is_refused(files):
    with pytest.raises(ValueError, match="knows the text of random weights alone"):
        load_pair("smollm2", f"synthetic:{files[1]}", "float32", "float32")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected a JSON file"),
        ("[]", "must be there"),
        ('{"survival": [0.5]}', "source and survival must be there"),
        ('{"source": "x", "survival": [0.5], "width": 1}', "must be there"),
        ('{"source": "x", "survival": 0.5}', "expected a list of numbers"),
        ('{"source": "x", "survival": [0.5], "slope": "1"}', "numbers in the other"),
        ('{"source": "x", "survival": [0.5, 0.6]}', "never rise"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "curve.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_synthetic(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="configs/synthetic has one"):
        read_synthetic(tmp_path / "nothing.json")


def test_the_shipped_curve_is_the_published_one():
    """Tokens that full blocks of 4, 8, 12 and 16 rows yield, within 1%."""
    found, published = read_synthetic(PUBLISHED), load_published()
    assert len(found.survival) == 15
    for rows in (4, 8, 12, 16):
        length = 1 + sum(found.survival[: rows - 1])
        assert length == pytest.approx(published.length(rows), rel=0.01)


def test_declared_parameters_are_not_drawn_twice(pair):
    assert pair.models.params["target"] is pair.target.params
    assert jax.tree.leaves(pair.models.params)[0].dtype == jnp.bfloat16
