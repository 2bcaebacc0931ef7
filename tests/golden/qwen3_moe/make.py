"""Writes what transformers' Qwen3-MoE does with tiny random weights.

    python tests/golden/qwen3_moe/make.py    # torch 2.13.0, transformers 5.15.0

Nothing of this project is imported, and no test runs it.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parent


def make_model():
    """Three layers, of which the second is dense; six experts, two a row."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=8,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for value in model.parameters():  # norms too, which start at one
            value += 0.1 * torch.randn_like(value)
    return model


def run(model, tokens, renormalise):
    """Logits, and the experts that each layer sent its rows to."""
    routed, hooks = {}, []
    for i, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue
        layer.mlp.gate.norm_topk_prob = renormalise

        def record(module, args, out, i=i):
            routed[i] = out[2].to(torch.int32)

        hooks.append(layer.mlp.gate.register_forward_hook(record))
    with torch.no_grad():
        logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return logits, routed


def main():
    model = make_model()
    model.save_pretrained(HERE)
    (HERE / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    golden = {"tokens": tokens.to(torch.int32)}
    for name, renormalise in (("renormalised", True), ("softmax", False)):
        logits, routed = run(model, tokens, renormalise)
        golden[f"{name}.logits"] = logits
        golden |= {f"{name}.experts.{i}": value for i, value in routed.items()}
    save_file(
        {k: v.contiguous() for k, v in golden.items()}, HERE / "golden.safetensors"
    )


if __name__ == "__main__":
    main()
