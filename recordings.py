"""Recordings: how they are named and read, and how two of them compare. Nothing in this file needs the model.

    STEPS                   the arrays of a layer in the order of computation, and what computes each
    Recording, transform    a file of ours, or of another engine with a map of its names and layouts
    compare_array           one array of two recordings: values, selections as sets, gaps at the cut
    compare                 the verdict: which difference is first, which are causes, which may be consequences

golden.py makes recordings and is the command line.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
         "I8": torch.int8}
LEVELS = ("logits", "layers", "all")
BAD_INPUT = IndexError, KeyError, RuntimeError, TypeError, AttributeError, re.error, SafetensorError
WIDTH = 80               # of what is printed
BLOCK = 32 << 20         # bytes of one tensor in memory at a time, when files are compared

# The arrays of a layer in the order of computation: the level that records each, and what computes it.
STEPS: dict[str, tuple[str, str]] = {
    "engram_rows": ("layers", "Engram: token map, look-back, hashes; the pad class where look-back is blocked"),
    "engram_in": ("layers", "streams before Engram, from the layer below"),
    "engram_out": ("layers", "Engram: rows of the table, wkv, gate"),
    "input": ("layers", "streams at the entry of the layer: embedding or image features, the layer below, Engram"),
    "pre_mix": ("layers", "mHC: the pre of the sublayer before, from its streams"),
    "attn_in": ("layers", "mHC: read with pre_mix; attn_norm"),
    "q": ("all", "queries: wq_a, q_norm, wq_b, rotary"),
    "window_kv": ("all", "window rows: wkv, kv_norm, rotary, FP8"),
    "main_kv": ("all", "main KV: compressor, pooling of a group, rotary at its first token, FP4"),
    "index_key": ("all", "index keys: wk of the un-rotated latent, k_norm, rotary at the group's first token, FP4"),
    "index_query": ("all", "index queries: indexer.wq_b, rotary, FP4"),
    "topk": ("layers", "indexer: scores and the selection of rows"),
    "topk_margin": ("layers", "indexer: the gap of the scores at the cut"),
    "candidates": ("layers", "candidate pool: block maxima, the newest block pinned"),
    "candidates_margin": ("layers", "candidate pool: the gap at the cut"),
    "attention": ("all", "sparse attention: window and selected rows, scale, sink"),
    "attn_out": ("layers", "inverse rotary, wo_a, wo_b (without level all: the whole of attention)"),
    "ffn_in": ("layers", "mHC: attention's result written (post, comb), streams read with pre; ffn_norm"),
    "route_experts": ("layers", "gate: affinities + bias (bias_vl inside images), the best experts"),
    "route_weights": ("layers", "gate: weights of the chosen experts: affinities without bias, normalised, scaled"),
    "route_margin": ("layers", "gate: the gap at the cut"),
    "ffn_out": ("layers", "experts: w1, w3, limits, SwiGLU, routing weight before w2; shared expert"),
    "output": ("layers", "mHC: the experts' result written (post, comb)"),
}
BEFORE = {"tokens": "tokens", "prompt_length": "tokens", "positions": "tokens",
          "image.token_types": "image spans in the prompt", "image.types": "image span: resize plan",
          "image.grids": "image: resize plan",
          "image.patches": "image: decoding, resizing, normalisation", "image.vit": "vision tower",
          "image.features": "aligner"}
AFTER = {"final_hidden": "streams read with the last pre; norm", "logits": "language-model head",
         "dspark.main_hidden": "DSpark: mean over the streams at the entry of the target layers",
         "dspark.logits": "DSpark: main_proj, draft layers, head, Markov bias",
         "dspark.tokens": "DSpark: greedy drafts", "dspark.confidence": "DSpark: confidence head"}
BOOKKEEPING = {"tokens", "prompt_length", "positions"}
SETS = ("topk", "candidates")                                  # rows of ids, ascending, -1 empty: compared as sets
MARGINS = {"topk": "topk_margin", "candidates": "candidates_margin", "route_experts": "route_margin"}    # the gaps
FLOAT32 = ("pre_mix", "route_weights")    # unrounded, so their last float32 digit is not pinned down


def order(name: str) -> tuple[int, int, int, str]:
    """Sort key: the order of computation."""
    layer = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
    if layer and layer[2] in STEPS:
        return 1, int(layer[1]), list(STEPS).index(layer[2]), ""
    group, names = (0, list(BEFORE)) if name in BEFORE else (2, list(AFTER))
    return (group, 0, names.index(name), "") if name in names else (3, 0, 0, name)


def mechanism(name: str) -> str:
    kind = name.rpartition(".")[2]
    return BEFORE.get(name) or AFTER.get(name) or (STEPS[kind][1] if kind in STEPS else "not a known array")


# ------------------------------------------------------------------------------------------------------------- reading

def manifest_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".safetensors") + ".manifest.json")


def _size(value: int | str, config: dict[str, Any]) -> int:
    if isinstance(value, str) and not isinstance(config.get(value), int):
        raise ValueError(f"the map uses {value!r}, which is no size in the configuration of A's manifest")
    return config[value] if isinstance(value, str) else value


def transform(x: Tensor, steps: list[list[Any]], config: dict[str, Any]) -> Tensor:
    """The named transforms of a --map rule, in order. Sizes may be names of the configuration ("hidden_size").

    ["reshape", sizes...]  ["transpose", axes...]  ["slice", axis, start, stop]  ["squeeze"] (leading axes of size 1)
    ["view", "BF16"] (same bits, another type)     ["add", n] (to ids >= 0)
    ["blocks"]  a mask bool [P, rows] of compressed rows -> ids [P, candidate_topk_blocks] of the blocks with any
    """
    for kind, *args in steps:
        if kind == "view":
            if args[:1] == [] or args[0] not in TYPES:
                raise ValueError(f"view wants one of {', '.join(TYPES)}, not {args}")
            x = x.view(TYPES[args[0]])
            continue
        args = [_size(value, config) for value in args]
        if kind == "reshape":
            x = x.reshape(args)
        elif kind == "transpose":
            x = x.permute(args)
        elif kind == "slice":
            x = x.narrow(args[0], args[1], args[2] - args[1])
        elif kind == "squeeze":
            while x.dim() > 1 and x.shape[0] == 1:
                x = x[0]
        elif kind == "add":
            x = torch.where(x >= 0, x + args[0], x)
        elif kind == "blocks":
            size, width = config["candidate_block_size"], config["candidate_topk_blocks"]
            found = F.pad(x.bool(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).any(-1)
            ids = torch.where(found, torch.arange(found.shape[-1]), found.shape[-1]).sort(-1).values
            ids = F.pad(ids, (0, max(0, width - ids.shape[-1])), value=found.shape[-1])[..., :width]
            x = torch.where(ids < found.shape[-1], ids, -1)
        else:
            raise ValueError(f"the map asks for an unknown transform {kind!r}")
    return x


class Recording:
    """A recording of ours, or with a map any safetensors file that holds the same arrays under other names."""

    def __init__(self, path: str | Path, mapping: str | Path | None = None, like: Recording | None = None) -> None:
        self.path = Path(path)
        try:
            self.file = safe_open(self.path, framework="pt")
            stored = self.file.keys()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
        facts = manifest_path(self.path)
        self.manifest = read_json(facts) if facts.exists() else {}
        if not isinstance(self.manifest, dict) or not isinstance(self.manifest.get("config", {}), dict):
            raise ValueError(f"{facts} is not a manifest: an object, with an object `config`")
        self.config: dict[str, Any] = self.manifest.get("config") or (like.config if like is not None else {})
        self.sources: dict[str, tuple[list[str], dict[str, Any]]] = {name: ([name], {}) for name in stored}
        self.ignored: list[str] = []
        if mapping is not None:
            self._map(stored, read_json(mapping), mapping)
        self._kept: tuple[str, Tensor] | None = None
        self.reading = ""        # the array that was read last, for messages
        no_tokens = torch.zeros(0, dtype=torch.int64) if like is None else like.tokens
        self.tokens = self.all("tokens").flatten() if "tokens" in self.sources else no_tokens
        if self.tokens.is_floating_point():
            raise ValueError(f"{path}: tokens are {self.tokens.dtype}, not ids")
        self._within("tokens", self.tokens)
        self.prompt = len(self.tokens) if like is None else like.prompt
        if "prompt_length" in self.sources:
            length = self.all("prompt_length").flatten().tolist()
            if len(length) != 1 or not 0 < length[0] <= len(self.tokens):
                raise ValueError(f"{path}: prompt_length is {length[:3]}, with {len(self.tokens)} tokens")
            self.prompt = int(length[0])
        self.span = 0, len(self.tokens)      # the positions that the arrays have
        if "positions" in self.sources:
            places = self.all("positions").flatten().tolist()
            if not places or places != list(range(places[0], places[0] + len(places))) or not (
                    0 <= places[0] and places[-1] < len(self.tokens)):
                raise ValueError(f"{path}: positions are not a range within the {len(self.tokens)} tokens")
            self.span = places[0], places[-1] + 1

    def _map(self, stored: list[str], mapping: dict[str, Any], path: str | Path) -> None:
        self.sources = {}
        try:
            rules = [(re.compile(rule["from"]), rule) for rule in mapping["rules"]]
        except (KeyError, TypeError, re.error) as error:
            raise ValueError(f"{path} is not a map: rules with a regular expression `from`: {error!r}") from None
        natural = sorted(stored, key=lambda name: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", name)])
        for name in natural:      # several tensors with one name, such as one for each step, are joined in this order
            rule = next(((m, rule) for pattern, rule in rules if (m := pattern.fullmatch(name))), None)
            if rule is None or rule[1].get("to") is None:
                self.ignored += [name] if rule is None else []
            else:
                try:
                    to = rule[0].expand(rule[1]["to"])
                except (re.error, IndexError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path}: the rule from {rule[1]['from']!r} cannot make a name of "
                                     f"{rule[1]['to']!r}: {error}") from None
                self.sources.setdefault(to, ([], rule[1]))[0].append(name)
        if stored and len(self.ignored) == len(stored):
            raise ValueError(f"no rule of the map matches any of B's {len(stored)} tensors, such as {natural[0]}")

    def __contains__(self, name: str) -> bool:
        return name in self.sources

    def _tensor(self, name: str) -> Tensor:
        if self._kept is None or self._kept[0] != name:
            parts, rule = self.sources[name]
            try:
                pieces = [transform(self.file.get_tensor(part), rule.get("do", []), self.config) for part in parts]
                self._kept = name, torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            except (*BAD_INPUT, ValueError) as error:
                reason = (str(error) or repr(error)).splitlines()[0]
                raise ValueError(f"{self.path}: {parts[0]} cannot be read as {name}: {reason}") from None
        return self._kept[1]

    def shape(self, name: str) -> list[int]:
        parts, rule = self.sources[name]
        return list(self._tensor(name).shape) if rule or len(parts) > 1 else self.file.get_slice(name).get_shape()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        parts, rule = self.sources[name]
        return self._tensor(name)[start:stop] if rule or len(parts) > 1 else self.file.get_slice(name)[start:stop]

    def count(self, name: str) -> int:
        """How many rows an array has."""
        self.reading, shape = name, self.shape(name)
        if not shape:
            raise ValueError(f"{self.path}: {name} is a single number, not rows")
        return shape[0]

    def all(self, name: str) -> Tensor:
        return self.rows(name, 0, self.count(name))

    def _within(self, name: str, ids: Tensor) -> None:
        """ValueError for ids that the model has nothing for: they could not be looked up."""
        c, kind, low = self.config, name.rpartition(".")[2], 0
        if not c or not ids.numel():
            return
        if kind == "candidates":
            low, high = -1, -(-len(self.tokens) // c["candidate_block_size"])
        elif kind == "engram_rows":
            high = c["engram_num_embeddings"][c["engram_layer_ids"].index(int(name.split(".")[1]))]
        else:
            high = {"tokens": c.get("vocab_size"), "route_experts": c.get("n_routed_experts")}.get(kind)
        if high is not None and not low <= int(ids.min()) <= int(ids.max()) < high:
            raise ValueError(f"{self.path}: {name} has ids from {int(ids.min())} to {int(ids.max())}, not within {low} "
                             f"to {high - 1}")

    def unit(self, name: str) -> int:
        """What the rows of an array are: 0 something else, -1 decode steps, m > 0 groups of m positions."""
        kind = name.rpartition(".")[2]
        if name.startswith("dspark.") and kind != "main_hidden":
            return -1
        if kind in ("main_kv", "index_key") and self.config:
            return self.config["compress_ratios"][int(name.split(".")[1])]
        return 0 if name.startswith("image.") and kind != "token_types" or kind in ("prompt_length", "positions") else 1

    def first(self, name: str) -> int:
        """What row 0 stands for. A map rule may say "rows": the first position, or "prompt", "sampled" (the last
        of the prompt and the decoded ones), "decode" or "last"."""
        rows, unit = self.sources[name][1].get("rows"), self.unit(name)
        if rows is not None:
            words = {"prompt": 0, "sampled": self.prompt - 1, "decode": self.prompt, "last": len(self.tokens) - 1}
            if not isinstance(rows, int) and (not isinstance(rows, str) or rows not in words):
                raise ValueError(f"a map's rows are a number or one of {', '.join(words)}, not {rows!r}")
            return words.get(rows, rows)
        if unit == 0 or name in ("tokens", "image.token_types"):
            return 0
        return max(self.span[0] - self.prompt, 0) if unit < 0 else self.span[0] // unit

    def bounds(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """start..stop-1 as far as it is there, and was computed."""
        first = max(self.first(name), self.manifest.get("first_computed", {}).get(name, 0))
        return max(start, first), min(stop, self.first(name) + self.count(name))

    def surplus(self, name: str) -> str | None:
        """A sentence, if an array has more rows than there are tokens for."""
        unit, (_, end) = self.unit(name), self.span
        if unit == 0:
            return None
        most = max(end - self.prompt, 0) if unit < 0 else (len(self.tokens) if name == "image.token_types" else
                                                           end // unit)
        most, rows = most - self.first(name), self.count(name)
        return f"{self.path}: {name} has {rows} rows, its tokens make {most}" if rows > most else None

    def between(self, name: str, start: int, stop: int) -> tuple[int, Tensor] | None:
        """The rows that stand for start..stop-1, as far as they are there, and what the first of them stands for."""
        if name not in self.sources:
            return None
        start, stop = self.bounds(name, start, stop)
        if start >= stop:
            return None
        rows = self.rows(name, start - self.first(name), stop - self.first(name))
        self._within(name, rows)
        return start, rows


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable JSON file: {error}") from None


# ----------------------------------------------------------------------------------------------------------- comparing

@dataclass
class Result:
    """How one array of two recordings compares."""
    name: str
    shape: list[int]
    status: str = "equal"            # equal, close, tie, near tie, DIFFERENT
    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))     # where it differs
    compared: tuple[int, int] = (0, 0)    # first and last position compared
    rows: tuple[int, int] = (0, 0)   # how many rows were compared, of how many in A
    max_abs: float = 0.0
    rel_l2: float = 0.0
    same: float = 1.0                # share of elements equal in bfloat16; of rows, for ids
    ulps: int = 0                    # worst distance in steps of bfloat16
    unreal: int = 0                  # elements that are NaN or infinite on one side only
    margin: float | None = None      # largest gap at the cut among the rows that differ
    hints: list[str] = field(default_factory=list)
    errors: np.ndarray | None = None # largest absolute error at every position, for plots

    @property
    def first(self) -> int | None:
        return int(self.positions[0]) if len(self.positions) else None

    @property
    def differs(self) -> bool:
        return self.status not in ("equal", "close", "not compared")

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": self.shape, "status": self.status, "first_position": self.first,
                "rows_compared": self.rows[0], "rows_in_a": self.rows[1],
                "positions": len(self.positions), "max_abs": self.max_abs, "rel_l2": self.rel_l2,
                "bf16_equal": self.same, "bf16_ulps": self.ulps, "not_finite": self.unreal, "margin": self.margin,
                "hints": self.hints, "mechanism": mechanism(self.name)}


def compare_array(name: str, a: Recording, b: Recording, stop: int, tolerance: dict[str, float]) -> Result | None:
    """Compare one array over the positions that both hold, before position `stop`. When B has none of those that A
    has, no row is compared; None when A has none either.

    Values: equal bits, or max_abs and rel_l2 within `tolerance`. Ids: equal sets, or sets that differ only where the
    gap at A's cut is at most the tolerance's margin; 0 is a tie. ValueError when rows have different shapes, or
    there are more of them than tokens.
    """
    kind, unit, shape = name.rpartition(".")[2], a.unit(name), a.shape(name)
    # a draft step begins with the token after its position
    end = {0: 1 << 62, -1: stop - a.prompt - (stop < len(a.tokens))}.get(unit, stop // max(unit, 1))
    bounds = [r.bounds(name, 0, end) for r in (a, b)]
    first, last = max(low for low, _ in bounds), min(high for _, high in bounds)
    for r in (a, b):
        if sentence := r.surplus(name):
            raise ValueError(sentence)
    held = max(bounds[0][1] - bounds[0][0], 0)
    if unit == 0 and b.count(name) > a.count(name):
        raise ValueError(f"{name} has {b.count(name)} rows in B, and {a.count(name)} in A")
    if first >= last:
        return Result(name, shape, "not compared", rows=(0, held)) if held else None
    out, off, errors, margins, hints = Result(name, shape), [], [], [], set()
    channels, total, same, diff2, norm2 = None, 0, 0, 0.0, 0.0
    step = max(1, BLOCK // max(1, 8 * int(np.prod(shape[1:]))))
    for i in range(first, last, step):
        block = i, min(i + step, last)
        x, y = (r.between(name, *block)[1] for r in (a, b))
        if kind == "route_weights":     # whatever the order of the experts
            experts = [r.between(name.replace("weights", "experts"), *block) for r in (a, b)]
            x, y = (t if e is None else t.gather(-1, e[1].long().argsort(-1)) for t, e in zip((x, y), experts))
        if kind in MARGINS:
            x, y = _as_sets(x, y)
        if x.shape != y.shape:
            raise ValueError(f"{name} has rows {list(x.shape[1:])} in A and {list(y.shape[1:])} in B: a --map can tell "
                             f"their layout")
        if x.dtype.is_floating_point:
            y = y.to(x.dtype)
            u, v = x.double(), y.double()
            real = u.isfinite() & v.isfinite()
            unreal = ~real & ~(u.isnan() & v.isnan()) & (u != v)
            delta = torch.where(real, u - v, 0.0).abs()
            p, q = (_steps(t) for t in (x, y))
            equal = (_bits(x) == _bits(y)) | (u.isnan() & v.isnan())
            if kind in FLOAT32:
                equal |= delta <= 2.0**-22 * u.abs()
            out.max_abs, out.unreal = max(out.max_abs, float(delta.max())), out.unreal + int(unreal.sum())
            out.ulps = max(out.ulps, int((p - q).abs().masked_fill(~real, 0).max()))
            diff2, norm2 = diff2 + float(delta.square().sum()), norm2 + float(u.masked_fill(~real, 0).square().sum())
            same, total = same + int((p == q).sum()), total + x.numel()
        else:
            equal = x == y
            delta = (~equal).double()
            same, total = same + int(_by_row(equal).all(1).sum()), total + len(x)
        wrong = ~_by_row(equal).all(1)
        errors.append(_by_row(delta).amax(1))
        off.append(i + wrong.nonzero().flatten().numpy())
        apart = (~equal).flatten(0, -2).any(0) if equal.dim() > 1 else wrong.any(0, True)      # by channel
        channels = apart if channels is None or channels.shape != apart.shape else channels | apart
        if kind in MARGINS and wrong.any():
            cut = next((c for r in (a, b) if (c := r.between(name.replace(kind, MARGINS[kind]), *block))), None)
            margins += [] if cut is None else cut[1][wrong].tolist()
            newest = x.masked_fill(x == EMPTY, -1).amax(-1, keepdim=True)
            if kind == "candidates" and not (y == newest)[wrong].any():
                hints.add("B lacks the newest block")
        if name == "dspark.tokens" and wrong.any() and (row := a.between("dspark.logits", *block)) is not None:
            at = (~equal[wrong]).int().argmax(-1, keepdim=True)     # drafts after the first other one are another story
            logits = row[1][wrong].gather(1, (at - 1).clamp_min(0).unsqueeze(-1).expand(-1, -1, row[1].shape[-1]))[:, 0]
            margins += (logits.amax(-1) - logits.gather(-1, y[wrong].gather(1, at))[:, 0]).tolist()
    position = {0: lambda i: -1 + 0 * i, -1: lambda i: i + a.prompt}.get(unit, lambda i: (i + 1) * unit - 1)
    out.positions = position(np.concatenate(off))
    out.rows = last - first, held
    out.compared = int(position(first)), int(position(last - 1))
    out.errors, out.same = torch.cat(errors).numpy(), same / total
    out.rel_l2 = (diff2 / norm2) ** 0.5 if norm2 else float(diff2 > 0)
    out.margin = max(margins) if margins else None
    if len(out.positions):
        out.status = _status(out, kind, x.dtype.is_floating_point, tolerance)
        out.hints = sorted(hints) + pattern(out, channels.numpy(), a)
    return out


EMPTY = 1 << 40


def _as_sets(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Ids in ascending order, both as wide as the wider one; EMPTY at the end."""
    width = max(x.shape[-1], y.shape[-1])
    x, y = (torch.where(t < 0, EMPTY, t.long()).sort(-1).values for t in (x, y))
    return tuple(F.pad(t, (0, width - t.shape[-1]), value=EMPTY) for t in (x, y))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _steps(x: Tensor) -> Tensor:
    """Values as numbers of steps of bfloat16 from zero."""
    bits = x.to(torch.float32).to(torch.bfloat16).contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _by_row(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1)


def _status(r: Result, kind: str, values: bool, tolerance: dict[str, float]) -> str:
    if kind in MARGINS.values():
        return "close"                   # for the reader; never a failure
    if kind in MARGINS or r.name == "dspark.tokens":
        within = r.margin is not None and r.margin <= tolerance.get("margin", 0.0)
        return "DIFFERENT" if not within else "tie" if r.margin == 0 else "near tie"
    within = values and not r.unreal and all(value <= tolerance.get(key, 0.0) for key, value in
                                             (("max_abs", r.max_abs), ("rel_l2", r.rel_l2)))
    return "close" if within else "DIFFERENT"


def pattern(r: Result, channels: np.ndarray, a: Recording) -> list[str]:
    """What the places of a difference have in common."""
    c, p, (low, high), unit, hints = a.config, r.positions, r.compared, a.unit(r.name), []
    kind = r.name.rpartition(".")[2]
    if not c or unit == 0:
        return hints
    inside = np.zeros(high + 1, bool)
    if "image.token_types" in a:
        inside = np.resize(a.rows("image.token_types", 0, high + 1).numpy() >= 0, high + 1)
    if inside[p].all() and not inside[low:].all():
        hints.append("only inside images")
    elif kind == "engram_rows":
        start = np.maximum.accumulate(np.where(inside, np.arange(high + 1), -1))      # look-back ends at the last image
        if (p - start[p] < c["engram_max_ngram_size"]).all():
            hints.append("only where look-back meets the beginning or an image")
    if low < a.prompt <= p[0]:
        hints.append("only in decoded tokens")
    if low < p[0] and p[0] in (c["sliding_window"] - 1, c["sliding_window"]):
        hints.append("from the position on where the window is full")
    if low == 0 and unit == 1 and p[0] == 1:
        hints.append("not at position 0")
    if unit == 1 and len(p) > 3 and len(set((p % 2).tolist())) == 1:
        hints.append(f"only at {'odd' if p[0] % 2 else 'even'} positions")
    turned = c["qk_rope_head_dim"]
    if kind in ("q", "window_kv", "main_kv", "index_key", "index_query", "attention") and not channels[:-turned].any():
        hints.append("only in the channels that rotary turns" if len(channels) > turned else "")
    return [hint for hint in hints if hint]


@dataclass
class Report:
    """The comparison of two recordings."""
    results: list[Result]
    verdict: list[str]
    passed: bool
    notes: list[str]
    causes: list[Result]
    local: list[Result] | None                 # B against the model reading what B recorded
    only: tuple[list[str], list[str]]
    partial: list[str]                         # what B holds only in part: "name (7 of 54)"

    def json(self) -> dict[str, Any]:
        return {"passed": self.passed, "verdict": self.verdict, "notes": self.notes,
                "causes": [r.json() for r in self.causes], "tensors": [r.json() for r in self.results],
                "local": self.local and [r.json() for r in self.local], "only_in_a": self.only[0],
                "only_in_b": self.only[1], "compared_in_part": self.partial}


def compare(a: Recording, b: Recording, again: Recording | None = None) -> Report:
    """Compare two recordings of one prompt. `again`: the model run once more, every step reading what B recorded.

    Without `again` the first difference in the order of computation is a cause, and so is one that begins at an earlier
    position than all causes before it. With it, the steps that disagree there are the causes, and they alone decide
    whether B passes. ValueError when the prompts differ or nothing can be compared.
    """
    if not len(a.tokens):
        raise ValueError(f"{a.path} holds no tokens: it is not a recording")
    n = min(len(a.tokens), len(b.tokens))
    apart = (a.tokens[:n] != b.tokens[:n]).nonzero().flatten().tolist()
    if a.prompt != b.prompt or apart and apart[0] < a.prompt:
        raise ValueError(f"{a.path} and {b.path} are recordings of different prompts")
    stop = apart[0] if apart else n
    tolerances = a.manifest.get("tolerances") or {"free": {}, "local": {}}
    notes, excused = _another_token(a, b, stop, tolerances["free"]) if apart else ([], True)
    for key in ("weights", "numerics", "fake_quant", "prefill"):
        if key in a.manifest and key in b.manifest and a.manifest[key] != b.manifest[key]:
            notes.append(f"{key}: {a.manifest[key]} in A, {b.manifest[key]} in B")
    if b.ignored:
        notes.append(f"{len(b.ignored)} tensors of B fit no rule of the map, such as {b.ignored[0]}")

    def compare_all(x: Recording, stop: int, tolerances: dict[str, Any]) -> list[Result]:
        names = sorted((set(x.sources) & set(b.sources)) - BOOKKEEPING, key=order)
        found = []
        for name in names:
            try:
                found.append(compare_array(name, x, b, stop, tolerances.get(name, {})))
            except BAD_INPUT as error:
                raise ValueError(f"comparing {name}: {(str(error) or repr(error)).splitlines()[0]}") from error
        return [r for r in found if r is not None]

    only = tuple(sorted(set(x.sources) - set(y.sources) - BOOKKEEPING, key=order) for x, y in ((a, b), (b, a)))
    results = compare_all(a, stop, tolerances["free"])
    partial = [f"{r.name} ({r.rows[0]} of {r.rows[1]})" for r in results if r.rows[0] < r.rows[1]]
    if not apart and n < len(a.tokens):
        partial.insert(0, f"tokens ({n} of {len(a.tokens)})")
    results = [r for r in results if r.rows[0]]
    if not results:
        raise ValueError(f"{a.path} and {b.path} have no array in common at the same positions; B has "
                         f"{', '.join(list(b.sources)[:5])}")
    differing = [r for r in results if r.differs]
    if again is None:
        local, causes = None, []
        for r in differing:
            if not any(cause.first <= r.first for cause in causes):
                causes.append(r)
        passed = excused and all(r.status != "DIFFERENT" for r in results)
        verdict = [f"first difference: {describe(r)}" for r in causes[:1]]
        verdict += [f"differs at earlier positions, so by itself: {describe(r)}" for r in causes[1:]]
        if len(differing) > len(causes):
            rest = len(differing) - len(causes)
            verdict.append(f"{rest} other tensors differ from these positions on: they may all be consequences")
    else:
        local = [r for r in compare_all(again, len(b.tokens), tolerances["local"]) if r.rows[0]]
        causes = _without_followers([r for r in local if r.differs])
        passed = all(r.status != "DIFFERENT" for r in causes)
        verdict = []
        for first, *others in _by_kind(causes):
            also = f" Also in layer {', '.join(r.name.split('.')[1] for r in others)}." if others else ""
            verdict.append(f"{'wrong' if first.status == 'DIFFERENT' else 'a tie'} by itself: {describe(first)}.{also}")
        rest = len({r.name for r in differing} - {r.name for r in causes})
        if rest or causes:
            verdict.append(f"given what B recorded, every other step agrees: the other {rest} differences "
                           + ("are consequences" if causes else "come from rounding within the tolerances"))
    if not differing and not apart:
        bits = sum(r.status == "equal" for r in results)
        close = ", the others within tolerance" if bits < len(results) else ""
        verdict.insert(0, f"equal: {bits} of {len(results)} tensors bit for bit{close}")
    return Report(results, verdict, passed, notes, causes, local, only, partial)


def _another_token(a: Recording, b: Recording, at: int, tolerances: dict[str, Any]) -> tuple[list[str], bool]:
    """A note about the first token that B chose otherwise, and whether noise may have done it."""
    ours, theirs = int(a.tokens[at]), int(b.tokens[at])
    note, excused = f"tokens: at position {at} A chose {ours} and B {theirs}", False
    logits = a.between("logits", at - 1, at)
    if logits is not None:
        gap = float(logits[1][0, ours] - logits[1][0, theirs])
        excused = gap <= 2 * tolerances.get("logits", {}).get("max_abs", 0.0)
        note += f", {gap:.6g} apart in A's logits, {'within the' if excused else 'more than'} noise"
    return [note + "; compared up to there"], excused


# A wrong step makes these wrong too, since what it gave inside the model was not replaced by what B recorded.
FOLLOWS = {"route_weights": ("route_experts",), "topk": ("index_query",), "candidates": ("index_query", "topk"),
           "dspark.tokens": ("dspark.logits",), "dspark.confidence": ("dspark.logits",)}


def _without_followers(causes: list[Result]) -> list[Result]:
    wrong, kept = {r.name: r.first for r in causes}, []
    for r in causes:
        kind = r.name.rpartition(".")[2]
        leaders = FOLLOWS.get(r.name) or [r.name.removesuffix(kind) + leader for leader in FOLLOWS.get(kind, ())]
        if not any(leader in wrong and wrong[leader] <= r.first for leader in leaders):
            kept.append(r)
    return kept


def _by_kind(results: list[Result]) -> list[list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((re.sub(r"^layers\.\d+\.", "", r.name), r.status), []).append(r)
    return list(groups.values())


def describe(r: Result) -> str:
    """One difference in words: what, where, what the places have in common, and what computes it."""
    parts = [] if r.first < 0 else [f"first at position {r.first}, {len(r.positions)} of them in all"]
    parts += r.hints
    if r.unreal:
        parts.append(f"{r.unreal} elements are NaN or infinite on one side only")
    if r.status == "tie":
        parts.append("a tie: the scores at the cut are equal")
    elif r.margin is not None:
        word = "within the noise" if r.status == "near tie" else "no tie"
        parts.append(f"{word}: up to {r.margin:.3g} between the scores at the cut" if r.margin < np.inf else
                     "no tie: there was nothing to choose")
    return f"{r.name} ({'; '.join(parts)}) <- {mechanism(r.name)}" if parts else f"{r.name} <- {mechanism(r.name)}"


def table(rows: list[list[str]], pretty: bool, below: dict[int, str] | None = None) -> str:
    """Columns under a header; lines and colours where someone looks at it. `below`: lines that follow rows, by number.
    At most WIDTH wide: a first cell that is too long for that stands above the others of its row."""
    widths = [max(len(row[j]) for row in rows) for j in range(len(rows[0]))]
    bar, rule = (" │ ", "─") if pretty else ("  ", "")
    widths[0] = min(widths[0], max(len(rows[0][0]), WIDTH - sum(widths[1:]) - len(bar) * (len(widths) - 1)))
    colour = {"equal": 32, "close": 32, "tie": 33, "near tie": 33, "DIFFERENT": 31}
    lines = []
    for i, row in enumerate(rows):
        name, *cells = row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))
        above = [] if len(name) == widths[0] else [name]
        own = [*above, bar.join([" " * widths[0] if above else name, *cells]).rstrip()]
        own += [below[i]] if below and i in below else []
        code = colour.get(row[-1]) if pretty else None
        lines += own if code is None else [f"\x1b[{code}m{line}\x1b[0m" for line in own]
        if pretty and i == 0:
            lines.append("─┼─".join(rule * w for w in widths))
    return "\n".join(lines)


def result_table(results: list[Result], pretty: bool) -> str:
    """A row for each array; below it, where anything differs, from which position on and by how much."""
    rows, below = [["tensor", "shape", "compared", "bf16 equal", "status"]], {}
    for r in results:
        compared = f"{r.rows[0]} of {r.rows[1]}" if r.rows[0] < r.rows[1] else str(r.rows[0])
        rows.append([r.name, "x".join(map(str, r.shape)), compared, f"{r.same:.3%}", r.status])
        if r.first is not None or r.max_abs:
            text = f"    first {'-' if r.first is None else r.first:>6}"
            if r.name.rpartition(".")[2] not in MARGINS:
                text += f"  max abs {r.max_abs:>8.3g}  rel L2 {r.rel_l2:>8.2e}  ulps {r.ulps:>5}"
            below[len(rows) - 1] = text + (f"  NaN/inf {r.unreal}" if r.unreal else "")
    return table(rows, pretty, below)


def plot(report: Report, path: str) -> None:
    """Error by layer and by position."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    by_layer, by_position = figure.subplots(2, 1)
    for kind in ("input", "attn_out", "ffn_out", "output"):
        layers = [r for r in report.results if re.fullmatch(rf"layers\.\d+\.{kind}", r.name)]
        found = [(int(r.name.split(".")[1]), r.rel_l2) for r in layers]
        if found:
            by_layer.plot(*zip(*found), marker="o", label=kind)
    for r in [r for r in report.results if r.name == "logits" or r.name.endswith(".output")][-4:]:
        by_position.plot(np.arange(r.compared[0], r.compared[0] + len(r.errors)), r.errors, label=r.name)
    for axes, x, y in ((by_layer, "layer", "relative L2"), (by_position, "position", "largest absolute error")):
        axes.set(xlabel=x, ylabel=y, yscale="symlog")
        axes.legend(loc="upper left")
    figure.savefig(path)


# ------------------------------------------------------------------------------------------------------ showing

def show(a: Recording, pretty: bool) -> str:
    m, rows, below = a.manifest, [["tensor", "type", "shape", "NaN"]], {}
    facts = ("numerics", "prefill", "level", "positions", "device", "versions", "weights", "command")
    lines = [f"{a.path}: {len(a.tokens)} tokens, {a.prompt} of them the prompt"]
    lines += [f"  {key}: {m[key]}" for key in facts if m.get(key)]
    for name in sorted(a.sources, key=order):
        shape = a.shape(name)
        some = max(1, BLOCK // max(1, int(np.prod(shape[1:]))))       # of a long one the first rows will do
        x = a.rows(name, 0, some) if shape else a._tensor(name)
        y = x.double().flatten()
        y = y[~y.isnan()]
        kind = str(x.dtype).removeprefix("torch.")
        rows.append([name, kind, "x".join(map(str, shape)), str(x.numel() - y.numel() or "-")])
        if y.numel():
            low, high, mean, rms = (f"{float(t):.4g}" for t in (y.min(), y.max(), y.mean(), y.square().mean().sqrt()))
            below[len(rows) - 1] = f"    {low:>10} to {high:<10}  mean {mean:>10}  rms {rms:>9}"
    return "\n".join(lines) + "\n\n" + table(rows, pretty, below)


def selection_map(a: Recording, layer: int, picture: str | None) -> str:
    """Which compressed rows each position selects: positions downwards, rows to the right; darker is more."""
    name = f"layers.{layer}.topk"
    if name not in a:
        raise ValueError(f"{a.path} holds no {name}: only index sources select rows, the layers after one reuse them")
    ids = a.all(name).long()
    n, first = max(int(ids.max()) + 1, 1), a.first(name)
    high, wide = (1024, 1024) if picture else (40, WIDTH)
    grid = torch.zeros(min(high, len(ids)), min(wide, n))
    at, chosen = torch.arange(len(ids)).unsqueeze(-1).expand_as(ids)[ids >= 0], ids[ids >= 0]
    place = at * len(grid) // len(ids), chosen * grid.shape[1] // n
    grid.index_put_(place, torch.ones(len(at)), accumulate=True)
    grid = (grid / (len(ids) / len(grid) * n / grid.shape[1])).clamp_max(1)          # share of a cell that is selected
    if picture:
        from PIL import Image
        Image.fromarray(((1 - grid) * 255).to(torch.uint8).numpy()).save(picture)
        return f"{picture}: {len(ids)} positions downwards, {n} compressed rows to the right"
    lines = ["".join(" .:-=+*#%@"[int(np.ceil(v * 9))] for v in row) for row in grid.tolist()]
    return "\n".join([f"{name}: positions {first} to {first + len(ids) - 1} downwards, rows 0 to {n - 1} to the right",
                      *lines])
