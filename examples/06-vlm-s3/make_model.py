# SPDX-License-Identifier: Apache-2.0
"""A vision-language model as a Hugging Face folder, build/seer: a Qwen2-VL, tiny, with random weights."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import logging

FOLDER = "build/seer"
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for item in m.content %}{% if item.type == 'text' %}{{ item.text }}"
    "{% else %}<|vision_start|><|{{ item.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}assistant: "
)

logging.disable_progress_bar()
words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=400, special_tokens=["<s>", "</s>", *MARKS], initial_alphabet=alphabet, show_progress=False
)
words.train_from_iterator(["the picture shows the water that runs to the mill"] * 9, trainer)
marks = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": MARKS}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **marks)
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained(FOLDER)

start, end, image, video = tokenizer.convert_tokens_to_ids(MARKS)
text = {
    "vocab_size": 400,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
sight = {"depth": 2, "num_heads": 4, "patch_size": 4, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
torch.manual_seed(0)
model = Qwen2VLForConditionalGeneration(
    Qwen2VLConfig(
        text_config=text,
        vision_config=sight,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
)
model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
model.save_pretrained(FOLDER)
Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=2048).save_pretrained(FOLDER)
