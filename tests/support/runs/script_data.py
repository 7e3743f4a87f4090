"""Write tiny models and data sets in the forms that public scripts read; each function creates one path."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

COUNT = 48
"""Samples of a data set."""


def write_words(number: int, length: int = 6) -> str:
    """Return a sentence of the vocabulary of the tokenizer."""
    return " ".join(f"w{(number * 7 + word * 3) % 40}" for word in range(length))


def write_rows(path: Path, **splits: list[dict[str, Any]]) -> None:
    """Write a data set of rows, which `load_dataset` reads from its folder."""
    path.mkdir(parents=True)
    for split, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (path / f"{split}.jsonl").write_text(text, encoding="utf-8")


def texts(path: Path) -> None:
    """Texts, for language models."""
    write_rows(path, train=[{"text": write_words(number, 12)} for number in range(COUNT)])


def prompts(path: Path) -> None:
    """Prompts, for reinforcement learning."""
    write_rows(path, train=[{"prompt": write_words(number)} for number in range(COUNT)])


def rewards(path: Path) -> None:
    """A module with a reward of completions."""
    text = "def count_words(completions, **_):\n    return [float(len(set(text.split()))) for text in completions]\n"
    path.write_text(text, encoding="utf-8")


def preferences(path: Path) -> None:
    """Prompts with a chosen and a rejected completion."""
    rows = [
        {
            "prompt": write_words(number),
            "chosen": " " + write_words(number + 1, 5),
            "rejected": " " + write_words(number + 2, 4),
        }
        for number in range(COUNT)
    ]
    write_rows(path, train=rows)


def labelled_completions(path: Path) -> None:
    """Prompts with a completion that is good or bad."""
    rows = [
        {
            "prompt": write_words(number),
            "completion": " " + write_words(number + 1, 5),
            "label": number % 2 == 0,
        }
        for number in range(COUNT)
    ]
    write_rows(path, train=rows)


def instructions(path: Path) -> None:
    """Instructions and answers, in the columns of Alpaca."""
    rows = [
        {"instruction": write_words(number), "input": "", "output": write_words(number + 1)}
        for number in range(COUNT)
    ]
    write_rows(path, train=rows)


def text_file(path: Path) -> None:
    """Lines of words."""
    path.write_text("\n".join(write_words(number, 20) for number in range(200)) + "\n", encoding="utf-8")


def sentence_pairs(path: Path) -> None:
    """Pairs of sentences with a score, in the columns of STSb."""
    rows = [
        {
            "sentence1": write_words(number),
            "sentence2": write_words(number + 1, 5),
            "score": number % 5 / 4,
        }
        for number in range(COUNT)
    ]
    write_rows(path, train=rows, validation=rows[:16], test=rows[:16])


def tokenizer(path: Path) -> None:
    """A tokenizer of words."""
    from support.runs.library_scripts import build_tokenizer

    build_tokenizer().save_pretrained(path)


def llama(path: Path) -> None:
    """A language model with its tokenizer."""
    from support.runs.library_scripts import build_llama

    build_llama().save_pretrained(path)
    tokenizer(path)


def bert(path: Path) -> None:
    """An encoder with its tokenizer."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForMaskedLM(config).save_pretrained(path)
    tokenizer(path)


def masking_bert(path: Path) -> None:
    """An encoder whose tokenizer has a token of masks."""
    from support.runs.library_scripts import build_tokenizer

    bert(path)
    words = build_tokenizer()
    words.add_special_tokens({"mask_token": "<mask>"})
    words.save_pretrained(path)


def draw_image(number: int, size: int) -> Any:
    """Return an image of noise."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def images(path: Path) -> None:
    """Images with captions, for an `imagefolder`."""
    path.mkdir(parents=True)
    rows = []
    for number in range(16):
        draw_image(number, 32).save(path / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": write_words(number)})
    (path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def photos(path: Path) -> None:
    """Images of one subject."""
    path.mkdir(parents=True)
    for number in range(8):
        draw_image(number, 32).save(path / f"{number}.png")


def image_classes(path: Path) -> None:
    """Images of two classes in a folder each, for training and validation."""
    for split in ("train", "validation"):
        for kind in ("cat", "dog"):
            (folder := path / split / kind).mkdir(parents=True)
            for number in range(12):
                draw_image(number + 100 * (kind == "dog"), 32).save(folder / f"{number}.png")


def unet(path: Path) -> None:
    """The configuration of a small unconditional denoiser."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
    )
    model.save_config(path)


def stable_diffusion(path: Path) -> None:
    """A pipeline from text to images."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )
    model = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    path.mkdir(parents=True)
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *(f"{letter}{end}" for letter in "w0123456789" for end in ("", "</w>")),
    ]
    (path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    clip = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt"), model_max_length=77),
        unet=model,
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
    ).save_pretrained(path)


def mnist(path: Path) -> None:
    """The files of MNIST, of noise."""
    import numpy as np

    path.mkdir(parents=True)
    random = np.random.default_rng(0)
    for prefix, count in {"train": 256, "t10k": 64}.items():
        pixels = random.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = struct.pack(">IIII", 0x00000803, count, 28, 28)
        (path / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = struct.pack(">II", 0x00000801, count)
        (path / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def wikitext(path: Path) -> None:
    """Three files of words."""
    path.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        text_file(path / f"{split}.txt")


def enwik8(path: Path) -> None:
    """The number of bytes of enwik8 that scripts read, as one text that repeats."""
    text = "".join(f"{write_words(number, 30)}\n" for number in range(1000)).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(text * (95_000_000 // len(text) + 1))


def empty_folder(path: Path) -> None:
    """A folder for results."""
    path.mkdir(parents=True)
