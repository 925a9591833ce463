"""Layer sizes of published models, and argparse types for sizes."""

from __future__ import annotations

import argparse

MODELS = {  # name: (H, I, E, top_k)
    "deepseek-v2-lite": (2048, 1408, 64, 6),
    "deepseek-v3": (7168, 2048, 256, 8),
    "glm-4.5": (5120, 1536, 160, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "kimi-k2": (7168, 2048, 384, 8),
    "llama-4-maverick": (5120, 8192, 128, 1),
    "llama-4-scout": (5120, 8192, 16, 1),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "olmoe": (2048, 1024, 64, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-next": (2048, 512, 512, 10),
}

# Gating of models by `topk_sigmoid`, renormalized, with a bias in float32: (num_groups, top_groups, scale)
SIGMOID_GATING = {
    "deepseek-v3": (8, 4, 2.5),
    "glm-4.5": (1, 1, 2.5),
    "glm-4.5-air": (1, 1, 1.0),
    "kimi-k2": (1, 1, 2.827),
}

# Models whose own layers have biases and another activation than the SwiGLU layers of these sizes.
NOT_SWIGLU = ("gpt-oss-120b", "gpt-oss-20b")


def gemms(H: int, width: int) -> dict[str, tuple[int, int]]:
    """Return (N, K) of both products of an expert: gate and up together, then down."""
    return {"up": (2 * width, H), "down": (H, width)}


def shape(text: str, form: str = "G,M,N,K") -> tuple[int, int, int, int]:
    """Parse four numbers as in `form`, for argparse."""
    numbers = [positive(number) for number in text.split(",")]
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"expected {form}, got {text!r}")
    first, second, third, fourth = numbers
    return first, second, third, fourth


def positive(text: str) -> int:
    """Parse a positive whole number, for argparse."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    if int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"expected less than 2**31, got {text!r}")
    return int(text)
