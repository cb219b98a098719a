"""Golden recordings: what the model computes, position by position, and a comparison that names the first difference.

    python golden.py record  --ckpt-path DIR (--prompt TEXT | --messages FILE.json | --tokens FILE.json) --decode N
                             [--image FILE ...] [--level logits|layers|all] --out FILE.safetensors
    python golden.py compare A.safetensors B.safetensors [--ckpt-path DIR] [--map FILE.json] [--json] [--plot FILE.png]
    python golden.py noise   A.safetensors --ckpt-path DIR      tolerances, from reruns with rounding noise
    python golden.py show    A.safetensors [--layer I]          what is in a recording; which rows a layer selects

A recording is FILE.safetensors, values only, and FILE.manifest.json, the facts of the run. In exact mode the values are
the same bytes for any chunking, batch, number of ranks and device, drafted or not. They are taken by forward hooks
(`Recorder`) and written to their place in the file as they come, so a recording never has to fit in memory.

`compare` (recordings.py) goes through the arrays in the order of computation: the first that differs is a cause. With a
checkpoint the model is run again with every step reading what B recorded (`Forcing`): a step that then gives something
else than B holds is wrong by itself, and everything else is a consequence. docs/checking-an-engine.md shows how to use
this on another engine.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from convert import PARTIAL, Parser, load_model, open_checkpoint, weights_digest, write_atomically
from dspark import Sampler, SpeculativeDecoder, best_tokens
from encoding import encode_messages, image_source
from model import (Block, Cache, Chunk, ImageTokens, ModelConfig, Output, Selection, SparseAttention, Transformer,
                   plan_layers)
from quant import FakeQuant, Linear, RMSNorm, to_bf16
from recordings import (BAD_INPUT, BOOKKEEPING, FLOAT32, LEVELS, MARGINS, SETS, STEPS, TYPES, WIDTH, Recording, Report,
                        compare, compare_array, manifest_path, order, plot, read_json, result_table, selection_map,
                        show, table)
from vision import ImageInput, load_image

TIES = "lowest index, for selected rows, candidate blocks, experts and tokens"
ROUTE_GRID = 2.0**20     # route margins come in steps of 2**-20: the last digits of float64 would show otherwise


# ------------------------------------------------------------------------------------------------------ writing a file

@dataclass(frozen=True)
class Sheet:
    """An array of a recording. Row 0 stands for `first`: a position, a group of m tokens, or a decode step."""
    dtype: str
    shape: tuple[int, ...]
    first: int = 0

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * TYPES[self.dtype].itemsize


def layout(c: ModelConfig, prompt: int, total: int, level: str = "layers", layers: Iterable[int] | None = None,
           span: tuple[int, int] | None = None, logits: bool = True, draft: bool = False,
           images: list[ImageInput] | None = None) -> dict[str, Sheet]:
    """Every array of a recording of `total` tokens, of which `prompt` are given, in the order of computation; `layers`
    and `span` (first position, last + 1) restrict it."""
    a, b = (0, total) if span is None else span
    n, N, D, k = b - a, c.hc_mult, c.hidden_size, c.num_experts_per_tok
    out = {"tokens": Sheet("I64", (total,)), "prompt_length": Sheet("I64", (1,))}
    if span is not None:
        out["positions"] = Sheet("I64", (n,), a)
    if images and level != "logits":
        p, patches = c.vision_config.patch_size, sum(len(image.patches) for image in images)
        out["image.token_types"] = Sheet("I8", (total,))
        out["image.types"] = Sheet("I8", (sum(len(image.span) for image in images),))
        out["image.grids"] = Sheet("I32", (len(images), 2))
        out["image.patches"] = Sheet("BF16", (patches, 3, p, p))
        out["image.vit"] = Sheet("BF16", (patches, c.vision_config.hidden_size))
        out["image.features"] = Sheet("BF16", (sum(h * w for h, w in (image.llm_grid for image in images)), D))
    for plan in plan_layers(c)[: c.num_hidden_layers] if level != "logits" else ():
        if layers is not None and plan.layer not in layers:
            continue
        shapes = {"input": ("BF16", N, D), "pre_mix": ("F32", N), "output": ("BF16", N, D), "route_experts": ("I32", k),
                  "route_weights": ("F32", k), "route_margin": ("F32",)}
        shapes |= {name: ("BF16", D) for name in ("attn_in", "attn_out", "ffn_in", "ffn_out")}
        shapes |= {name: ("BF16", c.num_attention_heads, c.head_dim) for name in ("q", "attention")}
        shapes["window_kv"] = "BF16", c.head_dim
        if plan.engram is not None:
            shapes |= {"engram_rows": ("I64", (c.engram_max_ngram_size - 1) * c.engram_n_heads),
                       "engram_in": ("BF16", N, D), "engram_out": ("BF16", N, D)}
        if plan.mode == "full":
            shapes |= {"main_kv": ("BF16", c.head_dim), "index_key": ("BF16", c.index_head_dim)}
        if plan.mode in ("full", "reindex"):
            shapes |= {"topk": ("I32", c.index_topk), "topk_margin": ("F32",),
                       "index_query": ("BF16", c.index_n_heads, c.index_head_dim)}
        if plan.makes_pool:
            shapes |= {"candidates": ("I32", c.candidate_topk_blocks), "candidates_margin": ("F32",)}
        for name, (least, _) in STEPS.items():
            if name in shapes and LEVELS.index(least) <= LEVELS.index(level):
                m = plan.ratio if name in ("main_kv", "index_key") else 1     # groups whose last token is in the span
                kind, *shape = shapes[name]
                out[f"layers.{plan.layer}.{name}"] = Sheet(kind, (b // m - a // m, *shape), a // m)
    if level == "all":
        out["final_hidden"] = Sheet("BF16", (n, D), a)
    if logits:
        out["logits"] = Sheet("F32", (n, c.vocab_size), a)
    if draft:
        T, first = c.dspark_block_size, max(a - prompt, 0)
        steps = max(b - prompt, first) - first
        if level != "logits":
            out["dspark.main_hidden"] = Sheet("BF16", (n, len(c.dspark_target_layer_ids) * D), a)
        out["dspark.logits"] = Sheet("F32", (steps, T, c.vocab_size), first)
        out["dspark.tokens"] = Sheet("I64", (steps, 1 + T), first)
        out["dspark.confidence"] = Sheet("F32", (steps, T), first)
    return out


class Writer:
    """A safetensors file whose arrays are filled in any order. It gets its name when it is complete."""

    def __init__(self, path: Path, sheets: dict[str, Sheet]) -> None:
        self.path, self.sheets = path, sheets
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position, places = 0, {}
        for name in sorted(sheets, key=lambda name: -TYPES[sheets[name].dtype].itemsize):      # so that all are aligned
            places[name], sheet = position, sheets[name]
            position += sheet.row_bytes * sheet.shape[0]
            header[name] = {"dtype": sheet.dtype, "shape": sheet.shape, "data_offsets": [places[name], position]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.offset = {name: 8 + len(text) + start for name, start in places.items()}
        self.filled = {name: np.zeros(sheet.shape[0], bool) for name, sheet in sheets.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.partial = path.with_name(path.name + PARTIAL)
        self.file = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self.file, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self.file, 8 + len(text) + position)

    def write(self, name: str, index: int, rows: Tensor) -> None:
        """Rows [n, ...] from `index` on; those outside of the array are left out."""
        sheet = self.sheets[name]
        if tuple(rows.shape[1:]) != sheet.shape[1:]:
            raise RuntimeError(f"{name}: rows {list(rows.shape)} do not fit {list(sheet.shape)}")
        skip = max(sheet.first - index, 0)
        rows = rows[skip : max(sheet.first + sheet.shape[0] - index, 0)]
        if rows.shape[0]:
            at = index + skip - sheet.first
            data = rows.detach().to("cpu", TYPES[sheet.dtype]).contiguous().view(-1).view(torch.uint8).numpy()
            view, place = memoryview(data), self.offset[name] + at * sheet.row_bytes
            while view:     # one call writes 2 GiB at most
                done = os.pwrite(self.file, view, place)
                view, place = view[done:], place + done
            self.filled[name][at : at + rows.shape[0]] = True

    def gaps(self) -> dict[str, int]:
        """Arrays with rows that were not computed, and the first position from which on all are."""
        return {name: self.sheets[name].first + int(np.flatnonzero(~filled)[-1]) + 1
                for name, filled in self.filled.items() if not filled.all()}

    def close(self) -> None:
        """Mark what was not computed, NaN or -1, and give the file its name."""
        for name in self.gaps():
            sheet = self.sheets[name]
            kind = TYPES[sheet.dtype]
            blank = torch.full((1, *sheet.shape[1:]), torch.nan if kind.is_floating_point else -1, dtype=kind)
            for row in np.flatnonzero(~self.filled[name]):
                self.write(name, sheet.first + int(row), blank)
        os.fsync(self.file)
        os.close(self.file)
        os.replace(self.partial, self.path)

    def discard(self) -> None:
        os.close(self.file)
        self.partial.unlink(missing_ok=True)


def check_out(path: Path) -> None:
    """ValueError when a recording would take the place of something else."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory")
    if path.exists():
        try:
            with safe_open(path, framework="pt") as file:
                ours = {"tokens", "prompt_length"} <= set(file.keys())
        except (OSError, SafetensorError):
            ours = False
        if not ours:
            raise ValueError(f"{path} exists and is not a recording: it is left as it is")


def write_manifest(path: Path, facts: dict[str, Any]) -> None:
    write_atomically(manifest_path(path), [json.dumps(facts, indent=1, ensure_ascii=False).encode() + b"\n"])


# ----------------------------------------------------------------------------------------------------------- recording

class Hooks:
    """Forward hooks that come off at the end of a with statement."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def before(self, module: nn.Module, hook: Callable[[tuple], tuple | None]) -> None:
        """hook(args) may return other arguments."""
        self.handles.append(module.register_forward_pre_hook(lambda _, args: hook(args)))

    def after(self, module: nn.Module, hook: Callable[[tuple, Any], Any], prepend: bool = False) -> None:
        """hook(args, result) may return another result."""
        self.handles.append(module.register_forward_hook(lambda _, args, out: hook(args, out), prepend=prepend))

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


class Recorder(Hooks):
    """Writes one row of a batch. `chunk` is the chunk that the model is working on."""

    def __init__(self, model: Transformer, sheets: dict[str, Sheet], write: Callable[[str, int, Tensor], None],
                 row: int = 0) -> None:
        super().__init__()
        self.model, self.sheets, self.write, self.row = model, sheets, write, row
        self.chunk: Chunk | None = None
        self.entered: dict[int, dict[str, Tensor]] = {}     # Engram runs before its layer's chunk is known
        self.images: Counter[str] = Counter()
        for block in model.layers:
            self._layer(block)
        self.after(model.norm, lambda args, out: self.put("final_hidden", out))
        self.after(model, lambda args, out: self.outputs(out))
        if any(name.startswith("image.") for name in sheets):
            self.before(model.vision, lambda args: self._image("image.patches", args[0]))
            self.after(model.vision, lambda args, out: self._image("image.vit", out))
            self.after(model.aligner, lambda args, out: self._image("image.features", out))

    def put(self, name: str, value: Tensor) -> None:
        """value [B, S, ...] for the tokens of the chunk, or [B, 1, ...] for the last one."""
        if name not in self.sheets:
            return
        start, end = self.chunk.starts[self.row], self.chunk.ends[self.row]
        whole = value.shape[1] == self.chunk.width
        self.write(name, start if whole else end - 1, value[self.row, : end - start if whole else 1])

    def outputs(self, out: Output) -> None:
        for name, value in (("logits", out.logits), ("dspark.main_hidden", out.main_hidden)):
            if value is not None:
                self.put(name, value)

    def _image(self, name: str, value: Tensor) -> None:     # images come one after the other
        self.write(name, self.images[name], value)
        self.images[name] += len(value)

    def _layer(self, block: Block) -> None:
        i, attn, put, p = block.plan.layer, block.attn, self.put, f"layers.{block.plan.layer}."

        def begin(args: tuple) -> None:
            self.chunk = args[4]
            for name, value in self.entered.pop(i, {}).items():
                put(p + name, value)
            put(p + "input", args[0])
            put(p + "pre_mix", args[1])

        self.before(block, begin)
        if not any(name.startswith(p) for name in self.sheets):
            return
        if block.engram is not None:
            self.before(block.engram, lambda args: self.entered.update(
                {i: {"engram_in": args[0], "engram_rows": args[1]}}))
            self.after(block.engram, lambda args, out: self.entered[i].update(engram_out=out))
        for module, name in ((block.attn_norm, "attn_in"), (block.ffn_norm, "ffn_in"), (block.ffn, "ffn_out")):
            self.after(module, lambda args, out, name=name: put(p + name, out))
        self.after(attn, lambda args, out: put(p + "attn_out", out[0]))
        self.after(block, lambda args, out: put(p + "output", out[0]))
        self.after(block.ffn.gate, lambda args, out: self._gate(p, block.ffn.gate, args, out))
        self.before(attn.core, lambda args: self._core(p, *args[:3], *args[4:6]))
        self.after(attn.core, lambda args, out: self._heads(p + "attention", out))
        if block.plan.mode == "full":
            self.before(attn.indexer, lambda args: self.compressed(i, args[3], args[4]))
        if block.plan.mode in ("full", "reindex"):
            self.after(attn.indexer, lambda args, out: self._indexer(p, attn.indexer, args, out))

    def _heads(self, name: str, x: Tensor) -> None:                                                # [B, S, heads, d]
        if name in self.sheets:     # the heads of all ranks; float32 because not every backend sends bfloat16
            whole = self.model.ranks.gather(x.flatten(2).to(torch.float32))
            self.put(name, whole.unflatten(-1, (-1, x.shape[-1])))

    def _core(self, p: str, q: Tensor, window: Tensor, depth: int, chunk: Chunk, cache: Cache) -> None:
        self._heads(p + "q", q)
        if p + "window_kv" in self.sheets:
            new = window.view(len(chunk.starts), depth + chunk.width, -1)[:, depth:]               # [B, S, bytes]
            self.put(p + "window_kv", cache.window_rows.unpack(new))

    def compressed(self, layer: int, chunk: Chunk, cache: Cache) -> None:
        """The packed rows that a KV source has written for this chunk's groups."""
        ratio, row = cache.plans[layer].ratio, self.row
        for name, store, codec in (("main_kv", cache.main, cache.main_rows), ("index_key", cache.keys, cache.key_rows)):
            name, j1 = f"layers.{layer}.{name}", chunk.ends[row] // ratio
            for j in range(chunk.starts[row] // ratio, j1, 4096) if name in self.sheets else ():
                self.write(name, j, codec.unpack(store[layer][row, j : min(j + 4096, j1)]))

    def _indexer(self, p: str, indexer: nn.Module, args: tuple, out: Selection) -> None:
        c, x, qr, turn, chunk, cache, pool = indexer.config, *args
        for name, ids, width in (("topk", out.rows, c.index_topk), ("candidates", out.pool, c.candidate_topk_blocks)):
            if p + name in self.sheets:
                self.put(p + name, F.pad(ids, (0, width - ids.shape[-1]), value=-1))
        if p + "topk_margin" not in self.sheets:
            return
        q, w = indexer.query(x, qr, turn)
        self._heads(p + "index_query", q)
        ratio, block, device = indexer.plan.ratio, c.candidate_block_size, x.device
        n = max(end // ratio for end in chunk.ends)
        place, margins = torch.arange(n, device=device), []
        for q0, q1 in chunk.blocks(n * (2 * indexer.heads + 6) * indexer.num.arith.itemsize):
            scores = indexer.score_all(q[:, q0:q1], w[:, q0:q1], cache, n)                         # [B, Q, n]
            visible = ((chunk.positions[:, q0:q1] + 1) // ratio).unsqueeze(-1)
            scores = scores.masked_fill(place >= visible, -torch.inf)
            blocks = F.pad(scores, (0, -n % block), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)
            if indexer.plan.uses_pool:
                inside = members(pool[:, q0:q1], blocks.shape[-1]).repeat_interleave(block, -1)
                scores = scores.masked_fill(~inside[..., :n], -torch.inf)
            found = [cut_margin(scores, out.rows[:, q0:q1])]
            if indexer.plan.makes_pool:     # the newest block is in whatever its score
                newest = place[: blocks.shape[-1]] == (visible - 1).div(block, rounding_mode="floor")
                found.append(cut_margin(blocks.masked_fill(newest, torch.inf), out.pool[:, q0:q1]))
            margins.append(found)
        scale = (c.index_head_dim * c.index_n_heads) ** -0.5        # the paper's constant, left out of the scores
        for name, parts in zip(("topk_margin", "candidates_margin"), zip(*margins)):
            self.put(p + name, torch.cat(parts, 1) * scale)

    def _gate(self, p: str, gate: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> None:
        if p + "route_margin" not in self.sheets:
            return
        shape = len(self.chunk.starts), self.chunk.width
        biased = gate.affinities(*args)[1]
        margin = (cut_margin(biased, out[1]) * ROUTE_GRID).round() / ROUTE_GRID
        for name, value in (("route_weights", out[0]), ("route_experts", out[1]), ("route_margin", margin)):
            self.put(p + name, value.unflatten(0, shape))


def members(ids: Tensor, n: int) -> Tensor:
    """Sets of ids [..., k], -1 empty, as bool [..., n]."""
    mask = torch.zeros(*ids.shape[:-1], n + 1, dtype=torch.bool, device=ids.device)
    return mask.scatter_(-1, torch.where(ids < 0, n, ids.long()), True)[..., :n]


def cut_margin(scores: Tensor, taken: Tensor) -> Tensor:
    """The lowest score taken minus the highest left out, over the last axis; inf when nothing could be swapped."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], torch.inf)
    mask = members(taken, scores.shape[-1])
    lowest, best = scores.masked_fill(~mask, torch.inf).amin(-1), scores.masked_fill(mask, -torch.inf).amax(-1)
    return torch.where((lowest == torch.inf) | (best == -torch.inf), torch.inf, lowest - best)


@dataclass
class Prompt:
    """Tokens as the model reads them, image spans expanded."""
    tokens: Tensor                                          # int64 [P]
    types: Tensor | None = None                             # int8 [P], of prompts with images
    images: list[ImageInput] = field(default_factory=list)


@torch.inference_mode()
def record(model: Transformer, prompt: Prompt, out: str | Path, *, decode: int = 0, level: str = "layers",
           layers: Iterable[int] | None = None, span: tuple[int, int] | None = None, logits: bool = True,
           way: str = "full", chunk_size: int = 512, batch: int = 1, speculative: bool = False,
           given: Tensor | None = None, around: Iterable[Callable[[Recorder], Hooks]] = (),
           names: set[str] | None = None, facts: dict[str, Any] | None = None) -> None:
    """Run the model over a prompt and `decode` greedily chosen tokens, never stopping at EOS, and record it to `out`,
    with its manifest; rank 0 writes.

    batch > 1: the prompt is the last row, others of other lengths go along. speculative: the decoded tokens come from
    drafts. `given` [decode]: feed these tokens instead of choosing. `around`: more hooks, made with the recorder.
    `names`: only these arrays. ValueError for an empty prompt, a span outside of the run, unknown layers or levels.
    """
    c, out, P = model.config, Path(out), len(prompt.tokens)
    total, row = P + decode, batch - 1
    draft = model.mtp is not None and decode > 0
    if P < 1 or decode < 0 or batch < 1 or chunk_size < 1:
        raise ValueError(f"a prompt of {P} tokens, {decode} decoded, a batch of {batch} and chunks of {chunk_size}: "
                         f"there is nothing to record")
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    if span is not None and not 0 <= span[0] < span[1] <= total:
        raise ValueError(f"positions {span[0]}:{span[1]} are not within the {total} tokens of this run")
    if layers is not None and not set(layers) <= set(range(c.num_hidden_layers)):
        raise ValueError(f"layers {sorted(layers)} are not all among the {c.num_hidden_layers} of this model")
    if speculative and model.mtp is None:
        raise ValueError("speculation needs the draft head, which was not loaded")
    sheets = layout(c, P, total, level, layers, span, logits, draft, prompt.images)
    sheets = {name: sheet for name, sheet in sheets.items() if names is None or name in names}
    writer = Writer(out, sheets) if model.ranks.rank == 0 else None

    def write(name: str, index: int, rows: Tensor) -> None:
        if writer is not None and name in sheets:
            writer.write(name, index, rows)

    try:
        with ExitStack() as stack:
            recorder = stack.enter_context(Recorder(model, sheets, write, row))
            for enter in around:
                stack.enter_context(enter(recorder))
            tokens = _run(model, prompt, recorder, sheets, total, way, chunk_size, batch, speculative, given)
        write("tokens", 0, tokens)
        write("prompt_length", 0, torch.tensor([P]))
        write("positions", 0, torch.arange(total))
        if prompt.images:
            write("image.token_types", 0, F.pad(prompt.types, (0, decode), value=-1))
            write("image.types", 0, torch.cat([image.span for image in prompt.images]))
            write("image.grids", 0, torch.tensor([image.grid for image in prompt.images]))
        if writer is None:
            return
        gaps = writer.gaps()
        if gaps and way == "full":
            raise RuntimeError(f"not everything was recorded: {gaps}")
        writer.close()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    on_gpu = model.device.type == "cuda"
    quant = {f.name: getattr(model.num.fake_quant, f.name) for f in fields(FakeQuant)}
    write_manifest(out, {
        "format": "golden recording 1", "values_sha256": file_digest(out), **(facts or {}), "prompt_length": P,
        "decode": decode, "level": level, "layers": None if layers is None else sorted(layers), "positions": span,
        "first_computed": gaps, "numerics": "exact" if model.num.exact else "fast", "fake_quant": quant,
        "tie_rule": TIES, "prefill": way, "chunk_size": chunk_size, "batch": batch, "row": row,
        "speculative": speculative, "tensor_parallel": model.ranks.size,
        "device": torch.cuda.get_device_name(model.device) if on_gpu else platform.processor() or "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "config": asdict(c), "tolerances": None})


def _run(model: Transformer, prompt: Prompt, recorder: Recorder, sheets: dict[str, Sheet], total: int, way: str,
         chunk_size: int, batch: int, speculative: bool, given: Tensor | None) -> Tensor:
    """Prefill, then decode; -> the tokens of the recorded row, [total]."""
    P, row = len(prompt.tokens), batch - 1
    # The other rows: the prompt turned around by some tokens, each three tokens shorter than the next.
    ids = torch.stack([prompt.tokens.roll(7 * (row - b)) for b in range(batch)])                   # [B, P]
    counts = [max(1, P - 3 * (row - b)) for b in range(batch)]
    images = None
    if prompt.images:
        features = torch.cat([model.encode_image(image.patches, image.grid) for image in prompt.images])
        types = torch.full(ids.shape, -1, dtype=torch.int8)
        types[row] = prompt.types
        images = ImageTokens(types.to(model.device), features)
    cache = model.new_cache(batch, total + model.config.dspark_block_size + 1)
    progress = tqdm(total=total, desc="recording", unit=" tokens", file=sys.stderr, leave=False,
                    disable=not sys.stderr.isatty() or model.ranks.rank > 0)
    if way == "full":
        for c0 in range(0, P, chunk_size):
            c1 = min(c0 + chunk_size, P)
            heads = [sheets[name] for name in ("logits", "final_hidden") if name in sheets]
            wanted = any(c0 < s.first + s.shape[0] and c1 > s.first for s in heads)
            lengths = [min(max(n - c0, 0), c1 - c0) for n in counts]
            part = None if images is None else images.columns(c0, c1)
            last = model(ids[:, c0:c1], cache, lengths, part, "all" if wanted else "last")
            progress.update(c1 - c0)
    else:
        last = model.prefill(ids, cache, way, counts, images, chunk_size)
        recorder.outputs(last)
        whole = Chunk([0] * batch, counts, [0] * batch, P, 1, cache.device)
        for layer in cache.main:
            recorder.compressed(layer, whole, cache)
    tokens = prompt.tokens.tolist()
    chosen = best_tokens(last.logits[row])[-1]
    decoder = SpeculativeDecoder(model, Sampler()) if speculative else None
    while len(tokens) < total:
        length = len(tokens)
        if given is not None:
            chosen = int(given[length - P])
        if decoder is not None:
            pending = [int(prompt.tokens[(length + b) % P]) for b in range(row)] + [chosen]
            new = decoder.step(cache, pending, [True] * batch, [total - length] * batch)[row]
            tokens += [chosen, *new[:-1]]
            chosen = new[-1]
        else:
            feed = [[int(prompt.tokens[(length + b) % P])] for b in range(row)] + [[chosen]]
            tokens.append(chosen)
            chosen = best_tokens(model(torch.tensor(feed), cache).logits[row])[-1]
        following = tokens[length + 1 :] + [chosen]
        for at in range(length, len(tokens)) if any(name.startswith("dspark.") for name in sheets) else ():
            then = cache           # drafts after the token at each position, as if decoding stood there
            if at + 1 < len(tokens):
                then = cache.fork()
                then.truncate([*cache.lengths[:row], at + 1])
            found = model.mtp.draft(model, torch.tensor([0] * row + [following[at - length]]), then)
            for name, value in (("tokens", found.ids), ("logits", found.logits), ("confidence", found.confidence)):
                recorder.write(f"dspark.{name}", at - P, value[row :])
        progress.update(len(tokens) - length)
    progress.close()
    return torch.tensor(tokens)


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -------------------------------------------------------------------------------------------- running from a recording

class Forcing(Hooks):
    """Lets every step read what a recording holds instead of what the steps before it gave. The recorder's hooks come
    first, so they see what each step computed. Batch of 1."""

    def __init__(self, recorder: Recorder, source: Recording) -> None:
        super().__init__()
        self.recorder, self.source = recorder, source
        self.images: Counter[str] = Counter()
        model = recorder.model
        for block in model.layers:
            self._layer(block)
        self.after(model.norm, lambda args, out: self.put("final_hidden", out))
        if model.config.vision_config is not None:
            self.before(model.vision, lambda args: (self._image("image.patches", args[0]), *args[1:]))
            self.after(model.vision, lambda args, out: self._image("image.vit", out))
            self.after(model.aligner, lambda args, out: self._image("image.features", out))

    def _layer(self, block: Block) -> None:
        i, attn, put, p = block.plan.layer, block.attn, self.put, f"layers.{block.plan.layer}."
        self.before(block, lambda args: (put(p + "input", args[0]), put(p + "pre_mix", args[1]),
                                         self.selection(block.plan.index_source, args[2]), *args[3:]))
        for module, name in ((block.attn_norm, "attn_in"), (block.ffn_norm, "ffn_in"), (block.ffn, "ffn_out"),
                             (attn.core, "attention")):
            self.after(module, lambda args, out, name=name: put(p + name, out))
        self.after(attn, lambda args, out: (put(p + "attn_out", out[0]), *out[1:]))
        self.after(block, lambda args, out: (put(p + "output", out[0]), *out[1:]))
        self.after(block.ffn.gate, lambda args, out: self.routes(p, out))
        self.before(attn.core, lambda args: self.core(i, args))
        if block.plan.mode == "full":
            self.before(attn.indexer, lambda args: self.compressed(i, args[3], args[4]))
        if block.plan.mode in ("full", "reindex"):
            self.after(attn.indexer, lambda args, out: self.selection(i, out))
        if block.engram is not None and i > 0:     # it runs while the chunk is still that of the layer below
            self.before(block.engram, lambda args: (
                put(p + "engram_in", args[0]), put(p + "engram_rows", args[1]), *args[2:]))
            self.after(block.engram, lambda args, out: put(p + "engram_out", out))

    def put(self, name: str, value: Tensor) -> Tensor:
        chunk = self.recorder.chunk
        found = self.source.between(name, chunk.starts[0], chunk.ends[0])
        if found is None or value.shape[1] != chunk.width:
            return value
        at, rows, kind = found[0] - chunk.starts[0], found[1].to(value.device), name.rpartition(".")[2]
        if kind in SETS and rows.shape[-1] > value.shape[-1]:     # lists of ids grow with the sequence
            value = F.pad(value, (0, rows.shape[-1] - value.shape[-1]), value=-1)
        part = value[0, at : at + len(rows)]
        self.fits(name, rows, *part.shape[1:])
        rows = to_bf16(rows) if value.dtype == torch.bfloat16 else rows.to(value.dtype)
        if kind in FLOAT32:       # what was computed stays where it is the same float32 number
            rows = torch.where((rows - part).abs() <= 2.0**-22 * part.abs(), part, rows)
        return torch.cat([value[:, :at], rows.unsqueeze(0), value[:, at + len(rows) :]], 1)

    def fits(self, name: str, rows: Tensor, *shape: int) -> None:
        if tuple(rows.shape[1:]) != shape:
            raise ValueError(f"{self.source.path}: {name} has rows {list(rows.shape[1:])}, the model's have "
                             f"{list(shape)}")

    def _image(self, name: str, value: Tensor) -> Tensor:
        at = self.images[name]
        self.images[name] += len(value)
        found = self.source.between(name, at, at + len(value))
        if found is None:
            return value
        self.fits(name, found[1], *value.shape[1:])
        return torch.cat([to_bf16(found[1].to(value.device)), value[len(found[1]) :]])

    def selection(self, layer: int | None, given: Selection | None) -> Selection | None:
        if given is None or layer is None:
            return given
        c = self.recorder.model.config
        rows, pool = self.put(f"layers.{layer}.topk", given.rows), given.pool
        if pool is not None:
            pool = self.put(f"layers.{c.candidate_source_layer_id}.candidates", pool)
            there = self.recorder.chunk.ends[0] // c.compress_ratios[c.candidate_source_layer_id]
            blocks = -(-there // c.candidate_block_size)
            pool = torch.where(pool < blocks, pool, -1)
        visible = self.recorder.chunk.ends[0] // c.compress_ratios[layer]     # what is not there cannot be read
        return Selection(torch.where(rows < visible, rows, -1), pool)

    def routes(self, p: str, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return tuple(self.put(p + name, t.unsqueeze(0))[0] for name, t in zip(("route_weights", "route_experts"), out))

    def core(self, layer: int, args: tuple) -> tuple:
        (q, window, depth, sink, chunk, cache, *rest), p = args, f"layers.{layer}."
        found = self.source.between(p + "window_kv", chunk.starts[0], chunk.ends[0])
        if found is not None:
            self.fits(p + "window_kv", found[1], self.recorder.model.config.head_dim)
            at = depth + found[0] - chunk.starts[0]
            packed = cache.window_rows.pack(to_bf16(found[1].to(window.device)))
            window = torch.cat([window[:at], packed, window[at + len(packed) :]])
            chunk.updates["window", layer] = chunk.next_ring(window, depth)
        return self.put(p + "q", q), window, depth, sink, chunk, cache, *rest

    def compressed(self, layer: int, chunk: Chunk, cache: Cache) -> None:
        ratio = cache.plans[layer].ratio
        for name, store, codec in (("main_kv", cache.main, cache.main_rows), ("index_key", cache.keys, cache.key_rows)):
            found = self.source.between(f"layers.{layer}.{name}", chunk.starts[0] // ratio, chunk.ends[0] // ratio)
            if found is not None:
                c = self.recorder.model.config
                self.fits(f"layers.{layer}.{name}", found[1], c.head_dim if name == "main_kv" else c.index_head_dim)
                store[layer][0, found[0] : found[0] + len(found[1])] = codec.pack(to_bf16(found[1].to(cache.device)))


class Noise(Hooks):
    """Moves bfloat16 results of modules to a neighbouring value: a share `rate` of the elements, up or down by one ulp.
    Those of attention once more after `Forcing`, for the streams between the sublayers, which no module gives."""

    def __init__(self, recorder: Recorder, points: str, rate: float, seed: int) -> None:
        super().__init__()
        self.rate, self.generator = rate, torch.Generator().manual_seed(seed)
        kinds = Linear, RMSNorm, SparseAttention, Block
        named = recorder.model.named_modules()
        found = [module for name, module in named if isinstance(module, kinds) and re.search(points, name)]
        if not found:
            raise ValueError(f"no rounding point of this model matches {points!r}")
        for module in found:
            self.after(module, lambda args, out: self.move(out), prepend=True)      # before the recorder's hooks
        for block in recorder.model.layers:
            if block.attn.core in found:
                self.after(block.attn, lambda args, out: self.move(out))

    def move(self, out: Any) -> Any:
        if isinstance(out, tuple):
            return (self.move(out[0]), *out[1:])
        if out.dtype != torch.bfloat16:
            return out
        draw = torch.rand(out.shape, generator=self.generator).to(out.device)
        step = (draw < self.rate / 2).to(torch.int16) - (draw > 1 - self.rate / 2).to(torch.int16)
        bits = out.contiguous().view(torch.int16)
        inside = (bits & 0x7FFF > 0) & (bits & 0x7FFF < 0x7F7F)        # zeros stay, nothing becomes infinite
        return torch.where(inside, bits + step, bits).view(torch.bfloat16)


def rerun(directory: str | Path, source: Recording, like: Recording, out: Path, forced: bool = False,
          noise: tuple[str, float, int] | None = None) -> None:
    """Record again what `source` holds, with its tokens; `like` says under which numerics and has the images. `noise`
    (points, rate, seed) runs in the other arithmetic."""
    facts = like.manifest
    if not facts:
        raise ValueError(f"{like.path} has no manifest: nothing says under which numerics to run again")
    model = load_model(directory, exact=(facts["numerics"] == "exact") == (noise is None),
                       fake_quant=FakeQuant(**facts["fake_quant"]),
                       draft=any(name.startswith("dspark.") for name in source.sources))
    prompt = Prompt(source.tokens[: source.prompt])
    if "image.token_types" in like:
        prompt.types = like.rows("image.token_types", 0, source.prompt)
        at, ratio = 0, model.config.vision_config.downsample_ratio
        for h, w in like.all("image.grids").tolist():
            patches = like.rows("image.patches", at, at + h * w)
            prompt.images.append(ImageInput(patches, (h, w), (-(-h // ratio), -(-w // ratio))))
            at += h * w
    elif like.config["image_token_id"] in prompt.tokens.tolist():
        raise ValueError(f"{like.path} holds no image arrays, so its images cannot be run again: record level layers")
    around = [lambda recorder: Forcing(recorder, source)] if forced else []
    if noise is not None:
        around.append(lambda recorder: Noise(recorder, *noise))
    span = source.span if source.span != (0, len(source.tokens)) else None
    record(model, prompt, out, decode=len(source.tokens) - source.prompt, level="all", span=span, way=facts["prefill"],
           given=source.tokens[source.prompt :], around=around, names=set(source.sources) | BOOKKEEPING)


def check(a: Recording, b: Recording, directory: str | Path | None = None) -> Report:
    """Compare two recordings; with a checkpoint, tell causes from consequences."""
    if directory is None:
        return compare(a, b)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "again.safetensors"
        rerun(directory, b, a, path, forced=True)
        return compare(a, b, Recording(path, like=a))


def noise(a: Recording, directory: str | Path, runs: int, rate: float, points: str, seed: int) -> dict[str, Any]:
    """Tolerances for every array, written into the manifest: twice the largest difference of reruns in the other
    arithmetic with noise, "free", and "local" with every step reading what `a` recorded; of ids, the gap at the cut."""
    out: dict[str, Any] = {"runs": runs, "rate": rate, "points": points, "seed": seed, "free": {}, "local": {}}
    for run in range(2 * runs):
        into, forced = out["local" if run % 2 else "free"], run % 2 == 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "noise.safetensors"
            rerun(directory, a, a, path, forced, (points, rate, seed + run))
            b = Recording(path, like=a)
            names = sorted(set(a.sources) - BOOKKEEPING, key=order)
            found = {name: r for name in names if (r := compare_array(name, a, b, len(a.tokens), {}))}
        for name, r in found.items():
            kind, worst = name.rpartition(".")[2], {"max_abs": r.max_abs, "rel_l2": r.rel_l2}
            if kind in MARGINS or name == "dspark.tokens":     # ids change places where noise does that much to gaps
                gap = found.get("dspark.logits" if kind == "tokens" else name.replace(kind, MARGINS[kind]))
                worst = {"margin": max(r.margin or 0.0, 0.0 if gap is None else gap.max_abs)}
            known = into.setdefault(name, {})
            known.update({key: max(known.get(key, 0.0), 2 * value) for key, value in worst.items()})
    a.manifest["tolerances"] = out
    write_manifest(a.path, a.manifest)
    return out


# ------------------------------------------------------------------------------------------------------- command line

def expand(tokens: list[int], config: ModelConfig, images: list[ImageInput], types: list[int] | None = None) -> Prompt:
    """Put the span of each image in the place of its token. ValueError when tokens and images do not fit."""
    if not all(type(t) is int for t in tokens) or not tokens:
        raise ValueError("a prompt is a list of at least one integer token id")
    if not images and types is None:
        return Prompt(torch.tensor(tokens))
    spans = [image.span for image in images]
    if types is not None:
        given = torch.tensor(types, dtype=torch.int8)
        if len(types) != len(tokens) or not torch.equal(given[given >= 0], torch.cat([*spans, given[:0]])):
            raise ValueError("token_types do not fit the tokens and the images given with --image")
        return Prompt(torch.tensor(tokens), given, images)
    if tokens.count(config.image_token_id) != len(images):
        raise ValueError(f"{len(images)} images are given for {tokens.count(config.image_token_id)} image tokens "
                         f"{config.image_token_id} in the prompt")
    rest, ids, kinds = iter(spans), [], []
    for token in tokens:
        span = next(rest) if token == config.image_token_id else torch.tensor([-1], dtype=torch.int8)
        ids += [token] * len(span)
        kinds.append(span)
    return Prompt(torch.tensor(ids), torch.cat(kinds), images)


def read_prompt(args: argparse.Namespace, config: ModelConfig) -> Prompt:
    """The prompt of the command line."""
    sources: list[Any] = list(args.image)
    if args.tokens:
        data = read_json(args.tokens)
        data = data if isinstance(data, dict) else {"tokens": data}
        if not isinstance(data.get("tokens"), list):
            raise ValueError(f"{args.tokens} must hold a list of token ids, or an object with `tokens`")
        tokens, types = data["tokens"], data.get("token_types")
        if config.vision_config is not None and config.image_token_id in tokens and not sources and types is None:
            raise ValueError(f"0 images are given for {tokens.count(config.image_token_id)} image tokens "
                             f"{config.image_token_id} in the prompt")
    else:
        types = None
        if args.messages:
            messages = read_json(args.messages)
        else:
            blocks = [{"type": "image", "source": source} for source in sources]
            messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": args.prompt}]}]
        text, blocks = encode_messages(messages, args.thinking_mode) if not args.raw else (args.prompt, [])
        if args.messages:
            sources = [image_source(block) for block in blocks]
        path = Path(args.ckpt_path) / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{path} is missing: text needs a tokenizer; give --tokens instead")
        tokens = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    if sources and config.vision_config is None:
        raise ValueError("this model has no vision tower: its config.json has no vision_config")
    return expand(tokens, config, [load_image(source, config.vision_config) for source in sources], types)


def _record(args: argparse.Namespace) -> int:
    check_out(Path(args.out))
    config = open_checkpoint(args.ckpt_path).config
    prompt = read_prompt(args, config)
    total, limit = len(prompt.tokens) + args.decode, config.max_position_embeddings
    off = set(filter(None, (args.fake_quant_off or "").split(",")))
    known = {f.name for f in fields(FakeQuant)}
    if off - known:
        raise ValueError(f"--fake-quant-off {sorted(off - known)[0]} is not one of {', '.join(sorted(known))}")
    layers = span = group = None
    try:
        if args.layers:
            pieces = [[int(n) for n in piece.split("-")] for piece in args.layers.split(",")]
            layers = [i for piece in pieces for i in range(piece[0], piece[-1] + 1)]
        if args.positions:
            low, high = args.positions.split(":")
            span = slice(int(low) if low else None, int(high) if high else None).indices(total)[:2]
    except ValueError:
        raise ValueError("--layers wants numbers such as 2,5-7, --positions a range such as 90:95 or -128:") from None
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:     # started by torchrun
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = torch.distributed.group.WORLD
    if total > limit and os.environ.get("RANK", "0") == "0":   # an oracle also says what is computed there
        print(f"note: {total:,} tokens are more than the model's context of {limit:,} (max_position_embeddings)",
              file=sys.stderr)
    draft = args.decode > 0 and config.num_nextn_predict_layers > 0 and not args.no_draft
    model = load_model(args.ckpt_path, exact=not args.fast, device=device, group=group, draft=draft,
                       offload=args.offload, fake_quant=FakeQuant(**{name: name not in off for name in known}))
    given = {key: getattr(args, key) for key in ("prompt", "messages", "tokens", "image") if getattr(args, key)}
    record(model, prompt, args.out, decode=args.decode, level=args.level, layers=layers, span=span,
           logits=not args.no_logits, way=args.prefill, chunk_size=args.chunk_size, batch=args.batch,
           speculative=args.speculative,
           facts={"weights": weights_digest(args.ckpt_path), "checkpoint": str(args.ckpt_path), "input": given,
                  "command": shlex.join(["golden.py", *args.command_line])})
    if group is not None:
        torch.distributed.destroy_process_group()
    return 0


def _compare(args: argparse.Namespace) -> int:
    b = None
    try:
        a = Recording(args.a)
        b = Recording(args.b, args.map, like=a)
        report = check(a, b, args.ckpt_path)
    except BAD_INPUT as error:      # what a file of another program holds can be anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(f"comparing {b and b.reading or args.b}: {reason}") from error
    if args.plot:
        plot(report, args.plot)
    if args.json:
        print(json.dumps(report.json(), indent=1))
        return 0 if report.passed else 1
    pretty = sys.stdout.isatty()
    print(result_table(report.results, pretty))
    if report.local is not None:
        print("\nB against the model reading what B recorded:\n" + result_table(report.local, pretty))
    lacking = [f"only in {which}: {len(names)} tensors, such as {names[0]}"
               for which, names in zip("AB", report.only) if names]
    parts, count = report.partial, len(report.partial)
    if parts:
        more = f" and {count - 8} more" if count > 8 else ""
        lacking.insert(0, f"compared only in part: {', '.join(parts[:8])}{more}")
    passed = f"PASSED on what B holds: {count} tensor{'s' * (count > 1)} in part" if parts else "PASSED"
    sentences = [*report.notes, *lacking, *report.verdict, passed if report.passed else "FAILED"]
    print("\n" + "\n".join(textwrap.fill(sentence, WIDTH, subsequent_indent="    ", break_long_words=False,
                                         break_on_hyphens=False) for sentence in sentences))
    return 0 if report.passed else 1


def _noise(args: argparse.Namespace) -> int:
    found = noise(Recording(args.a), args.ckpt_path, args.runs, args.rate, args.at, args.seed)
    values, ids = [["tensor", "max abs", "rel L2", "local max abs", "local rel L2"]], [["ids", "margin", "local margin"]]
    for name, free in found["free"].items():
        keys, rows = (("margin",), ids) if "margin" in free else (("max_abs", "rel_l2"), values)
        rows.append([name, *(f"{tolerance[key]:.3g}" for tolerance in (free, found["local"][name]) for key in keys)])
    for rows in (values, ids):
        if len(rows) > 1:
            print(table(rows, sys.stdout.isatty()) + "\n")
    print(f"written to {manifest_path(Path(args.a))}")
    return 0


def _show(args: argparse.Namespace) -> int:
    a = Recording(args.a)
    print(show(a, sys.stdout.isatty()) if args.layer is None else selection_map(a, args.layer, args.picture))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description="Record golden outputs and compare recordings.")
    commands = parser.add_subparsers(required=True, metavar="record|compare|noise|show")
    r = commands.add_parser("record", help="run the model and record it")
    r.set_defaults(run=_record, command_line=sys.argv[1:] if arguments is None else arguments)
    r.add_argument("--ckpt-path", required=True, metavar="DIR")
    source = r.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one user message; images given with --image come before it")
    source.add_argument("--messages", metavar="FILE.json", help="a conversation")
    source.add_argument("--tokens", metavar="FILE.json", help="token ids; an image token for each --image")
    r.add_argument("--image", action="append", default=[], metavar="FILE")
    r.add_argument("--raw", action="store_true", help="--prompt is the whole prompt, without the chat format")
    r.add_argument("--thinking-mode", choices=("chat", "thinking"), default="chat")
    r.add_argument("--decode", type=int, default=0, metavar="N", help="greedily chosen tokens to go on with")
    r.add_argument("--out", required=True, metavar="FILE.safetensors")
    r.add_argument("--level", choices=LEVELS, default="layers")
    r.add_argument("--layers", metavar="2,5-7", help="only these layers")
    r.add_argument("--positions", metavar="A:B", help="only these positions")
    r.add_argument("--no-logits", action="store_true")
    r.add_argument("--no-draft", action="store_true", help="without the draft head")
    r.add_argument("--prefill", choices=("full", "bounded", "exact-replay"), default="full")
    r.add_argument("--chunk-size", type=int, default=512)
    r.add_argument("--batch", type=int, default=1, help="rows computed together; the last is recorded")
    r.add_argument("--speculative", action="store_true", help="decode with drafts")
    r.add_argument("--fast", action="store_true", help="float32 between rounding points instead of float64")
    r.add_argument("--fake-quant-off", metavar="NAMES", help="of " + ",".join(f.name for f in fields(FakeQuant)))
    r.add_argument("--offload", action="store_true", help="leave the experts on disk")
    r.add_argument("--device")
    c = commands.add_parser("compare", help="compare two recordings; exit code 1 when they differ")
    c.set_defaults(run=_compare)
    c.add_argument("a", metavar="A.safetensors")
    c.add_argument("b", metavar="B.safetensors")
    c.add_argument("--ckpt-path", metavar="DIR", help="run every step from what B recorded: names causes")
    c.add_argument("--map", metavar="FILE.json", help="other names and layouts of B")
    c.add_argument("--json", action="store_true")
    c.add_argument("--plot", metavar="FILE.png")
    n = commands.add_parser("noise", help="measure tolerances and write them into the manifest")
    n.set_defaults(run=_noise)
    n.add_argument("a", metavar="A.safetensors")
    n.add_argument("--ckpt-path", required=True, metavar="DIR")
    n.add_argument("--runs", type=int, default=3)
    n.add_argument("--rate", type=float, default=0.05, help="share of elements moved by one ulp at each point")
    n.add_argument("--at", default="", metavar="REGEX", help="modules whose results are moved (default: all)")
    n.add_argument("--seed", type=int, default=0)
    s = commands.add_parser("show", help="what is in a recording")
    s.set_defaults(run=_show)
    s.add_argument("a", metavar="FILE.safetensors")
    s.add_argument("--layer", type=int, help="the rows that this layer selects, as text")
    s.add_argument("--picture", metavar="FILE.png", help="the same as a picture")
    try:
        args = parser.parse_args(arguments)
        return args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
