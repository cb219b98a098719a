"""One set of runs that touches every mechanism, and its results as named arrays: the same for any number of ranks and on
any device, which is what the tests of tensor parallelism and of CUDA compare. Also: starting the ranks."""
from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.multiprocessing
from torch import Tensor, nn

from convert import load_model
from dspark import Sampler, SpeculativeDecoder
from engram import engram_primes
from golden_data import same_bits
from model import ImageTokens, Transformer, argmax_lowest

UNROUNDED = ("pre_mix", "route_weights")   # float64 between rounding points: equal bits on one device, not across devices


class Watch:
    """Hooks that keep what layers, gates, selections and draft stages return, call by call."""

    def __init__(self, model: Transformer) -> None:
        self.kept: dict[str, list[Tensor]] = defaultdict(list)
        self.handles = []
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind in ("Block", "Stage"):
                self.add(module, name, ("output", "pre_mix"), lambda out: out[:2])
            elif kind == "Indexer":
                self.add(module, name, ("rows", "pool"), tuple)
            elif kind == "Gate":
                self.add(module, name, ("route_weights", "route_experts"), tuple)
            elif kind in ("Attention", "MoE", "Engram", "Embedding", "RMSNorm"):
                self.add(module, name, ("out",), lambda out: (out[0],) if isinstance(out, tuple) else (out,))

    def add(self, module: nn.Module, name: str, leaves: tuple[str, ...], pick: Callable[[Any], tuple]) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for leaf, value in zip(leaves, pick(out)):
                if value is not None:
                    self.kept[f"{name}.{leaf}"].append(value.cpu())
        self.handles.append(module.register_forward_hook(hook))

    def take(self, prefix: str) -> dict[str, Tensor]:
        out = {f"{prefix}.{name}.{i}": value for name, values in self.kept.items() for i, value in enumerate(values)}
        self.kept.clear()
        return out


def tokens_of(model: Transformer, n: int, seed: int, ids: int | None = None) -> Tensor:
    """n random token ids, none of them special; of only `ids` different ones where given, which makes ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, 16 + (ids or model.config.vocab_size - 16), (n,), generator=generator)


def image_of(model: Transformer) -> tuple[ImageTokens, Tensor]:
    """A 6 x 9 grid of random patches as a span inside 60 tokens: 2 x 3 image tokens, two newlines, start and end."""
    side = model.config.vision_config.patch_size
    generator = torch.Generator().manual_seed(5)
    patches = torch.randn(54, 3, side, side, generator=generator).to(torch.bfloat16)
    features = model.encode_image(patches, (6, 9))
    span = [0, *([1] * 3 + [2]) * 2, 3]
    types = torch.tensor([[-1] * 21 + span + [-1] * (60 - 21 - len(span))], dtype=torch.int8)
    tokens = tokens_of(model, 60, 6).masked_fill(types[0] >= 0, model.config.image_token_id)
    return ImageTokens(types, features), tokens


RUNS = ("text", "ragged", "ties", "image", "bounded", "sampled")


def all_runs(model: Transformer, prompt: int = 97, runs: tuple[str, ...] = RUNS) -> dict[str, Tensor]:
    """Chunks and greedy decoding with drafts, a ragged batch, ties, an image, bounded prefill, sampled speculation; those
    of them that this model can do."""
    watch, out = Watch(model), {}
    rows = tokens_of(model, 3 * 70, 2).view(3, 70)

    def finish(run: str, cache: Any, **more: Tensor) -> None:
        nonlocal out
        out |= watch.take(run) | {f"{run}.{name}": value.cpu() for name, value in more.items()}
        for row in range(cache.batch_size):
            out |= {f"{run}.state.{row}.{name}": value.cpu() for name, value in cache.live_state(row).items()}

    def feed(run: str, tokens: Tensor, chunks: list[int], images: ImageTokens | None = None) -> tuple[Any, Tensor]:
        cache, logits, at = model.new_cache(), [], 0
        for n in chunks:
            part = None if images is None else images.columns(at, at + n)
            logits.append(model(tokens[None, at : at + n], cache, images=part).logits[0])
            at += n
        return cache, torch.cat(logits)

    if "text" in runs:
        cache, logits = feed("text", tokens_of(model, prompt, 1), [37, 1, prompt - 38])
        chosen, drafts = [argmax_lowest(logits[-1])], []
        for _ in range(3):
            if model.mtp is not None:
                drafts.append(model.mtp.draft(model, chosen[-1].view(1), cache))
            chosen.append(argmax_lowest(model(chosen[-1].view(1, 1), cache).logits[0, -1]))
        leaves = ("ids", "logits", "confidence")
        arrays = {f"draft_{leaf}.{i}": getattr(d, leaf) for i, d in enumerate(drafts) for leaf in leaves}
        finish("text", cache, logits=logits, chosen=torch.stack(chosen), **arrays)

    if "ragged" in runs:
        cache = model.new_cache(3)
        parts = [model(rows[:, :64], cache, [3, 64, 31]).logits, model(rows[:, 64:], cache, [1, 0, 6]).logits]
        held = [parts[0][b, :n] for b, n in enumerate([3, 64, 31])] + [parts[1][b, :n] for b, n in enumerate([1, 0, 6])]
        watch.kept.clear()          # padded positions mean nothing
        finish("ragged", cache, logits=torch.cat(held))

    if "ties" in runs:
        cache, logits = feed("ties", tokens_of(model, prompt + 60, 3, ids=6), [prompt + 60])
        finish("ties", cache, logits=logits)

    if "image" in runs and model.config.vision_config is not None:
        images, tokens = image_of(model)
        cache, logits = feed("image", tokens, [25, 35], images)
        finish("image", cache, logits=logits, features=images.features)

    start = model.config.decoder_start
    if "bounded" in runs and start is not None and min(model.config.dspark_target_layer_ids, default=start) >= start:
        cache = model.new_cache()
        logits = model.prefill(tokens_of(model, prompt, 1)[None], cache, "bounded", chunk_size=40).logits
        finish("bounded", cache, logits=logits)

    if "sampled" in runs and model.mtp is not None:
        cache = model.new_cache(2)
        logits = model(rows[:2, :20], cache, logits="last").logits
        decoder = SpeculativeDecoder(model, Sampler(1.0, 0.95, seed=7))
        pending, texts = decoder.sampler.choose(logits[:, 0]), [[], []]
        for _ in range(4):
            new = decoder.step(cache, pending, [True, True], [9, 9])
            pending, texts = [row[-1] for row in new], [text + row for text, row in zip(texts, new)]
        finish("sampled", cache, **{f"row{b}": torch.tensor(text) for b, text in enumerate(texts)})
    for handle in watch.handles:
        handle.remove()
    return out


def unequal(actual: dict[str, Tensor], expected: dict[str, Tensor], across_devices: bool = False) -> list[str]:
    """Names whose bits differ, in the order of the runs. Across devices what is never rounded is compared to 1e-12."""
    if actual.keys() != expected.keys():
        return sorted(actual.keys() ^ expected.keys())
    out = []
    for name, want in expected.items():
        if across_devices and any(f".{kind}." in name for kind in UNROUNDED):
            equal = torch.allclose(actual[name].double(), want.double(), rtol=1e-12, atol=1e-12)
        else:
            equal = same_bits(actual[name], want)
        if not equal:
            out.append(name)
    return out


# --------------------------------------------------------------------------------------------- layers of released size

def released_layers(experts: int = 8) -> dict[str, Any]:
    """A config.json of layers of released width (hidden 5120, 64 heads of 512, LoRA ranks, index heads, experts' sizes):
    window only, Full m = 2 with Engram, Full m = 1 with the pool, Reindex, Reuse, and a draft layer. Few experts, a small
    vocabulary, and a short window, top-k and pool, so that short prompts go beyond them."""
    small = json.loads((Path(__file__).parent / "configs" / "parallel.json").read_text())
    full = json.loads((Path(__file__).parent.parent / "config.json").read_text())["text_config"]
    kept = ("hidden_size", "moe_intermediate_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank",
            "o_lora_rank", "o_groups", "swiglu_limit", "index_n_heads", "index_head_dim", "num_experts_per_tok",
            "routed_scaling_factor", "rope_scaling", "engram_n_heads", "engram_head_dim")
    text = small["text_config"] | {key: full[key] for key in kept} | dict(
        num_hidden_layers=5, compress_ratios=[0, 2, 1, 1, 1, 0], kv_source_layer_ids=[1, 2], index_source_layer_ids=[1, 2, 3],
        candidate_source_layer_id=2, engram_layer_ids=[1], n_routed_experts=experts, num_nextn_predict_layers=1,
        dspark_target_layer_ids=[3, 4], dspark_n_routed_experts=4)
    primes = engram_primes(1, text["engram_max_ngram_size"], text["engram_n_heads"], text["engram_vocab_size"])
    text["engram_num_embeddings"] = [sum(map(sum, primes[0]))]
    return {key: value for key, value in small.items() if key != "vision_config"} | {"text_config": text}


# -------------------------------------------------------------------------------------------------------------- ranks

def _rank(rank: int, sizes: tuple[int, ...], backend: str, folder: str, job: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    world = max(sizes)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for size in sizes:
        group = torch.distributed.new_group(list(range(size)))
        if rank < size:
            torch.save(job(group, *args), f"{folder}/{size}.{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def on_ranks(sizes: tuple[int, ...], folder: Path, job: Callable[..., Any], *args: Any,
             backend: str = "gloo") -> dict[int, list[Any]]:
    """job(group, *args) on every rank of groups of these sizes: {size: each rank's result}. The ranks are new processes."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(_rank, (sizes, backend, str(folder), job, args), nprocs=max(sizes))
    return {size: [torch.load(folder / f"{size}.{rank}.pt") for rank in range(size)] for size in sizes}


def negative_zeros(model: Transformer) -> None:
    """Put -0 into every third row of the embedding: what a sum with another rank's 0 would lose."""
    weight = model.embed.weight
    row = torch.arange(len(weight), device=weight.device) + model.ranks.rank * len(weight)
    weight[row % 3 == 0, ::5] = -0.0


def load_and_run(group: Any, directory: str | dict[int, str], device: str = "cpu", exact: bool = True,
                 runs: tuple[str, ...] = RUNS) -> dict[str, Tensor]:
    """`all_runs` of a checkpoint, or of the one for this number of ranks, with -0 in its embedding."""
    size = torch.distributed.get_world_size(group) if group is not None else 1
    on = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    model = load_model(directory[size] if isinstance(directory, dict) else directory, exact, on, group=group, draft=True)
    negative_zeros(model)
    return all_runs(model, runs=runs)


def as_rank(monkeypatch: Any, rank: int, size: int) -> Any:
    """A stand-in for a process group: loading asks a group for nothing but its rank and size."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
    return SimpleNamespace(rank=rank, size=size)
