"""Small random models for the tests, each with the slow twin's result for one sequence, and helpers to run and poison.

Everything the model computes at a position follows from the tokens up to it. So one reference, the twin's run over a
whole sequence, settles every way to feed its prefixes: `feed` in chunks, `feed_rows` as rows of a batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor, nn

import twin
from convert import load_model, write_random
from engram import engram_primes
from golden_data import CHECKPOINT, as_bits, same_bits
from model import Cache, ImageTokens, ModelConfig, Transformer
from quant import FakeQuant

# Sizes differ pairwise, so that a swapped axis cannot pass; top-k and pool are smaller than what is visible; YaRN on.
WIDE_WINDOW: dict[str, Any] = dict(
    hidden_size=128,
    moe_intermediate_size=160,
    num_hidden_layers=6,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=24,
    q_lora_rank=96,
    o_lora_rank=112,
    o_groups=2,
    max_position_embeddings=1024,
    n_routed_experts=7,
    num_experts_per_tok=3,
    sliding_window=128,
    compress_ratios=[0, 2, 2, 1, 1, 1],
    kv_source_layer_ids=[1, 3],
    index_source_layer_ids=[1, 3, 4],
    index_n_heads=5,
    index_head_dim=32,
    index_topk=20,
    candidate_source_layer_id=3,
    candidate_topk_blocks=8,
    candidate_block_size=6,
    engram_layer_ids=[2],
    num_nextn_predict_layers=0,
    dspark_block_size=5,
    dspark_target_layer_ids=[],
)
THIRDS: dict[str, Any] = dict(
    hidden_size=96,
    moe_intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=6,
    head_dim=32,
    qk_rope_head_dim=12,
    q_lora_rank=128,
    o_lora_rank=80,
    o_groups=2,
    max_position_embeddings=256,
    n_routed_experts=5,
    num_experts_per_tok=2,
    sliding_window=9,
    compress_ratios=[0, 3, 3, 1, 1],
    kv_source_layer_ids=[1, 3],
    index_source_layer_ids=[1, 2, 3, 4],
    index_n_heads=3,
    index_head_dim=32,
    index_topk=10,
    candidate_source_layer_id=3,
    candidate_topk_blocks=4,
    candidate_block_size=7,
    hc_mult=3,
    hc_sinkhorn_iters=7,
    engram_layer_ids=[],
    num_nextn_predict_layers=0,
    dspark_block_size=4,
    dspark_target_layer_ids=[],
)


def published(changes: dict[str, Any], vision: bool = False) -> dict[str, Any]:
    """The golden checkpoint's config.json with a changed text_config; without a vision tower unless asked for."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    text = config["text_config"] = config["text_config"] | changes
    primes = engram_primes(
        len(text["engram_layer_ids"]), text["engram_max_ngram_size"], text["engram_n_heads"], text["engram_vocab_size"]
    )
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    if not vision:
        del config["vision_config"]
    return config


def small_config(changes: dict[str, Any] | None = None, **more: Any) -> ModelConfig:
    """THIRDS, or other changes of the golden configuration, with more changes on top."""
    return ModelConfig.from_dict(published((THIRDS if changes is None else changes) | more))


@dataclass
class Small:
    """A random checkpoint in `directory`, its exact model, a sequence [n] and what the twin computes for it."""

    directory: Path
    model: Transformer
    tokens: Tensor
    twin: dict[str, Tensor]


def make(changes: dict[str, Any], directory: Path, seed: int, tokens: int) -> Small:
    path = directory / "config.json"
    path.write_text(json.dumps(published(changes)))
    write_random(path, directory / "checkpoint", seed, CHECKPOINT)
    model = load_model(directory / "checkpoint", exact=True, device="cpu")
    ids = torch.randint(11, model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Small(directory / "checkpoint", model, ids, twin.forward(str(directory / "checkpoint"), ids.tolist()))


def feed(
    model: Transformer,
    tokens: Tensor,
    chunks: Sequence[int],
    cache: Cache | None = None,
    images: ImageTokens | None = None,
) -> tuple[Tensor, Cache]:
    """Append the first sum(chunks) of tokens [n] chunk by chunk: logits [sum(chunks), V] and the cache."""
    cache = model.new_cache() if cache is None else cache
    logits, at = [], 0
    for n in chunks:
        part = None if images is None else images.columns(at, at + n)
        logits.append(model(tokens[None, at : at + n], cache, images=part).logits[0])
        at += n
    return torch.cat(logits), cache


def feed_rows(model: Transformer, rows: Sequence[Tensor], cache: Cache, padding: int = 0) -> list[Tensor]:
    """Append rows of any lengths, right padded with `padding`, in one forward: the logits [n, V] of each."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), padding)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    logits = model(ids, cache, lengths=[len(row) for row in rows]).logits
    return [logits[b, : len(row)] for b, row in enumerate(rows)]


def same_state(a: Cache, b: Cache, row_a: int = 0, row_b: int = 0) -> list[str]:
    """Names of the live state's entries that differ between a row of each cache; none means equal."""
    one, other = a.live_state(row_a), b.live_state(row_b)
    assert one.keys() == other.keys()
    return [name for name in one if not same_bits(one[name], other[name])]


@torch.inference_mode()
def poison(cache: Cache) -> int:
    """Overwrite every slot that no later token may read, with bytes that are NaN or absurd; returns how many bytes.

    Dead are: ring slots outside the last W - 1 tokens (W for draft stages; or outside the open group, or the last
    n-gram), compressed rows beyond the length, and the storage that has grown ahead of it. No rolling back after this.
    Rings of draft stages that a model without its draft head never fills are left alone: all zeros.
    """
    plans, c, count = {p.layer: p for p in cache.plans}, cache.config, 0
    for key, ring in list(cache.rings.items()):
        if key[0] == "window" and plans[key[1]].part == "draft" and not ring.any():
            continue
        ring = ring.clone()
        depth = ring.shape[1]
        for row, n in enumerate(cache.lengths):
            if key[0] == "window":
                part = plans[key[1]].part
                back = max(min(n - cache.window_start[part][row], c.sliding_window - (part != "draft")), 0)
            else:
                back = n % plans[key[1]].ratio if len(key) > 1 else min(n, c.engram_max_ngram_size - 1)
            dead = torch.ones(depth, dtype=torch.bool)
            dead[torch.arange(n - back, n) % depth] = False
            slots = ring[row]
            slots[dead] = {torch.uint8: 255, torch.float32: torch.nan, torch.int64: 1 << 60}[ring.dtype]
            count += int(dead.sum()) * ring[row, 0].nbytes
        cache.rings[key] = ring
    for store in (cache.main, cache.keys):
        for source, rows in store.items():
            for row, n in enumerate(cache.lengths):
                dead_rows = rows[row, n // plans[source].ratio :]
                dead_rows.fill_(255)
                count += dead_rows.nbytes
    return count


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Give every parameter values by its dtype: bf16 and float32 normal, E4M3 and E2M1 codes with scales near 2^-7."""
    g = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        value = torch.randn(parameter.shape, generator=g)
        if parameter.dtype == torch.float8_e8m0fnu:
            value = torch.randint(118, 121, parameter.shape, generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        elif parameter.dtype == torch.float8_e4m3fn:
            value = (value * 10).to(torch.float8_e4m3fn)
        elif parameter.dtype == torch.int8:
            value = torch.randint(-128, 128, parameter.shape, generator=g, dtype=torch.int8)
        parameter.copy_(value)


def without_fake_quant(directory: Path, draft: bool = False) -> Transformer:
    """The exact model of a checkpoint with every fake quantisation off: then cached rows are bfloat16."""
    off = FakeQuant(False, False, False, False, False)
    return load_model(directory, exact=True, device="cpu", fake_quant=off, draft=draft)


def images_of(types: Sequence[int], features: Tensor) -> ImageTokens:
    """Image tokens of one row from the types [S] of its tokens."""
    return ImageTokens(torch.tensor([list(types)], dtype=torch.int8), features)


def bits_differ(a: Tensor, b: Tensor) -> int:
    """How many elements differ in their bits."""
    return int((as_bits(a) != as_bits(b)).sum())
