"""Sessions that survive, and what the Causal Encoder-Decoder (CED) saves and costs, measured.

    python session.py gap [--exact] [--prompt-tokens N] [--decode N]      bounded replay against the full result
    python session.py cost [--config FILE] [--contexts N,N,...]           FLOPs of a decoded token by context
    python session.py time [--contexts N,N,...]                           time of a decoded token on this machine
    python session.py prefill [--prompt-tokens N]                         FLOPs and time of the three ways of prefill

A session file keeps the global KV (released: 890 bytes per token) and none of the windows: `load` rebuilds them by
running the last W tokens once more at their true positions (the paper's SWA bounded replay), which reads the global KV
and writes none of it. Such windows are approximate, in the encoder too: their first rows have seen fewer rows before
them than they once did. `with_windows` keeps them (released: some 3 MB), and the session goes on bit for bit.
"""
from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor

from convert import (Parser, check_context, check_space, load_model, open_checkpoint, read_header, weights_digest,
                     write_atomically)
from kv_cache import WORKING_SET, Snapshot
from model import KEY_BLOCK, Cache, ImageTokens, ModelConfig, Transformer, plan_layers
from vision import IMAGE, TEXT, ImageInput, image_span

FORMAT = "session 1"


# ------------------------------------------------------------------------------------------------------------- sessions

@dataclass(frozen=True)
class SavedImage(ImageInput):
    """An image of a loaded session: its sizes and what its pixels hashed to, not the pixels (`patches` has none).
    `features` bf16 [k, D] are the rows of its last IMAGE tokens, those among the last W tokens of the session."""
    pixels: bytes
    features: Tensor

    @property
    def digest(self) -> bytes:
        return self.pixels


class Session(NamedTuple):
    """What `load` gives back."""
    cache: Cache                                  # one row
    tokens: list[int]                             # all that the cache holds, image spans expanded
    images: tuple[tuple[int, SavedImage], ...]    # and the position at which each one's span begins
    chat: Any                                     # as it was given to `save`


def save(file: str | Path, model: Transformer, cache: Cache, tokens: Sequence[int],
         images: Sequence[tuple[int, ImageInput]] = (), chat: Any = None, row: int = 0,
         with_windows: bool = False) -> None:
    """Write one row of a cache to `file`, which has its name only once it is complete; of several ranks the first does.

    `tokens` are all that the row holds, `images` its images and the positions at which their spans begin; `chat` is
    anything JSON can hold. Kept: global KV, open groups, ids and types of the tokens, position and digest of each
    image, rows of the image tokens among the last W, digests of configuration and weights; `with_windows`: the windows.
    ValueError for tokens or images that do not fit the row, and for a file that cannot be written.
    """
    file, state = Path(file), cache.snapshot()
    n, highest, window = state.lengths[row], state.highest[row], cache.config.sliding_window
    if len(tokens) != n or not n:
        raise ValueError(f"a session of {len(tokens)} tokens does not fit a cache that holds {n}" if n else
                         "there is nothing to save: the cache holds no tokens")
    types = token_types(n, images)
    tensors = {"tokens": torch.tensor(list(tokens), dtype=torch.int32), "types": types,
               "image_rows": torch.cat([torch.empty(0, cache.config.hidden_size, dtype=torch.bfloat16)] + [
                   image_rows(model, image, place, n - window).cpu() for place, image in images])}
    for name, store in (("main", cache.main), ("index_key", cache.keys)):
        tensors |= {f"{name}.{i}": rows[row, : n // cache.plans[i].ratio] for i, rows in store.items()}
    for key, ring in state.rings.items():
        first = max(0, highest - ring.shape[1])          # rows before it are overwritten
        if key[0] == "window":
            part = cache.plans[key[1]].part
            if not with_windows or (part == "draft" and model.mtp is None):
                continue
            first = max(first, state.window_start[part][row])
        if key[0] != "ngram":                            # which follows from the tokens
            tensors[f"{key[0]}.{key[1]}"] = ring[row, torch.arange(first, n, device=ring.device) % ring.shape[1]]
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    facts = identity(model) | {
        "length": n, "highest": highest, "rollback": cache.rollback, "chat": chat,
        "windows": {part: starts[row] for part, starts in state.window_start.items()} if with_windows else None,
        "images": [{"place": place, "grid": image.grid, "llm_grid": image.llm_grid, "sha256": image.digest.hex()}
                   for place, image in images]}
    text = json.dumps(facts)
    metadata = {"session": json.dumps({"facts": text, "sha256": digest(text, tensors)})}
    if model.ranks.rank == 0:
        if file.exists() and not (file.is_file() and is_session(file)):
            raise ValueError(f"{file} exists and is no session file; it is left as it is")
        if not file.parent.is_dir():
            raise ValueError(f"{file} cannot be written: there is no folder {file.parent}")
        file = file.resolve()                            # through a link, not over it
        try:
            check_space(file.parent, sum(t.nbytes for t in tensors.values()))
            write_atomically(file, [serialise(tensors, metadata)])
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error.strerror}") from None


def load(model: Transformer, file: str | Path, max_length: int | None = None, rollback: int | None = None,
         replay: int | None = None) -> Session:
    """Read a session file and rebuild its windows by replaying the last `replay` tokens (default: W), unless the file
    has them. (layers) (W - 1) + 1 tokens would make them exact.

    ValueError, one sentence: no session file, cut off or damaged; of another configuration, other weights or other
    numerics; longer than `max_length`; an image among the tokens to replay whose rows the file does not have.
    """
    file, config = Path(file), model.config
    if "session" not in (read := read_header(file)[1]):
        raise ValueError(f"{file} is not a session file")
    try:
        tensors, envelope = load_file(file), json.loads(read["session"])
        facts = json.loads(envelope["facts"])
        damaged = digest(envelope["facts"], tensors) != envelope["sha256"]
        known, n = facts["format"] == FORMAT, facts["length"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if damaged:
        raise ValueError(f"{file} is damaged: its content does not have the digest it was saved with")
    if not known:
        raise ValueError(f"{file} is a session file of another version, {facts['format']!r}")
    for what, now in identity(model).items():
        if facts[what] != now:
            raise ValueError(f"{file} was saved by a model of other {what}" + (
                f": {facts[what]}, and this one is {now}" if what == "numerics" else ""))
    cache = model.new_cache(1, max_length, rollback)
    if n > cache.max_length:
        raise ValueError(f"{file} holds {n:,} tokens, more than max_length = {cache.max_length:,}")

    tokens, types = tensors["tokens"].long(), tensors["types"]
    for name, store in (("main", cache.main), ("index_key", cache.keys)):
        store |= {i: tensors[f"{name}.{i}"].unsqueeze(0).to(model.device, copy=True) for i in store}
    windows = facts["windows"] or dict.fromkeys(cache.PARTS, n)          # beginning at n: none
    rings, saved = dict(cache.rings), dict(tensors)
    if model.engram_index is not None:
        back = max(0, n - rings["ngram",].shape[1])
        saved["ngram"] = model.engram_index.compress(tokens[back:], types[back:] != TEXT)
    for key, ring in rings.items():
        rows = saved.get(".".join(map(str, key)))
        if rows is None:
            if cache.plans[key[1]].part == "draft":                      # saved without a draft head, loaded with one
                windows["draft"] = n
            continue
        rows, ring = rows[-ring.shape[1] :].to(ring.device), ring.clone()
        ring[0, torch.arange(n - len(rows), n, device=ring.device) % ring.shape[1]] = rows
        rings[key] = ring
    # Tokens can be taken back as far as before; with another rollback the count starts elsewhere.
    highest = max(n, facts["highest"] - facts["rollback"] + cache.rollback)
    cache.restore(Snapshot([n], {part: [start] for part, start in windows.items()}, rings, [highest], 0, cache._owner))
    if facts["windows"] is None:
        _replay(model, cache, tokens, types, tensors["image_rows"], config.sliding_window if replay is None else replay)
        for name, store in (("main", cache.main), ("index_key", cache.keys)):
            if not all(torch.equal(rows[0].cpu(), tensors[f"{name}.{i}"]) for i, rows in store.items()):
                raise RuntimeError("the replay has changed the global KV")

    images, at = [], 0
    for entry in facts["images"]:
        place, llm_grid = entry["place"], tuple(entry["llm_grid"])
        k = int((image_span(*llm_grid)[max(0, n - config.sliding_window - place) :] == IMAGE).sum())
        features, at = tensors["image_rows"][at : at + k], at + k
        image = SavedImage(torch.empty(0), tuple(entry["grid"]), llm_grid, bytes.fromhex(entry["sha256"]), features)
        images.append((place, image))
    return Session(cache, tokens.tolist(), tuple(images), facts["chat"])


def is_session(file: Path) -> bool:
    """Whether a file begins as a session file does: what `save` may write over."""
    try:
        return "session" in read_header(file)[1]
    except (ValueError, OSError):
        return False


def _replay(model: Transformer, cache: Cache, tokens: Tensor, types: Tensor, rows: Tensor, count: int) -> None:
    n = len(tokens)
    first = max(0, n - count)
    wanted = int((types[first:] == IMAGE).sum())
    if wanted > len(rows):
        raise ValueError(f"the last {n - first} tokens have {wanted} image tokens, the file has the rows of "
                         f"{len(rows)} only")
    images, before = None, None
    if bool((types[first:] != TEXT).any()):
        images = ImageTokens(types[None, first:], rows[len(rows) - wanted :])
    if model.engram_index is not None and first:
        before = model.engram_index.compress(tokens[None, :first], types[None, :first] != TEXT)
    model.replay(tokens[None, first:], cache, images=images, before=before)


def token_types(n: int, images: Sequence[tuple[int, ImageInput]]) -> Tensor:
    """Types int8 [n] of a sequence with images at these positions."""
    types = torch.full((n,), TEXT, dtype=torch.int8)
    for place, image in images:
        end = place + len(image.span)
        if place < 0 or end > n or bool((types[place:end] != TEXT).any()):
            raise ValueError(f"an image span at positions {place} to {end - 1} does not fit into {n} tokens")
        types[place:end] = image.span
    return types


def image_rows(model: Transformer, image: ImageInput, place: int, first: int) -> Tensor:
    """Rows bf16 [k, D] of an image's IMAGE tokens from position `first` on."""
    k = int((image.span[max(0, first - place) :] == IMAGE).sum())
    if not k:
        return torch.empty(0, model.config.hidden_size, dtype=torch.bfloat16)
    rows = image.features if isinstance(image, SavedImage) else model.encode_image(image.patches, image.grid)
    if len(rows) < k:
        raise ValueError("an image of a loaded session is needed again, but its pixels were not saved: send it again")
    return rows[len(rows) - k :]


def identity(model: Transformer) -> dict[str, Any]:
    """What a session must have been saved by to go on with this model."""
    if model.checkpoint is None:
        raise ValueError("a session belongs to weights that were loaded from a checkpoint; this model was not")
    config = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True).encode()).hexdigest()
    off = [name for name, on in asdict(model.num.fake_quant).items() if not on]
    numerics = ("exact" if model.num.exact else "fast") + "".join(f" without {name}" for name in off)
    weights = weights_digest(model.checkpoint)
    return {"format": FORMAT, "configuration": config, "weights": weights, "numerics": numerics}


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            total.update(memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B"))
    return total.hexdigest()


# ------------------------------------------------------------------------------------------- the gap of bounded replay

def gap(model: Transformer, tokens: Tensor, decode: int) -> dict[str, list[tuple[str, str]]]:
    """What bounded replay changes: for each way to continue a prompt [n], lines (what, how far from full prefill that
    was never interrupted). All ways are fed the tokens that full prefill decodes greedily."""
    n, window = len(tokens), model.config.sliding_window
    full = model.new_cache(1, n + decode)
    logits, fed = [model.prefill(tokens[None], full).logits[0, 0]], tokens.tolist()
    at_end = full.fork()
    for _ in range(decode):
        fed.append(int(logits[-1].argmax()))
        logits.append(model(torch.tensor([fed[-1:]]), full).logits[0, 0])

    def prefilled(way: str) -> tuple[Cache, Tensor]:
        cache = model.new_cache(1, n + decode)
        return cache, model.prefill(tokens[None], cache, way).logits[0, 0]

    def resumed(replay: int, with_windows: bool = False) -> tuple[Cache, None]:
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder) / "session", model, at_end, fed[:n], with_windows=with_windows)
            return load(model, Path(folder) / "session", n + decode, replay=replay).cache, None

    return {name: _gap_lines(model, make(), at_end, full, logits, fed[n:]) for name, make in {
        "bounded": lambda: prefilled("bounded"), "exact-replay": lambda: prefilled("exact-replay"),
        "resumed": lambda: resumed(window), "resumed, 4 W": lambda: resumed(4 * window),
        "with windows": lambda: resumed(0, True)}.items()}


def _gap_lines(model: Transformer, start: tuple[Cache, Tensor | None], at_end: Cache, full: Cache, logits: list[Tensor],
               fed: list[int]) -> list[tuple[str, str]]:
    cache, first = start
    one, other, lines = at_end.live_state(0), cache.live_state(0), []
    stored = [name for name in one if name.startswith(("main.", "index_key."))]
    same = all(torch.equal(one[name], other[name]) for name in stored)
    lines.append(("global KV of the prompt", "equal" if same else "DIFFERENT"))
    for i in range(len(model.layers)):
        a = full.window_rows.unpack(one[f"window.{i}"])
        lines.append((f"window rows of layer {i}", _apart(a, full.window_rows.unpack(other[f"window.{i}"])[-len(a) :])))
    rows = [logits[0] if first is None else first]
    rows += [model(torch.tensor([[token]]), cache).logits[0, 0] for token in fed]
    for k, (a, b) in enumerate(zip(logits, rows)):
        if (k or first is not None) and k & (k - 1) == 0 or k == len(fed):
            what = "last logits of the prompt" if not k else f"logits after {k} tokens"
            lines.append((what, _apart(a, b) + ("" if a.argmax() == b.argmax() else " *")))
    span = slice(1 if first is None else 0, None)
    agree = sum(int(a.argmax() == b.argmax()) for a, b in zip(logits[span], rows[span]))
    lines.append(("best token agrees", f"{agree} of {len(logits[span])}"))
    for i, store in full.main.items():
        at, end = at_end.lengths[0] // full.plans[i].ratio, full.lengths[0] // full.plans[i].ratio
        a, b = (c.main_rows.unpack(c.main[i][0, at:end]) for c in (full, cache))
        lines.append((f"main KV appended by layer {i}", _apart(a, b)))
    return lines


def _apart(a: Tensor, b: Tensor) -> str:
    distance, size = (a.double() - b.double()).norm().item(), a.double().norm().item()
    return "0" if torch.equal(a, b) else f"{distance / size:.2g}"


def gap_table(columns: dict[str, list[tuple[str, str]]]) -> str:
    """Lines that a column lacks (the logits of a prompt that a resumed session did not read) stay empty."""
    whats = list(dict.fromkeys(what for lines in columns.values() for what, _ in lines))
    whats.sort(key=lambda what: not what.startswith(("global", "window")))   # stable: logits of the prompt come after
    rows = _headers("", columns, 10) + [[what, *(dict(lines).get(what, "") for lines in columns.values())] for what in whats]
    return "\n".join((f"{row[0]:30}" + "".join(f"{cell:>10}" for cell in row[1:])).rstrip() for row in rows)


def _headers(first: str, columns: Sequence[str], width: int) -> list[list[str]]:
    """Names of columns as rows of words that fit: the last row is the one above the numbers."""
    words = [[first], *(textwrap.wrap(name, width - 1) for name in columns)]
    high = max(map(len, words))
    return [list(row) for row in zip(*([""] * (high - len(column)) + column for column in words))]


# ----------------------------------------------------------------------------------------------- cost of a long context

class Cost(NamedTuple):
    """Matrix products of one decoded token."""
    layer: int | None
    part: str
    format: str      # of the operands: "FP4" (index), "FP8", "FP8 x FP4" (experts), "bf16", "fp32"
    flops: float     # two for a multiplication and its addition


WEIGHTINGS = {   # of the formats, relative to FP8; "FP8-equivalent": by throughput, low-precision products only
    "plain": {"FP4": 1, "FP8": 1, "FP8 x FP4": 1, "bf16": 1, "fp32": 1},
    "FP8-equivalent": {"FP4": 0.5, "FP8": 1, "FP8 x FP4": 1, "bf16": 2, "fp32": 0},
    "... with fp32": {"FP4": 0.5, "FP8": 1, "FP8 x FP4": 1, "bf16": 2, "fp32": 4},
    "... experts at FP4 rate": {"FP4": 0.5, "FP8": 1, "FP8 x FP4": 0.5, "bf16": 2, "fp32": 4},
    "bits of the operands": {"FP4": 0.25, "FP8": 1, "FP8 x FP4": 0.5, "bf16": 4, "fp32": 16},
}


def decode_cost(config: ModelConfig, context: int) -> list[Cost]:
    """The products that decoding one token costs when the cache then holds `context` tokens, itself included; a group
    of m tokens costs each of them its m-th part. Elementwise work is not counted, nor the draft head."""
    c, D, N, d, e = config, config.hidden_size, config.hc_mult, config.head_dim, config.index_head_dim
    costs: list[Cost] = []
    for plan in plan_layers(c)[: c.num_hidden_layers]:
        def add(part: str, fmt: str, *sizes: float, i: int = plan.layer) -> None:
            product = 2.0
            for size in sizes:
                product *= size
            costs.append(Cost(i, part, fmt, product))

        m, held = plan.ratio, context // plan.ratio if plan.ratio else 0
        heads, groups = c.num_attention_heads, c.o_groups
        for sizes in ((D, c.q_lora_rank), (c.q_lora_rank, heads * d), (D, d), (groups * c.o_lora_rank, D)):
            add("attention projections", "FP8", *sizes)
        add("attention projections", "bf16", heads * d, c.o_lora_rank)          # wo_a: its activation is not quantised
        rows = min(c.sliding_window, context) + min(c.index_topk, held)
        add("attention core", "bf16", 2, heads, d, rows)
        if plan.mode == "full":
            add("compressor", "bf16", D, d, 1 if m == 1 else 2)
            add("indexer projections", "bf16", d, e, 1 / m)
        if plan.mode in ("full", "reindex"):
            add("indexer projections", "FP8", c.q_lora_rank, c.index_n_heads * e)
            add("indexer projections", "bf16", D, c.index_n_heads)
            pool = c.candidate_topk_blocks * c.candidate_block_size
            scored = min(held, pool) if plan.uses_pool else held
            add("index of the pool" if plan.uses_pool else "index scan", "FP4", c.index_n_heads, e, scored)
            add("index of the pool" if plan.uses_pool else "index scan", "fp32", c.index_n_heads, scored)
        add("router", "fp32", D, c.n_routed_experts)
        add("routed experts", "FP8 x FP4", c.num_experts_per_tok, 3, D, c.moe_intermediate_size)
        add("shared expert", "FP8", 3, D, c.moe_intermediate_size)
        for _ in ("attention", "experts"):
            add("mHC", "fp32", N * D, (2 + N) * N)
            add("mHC", "fp32", N, D)                                            # read the streams
            add("mHC", "fp32", N, N + 1, D)                                     # write them
        if plan.engram is not None:
            columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
            add("Engram projections", "FP8", columns * c.engram_head_dim, (N + 1) * D)
    costs.append(Cost(None, "mHC", "fp32", 2.0 * N * D))
    costs.append(Cost(None, "head", "bf16", 2.0 * D * c.vocab_size))
    return costs


def weighted(costs: Sequence[Cost], weights: dict[str, float]) -> float:
    return sum(weights[cost.format] * cost.flops for cost in costs)


def cost_table(config: ModelConfig, contexts: Sequence[int]) -> str:
    """FLOPs of a decoded token by format, plain and weighted, and how much they grow with the context."""
    at = {context: decode_cost(config, context) for context in contexts}
    formats = list(WEIGHTINGS["plain"])
    widths = {head: max(9, len(head) + 2) for head in (*formats, "all", "index scans")}
    lines = ["GFLOP of one decoded token, by the format of the operands",
             f"{'context':>10}" + "".join(f"{head:>{width}}" for head, width in widths.items())]
    for context, costs in at.items():
        by = [sum(cost.flops for cost in costs if cost.format == fmt) for fmt in formats]
        scans = sum(cost.flops for cost in costs if cost.part == "index scan")
        cells = (f"{flops / 1e9:>{width}.3f}" for flops, width in zip((*by, sum(by), scans), widths.values()))
        lines.append(f"{context:>10}" + "".join(cells))
    rows = _headers("weight of", list(WEIGHTINGS), 14)
    rows += [[fmt, *(f"{weights[fmt]:g}" for weights in WEIGHTINGS.values())] for fmt in formats]
    rows.append(["context"] + [""] * len(WEIGHTINGS))
    for context, costs in at.items():
        grown = (weighted(costs, weights) / weighted(at[contexts[0]], weights) - 1 for weights in WEIGHTINGS.values())
        rows.append([str(context), *(f"{growth:+.1%}" for growth in grown)])
    lines += ["", f"growth from {contexts[0]:,}, by weighting of the formats"]
    return "\n".join(lines + [(f"{row[0]:>10}" + "".join(f"{cell:>14}" for cell in row[1:])).rstrip() for row in rows])


# ------------------------------------------------------------------------------------------------ measured, on the spot

def random_history(model: Transformer, length: int, room: int = 64, seed: int = 0) -> tuple[Cache, Tensor]:
    """A cache of one row that holds `length` random tokens, and those: its packed global KV and open groups are random,
    not computed, its windows are replayed. For measurements at lengths that nobody wants to wait for."""
    g = torch.Generator().manual_seed(seed)
    c, cache = model.config, model.new_cache(1, length + room)
    tokens = torch.randint(c.vocab_size, (length,), generator=g)

    def packed(codec: Any, rows: int) -> Tensor:
        codes = torch.randint(256, (1, rows, codec.bytes), generator=g, dtype=torch.uint8)
        if codec.fmt is None:
            return torch.randn(1, rows, codec.width, generator=g).to(torch.bfloat16).view(torch.uint8)
        middle = 127 if codec.fmt.scale == "e8m0" else 48             # scales around 2^-2 and 1/2: no NaN, no extremes
        at = codec.fmt.code_bytes(codec.width)
        codes[..., at:] = torch.randint(middle - 4, middle, codes[..., at:].shape, generator=g, dtype=torch.uint8)
        return codes

    for i in cache.main:
        rows = length // cache.plans[i].ratio
        cache.main[i] = packed(cache.main_rows, rows).to(model.device)
        cache.keys[i] = packed(cache.key_rows, rows).to(model.device)
    rings = {key: torch.randn(ring.shape, generator=g).to(ring) if key[0] in ("kv", "score") else ring
             for key, ring in cache.rings.items()}
    cache.restore(Snapshot([length], {part: [length] for part in cache.PARTS}, rings, [length], 0, cache._owner))
    first = max(0, length - c.sliding_window)
    before = None if model.engram_index is None or not first else model.engram_index.compress(tokens[None, :first])
    model.replay(tokens[None, first:], cache, before=before)
    return cache, tokens


def time_table(model: Transformer, contexts: Sequence[int], decode: int) -> str:
    """Milliseconds of a decoded token, and the share that goes into unpacking index keys; CPU time on the CPU."""
    cuda = model.device.type == "cuda"

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(model.device)
        return time.perf_counter() if cuda else time.process_time()

    lines = [f"{'context':>10}{'ms/token':>12}{'unpacking index keys':>24}{'allocated MiB':>16}"]
    for context in contexts:
        cache, _ = random_history(model, context, decode + 1)
        spent, unpack = 0.0, cache.key_rows.unpack

        def timed(packed: Tensor) -> Tensor:
            nonlocal spent
            began = now()
            out = unpack(packed)
            spent += now() - began
            return out

        token = torch.zeros(1, 1, dtype=torch.int64)
        model(token, cache)                                                      # the first append moves the storage
        cache.key_rows.unpack = timed
        began = now()
        for _ in range(decode):
            model(token, cache)
        total = now() - began
        mib = cache.nbytes("allocated") / 2**20
        lines.append(f"{context:>10}{total / decode * 1e3:>12.1f}{spent / total:>24.1%}{mib:>16.1f}")
    return "\n".join(lines)


def prefill_memory(config: ModelConfig, chunk: int, context: int, arith: torch.dtype, working_set: int) -> int:
    """Upper bound in bytes of what a prefill in chunks of `chunk` tokens holds at a time besides weights and cache,
    when `context` tokens come before: the tensors of a chunk, and those of a block of queries, which take some
    `working_set` bytes or, where that is more, what a single query needs. Only this last grows with the context."""
    c, a = config, arith.itemsize
    streams, heads = c.hc_mult * c.hidden_size, c.num_attention_heads * c.head_dim
    width = 4 * streams + 3 * heads + 2 * c.num_experts_per_tok * c.hidden_size
    if c.engram_layer_ids:
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        width += columns * c.engram_head_dim + 2 * (c.hc_mult + 1) * c.hidden_size
    n = context + chunk
    query = n + 2 * c.index_n_heads * min(n, KEY_BLOCK[0]) + c.vocab_size
    return chunk * a * width + max(3 * working_set, 10 * a * query)


def prefill_table(model: Transformer, length: int, seed: int) -> str:
    """Counted FLOPs (matrix products) and measured seconds of the three ways of prefill; CPU time on the CPU."""
    from torch.utils.flop_counter import FlopCounterMode
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
    now = time.perf_counter if model.device.type == "cuda" else time.process_time
    results = {}
    for way in ("full", "bounded", "exact-replay"):
        model.prefill(ids[:, :64], model.new_cache(1, length), way)              # warm up
        began = now()
        float(model.prefill(ids, model.new_cache(1, length), way).logits[0, 0, 0])
        seconds = now() - began
        with FlopCounterMode(display=False) as counter:
            model.prefill(ids, model.new_cache(1, length), way)
        results[way] = counter.get_total_flops(), seconds
    base, working = results["full"], WORKING_SET[model.device.type == "cuda"]
    memory = prefill_memory(model.config, min(length, 4096), length, model.num.arith, working)
    return "\n".join([f"{'prefill':14}{'GFLOP':>12}{'of full':>10}{'seconds':>12}{'of full':>10}"] + [
        f"{way:14}{flops / 1e9:>12.2f}{flops / base[0]:>10.3f}{seconds:>12.2f}{seconds / base[1]:>10.3f}"
        for way, (flops, seconds) in results.items()] + [
        f"memory besides weights and cache: at most {memory / 2**20:,.0f} MiB"])


# --------------------------------------------------------------------------------------------------------- command line

CONTEXTS = {"cost": (4096, 16384, 65536, 262144, 1048576), "time": (4096, 32768, 524288)}


def contexts_within(config: ModelConfig, command: str, given: Sequence[int] | None, decoded: int = 0) -> list[int]:
    """The contexts given, all within the model's context, or those of the default that are."""
    room = max(1, config.max_position_embeddings - decoded)
    contexts = given or [n for n in CONTEXTS[command] if n <= room] or [room]
    for context in contexts:
        check_context(config, "--contexts", context, decoded)
    return list(contexts)


def main(arguments: Sequence[str] | None = None) -> int:
    here = Path(__file__).resolve().parent
    parser = Parser(description="What the Causal Encoder-Decoder saves and costs.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="gap|cost|time|prefill")
    for name, text in (("gap", "bounded replay against the full result"), ("cost", "FLOPs of a decoded token"),
                       ("time", "seconds of a decoded token"), ("prefill", "FLOPs and seconds of the ways of prefill")):
        add = commands.add_parser(name, help=text, allow_abbrev=False).add_argument
        if name == "cost":
            add("--config", metavar="FILE", default=str(here / "config.json"), help="default: the released one")
        else:
            add("--ckpt-path", metavar="DIR", default=str(here / "tiny"), help="default: tiny/")
            add("--device", help="cpu, cuda, cuda:N (default: cuda where there is one)")
            add("--exact", action="store_true", help="exact arithmetic")
            add("--seed", metavar="S", type=int, default=0)
        if name in ("gap", "prefill"):
            add("--prompt-tokens", metavar="N", type=int, default=1024, help="random tokens, default 1024")
        if name in ("gap", "time"):
            add("--decode", metavar="N", type=int, default=64 if name == "gap" else 8)
        if name in ("cost", "time"):
            add("--contexts", metavar="N,N,...", help=f"default {','.join(map(str, CONTEXTS[name]))}, those within the "
                "model's context")
    try:
        args = parser.parse_args(arguments)
        text = getattr(args, "contexts", None)
        contexts = None if text is None else [int(n) if n.isdecimal() else 0 for n in text.split(",")]
        if min(*(contexts or [1]), getattr(args, "prompt_tokens", 1), getattr(args, "decode", 1)) < 1:
            raise ValueError("--contexts, --prompt-tokens and --decode take numbers of 1 or more")
        if args.command == "cost":
            config = ModelConfig.from_json(args.config)
            print(cost_table(config, contexts_within(config, "cost", contexts)))
            return 0
        with contextlib.redirect_stderr(io.StringIO()):  # what there is to note about it is said by loading
            config = open_checkpoint(args.ckpt_path).config
        if args.command == "time":
            contexts = contexts_within(config, "time", contexts, args.decode + 1)
        else:
            check_context(config, "--prompt-tokens", args.prompt_tokens, getattr(args, "decode", 0))
        model = load_model(args.ckpt_path, args.exact, args.device)
        if args.command == "gap":
            g = torch.Generator().manual_seed(args.seed)
            tokens = torch.randint(model.config.vocab_size, (args.prompt_tokens,), generator=g)
            print(f"{args.ckpt_path}, {'exact' if args.exact else 'fast'}, {args.prompt_tokens} random tokens, window "
                  f"{model.config.sliding_window}\ndistance from full prefill, relative; *: another best token")
            print(gap_table(gap(model, tokens, args.decode)))
        elif args.command == "time":
            print(time_table(model, contexts, args.decode))
        else:
            print(prefill_table(model, args.prompt_tokens, args.seed))
    except (ValueError, torch.OutOfMemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
