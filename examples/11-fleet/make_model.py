# SPDX-License-Identifier: Apache-2.0
"""A language model as a Hugging Face folder: `python make_model.py FOLDER`. Tiny, with random weights: it talks nonsense."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

folder = sys.argv[1]
logging.disable_progress_bar()
words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
words.train_from_iterator(
    ["the water runs through the headrace to the mill"] * 9,
    trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
marks = {"bos_token": "<s>", "eos_token": "</s>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **marks)
tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
tokenizer.save_pretrained(folder)

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=400, bos_token_id=0, eos_token_id=1, max_position_embeddings=2048, **sizes)
LlamaForCausalLM(config).save_pretrained(folder)
