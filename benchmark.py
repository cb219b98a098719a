"""Speed and memory of a checkpoint, and of random layers part by part beside what the hardware allows.

    python generate.py --benchmark 512,4096
    python generate.py --benchmark 4096,32768 --random CONFIG.json --context 4096,262144 --batch-size 8

In the second form packed random weights are made in device memory and the cache is filled with random packed rows, so a
context of any length costs no prefill and nothing touches the disk. For each part of a step the bytes that must move and
the operations that must be done are counted first; the larger of the two times is its floor on the device.
"""
from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from convert import RandomWeights
from model import Cache, Experts, ModelConfig, Transformer
from quant import Linear, Numerics, bind

# ------------------------------------------------------------------------------------------------------- a checkpoint

class CountOperations(TorchDispatchMode):
    """Counts the eager operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def run_benchmark(s: Any, decoder: Any) -> None:
    """A line of the table for each prompt length: random prompts, greedy decoding, nothing else running in between. `s` is
    generate.py's Setting, `decoder` its greedy decoder. A prefill of up to 8,192 tokens over all rows is run once to warm up,
    when memory is asked of the system, and five times more, of which the median counts; a longer one is run once. GFLOP
    counts its matrix products."""
    args, model, rows = s.args, s.model, s.args.batch_size

    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    def measure(length: int, decode: int) -> tuple[float, int, float, int, int, int]:
        ids = torch.randint(model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(args.seed))  # [B, S]
        took: list[float] = []
        for _ in range(6 if rows * length <= 8192 else 1):
            cache, began = model.new_cache(rows, length + decode + 64), now()
            logits = model.prefill(ids, cache, args.prefill).logits
            took.append(now() - began)
        prefill = statistics.median(took[1:] or took)
        chosen = [[token] for token in decoder.sampler.choose(logits[:, -1])]
        read, made, room = now(), 0, [decode + 32] * rows
        while made < decode * rows:
            chosen = decoder.step(cache, [tokens[-1] for tokens in chosen], [True] * rows, room)
            made += sum(map(len, chosen))
        done = now()
        with CountOperations() as operations:
            decoder.step(cache, [tokens[-1] for tokens in chosen], [True] * rows, room)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if model.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(model.device)
        with FlopCounterMode(display=False) as products:
            model.prefill(ids, model.new_cache(rows, length), args.prefill)
        flops = products.get_total_flops()
        return rows * length / prefill, flops, made / (done - read), operations.count, cache.nbytes(), peak

    memory = "peak GPU MiB" if model.device.type == "cuda" else "peak RSS MiB"
    s.screen.note(f"{args.ckpt_path}: {'exact' if args.exact else 'fast'}, {args.prefill} prefill, "
                  f"{'speculative' if args.speculative else 'plain'} decoding,\nbatch {rows}, {model.device}, "
                  f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    s.screen.write(f"{'prompt':>8}{'prefill/s':>12}{'GFLOP':>9}{'decode/s':>11}{'ops/step':>11}{'cache MiB':>12}"
                   f"{memory:>14}\n")
    measure(min(16, *args.benchmark), 2)                     # warm up: first calls allocate and choose kernels
    for length in args.benchmark:
        prefill, flops, decode, operations, held, peak = measure(length, args.benchmark_decode)
        s.screen.write(f"{length:>8}{prefill:>12.1f}{flops / 1e9:>9.2f}{decode:>11.1f}{operations:>11}"
                       f"{held / 2**20:>12.2f}{peak / 2**20:>14.1f}\n")


# ------------------------------------------------------------------------------------------------------- random layers

PARTS = ("projections", "indexer", "gather + attention", "dequantisation", "experts", "mHC and the rest")
# What one H200 was measured to do here: bytes/s of a device copy (read + written), bf16 and float32 operations/s.
BANDWIDTH, BF16_RATE, FLOAT32_RATE = 4.3e12, 790e12, 55e12


def random_model(config: ModelConfig, num: Numerics, device: torch.device, seed: int = 0) -> Transformer:
    """A model whose weights are drawn on the device in their packed formats, scaled as convert.RandomWeights scales them."""
    with torch.device("meta"):
        model = Transformer(config, num)
    law = RandomWeights(config, seed)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        stored = name.removesuffix("scale") + "weight" if leaf == "scale" else name
        value = _draw(law, stored, parameter, generator, device)
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
        if isinstance(module, (Experts, Linear)):
            module.prepare()
    bind(model)
    return model


def _draw(law: RandomWeights, name: str, like: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    shape, dtype = like.shape, like.dtype
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device, generator=generator)
    if dtype == torch.float8_e8m0fnu:   # the power of two next to the deviation asked for
        sigma = law.fp4_sigma if ".experts." in name else law.fp8_sigma
        exponent = round(math.log2(law._mean_std(name, shape[-1] * 32)[1] / sigma))
        return torch.full(shape, 127 + exponent, dtype=torch.uint8, device=device).view(dtype)
    value = torch.empty(shape, dtype=dtype, device=device)
    mean, std = (0.0, law.fp8_sigma) if dtype == torch.float8_e4m3fn else law._mean_std(name, shape[-1])
    for rows in value.split(8192):      # float32 draws of a part at a time
        rows.copy_((torch.randn(rows.shape, device=device, generator=generator) * std + mean).clamp_(-448, 448))  # E4M3's range
    return value


def fill_cache(cache: Cache, length: int, seed: int = 0) -> Cache:
    """Make a cache hold `length` tokens of random packed rows, as if a prompt of that length had been processed."""
    generator = torch.Generator(cache.device).manual_seed(seed)

    def rows(codec: Any, *shape: int) -> Tensor:
        return codec.pack(torch.randn(*shape, codec.width, device=cache.device, generator=generator).to(torch.bfloat16))

    cache.lengths, cache._highest = [length] * cache.batch_size, [length] * cache.batch_size
    for key, ring in cache.rings.items():
        if key[0] == "window":
            cache.rings[key] = rows(cache.window_rows, *ring.shape[:2])
        elif ring.is_floating_point():
            cache.rings[key] = torch.randn(ring.shape, device=cache.device, generator=generator)
    for source in cache.main:
        held = length // cache.plans[source].ratio
        cache._grow(source, held)
        for store, codec in ((cache.main, cache.main_rows), (cache.keys, cache.key_rows)):
            for j in range(0, held, 32768):
                part = store[source][:, j : min(j + 32768, held)]
                part.copy_(rows(codec, *part.shape[:2]))
    return cache


@dataclass
class Work:
    """Bytes that a part must move and operations it must do."""
    bytes: float = 0.0
    bf16: float = 0.0
    float32: float = 0.0

    def floor(self) -> float:
        """Seconds on the device above: the larger of moving and computing."""
        return max(self.bytes / BANDWIDTH, self.bf16 / BF16_RATE + self.float32 / FLOAT32_RATE)


def experts_used(model: Transformer, run: Callable[[], Any]) -> list[int]:
    """How many different experts each layer's tokens go to in `run`."""
    seen: dict[int, set[int]] = {i: set() for i in range(len(model.layers))}
    handles = [layer.ffn.gate.register_forward_hook(lambda _, __, out, i=i: seen[i].update(out[1].unique().tolist()))
               for i, layer in enumerate(model.layers)]
    run()
    for handle in handles:
        handle.remove()
    return [len(experts) for experts in seen.values()]


def count_work(model: Transformer, rows: int, tokens: int, context: int, used_experts: list[int]) -> dict[str, Work]:
    """Work of one fast forward of `tokens` new tokens in each of `rows` rows that hold `context` tokens before.

    Weights and history are read once per forward, activations are not counted but for the residual streams. Dense weights
    are bfloat16; a dequantised expert is written and read once. Prompts attend to half of what they add, on average.
    `used_experts`: the experts of each layer that its tokens go to.
    """
    c, new = model.config, rows * tokens
    work = {part: Work() for part in PARTS}

    def matrix(part: str, elements: float, width: float = 2.0) -> None:
        work[part].bytes += elements * width
        work[part].bf16 += 2 * elements * new

    seen = context + (tokens + 1) / 2
    for block, used in zip(model.layers, used_experts):
        plan = block.plan
        for name, parameter in block.named_parameters():
            if parameter.dim() == 2 and not name.endswith("scale") and "hc_" not in name and ".experts." not in name:
                matrix("indexer" if ".indexer." in name else "projections", parameter.numel())
        window = min(c.sliding_window, seen)
        chosen = min(c.index_topk, seen / plan.ratio) if plan.ratio else 0
        products = 2 * c.num_attention_heads * c.head_dim * (window + chosen) * new
        attention = work["gather + attention"]
        attention.bf16 += products
        attention.float32 += products      # unrounded probabilities times values
        attention.bytes += new * chosen * (c.head_dim // 2 + c.head_dim // 16)
        attention.bytes += rows * min(seen, window + tokens) * (c.head_dim + c.head_dim // 32)
        if plan.mode in ("full", "reindex"):
            held = seen / plan.ratio
            scored = min(held, c.candidate_topk_blocks * c.candidate_block_size) if plan.uses_pool else held
            key_bytes = c.index_head_dim // 2 + c.index_head_dim // 32
            work["indexer"].bf16 += 2 * c.index_n_heads * c.index_head_dim * scored * new
            work["indexer"].float32 += 2 * c.index_n_heads * scored * new
            work["indexer"].bytes += key_bytes * (scored * new if plan.uses_pool and tokens == 1 else held * rows)
        per_expert = 3 * c.hidden_size * c.moe_intermediate_size
        routes = new * c.num_experts_per_tok
        work["dequantisation"].bytes += used * per_expert * (0.5 + 1 / 32 + 2)
        work["experts"].bytes += used * per_expert * 2
        work["experts"].bf16 += 2 * per_expert * routes
        streams = c.hc_mult * c.hidden_size
        mixes = (2 + c.hc_mult) * c.hc_mult
        work["mHC and the rest"].bytes += 2 * (3 * new * streams * 2 + mixes * streams * 4)
        work["mHC and the rest"].float32 += 2 * new * streams * (2 * mixes + 2 * (c.hc_mult + 1) + 2)
    matrix("projections", 0)
    work["projections"].bytes += model.head.weight.numel() * 2
    work["projections"].bf16 += 2 * model.head.weight.numel() * rows                # of last positions only
    return work


class PartTimer:
    """Times the parts of forwards by events around modules; parts inside others are taken out of them."""

    KINDS = {"Linear": "projections", "Compressor": "projections", "Indexer": "indexer", "SparseAttention": "gather + attention",
             "Experts": "experts"}

    def __init__(self, model: Transformer) -> None:
        self.spans: list[tuple[str, Any, Any]] = []
        self.open: list[Any] = []
        self.cuda = model.device.type == "cuda"
        self.handles: list[Any] = []
        self.patched: list[Experts] = []
        for name, module in model.named_modules():
            part = self.KINDS.get(type(module).__name__)
            nested = ".indexer." in name or ".compressor." in name
            if part is not None and not nested:
                self.handles.append(module.register_forward_pre_hook(lambda *_: self.open.append(self.mark())))
                self.handles.append(module.register_forward_hook(lambda *_, part=part: self.spans.append(
                    (part, self.open.pop(), self.mark()))))
            if part == "experts":                            # whose dequantisation is a method
                module.dense = lambda experts, dense=module.dense: self.dequantise(dense, experts)
                self.patched.append(module)

    def dequantise(self, dense: Callable[[Tensor], Any], experts: Tensor) -> Any:
        begin = self.mark()
        weights = dense(experts)
        self.spans.append(("dequantisation", begin, self.mark()))
        return weights

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, total: float, forwards: int) -> dict[str, float]:
        """Seconds of each part per forward, given the `total` of a forward; the last part is what is left."""
        for handle in self.handles:
            handle.remove()
        for module in self.patched:
            del module.dense
        if self.cuda:
            torch.cuda.synchronize()
        spent = dict.fromkeys(PARTS, 0.0)
        for part, begin, end in self.spans:
            spent[part] += (begin.elapsed_time(end) / 1e3 if self.cuda else end - begin) / forwards
        spent["experts"] -= spent["dequantisation"]
        spent[PARTS[-1]] = total - sum(spent.values())
        return spent


def measure(model: Transformer, run: Callable[[], Any], forwards: int) -> tuple[float, dict[str, float]]:
    """Seconds of one forward, median of `forwards`, and of its parts (measured apart, since the events cost time too)."""
    def one() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    one()
    total = sorted(one() for _ in range(forwards))[forwards // 2]
    timer = PartTimer(model)
    with_events = sum(one() for _ in range(forwards)) / forwards
    return total, timer.seconds(with_events, forwards)


def random_benchmark(config_path: str | Path, prompts: list[int], contexts: list[int], rows: int, exact: bool, device: torch.device,
                     seed: int, write: Callable[[str], Any]) -> None:
    """Print a table for every context (one decode step of `rows` rows) and prompt (a prefill of one row)."""
    config, num = ModelConfig.from_json(config_path), Numerics(torch.float64 if exact else torch.float32)
    if config.engram_layer_ids:
        raise ValueError(f"{config_path} has Engram layers, whose tables --random does not make: set engram_layer_ids to []")
    model = random_model(config, num, device, seed)
    modes = ", ".join(f"{p.mode}{f' m={p.ratio}' if p.mode == 'full' else ''}" for p in model.plans[: config.num_hidden_layers])
    write(f"random layers: {modes}\n{device}, {'exact' if num.exact else 'fast'}, torch {torch.__version__}\n")

    def table(what: str, tokens: int, work: dict[str, Work], total: float, spent: dict[str, float]) -> None:
        peak = f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else ""
        write(f"\n{what}: {total * 1e3:.1f} ms, {tokens / total:,.0f} tokens/s{peak}\n")
        write(f"  {'part':20}{'GB':>9}{'TFLOP':>9}{'H200 floor ms':>15}{'measured ms':>13}{'ratio':>8}\n")
        lines = [(part, work[part].bytes, work[part].bf16 + work[part].float32, work[part].floor(), spent[part]) for part in PARTS]
        lines.append(("all", *(sum(line[i] for line in lines) for i in (1, 2, 3)), total))
        for part, moved, done, floor, took in lines:
            write(f"  {part:20}{moved / 1e9:>9.3f}{done / 1e12:>9.4f}{floor * 1e3:>15.3f}{took * 1e3:>13.2f}{took / floor:>8.1f}\n")

    for context in contexts:
        cache = fill_cache(model.new_cache(rows, context + 64), context, seed)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        token = torch.randint(config.vocab_size, (rows, 1), generator=torch.Generator().manual_seed(seed))
        def step() -> Any:
            return model(token, cache, logits="last")
        used = experts_used(model, step)
        total, spent = measure(model, step, 5)
        table(f"decode, {rows} row{'s' * (rows > 1)}, context {context:,}", rows, count_work(model, rows, 1, context, used), total, spent)
        del cache
    for length in prompts:
        ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        def prefill() -> Any:
            return model.prefill(ids, model.new_cache(1, length))
        used = experts_used(model, prefill)
        total, spent = measure(model, prefill, 3)
        table(f"prefill, {length:,} tokens", length, count_work(model, 1, length, 0, used), total, spent)
