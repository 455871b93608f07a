"""A random-weight model of a few megabytes that vLLM loads like any other: `make(folder)`.

A Qwen3 configuration, a byte-level tokenizer trained on Python's own standard library, and a ChatML template. No
weights file: engines are started with dummy weights. KV cache: 512 bytes a token in BF16 by default.
Runs in the engine's environment (``python tiny_model.py FOLDER``), which has `tokenizers`.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(layers: int = 2, hidden: int = 128, kv_heads: int = 1, context: int = 40960) -> dict[str, object]:
    """A Qwen3 configuration; KV bytes a token = layers * kv_heads * 64 * 2 (key and value) * 2 (BF16)."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "vocab_size": 32768,  # more than the tokenizer has: prompts are token ids up to 30,000
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def make(folder: Path) -> None:
    """Writes the model into a folder; takes about a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(path) for path in text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps(config()))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
