"""Makes ``config.json`` and ``model.safetensors``: a tiny Llama with random weights, under a seed.

python -m halfeven.models.zoo.hf_llama.make    (needs transformers)
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    initializer_range=0.2,
    tie_word_embeddings=True,
    use_cache=False,
)


def main(out: Path = Path(__file__).parent) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)  # nothing is generated here
    (out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
