"""Engram: conditional memory. The last 2, 3 and 4 tokens are hashed into a very large table of embeddings, and what is
found there is added to the residual streams through a gate that the current hidden state opens or shuts.

In the order of computation:

    build_token_map     token ids -> compressed ids: "The", " the" and "THE" are one class
    engram_primes, engram_multipliers, engram_hashes      the constants of the hashes, derived from the configuration
    ngram_windows, ngram_hashes                           compressed ids -> rows of the table, integers only
    EngramIndex                                           all of that for one model
    TableRows, EngramTable                                the table: it stays on the host, only the rows used are read
    Engram                                                projection of the rows, gate, addition

Nothing here looks at a hidden state before the gate, so the rows of a token are known as soon as the token is: all of
it up to `EngramTable` runs on the host.

Axes: B batch, S tokens, N residual streams, D hidden size, C columns = (max_ngram - 1) * heads, one row each.
"""
from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sympy import nextprime
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor, nn

from quant import E4M3_E8M0, Linear, Numerics, Ranks, dequantise, to_bf16

DEAD = -1  # compressed id of a position that look-back cannot pass: an image token, or before the start of the sequence


# ---------------------------------------------------------------------------------------------------------- token map

def build_token_map(tokenizer: str | Path, compressed_vocab_size: int) -> Tensor:
    """Compressed id of every token of a tokenizer.json: int64 [len(tokenizer)], on the CPU.

    ValueError when the tokenizer does not fall into `compressed_vocab_size` classes: the multipliers of the hashes are
    made from that number, and every row looked up would be a wrong one.
    """
    try:
        backend = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{tokenizer} is not a readable tokenizer.json: {error}") from None
    n = backend.get_vocab_size(with_added_tokens=True)
    # A token that is a single space must not be stripped to nothing: it hides as a private character meanwhile.
    fold = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), "\ue000"),
        normalizers.Strip(), normalizers.Replace("\ue000", " ")])
    classes: dict[str, int] = {}
    token_map = []
    texts = backend.decode_batch([[i] for i in range(n)], skip_special_tokens=False)
    for i, text in enumerate(texts):
        if "\ufffd" in text:                       # part of a character: the token's own spelling is all there is
            key = backend.id_to_token(i)
        else:
            key = fold.normalize_str(text) or text
        token_map.append(classes.setdefault(key, len(classes)))   # new classes in order of first appearance
    if len(classes) != compressed_vocab_size:
        raise ValueError(f"{tokenizer} has {len(classes)} Engram classes but engram_compressed_vocab_size is "
                         f"{compressed_vocab_size}: it is not the tokenizer of this model")
    return torch.tensor(token_map, dtype=torch.int64, device="cpu")


def compress_ids(ids: Tensor, token_map: Tensor, dead: Tensor | None = None) -> Tensor:
    """Token ids [...] -> compressed ids int64 [...] on the CPU, DEAD where `dead` is true (positions of an image span).

    ValueError for an id outside the vocabulary; a negative index would quietly read the map from its end.
    """
    ids = ids.cpu()
    outside = (ids < 0) | (ids >= len(token_map))
    if outside.any():
        raise ValueError(f"token id {int(ids[outside][0])} is not in the vocabulary 0..{len(token_map) - 1}")
    compressed = token_map[ids]
    return compressed if dead is None else compressed.masked_fill(dead.cpu(), DEAD)


# ------------------------------------------------------------------------------------------- constants of the hashes

def engram_primes(layer_count: int, max_ngram: int, n_heads: int, vocab_size: int) -> list[list[list[int]]]:
    """Table sizes of every hash, indexed [Engram layer][n - 2][head]: different primes of at least `vocab_size`.

    One walk over layers, then n, then heads. Each n starts again from `vocab_size` and skips what is taken; as what is
    taken is always the least primes there are, the walk is the ascending list of primes.
    """
    prime = vocab_size - 1
    primes: list[list[list[int]]] = []
    for _ in range(layer_count):
        primes.append([])
        for _ in range(2, max_ngram + 1):
            primes[-1].append([prime := int(nextprime(prime)) for _ in range(n_heads)])
    return primes


def engram_multipliers(layer_id: int, max_ngram: int, compressed_vocab: int) -> list[int]:
    """Odd multipliers of the tokens at distance 0..max_ngram-1 in an Engram layer, seeded by the layer's number.

    They are small enough that a compressed id times a multiplier never leaves int64, so no hash is negative.
    """
    bound = max(1, np.iinfo(np.int64).max // compressed_vocab // 2)
    draw = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [int(m) * 2 + 1 for m in draw]


@dataclass(frozen=True)
class NgramHash:
    """The constants of one layer's hashes; all int64 on the CPU, columns in the order (n, head)."""
    multipliers: Tensor  # [max_ngram], of the tokens newest first
    primes: Tensor       # [max_ngram - 1, heads]
    offsets: Tensor      # [C], the first table row of each column: the primes before it, summed

    @classmethod
    def of(cls, multipliers: Sequence[int], primes: Sequence[Sequence[int]]) -> NgramHash:
        starts = list(accumulate((p for of_n in primes for p in of_n), initial=0))
        # on the CPU also while the model around it is built on the meta device
        return cls(*(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (multipliers, primes, starts[:-1])))

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return int(self.primes.sum())


def engram_hashes(config: Any) -> tuple[NgramHash, ...]:
    """The hash constants of every Engram layer of a ModelConfig.

    ValueError naming the layer when engram_num_embeddings is not the sum of its primes.
    """
    primes = engram_primes(len(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads,
                           config.engram_vocab_size)
    hashes = []
    for layer, given, of_layer in zip(config.engram_layer_ids, config.engram_num_embeddings, primes):
        multipliers = engram_multipliers(layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size)
        hashes.append(NgramHash.of(multipliers, of_layer))
        if hashes[-1].rows != given:
            raise ValueError(f"engram_num_embeddings of layer {layer} is {given}, but the primes of its hashes sum to "
                             f"{hashes[-1].rows}")
    return tuple(hashes)


# -------------------------------------------------------------------------------------------------------------- hashes

def ngram_windows(ids: Tensor, max_ngram: int, history: Tensor | None = None) -> Tensor:
    """Every position's last compressed ids, newest first: int64 [B, S] -> [B, S, max_ngram].

    `history` [B, max_ngram - 1] holds the compressed ids just before, in the order of the sequence; without it the
    sequence starts here. DEAD stands for what is not there.
    """
    if history is None:
        history = ids.new_full((ids.shape[0], max_ngram - 1), DEAD)
    return torch.cat([history, ids], 1).unfold(1, max_ngram, 1).flip(-1)              # [B, S, max_ngram]


def ngram_hashes(windows: Tensor, ngram_hash: NgramHash, pad: int) -> Tensor:
    """Table rows int64 [..., C] of windows of compressed ids int64 [..., max_ngram], newest first (paper, Engram).

    Look-back stops at the first DEAD id and stays stopped: that slot and all slots beyond it count as `pad`, which is
    the *compressed* id of engram_pad_token_id. Slots nearer than it keep their ids.
    """
    blocked = (windows < 0).cumsum(-1) > 0                                            # [..., max_ngram]
    terms = windows.masked_fill(blocked, pad) * ngram_hash.multipliers.to(windows.device)
    rolling = [terms[..., 0]]
    for i in range(1, terms.shape[-1]):
        rolling.append(rolling[-1] ^ terms[..., i])
    grams = torch.stack(rolling[1:], -1)                                              # [..., max_ngram - 1]
    rows = grams.unsqueeze(-1) % ngram_hash.primes.to(windows.device)                 # [..., max_ngram - 1, heads]
    return rows.flatten(-2) + ngram_hash.offsets.to(windows.device)                   # [..., C]


@dataclass(frozen=True)
class EngramIndex:
    """From token ids to table rows: the token map, its pad class and the hashes of every Engram layer."""
    token_map: Tensor               # int64 [vocabulary], on the CPU
    pad: int                        # the class of engram_pad_token_id, which need not be that number
    hashes: tuple[NgramHash, ...]

    @classmethod
    def of(cls, config: Any, token_map: Tensor) -> EngramIndex:
        """The index of a ModelConfig with `build_token_map`'s result, or any map into its compressed vocabulary."""
        classes = config.engram_compressed_vocab_size
        if not 0 <= int(token_map.min()) <= int(token_map.max()) < classes:
            raise ValueError(f"the token map reaches from {int(token_map.min())} to {int(token_map.max())}, outside "
                             f"engram_compressed_vocab_size = {classes}")
        if not 0 <= config.engram_pad_token_id < len(token_map):
            raise ValueError(f"engram_pad_token_id = {config.engram_pad_token_id} is not one of the {len(token_map)} "
                             f"tokens of the token map")
        return cls(token_map, int(token_map[config.engram_pad_token_id]), engram_hashes(config))

    def compress(self, ids: Tensor, dead: Tensor | None = None) -> Tensor:
        """Token ids [...] -> compressed ids [...], see `compress_ids`."""
        return compress_ids(ids, self.token_map, dead)

    def rows(self, windows: Tensor, layer: int) -> Tensor:
        """Table rows int64 [..., C] of the `layer`-th Engram layer for windows [..., max_ngram], see `ngram_hashes`."""
        return ngram_hashes(windows, self.hashes[layer], self.pad)


# --------------------------------------------------------------------------------------------------------------- table

def map_tensor(path: str | Path, name: str, dtype: str) -> np.ndarray:
    """The bytes of one tensor of a safetensors file, memory-mapped read-only: uint8 of the tensor's shape.

    For tensors of one byte an element (`dtype` "F8_E4M3", "F8_E8M0" or "I8"). Only the pages touched are read.
    ValueError names the file and the tensor when it is not there, not of that dtype, or the file is cut short.
    """
    try:
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")  # eight bytes of header length, the header, the data
            header = json.loads(file.read(start - 8))
            # Shared and read-only, so that a 98 GB table counts against no memory limit.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        entry = header.get(name)
        found, shape = (entry["dtype"], entry["shape"]) if entry else (None, [])
        begin, end = (start + offset for offset in entry["data_offsets"]) if entry else (0, 0)
    except (OSError, ValueError, OverflowError, MemoryError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
    if entry is None:
        raise ValueError(f"{path} has no tensor {name}")
    if found != dtype:
        raise ValueError(f"{name} in {path} is {found}, not {dtype}")
    if end > len(mapped) or end - begin != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{path} is cut short or its header is wrong: {name} should be bytes {begin} to {end} of "
                         f"{len(mapped)}")
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # rows are far apart: reading ahead would read 128 KiB for each
    return np.frombuffer(mapped, np.uint8, end - begin, begin).reshape(shape)


@dataclass(frozen=True)
class TableRows:
    """Rows of an Engram table somewhere in memory or on disk; row 0 is row `first_row` of the whole table."""
    weight: np.ndarray  # uint8 [rows, head_dim], E4M3 codes
    scale: np.ndarray   # uint8 [rows, head_dim / 32], E8M0 codes
    first_row: int = 0

    @classmethod
    def mapped(cls, weight_file: str | Path, weight_name: str, scale_file: str | Path, scale_name: str,
               first_row: int = 0) -> TableRows:
        """Memory-mapped from safetensors; weight and scale may live in different files."""
        weight = map_tensor(weight_file, weight_name, "F8_E4M3")
        return cls(weight, map_tensor(scale_file, scale_name, "F8_E8M0"), first_row)

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor, first_row: int = 0) -> TableRows:
        """From tensors in memory: float8_e4m3fn [rows, head_dim] and float8_e8m0fnu [rows, head_dim / 32]."""
        return cls(weight.cpu().view(torch.uint8).numpy(), scale.cpu().view(torch.uint8).numpy(), first_row)

    def release(self) -> None:
        """Give back the memory of the pages that were touched, where the rows are mapped; reading them again is legal."""
        for array in (self.weight, self.scale):
            while isinstance(array, np.ndarray):
                array = array.base
            if isinstance(array, memoryview) and isinstance(array.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                array.obj.madvise(mmap.MADV_DONTNEED)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableRows:
        return self  # read-only, and copying would read it all


class EngramTable(nn.Module):
    """A table [rows, head_dim] of E4M3 values with an E8M0 scale for 32, or one rank's contiguous part of it.

    The parameters say names, shapes and dtypes and are always on the meta device; the rows are read from where
    `attach` says. Moving or casting the model leaves the table where it is.
    """

    def __init__(self, rows: int, head_dim: int, ranks: Ranks = Ranks()) -> None:
        super().__init__()
        if head_dim % 32:
            raise ValueError(f"engram_head_dim = {head_dim} is not a multiple of 32, the block of the table's scales")
        self.total_rows = rows
        part = -(-rows // ranks.size)                                  # the last rank's part is padded to this
        self.first_row = ranks.rank * part
        self.end_row = min(self.first_row + part, rows)                # without the padding
        weight = torch.empty(part, head_dim, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(part, head_dim // 32, dtype=torch.float8_e8m0fnu, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.source: TableRows | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngramTable:
        return self  # what .to(), .cuda(), .half() and .to_empty() call

    def attach(self, source: TableRows) -> None:
        """Give the table its rows; ValueError when `source` is of another shape or lacks rows of this part."""
        head_dim = self.weight.shape[1]
        for what, array, width in (("weight", source.weight, head_dim), ("scale", source.scale, head_dim // 32)):
            if array.ndim != 2 or array.shape[1] != width or len(array) != len(source.weight):
                raise ValueError(f"an Engram table's {what} should be [{len(source.weight)}, {width}], "
                                 f"not {list(array.shape)}")
        if source.first_row > self.first_row or source.first_row + len(source.weight) < self.end_row:
            raise ValueError(f"rows {self.first_row} to {self.end_row} of an Engram table are needed, but rows "
                             f"{source.first_row} to {source.first_row + len(source.weight)} are given")
        self.source = source

    def gather(self, ids: Tensor) -> Tensor:
        """Values bfloat16 [..., head_dim] of rows int64 [...], on the CPU; zeros for the rows of other ranks.

        Each row is read once however often it occurs, in the order of the file.
        """
        if self.source is None:
            raise ValueError("an Engram table was used before its rows were attached")
        unique, where = np.unique(ids.cpu().numpy(), return_inverse=True)
        if len(unique) and not 0 <= unique[0] <= unique[-1] < self.total_rows:
            raise ValueError(f"Engram rows {unique[0]} to {unique[-1]} were asked of a table of {self.total_rows}")
        begin, end = np.searchsorted(unique, [self.first_row, self.end_row])
        own = unique[begin:end] - self.source.first_row
        codes, scales = torch.from_numpy(self.source.weight[own]), torch.from_numpy(self.source.scale[own])
        if len(own) > 1024:  # a long prompt: 8 KiB of pages for each of its rows would count as memory of this process
            self.source.release()
        values = torch.zeros(len(unique), self.weight.shape[1], dtype=torch.bfloat16, device="cpu")
        values[begin:end] = dequantise(codes, scales, E4M3_E8M0, torch.bfloat16)              # [unique, head_dim]
        return values[torch.from_numpy(where.reshape(ids.shape))]                              # [..., head_dim]


# -------------------------------------------------------------------------------------------------------------- module

class Engram(nn.Module):
    """Adds to every residual stream what the table knows of the last tokens, gated by the stream itself.

    `index` is the position of the layer in engram_layer_ids. The rows are looked up on the host; keep `rows` there.
    """

    def __init__(self, config: Any, index: int, num: Numerics, ranks: Ranks = Ranks()) -> None:
        super().__init__()
        self.num, self.ranks, self.eps = num, ranks, config.rms_norm_eps
        self.streams, dim = config.hc_mult, config.hidden_size
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.embed = EngramTable(config.engram_num_embeddings[index], config.engram_head_dim, ranks)
        # one key for each stream and a value for all of them
        self.wkv = Linear(columns * config.engram_head_dim, (self.streams + 1) * dim, "fp8", num)
        self.q_weight = nn.Parameter(torch.empty(self.streams, dim, dtype=torch.bfloat16), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(self.streams, dim, dtype=torch.bfloat16), requires_grad=False)

    def look_up(self, rows: Tensor, device: torch.device) -> Tensor:
        """Table rows int64 [B, S, C] -> their values side by side, bfloat16 [B, S, C * head_dim] on `device`."""
        values = self.embed.gather(rows).flatten(-2)                                   # [B, S, C * head_dim]
        if device.type == "cuda":
            values = values.pin_memory()  # so that the copy does not wait for the device
        values = values.to(device, non_blocking=True)
        if self.ranks.size > 1:
            # one rank has the row and the others zeros; summed as bits, since 0 + -0 would lose a sign
            values = self.ranks.sum(values.view(torch.int32)).view(torch.bfloat16)
        return values

    def forward(self, h: Tensor, rows: Tensor, shut: Tensor | None = None) -> Tensor:
        """Streams bfloat16 [B, S, N, D], rows int64 [B, S, C] -> streams; unchanged where `shut` [B, S] is true."""
        keys, value = self.wkv(self.look_up(rows, h.device)).split([h.shape[-2] * h.shape[-1], h.shape[-1]], -1)
        x = h.to(self.num.arith)                                                       # [B, S, N, D]
        k = keys.unflatten(-1, h.shape[-2:]).to(self.num.arith)                        # [B, S, N, D]
        weight = self.q_weight.to(self.num.arith) * self.k_weight.to(self.num.arith)   # [N, D]
        # the dot product of the two RMS-normalised vectors; the norms are scalars, taken out of the sum
        scale = (x.square().mean(-1) + self.eps).rsqrt() * (k.square().mean(-1) + self.eps).rsqrt()
        dot = (x * weight * k).sum(-1) * scale * h.shape[-1] ** -0.5                   # [B, S, N]
        # a signed square root: never exactly 0, so that even a vanishing product keeps its side
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))    # [B, S, N], unrounded
        out = to_bf16(x + gate.unsqueeze(-1) * value.to(self.num.arith).unsqueeze(-2))
        return out if shut is None else torch.where(shut[..., None, None], h, out)
