"""Memory of models that are declared and never made."""

import json
import math

import jax
import pytest

from dcut_jax import profile
from dcut_jax.config import ExpertsConfig, ModelConfig, RopeConfig
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.footprint import footprint, footprint_of_layers, render
from dcut_jax.mesh import make_placement
from dcut_jax.models import dense

TINY = ModelConfig(
    vocab=512,
    embed=64,
    mlp=128,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=16,
    rope=RopeConfig(1e4),
    norm_eps=1e-5,
    max_position=512,
    tied=False,
)
# meta-llama/Llama-3.3-70B-Instruct and Qwen/Qwen3-235B-A22B, by their config.json.
LLAMA_70B = ModelConfig(
    vocab=128256,
    embed=8192,
    mlp=28672,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    rope=RopeConfig(5e5),
    norm_eps=1e-5,
    max_position=131072,
    tied=False,
)
QWEN_235B = ModelConfig(
    vocab=151936,
    embed=4096,
    mlp=12288,
    layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    rope=RopeConfig(1e6),
    norm_eps=1e-6,
    max_position=40960,
    tied=False,
    qk_norm=True,
    experts=ExpertsConfig(
        count=128, active=8, mlp=1536, layers=tuple(range(94)), gating="renormalised"
    ),
)


def given(cfg, placement, slots, positions, bytes_each=2):
    """Parameters and caches of one device, by plain counting."""
    sizes = placement.mesh.shape

    def part(spec):
        cut = [placement.rules.get(axis, ()) for axis in spec.axes]
        return math.prod(spec.shape) // math.prod(
            sizes[n] for over in cut for n in over
        )

    params = sum(part(spec) for spec in jax.tree.leaves(dense.specs(cfg)))
    heads = cfg.kv_heads // sizes.get("model", 1)
    rows = 2 * cfg.layers * heads * cfg.head_dim * positions
    return bytes_each * (params + rows * slots // placement.shards)


def by_name(steps):
    return {step.step: step for step in steps}


def test_a_step_is_given_its_part_of_parameters_and_caches():
    placement = make_placement({"data": 2, "model": 4}, "dp+tp")
    config = EngineConfig(4, 200, cache_dtype="bfloat16")
    steps = by_name(footprint(TINY, placement, config, (1,), prefills=()))
    want = given(TINY, placement, 4, 256)
    # Beside them a few numbers per slot: state, tokens, counts.
    assert 0 <= steps["verify 4 rows"].arguments - want < 2048
    assert steps["verify 4 rows"].temporary > 0


def test_two_depths_tell_what_all_layers_take():
    placement = make_placement({"model": 2}, "tp")
    config = EngineConfig(2, 200)
    rest = (placement, config, (1,), "float32", ())
    whole = by_name(footprint(TINY, *rest))
    fewer = by_name(footprint_of_layers(TINY, 1, *rest))
    for name, step in whole.items():
        assert fewer[name].arguments == step.arguments, name
        assert fewer[name].total == pytest.approx(step.total, rel=0.05), name


@pytest.mark.slow
def test_the_command_reads_a_config_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "ROWS", (1,))  # each takes seconds to compile
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    flags = ["--abstract", "--target", str(tmp_path), "--mesh", "model=4"]
    assert profile.main([*flags, "--batch-sizes", "2", "--layers", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "batch 2"
    steps = [line.split()[0] for line in printed[2:]]
    assert steps == ["prefill", "prefill", "verify", "commit"]
    for wrong in (["--abstract"], ["--layers", "2"]):
        with pytest.raises(SystemExit):
            profile.main(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "sizes", "strategy", "layers"),
    [
        (LLAMA_70B, {"model": 8}, "tp", 80),
        (QWEN_235B, {"expert": 8}, "ep", 1),
        (QWEN_235B, {"expert": 2, "model": 4}, "tp+ep", 1),
    ],
    ids=["70B-tp", "235B-ep", "235B-tp+ep"],
)
def test_large_models_compile_without_being_made(cfg, sizes, strategy, layers):
    """A plain step: all layers in one program, or what one and two layers tell."""
    placement = make_placement(sizes, strategy)
    config = EngineConfig(32, 4096, cache_dtype="bfloat16")
    rest = (placement, config, (1,), "bfloat16", ())
    if layers == cfg.layers:
        steps = by_name(footprint(cfg, *rest))
    else:
        steps = by_name(footprint_of_layers(cfg, layers, *rest))
    want = given(cfg, placement, 32, 4096)
    print(render(tuple(steps.values())))
    assert steps["verify 32 rows"].arguments == pytest.approx(want, rel=1e-3)
    # Nothing of the model's size was ever made.
    assert sum(x.nbytes for x in jax.live_arrays()) < want / 100
