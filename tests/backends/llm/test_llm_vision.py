# SPDX-License-Identifier: Apache-2.0
"""Images and videos in prompts: tiny models with random weights, compared with transformers' own `generate`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llm_instances import served as instance_of

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.llm.backend import LlmBackend
from headrace.backends.llm.engine_core import make_scheduler
from headrace.backends.llm.lora import load_adapters
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model, open_runner
from headrace.backends.llm.scheduler import Sequence
from headrace.backends.llm.settings import LlmSettings
from headrace.backends.llm.tokenizer import Tokenizer
from headrace.backends.llm.vision.image_encoder import ImageEncoder
from headrace.backends.llm.vision.processors import PatchConfig, open_processor
from headrace.core.clock import SystemClock
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import Generation, GenerationRequest, PromptImage, PromptVideo, Sampling
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.telemetry.metrics import Registry
from headrace.models.adapters import AdapterCatalog
from headrace.models.config.messages import new_config, typed_config
from support.architectures import kinds_with_pictures
from support.llm_models import tiny_tokenizer

TOKENS = 10
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>")
START, END, IMAGE, VIDEO, PLACE = range(512, 517)
QWEN_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'text' -%}{{ item['text'] }}"
    "{%- else -%}<|vision_start|><|{{ item['type'] }}_pad|><|vision_end|>{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|end|>{%- endfor -%}<|assistant|>"
)
LLAVA_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|{{ item['type'] }}_pad|><|vision_end|>", "<image>")
TEXT_CONFIG = {
    "vocab_size": 520,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}


def picture(seed: int, height: int = 24, width: int = 32) -> PromptImage:
    return PromptImage(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def clip(seed: int, count: int = 5, height: int = 24, width: int = 24) -> PromptVideo:
    frames = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)
    return PromptVideo(frames, [place / 2 for place in range(count)], 2.0)


def asking(*media: PromptImage | PromptVideo, text: str = "the quick brown fox", **more: Any) -> Generation:
    items = [{"type": "image" if isinstance(medium, PromptImage) else "video"} for medium in media]
    content = [*items, {"type": "text", "text": text}]
    return Generation(messages=({"role": "user", "content": content},), media=media, **more)


def saved(folder: Path, model: str, config: str, settings: dict[str, Any], template: str) -> Path:
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        for name, parameter in made.named_parameters():
            if "norm" not in name and "ln_q" not in name:
                parameter.data.normal_(0, 0.15)
        made.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
        made.save_pretrained(folder)
    tokenizer = tiny_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def tiny_qwen(folder: Path, kind: str) -> Path:
    """`Qwen2VL`, `Qwen2_5_VL` or `Qwen3VL`: pictures in patches of 4 x 4."""
    import transformers

    sight: dict[str, Any] = {
        "depth": 2,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if kind == "Qwen2VL":
        sight |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    elif kind == "Qwen2_5_VL":
        sight |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "tokens_per_second": 4}
        sight |= {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        sight |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_position_embeddings": 64}
        sight |= {"depth": 3, "deepstack_visual_indexes": [0, 1]}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**TEXT_CONFIG, "rope_parameters": rope, "head_dim": 16}
    settings = {"text_config": text, "vision_config": sight, **QWEN_IDS}
    saved(folder, f"{kind}ForConditionalGeneration", f"{kind}Config", settings, QWEN_TEMPLATE)
    transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=2048
    ).save_pretrained(folder)
    return folder


def tiny_llava(folder: Path) -> Path:
    import transformers

    sight = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    settings = {
        "text_config": {"model_type": "llama", **TEXT_CONFIG},
        "vision_config": sight,
        "image_token_id": PLACE,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }
    saved(folder, "LlavaForConditionalGeneration", "LlavaConfig", settings, LLAVA_TEMPLATE)
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
    return folder


def loaded(settings: LlmSettings) -> Any:
    """The model of a folder, on the CPU."""
    return load_model(check_folder(settings), settings, torch.device("cpu"))


class VisionModel:
    """A model with its runner and multimodal processor, and the same model in transformers."""

    def __init__(self, folder: Path, adapters: dict[str, Path] | None = None) -> None:
        self.folder = folder
        self.settings = LlmSettings(model_path=folder, kv_cache_bytes=1 << 22, page_size=8)
        model = loaded(self.settings)
        self.config = model.config
        self.tokenizer = Tokenizer.load(folder)
        self.processor: Any = open_processor(folder, model.config, self.tokenizer, {})
        changed = load_adapters(model, adapters) if adapters else None
        self.runner, _ = open_runner(model, self.settings, torch.device("cpu"))
        self.image_encoder = ImageEncoder(self.runner, changed)
        if changed is not None:
            self.runner.before_forward = changed.select_rows
        self.own = loaded(self.settings)

    def sequence(self, generation: Generation, adapter: str = "") -> Sequence:
        if not generation.media:
            text = self.tokenizer.apply_chat_template(generation.messages)
            tokens = self.tokenizer.encode(text, False)
            return Sequence(tokens, len(tokens) + TOKENS, adapter=adapter)
        prepared = self.processor.prepare(generation, 1024)
        prompt_inputs, most = self.image_encoder.encode(prepared, adapter), len(prepared.tokens) + TOKENS
        return Sequence(
            list(prepared.tokens), most, cache_salt=prepared.media_hash, prompt_inputs=prompt_inputs, adapter=adapter
        )

    def scheduler(self, chunk: int = 512) -> Any:
        return make_scheduler(self.runner, max_running=8, max_step_tokens=chunk, prefix_cache=True)

    def generated(self, *asked: Generation, scheduler: Any = None, adapter: str = "") -> list[list[int]]:
        """What all of them get, computed together."""
        scheduler = scheduler or self.scheduler()
        sequences = [self.sequence(generation, adapter) for generation in asked]
        for sequence in sequences:
            scheduler.add(sequence)
        while not scheduler.idle:
            plan = scheduler.schedule()
            scheduler.commit(plan, self.runner.launch(plan, greedy=True).tokens())
            scheduler.finish([sequence for sequence in sequences if len(sequence.tokens) == sequence.limit])
        return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]

    def expected(self, generation: Generation) -> list[int]:
        """What transformers generates from the same tensors."""
        if generation.media:
            prepared = self.processor.prepare(generation, 1024)
            tokens, arguments = prepared.tokens, dict(prepared.arguments)
        else:
            tokens, arguments = self.sequence(generation).tokens, {}
        ids = torch.tensor([tokens])
        made = self.own.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
            **arguments,
        )
        return made[0, len(tokens) :].tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(kind: str) -> VisionModel:
        folder = tmp_path_factory.mktemp(kind)
        return VisionModel(tiny_llava(folder) if kind == "Llava" else tiny_qwen(folder, kind))

    return make


QWENS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
QWEN_PARAMS = ("Qwen2VL", pytest.param("Qwen2_5_VL", marks=pytest.mark.slow), "Qwen3VL")


@pytest.mark.parametrize("kind", kinds_with_pictures())
def test_a_prompt_with_pictures_gets_what_transformers_generates(made: Any, kind: str) -> None:
    vision_model = made(kind)
    one, two = asking(picture(1)), asking(picture(1), picture(2, 32, 16))
    assert vision_model.generated(one) == [vision_model.expected(one)]
    assert vision_model.generated(two) == [vision_model.expected(two)]
    assert vision_model.expected(one) != vision_model.expected(asking(picture(3))), "the picture changes nothing"


@pytest.mark.parametrize("kind", QWEN_PARAMS)
def test_a_prompt_with_a_clip(made: Any, kind: str) -> None:
    vision_model = made(kind)
    alone, beside = asking(clip(1)), asking(clip(2, 2), picture(1), clip(3, 4, 16, 32))
    assert vision_model.generated(alone) == [vision_model.expected(alone)]
    assert vision_model.generated(beside) == [vision_model.expected(beside)]
    assert vision_model.expected(alone) != vision_model.expected(asking(clip(9))), "the clip changes nothing"


@pytest.mark.parametrize("kind", kinds_with_pictures())
@pytest.mark.parametrize("chunk", [8, 512])
def test_together_with_texts_and_in_chunks(made: Any, kind: str, chunk: int) -> None:
    vision_model = made(kind)
    generations = [
        asking(picture(1)),
        asking(text="a mill grinds corn"),
        asking(picture(4), text="to the sea"),
        asking(text="json"),
    ]
    if kind != "Llava":
        generations.append(asking(clip(1)))
    assert vision_model.generated(*generations, scheduler=vision_model.scheduler(chunk)) == [
        vision_model.expected(generation) for generation in generations
    ]


def test_pages_are_shared_by_the_same_picture_only(made: Any) -> None:
    vision_model = made("Qwen2VL")
    same, other = asking(picture(1)), asking(picture(2))
    scheduler = vision_model.scheduler()
    assert vision_model.generated(same, scheduler=scheduler) == vision_model.generated(same, scheduler=scheduler)
    hits = scheduler.prefix_hits
    assert hits >= vision_model.runner.page_size
    assert vision_model.generated(other, scheduler=scheduler) == [vision_model.expected(other)]
    assert scheduler.prefix_hits == hits
    turned = PromptImage(np.ascontiguousarray(picture(1).pixels.transpose(1, 0, 2)))
    assert vision_model.sequence(asking(turned)).cache_salt != vision_model.sequence(same).cache_salt
    assert (
        vision_model.sequence(asking(clip(1))).cache_salt
        != vision_model.sequence(asking(PromptVideo(clip(1).frames, clip(1).seconds, 4.0))).cache_salt
    )


def test_an_adapter_of_the_image_encoder(made: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    vision_model = made("Qwen2VL")
    with torch.random.fork_rng():
        torch.manual_seed(4)
        base = loaded(vision_model.settings)
        changed = get_peft_model(base, LoraConfig(r=4, target_modules=["qkv", "q_proj", "v_proj", "fc1", "down_proj"]))
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        changed.save_pretrained(tmp_path / "adapter")
    generation = asking(picture(1))
    adapted = VisionModel(vision_model.folder, {"mine": tmp_path / "adapter"})
    adapted.own = PeftModel.from_pretrained(loaded(vision_model.settings), tmp_path / "adapter").eval()
    assert adapted.generated(generation, adapter="mine") == [adapted.expected(generation)]
    assert adapted.expected(generation) != vision_model.expected(generation)
    assert adapted.generated(generation) == [vision_model.expected(generation)]


def test_clips_are_cut_as_pictures_are(made: Any) -> None:
    """Two frames that are the same picture are what the processor of transformers makes of that picture."""
    import transformers
    from PIL import Image

    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=2048
    )
    patching = made("Qwen2VL").processor._patches
    assert isinstance(patching, PatchConfig)
    for height, width, close in ((24, 32, 1e-6), (50, 70, 0.06)):
        pixels = np.random.default_rng(1).integers(100, 156, (height, width, 3), np.uint8)
        right = images(images=[Image.fromarray(pixels)], return_tensors="pt")
        grid = patching.grid(2, height, width, 1 << 30)
        assert list(grid) == right["image_grid_thw"][0].tolist()
        found = patching.patchify(PromptVideo(np.stack([pixels, pixels]), [0.0, 0.5], 2.0), grid)
        torch.testing.assert_close(found, right["pixel_values"], atol=close, rtol=0)


def test_a_long_clip_is_made_smaller_to_fit(made: Any) -> None:
    patching = made("Qwen2VL").processor._patches
    times, rows, columns = patching.grid(40, 400, 400, 8192)
    assert times == 20
    assert times * rows * columns * 16 <= 8192
    assert patching.grid(2, 400, 400, 8192)[1] > rows


def test_a_clip_of_one_frame_is_shown_twice(made: Any) -> None:
    for kind in QWENS:
        vision_model = made(kind)
        single = asking(clip(1, 1))
        assert vision_model.generated(single) == [vision_model.expected(single)]


def test_qwen3_gets_the_frame_times(made: Any) -> None:
    tokens = made("Qwen3VL").processor.prepare(asking(clip(1, 4, 16, 24)), 1024).tokens
    text = made("Qwen3VL").tokenizer.decode(tokens, skip_special=False)
    pads = "<|video_pad|>" * 6
    assert f"<0.2 seconds><|vision_start|>{pads}<|vision_end|><1.2 seconds><|vision_start|>{pads}<|vision_end|>" in text
    assert text.count("<|vision_start|>") == 2


@pytest.mark.parametrize(
    ("generation", "text"),
    [
        (Generation(messages=({"role": "user", "content": "hello"},), media=(picture(1),)), "has places for nothing"),
        (asking(picture(1), text="<|image_pad|>"), r"places for 2 \(image, image\), and the request has 1 \(image\)"),
        (
            Generation(prompt="<|video_pad|>", media=(picture(1),)),
            r"places for 1 \(video\), and the request has 1 \(image\)",
        ),
        (Generation(prompt=[1, 2], media=(picture(1),)), "needs 'messages', or a 'prompt' that is text"),
        (asking(*[picture(1)] * 33), "has 33 images and videos, and this model takes 32"),
        (asking(picture(1, 1, 300)), "of 300 x 1 pixels"),
        (asking(picture(1, 0, 8)), "without a single pixel"),
        (asking(clip(1, 0)), "without a single pixel"),
        (asking(picture(1), template_arguments={"total_pixels": 100}), "'total_pixels' of 100 in a request"),
        (asking(picture(1), template_arguments={"total_pixels": "all"}), "'total_pixels' must be a whole number"),
        (
            asking(*[picture(1, 40, 40)] * 32),
            r"has \d{3,4} tokens with its images and videos, and this model takes 500",
        ),
    ],
)
def test_a_bad_request_is_refused_with_the_field(made: Any, generation: Generation, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        made("Qwen2VL").processor.prepare(generation, 500)


def test_a_model_of_images_takes_no_clip(made: Any) -> None:
    with pytest.raises(InvalidArgument, match="has a video, and this model sees images only"):
        made("Llava").processor.prepare(asking(clip(1)), 500)
    with pytest.raises(InvalidArgument, match=r"places for 2 \(image, image\), and the request has 1"):
        made("Llava").processor.prepare(asking(picture(1), text="<image>"), 500)


def test_a_text_only_model(made: Any, tmp_path: Path) -> None:
    from support.llm_models import tiny_llama

    folder = tiny_llama(tmp_path / "llama")
    model = loaded(LlmSettings(model_path=folder))
    assert open_processor(folder, model.config, made("Llava").tokenizer, {}) is None


def test_a_folder_without_a_processor_is_refused(made: Any, tmp_path: Path) -> None:
    vision_model = made("Qwen2VL")
    with pytest.raises(FailedPrecondition, match="the image processor in .* could not be read"):
        open_processor(tmp_path, vision_model.config, vision_model.tokenizer, {})
    with pytest.raises(InvalidArgument, match="parameter total_pixels is '0'"):
        open_processor(vision_model.folder, vision_model.config, vision_model.tokenizer, {"total_pixels": "0"})


class Waiting:
    """A request to an instance, and its replies."""

    cancelled = False

    def __init__(self, generation: Generation) -> None:
        self.request = GenerationRequest("vision_model", generation)
        self.answers: list[Any] = []
        self.done = asyncio.Event()

    def reply(self, outputs: Any, *, final: bool = True, parameters: Any = None) -> None:
        self.answers.append((outputs, parameters))
        if final:
            self.done.set()


async def served(folder: Path, asked: list[Generation]) -> list[Any]:
    """Through the backend, all at once."""
    message = new_config(name="vision_model", backend="llm")
    message.parameters["model_path"].string_value = str(folder)
    message.parameters["kv_cache_bytes"].string_value = str(1 << 22)
    files = ModelFiles(folder, 1, folder)
    backend = LlmBackend()
    message.MergeFrom(backend.complete(typed_config(message, "llm"), files))
    services: Any = SimpleNamespace(
        loop=asyncio.get_running_loop(),
        metrics=Registry(SystemClock()),
        kv_transfer=KvTransferSettings(),
        adapters=AdapterCatalog(),
        kept_memory=None,
    )
    model = backend.load(typed_config(message, "llm"), files, services)
    instance: Any = await asyncio.to_thread(model.open, Placement("seer_0_cpu"))
    try:
        waiting = [Waiting(generation) for generation in asked]
        instance.execute(waiting, lambda: None)
        await asyncio.wait_for(asyncio.gather(*(each.done.wait() for each in waiting)), 60)
        assert instance.engine.scheduler.pool.used == 0
        return [each.answers for each in waiting]
    finally:
        await asyncio.to_thread(instance.close)
        model.close()


def test_through_the_backend(made: Any) -> None:
    vision_model = made("Qwen2VL")
    sampling = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    asked = [
        asking(picture(1), sampling=sampling),
        asking(text="a mill grinds corn", sampling=sampling),
        asking(clip(1), picture(2), sampling=sampling),
        asking(picture(1), text="<|image_pad|>", sampling=sampling),
    ]
    *answered, refused = asyncio.run(served(vision_model.folder, asked))
    for generation, answers in zip(asked, answered, strict=False):
        ((outputs, parameters),) = answers
        assert outputs[0].array.ravel()[0].decode() == vision_model.tokenizer.decode(vision_model.expected(generation))
        assert parameters["completion_tokens"] == TOKENS
        assert parameters["prompt_tokens"] == len(vision_model.sequence(generation).tokens)
    assert isinstance(refused[0][0], InvalidArgument)
    assert "do not write the model's placeholder tokens into texts" in refused[0][0].message


@pytest.mark.parametrize("kind", ["Qwen2VL", pytest.param("Llava", marks=pytest.mark.slow)])
def test_pages_of_a_prompt_with_images_are_transferred(made: Any, kind: str) -> None:
    """And those of another picture are not taken for them."""
    folder, key = made(kind).folder, b"k" * 32
    sampling = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    seen = asking(picture(1, 48, 48), text="the quick brown fox jumps over the lazy dog " * 3, sampling=sampling)
    other = replace(seen, media=(picture(2, 48, 48),))

    async def asked() -> None:
        async with (
            instance_of(folder, page_size="8") as alone,
            instance_of(folder, KvTransferSettings("prefill", key), page_size="8") as prefill,
            instance_of(folder, KvTransferSettings("decode", key), page_size="8") as decode,
        ):
            ticket = (await prefill.ask(replace(seen, prefill_only=True))).last["ticket"]
            assert (await decode.ask(replace(seen, transfer_token=ticket))).text == (await alone.ask(seen)).text
            assert decode.value("headrace_llm_handings_total") == 1
            ticket = (await prefill.ask(replace(seen, prefill_only=True))).last["ticket"]
            assert (await decode.ask(replace(other, transfer_token=ticket))).text == (await alone.ask(other)).text
            assert decode.value("headrace_llm_handing_fallbacks_total") == 1

    asyncio.run(asked())


def test_pages_of_a_prompt_with_images_are_kept_in_host_memory(made: Any) -> None:
    """And those of another picture are not taken for them."""
    sampling = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    text = "the quick brown fox jumps over the lazy dog " * 3
    visits = [asking(picture(seed, 48, 48), text=text, sampling=sampling) for seed in range(6)]

    async def answers(**parameters: str) -> tuple[list[str], float]:
        async with instance_of(made("Qwen2VL").folder, page_size="8", max_running="2", **parameters) as tiny:
            texts = [(await tiny.ask(generation)).text for generation in visits * 2]
            offload = tiny.engine._components.offload
            return texts, 0 if offload is None else offload.counts["host"].tokens

    async def main() -> None:
        wanted, _ = await answers()
        found, tokens = await answers(kv_cache_bytes=str(200_000), kv_host_bytes=str(1 << 24), kv_host_min_tokens="8")
        assert found == wanted
        assert tokens > 0

    asyncio.run(main())
