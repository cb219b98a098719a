"""Checkpoints: what is in one, whether a folder holds one, how to cut one for several ranks, how to load one.

    python convert.py --check DIR-or-config.json                                  headers against the configuration
    python convert.py --hf-ckpt-path DIR --save-path DIR --model-parallel N       one file for each tensor-parallel rank
    python convert.py --random CONFIG.json --save-path DIR --seed S [--tokenizer DIR]      random weights, any config

Two layouts hold the same tensors under the same names. Published: `model.safetensors.index.json` and any number of
files. Shards: `model{rank}-mp{ranks}.safetensors`, each holding one rank's slices. `load_model` reads both, each rank
only its own bytes. Everything follows from one table, `checkpoint_schema`, and one rule of slicing, `part_of`.

The bytes are read and written here directly (a safetensors file is a length, a JSON header and the tensors): tables of
98 GB have to be cut, and rows of them looked up, without any of them ever being in memory.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dspark import DSpark
from engram import EngramIndex, EngramTable, TableRows, build_token_map
from model import Experts, ModelConfig, Transformer, plan_layers
from quant import bind, E2M1, FakeQuant, Linear, Numerics, Ranks

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
          "I8": torch.int8}  # I8 holds two E2M1 codes
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PARTIAL = ".partial"          # suffix of a file that is being written
MAPPED = 1 << 20              # bytes from which on a tensor is mapped (--offload)
CHUNK = 64 << 20              # bytes of a tensor in memory at a time while it is copied


# ------------------------------------------------------------------------------------------------------------- schema

@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a stored tensor; dtype is the safetensors name."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def checkpoint_schema(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the published layout, vision and draft head included, in the order of the model."""
    c, hc = config, config.hc_mult
    out: dict[str, TensorSpec] = {}

    def put(name: str, dtype: str, *shape: int) -> None:
        out[name] = TensorSpec(dtype, shape)

    def fp8(name: str, n: int, k: int) -> None:
        put(f"{name}.weight", "F8_E4M3", n, k)
        put(f"{name}.scale", "F8_E8M0", -(-n // 32), k // 32)  # a scale for 32 x 32; the last rows may be fewer

    def block(prefix: str, experts: int) -> None:
        put(f"{prefix}.attn_norm.weight", "BF16", c.hidden_size)
        put(f"{prefix}.ffn_norm.weight", "BF16", c.hidden_size)
        for part in ("hc_attn", "hc_ffn"):
            put(f"{prefix}.{part}_fn", "F32", (2 + hc) * hc, hc * c.hidden_size)
            put(f"{prefix}.{part}_base", "F32", (2 + hc) * hc)
            put(f"{prefix}.{part}_scale", "F32", 3)
        put(f"{prefix}.attn.attn_sink", "F32", c.num_attention_heads)
        put(f"{prefix}.attn.q_norm.weight", "BF16", c.q_lora_rank)
        put(f"{prefix}.attn.kv_norm.weight", "BF16", c.head_dim)
        fp8(f"{prefix}.attn.wq_a", c.q_lora_rank, c.hidden_size)
        fp8(f"{prefix}.attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
        fp8(f"{prefix}.attn.wkv", c.head_dim, c.hidden_size)
        fp8(f"{prefix}.attn.wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads // c.o_groups * c.head_dim)
        fp8(f"{prefix}.attn.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
        put(f"{prefix}.ffn.gate.weight", "BF16", experts, c.hidden_size)
        put(f"{prefix}.ffn.gate.bias", "F32", experts)
        if c.vision_config is not None:
            put(f"{prefix}.ffn.gate.bias_vl", "F32", experts)
        sizes = {"w1": (c.moe_intermediate_size, c.hidden_size), "w2": (c.hidden_size, c.moe_intermediate_size),
                 "w3": (c.moe_intermediate_size, c.hidden_size)}
        for w, (n, k) in sizes.items():
            fp8(f"{prefix}.ffn.shared_experts.{w}", n, k)
        for e in range(experts):
            for w, (n, k) in sizes.items():
                put(f"{prefix}.ffn.experts.{e}.{w}.weight", "I8", n, k // 2)
                put(f"{prefix}.ffn.experts.{e}.{w}.scale", "F8_E8M0", n, k // 32)

    put("embed.weight", "BF16", c.vocab_size, c.hidden_size)
    for plan in plan_layers(c):
        if plan.part == "draft":
            continue
        prefix = f"layers.{plan.layer}"
        if plan.engram is not None:
            rows, width = c.engram_num_embeddings[plan.engram], c.engram_head_dim
            put(f"{prefix}.engram.embed.weight", "F8_E4M3", rows, width)
            put(f"{prefix}.engram.embed.scale", "F8_E8M0", rows, width // 32)  # for each row, unlike weights
            looked_up = (c.engram_max_ngram_size - 1) * c.engram_n_heads  # rows of a token
            fp8(f"{prefix}.engram.wkv", (hc + 1) * c.hidden_size, looked_up * width)
            put(f"{prefix}.engram.q_weight", "BF16", hc, c.hidden_size)
            put(f"{prefix}.engram.k_weight", "BF16", hc, c.hidden_size)
        block(prefix, c.n_routed_experts)
        if plan.mode == "full":
            put(f"{prefix}.attn.compressor.wkv.weight", "BF16", c.head_dim, c.hidden_size)
            put(f"{prefix}.attn.compressor.norm.weight", "BF16", c.head_dim)
            if plan.ratio > 1:
                put(f"{prefix}.attn.compressor.wgate.weight", "BF16", c.head_dim, c.hidden_size)
            put(f"{prefix}.attn.indexer.wk.weight", "BF16", c.index_head_dim, c.head_dim)
            put(f"{prefix}.attn.indexer.k_norm.weight", "BF16", c.index_head_dim)
        if plan.mode in ("full", "reindex"):
            fp8(f"{prefix}.attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            put(f"{prefix}.attn.indexer.weights_proj.weight", "BF16", c.index_n_heads, c.hidden_size)
    put("norm.weight", "BF16", c.hidden_size)
    put("head.weight", "BF16", c.vocab_size, c.hidden_size)
    if c.num_nextn_predict_layers:
        last = f"mtp.{c.num_nextn_predict_layers - 1}"
        fp8("mtp.0.main_proj", c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
        put("mtp.0.main_norm.weight", "BF16", c.hidden_size)
        for j in range(c.num_nextn_predict_layers):
            block(f"mtp.{j}", c.dspark_n_routed_experts)
        put(f"{last}.norm.weight", "BF16", c.hidden_size)
        put(f"{last}.markov_head.embed.weight", "BF16", c.vocab_size, c.dspark_markov_rank)
        put(f"{last}.markov_head.head.weight", "BF16", c.vocab_size, c.dspark_markov_rank)
        put(f"{last}.confidence_head.proj.weight", "BF16", 1, c.hidden_size + c.dspark_markov_rank)
    if c.vision_config is not None:
        _vision_schema(c, put)
    return out


def _vision_schema(config: ModelConfig, put: Callable[..., None]) -> None:
    v, d = config.vision_config, config.hidden_size

    def bf16(name: str, n: int, k: int, bias: bool) -> None:
        put(f"{name}.weight", "BF16", n, k)
        if bias:
            put(f"{name}.bias", "BF16", n)

    bf16("vision.patch_embed.proj", v.hidden_size, 3 * v.patch_size**2, True)
    for i in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{i}"
        put(f"{prefix}.norm1.weight", "BF16", v.hidden_size)
        bf16(f"{prefix}.attn.wqkv", 3 * v.hidden_size, v.hidden_size, True)
        bf16(f"{prefix}.attn.wo", v.hidden_size, v.hidden_size, True)
        put(f"{prefix}.norm2.weight", "BF16", v.hidden_size)
        bf16(f"{prefix}.mlp.w1", 2 * v.intermediate_size, v.hidden_size, False)
        bf16(f"{prefix}.mlp.w2", v.hidden_size, v.intermediate_size, False)
    put("vision.norm.weight", "BF16", v.hidden_size)
    bf16("aligner.w1", d, v.hidden_size * v.downsample_ratio**2, True)
    bf16("aligner.w2", d, d, True)
    for name in ("image_start", "image_end", "image_newline"):
        put(name, "BF16", d)


# ------------------------------------------------------------------------------------------------------------ slicing

@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor: start..stop of an axis, and `size`, which is larger where padding follows."""
    axis: int
    start: int
    stop: int
    size: int

    def spec(self, spec: TensorSpec) -> TensorSpec:
        shape = list(spec.shape)
        shape[self.axis] = self.size
        return TensorSpec(spec.dtype, tuple(shape))


_EXPERT = re.compile(r"(.+\.ffn\.experts)\.(\d+)\.(w[123]\.(?:weight|scale))")
_ENGRAM_TABLE = re.compile(r"layers\.\d+\.engram\.embed\.(weight|scale)")
_AXIS_0 = ("embed", "head", "wq_b", "wo_a", "attn_sink", "weights_proj")  # vocabulary rows, heads, output groups
_AXIS_1 = ("wo_b",)


def part_of(config: ModelConfig, name: str, spec: TensorSpec, rank: int, size: int) -> Part | None:
    """The part of a tensor that `rank` of `size` holds; None for an expert of another rank."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        total = config.dspark_n_routed_experts if name.startswith("mtp.") else config.n_routed_experts
        mine = int(expert[2]) // (total // size) == rank
        return Part(0, 0, spec.shape[0], spec.shape[0]) if mine else None
    words = name.split(".")
    key = words[-2] if words[-1] in ("weight", "scale", "bias") else words[-1]
    axis = 1 if key in _AXIS_1 else 0
    length = spec.shape[axis]
    if _ENGRAM_TABLE.fullmatch(name):
        rows = -(-length // size)  # the hash spreads rows evenly, so any cut will do: the last rank is padded
        return Part(0, min(rank * rows, length), min((rank + 1) * rows, length), rows)
    if key in _AXIS_0 or key in _AXIS_1:
        step = length // size
        return Part(axis, rank * step, (rank + 1) * step, step)
    return Part(0, 0, length, length)


def check_ranks(config: ModelConfig, size: int) -> None:
    """ValueError when the model cannot be cut for `size` ranks, naming the size that does not divide."""
    if size < 1:
        raise ValueError(f"{size} tensor-parallel ranks: at least 1 is needed")
    whole = ["num_attention_heads", "o_groups", "vocab_size", "n_routed_experts"]
    whole += ["index_n_heads"] if config.index_source_layer_ids else []
    whole += ["dspark_n_routed_experts"] if config.num_nextn_predict_layers else []
    for key in whole:
        if getattr(config, key) % size:
            raise ValueError(f"{key} = {getattr(config, key)} does not divide over {size} tensor-parallel ranks")
    inner = config.o_groups // size * config.o_lora_rank
    if inner % 32:
        raise ValueError(f"over {size} tensor-parallel ranks each has {inner} inputs of wo_b (o_groups * o_lora_rank "
                         f"/ {size}), which is not a multiple of 32, the block of its scales")


def rank_schema(config: ModelConfig, rank: int, size: int) -> dict[str, TensorSpec]:
    """Every tensor of one rank's shard."""
    parts = ((name, spec, part_of(config, name, spec, rank, size)) for name, spec in checkpoint_schema(config).items())
    return {name: part.spec(spec) for name, spec, part in parts if part is not None}


# ------------------------------------------------------------------------------------------------------ files, reading

@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `offset` is its first byte in the file."""
    path: Path
    offset: int
    spec: TensorSpec

    def read(self, part: Part | None = None) -> Tensor:
        """The tensor, or this part of it without its padding, on the CPU."""
        rows = part if part is not None and part.axis == 0 else Part(0, 0, self.spec.shape[0], self.spec.shape[0])
        out = self._rows(rows.start, rows.stop)
        return out if part is None or part.axis == 0 else out[:, part.start:part.stop].contiguous()

    def chunks(self, part: Part) -> Iterator[np.ndarray]:
        """The bytes of a part and its padding in blocks of rows, at most about CHUNK bytes each."""
        step = max(1, CHUNK // self.spec.row_bytes)
        rows = range(part.start, part.stop) if part.axis == 0 else range(self.spec.shape[0])
        for i in range(0, len(rows), step):
            block = self._rows(rows.start + i, min(rows.start + i + step, rows.stop))
            if part.axis == 1:
                block = block[:, part.start:part.stop].contiguous()
            yield block.view(torch.uint8).numpy()
        padding = (part.size - (part.stop - part.start)) * self.spec.row_bytes
        value = 127 if self.spec.dtype == "F8_E8M0" else 0  # a padded row is 0 with a scale of 2**0
        for start in range(0, padding, CHUNK):
            yield np.full(min(CHUNK, padding - start), value, np.uint8)

    def map(self, part: Part | None = None) -> tuple[Tensor, mmap.mmap] | None:
        """The tensor, or a part of axis 0, as a read-only map of its file, and the map. None where it cannot be one: for
        other axes, an element that is not aligned, and what is too small to be worth it."""
        whole = part is None or part.stop - part.start == self.spec.shape[part.axis]
        start, stop = (0, self.spec.shape[0]) if whole else (part.start, part.stop)
        place, count = self.offset + start * self.spec.row_bytes, (stop - start) * self.spec.row_bytes
        if (not whole and part.axis) or place % DTYPES[self.spec.dtype].itemsize or count < MAPPED:
            return None
        lead = place % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), lead + count, offset=place - lead, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is not writable: weights never are
            data = torch.frombuffer(mapped, dtype=torch.uint8, offset=lead)
        return data.view(DTYPES[self.spec.dtype]).view(stop - start, *self.spec.shape[1:]), mapped

    def _rows(self, start: int, stop: int) -> Tensor:
        count = (stop - start) * self.spec.row_bytes
        data = np.fromfile(self.path, np.uint8, count, offset=self.offset + start * self.spec.row_bytes)
        if data.size != count:
            raise ValueError(f"{self.path} ended early: it changed while it was being read")
        return torch.from_numpy(data).view(DTYPES[self.spec.dtype]).view(stop - start, *self.spec.shape[1:])


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a safetensors file and its metadata, from the header alone. ValueError names the file."""
    try:
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(total - 8, 100 << 20) else b""
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text)
        metadata = dict(header.pop("__metadata__", {}))
        found = []
        for name, tensor in header.items():
            (start, stop), shape = tensor["data_offsets"], tuple(tensor["shape"])
            if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
                raise TypeError
            found.append((start, stop, name, TensorSpec(str(tensor["dtype"]), shape)))
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} is not a safetensors file: its header makes no sense") from None
    entries, position = {}, 0
    for start, stop, name, spec in sorted(found, key=lambda t: t[:2]):
        # a dtype or shape that no tensor of this model has is reported by the comparison with the schema
        if start != position or stop < start or (spec.dtype in DTYPES and spec.shape and stop - start != spec.nbytes):
            raise ValueError(f"{path}: the bytes of {name} do not fit its type and shape, {spec}")
        entries[name], position = Entry(path, 8 + length + start, spec), stop
    if 8 + length + position != total:
        raise ValueError(f"{path} has {total:,} bytes, its header describes {8 + length + position:,}: it is cut off "
                         f"or damaged")
    return entries, metadata


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers have been found to be right."""
    directory: Path
    config: ModelConfig
    files: tuple[Path, ...]
    ranks: int | None                       # None: published layout
    tensors: tuple[dict[str, Entry], ...]   # one table for each rank of shards; a single one in the published layout


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Find and check a checkpoint by its headers alone. ValueError: a sentence naming the file or tensor at fault."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"there is no folder {directory}")
    config = ModelConfig.from_json(directory / "config.json")
    if (directory / INDEX).exists():
        return _open_published(directory, config)
    shards = {path: match for path in sorted(directory.iterdir())
              if (match := re.fullmatch(r"model(\d+)-mp(\d+)\.safetensors", path.name))}
    if not shards:
        raise ValueError(f"{directory} holds neither {INDEX} nor shards model0-mpN.safetensors")
    return _open_shards(directory, config, shards)


def _open_published(directory: Path, config: ModelConfig) -> Checkpoint:
    index = directory / INDEX
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: directory / file for name, file in where.items() if Path(file).name == file}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{index} is not a readable index: it needs a weight_map of tensor names to files") from None
    if len(files) != len(where):
        outside = next(file for name, file in where.items() if name not in files)
        raise ValueError(f"{index} lists a file outside its folder: {outside}")
    tensors: dict[str, Entry] = {}
    for path in sorted(set(files.values())):
        if not path.exists():
            raise ValueError(f"{index} lists {path.name}, which is not there")
        for name, entry in read_header(path)[0].items():
            if files.get(name) != path:
                where_else = f"the index says {files[name].name}" if name in files else "the index does not list it"
                raise ValueError(f"{path} holds {name}, but {where_else}")
            tensors[name] = entry
    for name in files.keys() - tensors.keys():
        raise ValueError(f"{index} says that {files[name].name} holds {name}, but it does not")
    compare(tensors, checkpoint_schema(config), directory)
    return Checkpoint(directory, config, tuple(sorted(set(files.values()))), None, (tensors,))


def _open_shards(directory: Path, config: ModelConfig, shards: dict[Path, re.Match[str]]) -> Checkpoint:
    sizes = sorted({int(m[2]) for m in shards.values()})
    if len(sizes) > 1:
        raise ValueError(f"{directory} mixes shards made for {' and '.join(map(str, sizes))} ranks")
    size, sources = sizes[0], {}
    check_ranks(config, size)
    files = tuple(directory / shard_name(rank, size) for rank in range(size))
    for path in shards:
        if path not in files:
            raise ValueError(f"{path} is a shard that a set of {size} does not have")
    tensors = []
    for rank, path in enumerate(files):
        if not path.exists():
            raise ValueError(f"the shard {path.name} is missing in {directory}")
        entries, metadata = read_header(path)
        compare(entries, rank_schema(config, rank, size), path)
        if (metadata.get("rank"), metadata.get("ranks")) != (str(rank), str(size)) or "source" not in metadata:
            raise ValueError(f"{path} was written as shard {metadata.get('rank')} of {metadata.get('ranks')}: it has "
                             f"been renamed")
        sources.setdefault(metadata.get("source"), path)
        tensors.append(entries)
    if len(sources) > 1:
        raise ValueError(f"{list(sources.values())[1]} is a shard of another model than {files[0].name}")
    return Checkpoint(directory, config, files, size, tuple(tensors))


def shard_name(rank: int, size: int) -> str:
    return f"model{rank}-mp{size}.safetensors"


def compare(found: dict[str, Entry], wanted: dict[str, TensorSpec], where: Path) -> None:
    """ValueError naming the first tensor that is missing, not of this model, or of another type or shape."""
    for name, spec in wanted.items():
        if name not in found:
            raise ValueError(f"{where}: the tensor {name} is missing")
        if found[name].spec != spec:
            raise ValueError(f"{found[name].path}: tensor {name} is {found[name].spec}, config.json asks for {spec}")
    for name in found:
        if name not in wanted:
            raise ValueError(f"{found[name].path}: the tensor {name} is not one of this model")


def weights_digest(directory: str | Path) -> str:
    """SHA-256 that identifies the weights of a checkpoint: of each file its header, size and content, from 1 GiB on a
    sample of 1 MiB at fixed offsets. Shards carry the digest of the checkpoint they were cut from."""
    return _digest(open_checkpoint(directory))


def _digest(checkpoint: Checkpoint) -> str:
    if checkpoint.ranks is not None:
        return read_header(checkpoint.files[0])[1]["source"]
    digest = hashlib.sha256()
    for path in checkpoint.files:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            digest.update(f"{path.name} {size} ".encode() + file.read(length))
            if size < 1 << 30:
                while block := file.read(1 << 20):
                    digest.update(block)
            else:
                for i in range(16):
                    file.seek(8 + length + (size - 8 - length - (1 << 16)) * i // 15)
                    digest.update(file.read(1 << 16))
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------ files, writing

def safetensors_header(tensors: dict[str, TensorSpec], metadata: dict[str, str]) -> tuple[bytes, list[str]]:
    """The bytes in front of a file's tensors, and the order of these."""
    # wide elements first, so that every tensor is aligned to its element
    order = sorted(tensors, key=lambda name: -DTYPES[tensors[name].dtype].itemsize)
    header, position = {"__metadata__": metadata}, 0
    for name in order:
        spec = tensors[name]
        start, position = position, position + spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, position]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write_safetensors(path: Path, tensors: dict[str, TensorSpec], data: Callable[[str], Iterable[np.ndarray]],
                      metadata: dict[str, str], progress: tqdm) -> None:
    """Write a file header first, then the tensors block by block. It has its name only once it is complete on disk."""
    header, order = safetensors_header(tensors, metadata)

    def blocks() -> Iterator[bytes | memoryview]:
        yield header
        for name in order:
            written = 0
            for block in data(name):
                yield memoryview(block).cast("B")
                written += block.nbytes
                progress.update(block.nbytes)
            if written != tensors[name].nbytes:
                raise RuntimeError(f"{name}: {written} bytes for {tensors[name]}")

    write_atomically(path, blocks())


def write_atomically(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say where
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself has to reach the disk
    os.fsync(folder)
    os.close(folder)


def check_space(directory: Path, needed: int) -> None:
    """ValueError when the disk of a folder (which need not exist yet) has less than `needed` bytes free."""
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(f"{directory} needs {needed:,} bytes of free disk space, {free:,} are left; nothing was "
                         f"written")


def progress_bar(total: int, what: str) -> tqdm:
    # bars are for people who wait
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False,
                disable=not sys.stderr.isatty() or total < 1 << 28)


# ------------------------------------------------------------------------------------------------------------- shards

def write_shards(source: str | Path, target: str | Path, size: int) -> None:
    """Cut a published checkpoint into one file for each of `size` ranks, types as published.

    Memory: a few CHUNK. An interrupted run is taken up again by the same command. ValueError, before anything is
    written, for a source that is not right, sizes that do not divide, a folder with other things in it, or too little
    free disk.
    """
    source, target = Path(source), Path(target)
    checkpoint = open_checkpoint(source)
    if checkpoint.ranks is not None:
        raise ValueError(f"{source} holds shards for {checkpoint.ranks} ranks already; they are cut from the published "
                         f"layout")
    check_ranks(checkpoint.config, size)
    digest, schema = _digest(checkpoint), checkpoint_schema(checkpoint.config)
    shards = {target / shard_name(rank, size): rank_schema(checkpoint.config, rank, size) for rank in range(size)}
    # config.json last: without it the folder is not a checkpoint
    copies = {name: (source / name).read_bytes() for name in (*TOKENIZER_FILES, "config.json") if (source / name).exists()}

    def check_shard(path: Path, entries: dict[str, Entry], metadata: dict[str, str]) -> None:
        if metadata.get("source") != digest:
            raise ValueError(f"{path} is a shard of another checkpoint than {source}; give an empty folder")
        compare(entries, shards[path], path)

    missing = _take_up(target, shards, copies, check_shard, str(source))
    with progress_bar(sum(s.nbytes for path in missing for s in shards[path].values()), "writing shards") as progress:
        for rank, path in enumerate(shards):
            if path in missing:
                parts = {name: part_of(checkpoint.config, name, schema[name], rank, size) for name in shards[path]}
                write_safetensors(path, shards[path], lambda name: checkpoint.tensors[0][name].chunks(parts[name]),
                                  {"format": "pt", "rank": str(rank), "ranks": str(size), "source": digest}, progress)
    for name, data in copies.items():
        write_atomically(target / name, [data])


def _take_up(target: Path, files: dict[Path, dict[str, TensorSpec]], others: dict[str, bytes],
             check_file: Callable[[Path, dict[str, Entry], dict[str, str]], None], what: str) -> list[Path]:
    """Make a folder ready for a run that may have been interrupted: unfinished files go, complete ones stay; -> the
    safetensors `files` that are still to be written.

    ValueError, with the folder untouched, for too little free disk and for anything that is not of the same run: of
    `files`, `check_file(path, tensors, metadata)` refuses those that are not; `others` have these names and bytes.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is not a folder")
    unfinished = []
    names = {name + PARTIAL for name in (*others, *(path.name for path in files))}
    for path in sorted(target.iterdir()) if target.exists() else []:
        if path.name in names and path.is_file():
            unfinished.append(path)
        elif path in files:
            check_file(path, *read_header(path))
        elif path.name not in others or not path.is_file() or path.read_bytes() != others[path.name]:
            raise ValueError(f"{target} is not empty: {path.name} is not part of an earlier run for {what}; give an "
                             f"empty folder")
    missing = [path for path in files if not path.exists()]
    needed = sum(s.nbytes + 200 for path in missing for s in files[path].values())  # 200: a line of the header
    check_space(target, needed - sum(path.stat().st_size for path in unfinished))
    for path in unfinished:
        path.unlink()
    target.mkdir(parents=True, exist_ok=True)
    return missing


# ----------------------------------------------------------------------------------------------------- random weights

class RandomWeights:
    """Random tensors whose model behaves: streams stay of order one over the layers, attention, routing and selections
    discriminate, logits spread by a few units. A tensor depends on the seed and its name only."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"the seed {seed} is negative")
        self.config, self.seed = config, seed
        normal = NormalDist()
        # Quantiles of the normal distribution, looked up by 16 random bits: fast, and the same with any library.
        self.normal = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)])
        self.fp8_sigma = 100.0  # the largest quantile, 4.3, stays below 448
        self.fp8 = torch.from_numpy(self.normal * self.fp8_sigma).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        self.fp4_sigma = math.sqrt(sum(v * v for v in E2M1) / 8)  # of uniformly drawn codes

    def chunks(self, name: str, spec: TensorSpec) -> Iterator[np.ndarray]:
        """The bytes of a tensor in blocks of rows."""
        step = max(1, CHUNK // 8 // spec.row_bytes)
        for i, start in enumerate(range(0, spec.shape[0], step)):
            shape = (min(step, spec.shape[0] - start), *spec.shape[1:])
            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            bits = np.random.PCG64([self.seed, key, i])  # raw bits are stable; the distributions on top need not be
            draw = bits.random_raw(-(-math.prod(shape) * 2 // 8)).view(np.uint16)[: math.prod(shape)].reshape(shape)
            yield self._values(name, spec, draw)

    def made(self, entries: dict[str, Entry]) -> bool:
        """Whether stored tensors are these, judged by their first 4 KB: another seed shows at once."""
        for name, entry in entries.items():
            rows = min(entry.spec.shape[0], -(-4096 // entry.spec.row_bytes))
            first = next(self.chunks(name, TensorSpec(entry.spec.dtype, (rows, *entry.spec.shape[1:]))))
            if np.fromfile(entry.path, np.uint8, first.nbytes, offset=entry.offset).tobytes() != first.tobytes():
                return False
        return True

    def _values(self, name: str, spec: TensorSpec, draw: np.ndarray) -> np.ndarray:
        if spec.dtype == "I8":
            return (draw & 255).astype(np.uint8)  # all 16 codes equally often
        if spec.dtype == "F8_E4M3":
            return self.fp8[draw]
        if spec.dtype == "F8_E8M0":
            # Scales 2**k and 2**(k+1), mixed so that the weights have exactly the standard deviation asked for.
            packed = _EXPERT.fullmatch(name) is not None
            std = self._mean_std(name.removesuffix("scale") + "weight", spec.shape[-1] * 32)[1]
            ratio = std / (self.fp4_sigma if packed else self.fp8_sigma)
            k = math.floor(math.log2(ratio))
            share = ((ratio / 2.0**k) ** 2 - 1) / 3
            return (127 + k + (draw < share * 65536)).astype(np.uint8)
        mean, std = self._mean_std(name, spec.shape[-1])
        values = mean + std * self.normal[draw]
        if name.endswith(".attn_sink"):
            values = np.abs(values) * np.where(np.arange(len(values)) % 2, -1.0, 1.0)  # both signs in any slice
        return torch.from_numpy(values).to(torch.float32).to(DTYPES[spec.dtype]).view(torch.uint8).numpy()

    def _mean_std(self, name: str, inputs: int) -> tuple[float, float]:
        """Mean and standard deviation of a tensor's elements; `inputs`: what a row of it is multiplied with."""
        words = name.split(".")
        leaf = words[-2] if words[-1] in ("weight", "bias") and len(words) > 1 else words[-1]
        if leaf.endswith("norm") or leaf in ("norm1", "norm2"):
            return 1.0, 0.1
        if leaf in ("q_weight", "k_weight"):
            return 1.0, 0.2
        if leaf == "embed" or leaf.startswith("image_") or leaf == "attn_sink":
            return 0.0, 1.0
        if leaf.endswith("_base"):
            return 0.0, 0.6      # pre, post and the mixing matrix of each sublayer differ, and none is symmetric
        if leaf.endswith("_scale"):
            return 0.6, 0.15
        if words[-1] in ("bias", "bias_vl"):
            return 0.0, 0.2 if leaf in ("gate", "bias_vl") else 0.1
        # Gains over 1/sqrt(inputs), which keeps the size of a normalised input.
        gain = {"gate": 2.0, "wgate": 2.0, "wo_a": 1.5, "wo_b": 1.5, "w2": 2.0}.get(leaf, 1.0)
        if name == "head.weight":
            gain = 2.5
        elif name.endswith(".attn.wq_b.weight"):
            gain = 2.0           # attention that looks somewhere
        elif name.startswith(("vision.", "aligner.")):
            gain = 1.0
        return 0.0, gain / math.sqrt(inputs)


def write_random(config_path: str | Path, target: str | Path, seed: int, tokenizer: str | Path | None = None) -> None:
    """Write a random checkpoint of any configuration in the published layout. Deterministic in the seed.

    Memory: a few CHUNK. An interrupted run is taken up again by the same command. ValueError, before anything is
    written, for a folder with other things in it, too little free disk, a tokenizer that is not there.
    """
    config_path, target = Path(config_path), Path(target)
    config = ModelConfig.from_json(config_path)
    weights, schema = RandomWeights(config, seed), checkpoint_schema(config)
    if tokenizer is not None and not (Path(tokenizer) / "tokenizer.json").exists():
        raise ValueError(f"there is no tokenizer.json in {tokenizer}")
    total = sum(spec.nbytes for spec in schema.values())
    count = max(3, -(-total // (10 << 30)))
    files: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in schema.items():
        if filled + spec.nbytes > total / count * len(files) and files[-1] and len(files) < count:
            files.append({})
        files[-1][name] = spec
        filled += spec.nbytes
    metadata = {"format": "pt"}
    paths = {target / f"model-{i + 1:05}-of-{len(files):05}.safetensors": tensors for i, tensors in enumerate(files)}
    weight_map = {name: path.name for path, tensors in paths.items() for name in tensors}
    index = {"metadata": {"total_size": total, "random_seed": seed}, "weight_map": weight_map}
    # config.json first, so that a run with another one is told from this; without the index the folder is no checkpoint
    others = {"config.json": config_path.read_bytes()}
    others |= {name: (Path(tokenizer) / name).read_bytes() for name in TOKENIZER_FILES
               if tokenizer is not None and (Path(tokenizer) / name).exists()}
    last = {INDEX: json.dumps(index, indent=1).encode()}

    def check_values(path: Path, entries: dict[str, Entry], _: dict[str, str]) -> None:
        header = safetensors_header(paths[path], metadata)[0]
        with open(path, "rb") as file:
            same = file.read(len(header)) == header
        if not same or not weights.made(entries):
            raise ValueError(f"{path} does not hold the random weights of {config_path} with seed {seed}; give an empty "
                             f"folder")

    missing = _take_up(target, paths, others | last, check_values, f"{config_path} with seed {seed}")
    for name, data in others.items():
        write_atomically(target / name, [data])
    with progress_bar(sum(spec.nbytes for path in missing for spec in paths[path].values()), "random weights") as progress:
        for path in missing:
            write_safetensors(path, paths[path], lambda name: weights.chunks(name, schema[name]), metadata, progress)
    write_atomically(target / INDEX, [last[INDEX]])


# ------------------------------------------------------------------------------------------------------------ loading

def checkpoint_name(parameter: str, expert: int = 0) -> str:
    """The checkpoint's name of a model parameter. They are the same, but for experts, which the model stacks: slice e
    of `ffn.experts.w1.weight` is `ffn.experts.{e}.w1.weight`."""
    stacked = re.fullmatch(r"(.+\.ffn\.experts)\.(w[123]\.(?:weight|scale))", parameter)
    return f"{stacked[1]}.{expert}.{stacked[2]}" if stacked else parameter


class ExpertCache:
    """The experts used last, at most `limit` bytes of them, shared by all layers of a model."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.nbytes = limit, 0
        self.kept: OrderedDict[tuple[Path, int], Tensor] = OrderedDict()

    def get(self, entry: Entry) -> Tensor:
        key = (entry.path, entry.offset)
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        tensor = entry.read()
        self.kept[key] = tensor
        self.nbytes += tensor.nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self.kept.popitem(last=False)[1].nbytes
        return tensor


class ExpertStore:
    """One matrix (w1, w2 or w3) of a layer's routed experts, left on disk: called with experts, it reads those.

    They are read, not mapped: every page of a map that was ever touched would count as memory of the process.
    """

    def __init__(self, experts: list[tuple[Entry, Entry]], cache: ExpertCache, device: torch.device) -> None:
        self.experts, self.cache, self.device = experts, cache, device

    def __call__(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Packed weights int8 [n, out, in/2] and scales float8_e8m0fnu [n, out, in/32] of this rank's experts [n]."""
        chosen = [self.experts[e] for e in experts.tolist()]
        # stacked as bytes: not every operation knows the narrow types
        weight, scale = (torch.stack([self.cache.get(pair[i]).view(torch.uint8) for pair in chosen]) for i in (0, 1))
        return weight.view(torch.int8).to(self.device), scale.view(torch.float8_e8m0fnu).to(self.device)


def release(maps: list[mmap.mmap]) -> None:
    """Take pages that were touched out of this process's memory; the next use reads them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for mapped in maps:
            mapped.madvise(mmap.MADV_DONTNEED)


def load_model(directory: str | Path, exact: bool = False, device: torch.device | str | None = None,
               fake_quant: FakeQuant = FakeQuant(), group: Any = None, draft: bool = False,
               offload: bool = False) -> Transformer:
    """Build the model of a checkpoint folder, published layout or shards, and fill it; each rank reads its slices only.

    `exact`: float64 between rounding points. `device`: CUDA where there is one. `group`: a torch.distributed group for
    tensor parallelism. `draft`: with the draft head. `offload`: routed experts stay on disk and are read when used; on a
    CPU so does all else, as read-only maps that are dropped from memory after each layer. The files must stay in place.
    Strict: every parameter is filled and every tensor used, but for the draft head's without `draft`. ValueError: one
    sentence that names the file, tensor or size at fault, the same on every rank and before any tensor is read.
    """
    try:
        device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        raise ValueError(f"{device} is not a device such as cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the device {device} is not supported: cpu and cuda are")
    ranks = Ranks()
    if group is not None:
        ranks = Ranks(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    if checkpoint.ranks not in (None, ranks.size):
        raise ValueError(f"{directory} holds shards for {checkpoint.ranks} ranks but {ranks.size} are running; start "
                         f"{checkpoint.ranks}, or cut shards for {ranks.size}")
    check_ranks(config, ranks.size)
    if draft and not config.num_nextn_predict_layers:
        raise ValueError(f"{directory} has no draft head: num_nextn_predict_layers = 0")
    engram_index = None
    if config.engram_layer_ids:
        tokens = build_token_map(checkpoint.directory / "tokenizer.json", config.engram_compressed_vocab_size)
        engram_index = EngramIndex.of(config, tokens)
    num = Numerics(torch.float64 if exact else torch.float32, fake_quant)
    with torch.device("meta"):
        model = Transformer(config, num, ranks, DSpark(config, num, ranks) if draft else None)

    schema, stored = checkpoint_schema(config), checkpoint.tensors[0 if checkpoint.ranks is None else ranks.rank]
    parts = {name: part_of(config, name, spec, ranks.rank, ranks.size) for name, spec in schema.items()}
    unused = {name for name, part in parts.items() if part is not None and (draft or not name.startswith("mtp."))}
    cache = ExpertCache()

    def entry(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
        if name not in unused:
            raise ValueError(f"{directory}: the model asks for a tensor {name}, which is not for it in this checkpoint")
        unused.remove(name)
        spec = parts[name].spec(schema[name])
        if (spec.shape, DTYPES[spec.dtype]) != (tuple(shape), dtype):
            raise ValueError(f"{directory}: the tensor {name} is {spec}; the model holds {dtype} {list(shape)}")
        return stored[name]

    def read(name: str) -> Tensor:
        return stored[name].read(parts[name] if checkpoint.ranks is None else None)

    plan: list[tuple[nn.Module, str, list[str]]] = []  # where, and the tensor or the experts' tensors to put there
    for full, parameter in list(model.named_parameters()):
        owner, _, leaf = full.rpartition(".")
        module = model.get_submodule(owner)
        if checkpoint_name(full) == full:
            entry(full, parameter.shape, parameter.dtype)
            if not isinstance(module, EngramTable):  # its rows stay on disk
                plan.append((module, leaf, [full]))
        else:
            first = ranks.rank * parameter.shape[0]
            names = [checkpoint_name(full, first + e) for e in range(parameter.shape[0])]
            for name in names:
                entry(name, parameter.shape[1:], parameter.dtype)
            if not offload:
                plan.append((module, leaf, names))
            elif leaf == "weight":
                pairs = [(stored[name], stored[name.removesuffix("weight") + "scale"]) for name in names]
                module.store = ExpertStore(pairs, cache, device)
    if unused:
        raise ValueError(f"{directory}: the model has no place for the tensor {min(unused)}")

    maps: dict[nn.Module, list[mmap.mmap]] = {}        # of each module that owns mapped parameters
    if offload and device.type == "cpu":
        to_map, plan = plan, []
        for module, leaf, names in to_map:
            mapped = stored[names[0]].map(parts[names[0]] if checkpoint.ranks is None else None)
            if mapped is None:
                plan.append((module, leaf, names))
            else:
                setattr(module, leaf, nn.Parameter(mapped[0], requires_grad=False))
                maps.setdefault(module, []).append(mapped[1])
        for module, of_module in maps.items():
            if isinstance(module, Linear):
                module.release = lambda own=of_module: release(own)
        for module in (*model.children(), *model.layers, *(model.mtp or ())):  # for what is used otherwise
            own = [m for child in module.modules() for m in maps.get(child, [])]
            module.register_forward_hook(lambda *_, own=own: release(own))
    total = sum(parts[name].spec(schema[name]).nbytes for *_, names in plan for name in names)
    if not offload:
        for module in model.modules():
            if isinstance(module, Experts):
                module.allocate(device)
    with progress_bar(total, "loading") as progress:
        for module, leaf, names in plan:
            parameter = getattr(module, leaf)
            if _EXPERT.fullmatch(names[0]) is None:
                parameter = read(names[0]).to(device)
                setattr(module, leaf, nn.Parameter(parameter, requires_grad=False))
            else:  # filled expert by expert: the stack is the only copy
                for i, name in enumerate(names):
                    parameter[i].view(torch.uint8).copy_(read(name).view(torch.uint8))
            progress.update(parameter.nbytes)
    for full, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):  # constants that the modules made themselves
            if buffer.is_meta:
                raise ValueError(f"the buffer {full}.{name} of the model was made on the meta device and has no value")
            setattr(module, name, buffer.to(device))
        if isinstance(module, EngramTable):
            weight, scale = stored[f"{full}.weight"], stored[f"{full}.scale"]
            first = 0 if checkpoint.ranks is None else parts[f"{full}.weight"].start
            module.attach(TableRows.mapped(weight.path, f"{full}.weight", scale.path, f"{full}.scale", first))
        elif isinstance(module, Linear) and module not in maps:
            module.prepare()
    bind(model)
    model.engram_index, model.checkpoint = engram_index, checkpoint.directory
    return model


# ------------------------------------------------------------------------------------------------------ command lines

class Parser(argparse.ArgumentParser):
    """Of every command here: bad arguments are a ValueError, which becomes one sentence and exit code 1 like all others."""

    def error(self, message: str) -> None:
        raise ValueError(message)


def check_context(config: ModelConfig, option: str, tokens: int, decoded: int = 0) -> None:
    """ValueError when what an option asks for, and the tokens decoded after it, are more than the model was made for."""
    limit = config.max_position_embeddings
    if tokens + decoded > limit:
        more = f" and {decoded:,} decoded token{'s' * (decoded > 1)}" if decoded else ""
        raise ValueError(f"{option}: {tokens:,} tokens{more} are more than the model's context of {limit:,} "
                         f"(max_position_embeddings)")


def check(path: str | Path) -> str:
    """A description of a checkpoint folder that is right, or of the schema of a config.json; ValueError otherwise."""
    path = Path(path)
    if path.is_dir():
        checkpoint = open_checkpoint(path)
        specs = [entry.spec for table in checkpoint.tensors for entry in table.values()]
        layout = "published layout" if checkpoint.ranks is None else f"shards for {checkpoint.ranks} ranks"
        first = f"{path}: {layout}, {len(checkpoint.files)} files, headers as config.json asks for"
    else:
        specs = list(checkpoint_schema(ModelConfig.from_json(path)).values())
        first = f"{path}: schema of the published layout"
    counts = Counter(spec.dtype for spec in specs)
    nbytes = {dtype: sum(spec.nbytes for spec in specs if spec.dtype == dtype) for dtype in counts}
    lines = [f"  {d:<8} {counts[d]:>7,} tensors {nbytes[d]:>19,} bytes" for d in DTYPES if d in counts]
    return "\n".join([first, *lines, f"  total    {len(specs):>7,} tensors {sum(nbytes.values()):>19,} bytes"])


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description="Check, cut or make checkpoints.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", metavar="DIR-or-config.json", help="check a checkpoint from its headers alone")
    what.add_argument("--hf-ckpt-path", metavar="DIR", help="cut this published checkpoint for --model-parallel ranks")
    what.add_argument("--random", metavar="CONFIG.json", help="write a random checkpoint of this configuration")
    parser.add_argument("--save-path", metavar="DIR", help="where --hf-ckpt-path or --random write")
    parser.add_argument("--model-parallel", type=int, metavar="N", help="number of tensor-parallel ranks")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument("--tokenizer", metavar="DIR", help="--random copies the tokenizer files of this folder")
    args = None
    try:
        args = parser.parse_args(arguments)
        if not args.check and not args.save_path:
            parser.error("--save-path is needed")
        if args.hf_ckpt_path and args.model_parallel is None:
            parser.error("--model-parallel is needed")
        if args.check:
            print(check(args.check))
        elif args.random:
            write_random(args.random, args.save_path, args.seed, args.tokenizer)
        else:
            write_shards(args.hf_ckpt_path, args.save_path, args.model_parallel)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        hint = "" if args is None or args.check else "; the same command takes it up again"
        print(f"interrupted{hint}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
