"""Makes ``config.json`` and ``model.safetensors``: a tiny BERT classifier with random weights, under a seed.

python -m halfeven.models.zoo.hf_bert.make    (needs transformers)
"""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

CONFIG = BertConfig(
    vocab_size=500,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    initializer_range=0.1,
    id2label=dict(enumerate("abcd")),
)


def main(out: Path = Path(__file__).parent) -> None:
    torch.manual_seed(0)
    BertForSequenceClassification(CONFIG).save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)  # nothing is generated here
    (out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
