"""The history of a batch of sequences, and the new tokens that are appended to it.

    Chunk    the new tokens of one forward, and where the history before them lies
    Cache    packed global KV, and rings of local state: windows, open groups, n-grams   890 bytes of global KV per token

A forward reads the cache, notes in its chunk what is to be kept, and the cache takes it over at the end: whatever interrupts
a forward, the cache is as it was.

Letters in shapes as in model.py, and L depth of a ring, R longest rollback, G groups completed.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from config import ModelConfig, plan_layers
from quant import E2M1_E4M3, E2M1_E8M0, E4M3_E8M0, Numerics, RowCodec

if TYPE_CHECKING:
    from model import Transformer


class Chunk:
    """The new tokens of one forward, S of them right padded for each row of the batch: where they stand and where the
    history before them lies. Computed once, read by every layer; `updates` holds what the cache takes over at its end.

    A history of depth L is a ring: position p lies in slot p % L. Layers read it joined with the chunk's own rows
    ([B, L + S], flattened), so a chunk of any length sees what came before it and overwrites nothing.
    """

    def __init__(self, starts: list[int], counts: list[int], first: list[int], width: int, window: int,
                 device: torch.device, appends: bool = True) -> None:
        self.starts, self.counts, self.first_seen, self.width, self.window = starts, counts, first, width, window
        self.ends = [s + c for s, c in zip(starts, counts)]
        self.appends = appends  # replay reads compressed rows and writes none
        # copied without waiting for what the device still has to do, like everything else a step needs from the host
        rows = torch.tensor([starts, self.ends, first]).to(device, non_blocking=True)
        self.start, self.end, self.first = rows.unsqueeze(-1)                                  # [B, 1] each
        self.positions = self.start + torch.arange(width, device=device)                                      # [B, S]
        self.block = QUERY_BLOCK[device.type == "cuda"]
        self.updates: dict[tuple, Tensor] = {}
        # What layers of this forward share: {KV source: all its rows, unpacked}, and (selection, its rows, empty picks).
        self.unpacked: dict[int, Tensor] = {}
        self.rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._index: dict[tuple, Any] = {}

    def on(self, device: torch.device) -> Chunk:
        """The same chunk with its indices on another device; updates go to the same commit."""
        if device == self.start.device:
            return self
        twin = Chunk(self.starts, self.counts, self.first_seen, self.width, self.window, device, self.appends)
        twin.updates = self.updates
        return twin

    def _rows(self, depth: int) -> Tensor:                                                  # offset of each row, [B, 1]
        return torch.arange(len(self.starts), device=self.start.device).unsqueeze(-1) * (depth + self.width)

    def join(self, ring: Tensor, new: Tensor, key: tuple | None = None) -> Tensor:
        """ring [B, L, ...] and the chunk's rows [B, S, ...] as one flat [B * (L + S), ...]. The ring's next state is
        noted for the commit under `key`."""
        joined = torch.cat([ring, new], 1).flatten(0, 1)
        if key is not None:
            self.updates[key] = self.next_ring(joined, ring.shape[1])
        return joined

    def next_ring(self, joined: Tensor, depth: int) -> Tensor:
        """The ring after this chunk, [B, L, ...]: a slot keeps its row unless a new token has taken the place."""
        if depth not in self._index:
            slot = torch.arange(depth, device=joined.device)
            latest = self.end - 1 - (self.end - 1 - slot) % depth                              # [B, L]
            keep = torch.where(latest >= self.start, depth + latest - self.start, slot)
            self._index[depth] = (keep + self._rows(depth)).flatten()
        return joined.index_select(0, self._index[depth]).view(len(self.starts), depth, *joined.shape[1:])

    def locate(self, positions: Tensor, depth: int, first: Tensor | int = 0) -> Tensor:
        """Where positions [B, K] lie in `join`'s result, flattened. A position before `first` or after the chunk gives the
        place of the nearest live one, so that nothing dead is ever read; the caller masks it."""
        live = torch.minimum(positions.clamp_min(first), self.end - 1)
        place = torch.where(live >= self.start, depth + live - self.start, live % depth)
        return (place + self._rows(depth)).flatten()

    def window_block(self, q0: int, q1: int, depth: int) -> tuple[Tensor, Tensor | None]:
        """For queries q0..q1-1: the place of every window row that one of them may see, flat [B * K] with
        K <= W - 1 + q1 - q0, and float32 [B, Q, 1, K] to add to the scores: -inf where query i must not see position j
        (None: it sees all). Query at position p sees max(first, p - W + 1)..p."""
        key = (q0, q1, depth)
        if key not in self._index:
            held = [f - s for s, f in zip(self.starts, self.first_seen)]      # where each row's first window row lies
            back = max(q0 - self.window + 1, min(held))
            wanted = self.start + torch.arange(back, q1, device=self.start.device)                           # [B, K]
            hidden = None
            if q1 - q0 > 1 or max(held) > back:
                ahead = self.positions[:, q0:q1, None] - wanted[:, None]                                     # [B, Q, K]
                unseen = (ahead < 0) | (ahead >= self.window) | (wanted < self.first)[:, None]
                hidden = torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, -torch.inf).unsqueeze(2)
            self._index[key] = self.locate(wanted, depth, self.first), hidden
        return self._index[key]

    def blocks(self, per_query: int) -> list[tuple[int, int]]:
        """Queries in blocks whose working set, at `per_query` bytes for one query of one row, stays bounded."""
        if self.width == 1:
            return [(0, 1)]
        size = max(1, min(self.block, WORKING_SET[self.start.device.type == "cuda"] // max(1, per_query * len(self.starts))))
        return [(q, min(q + size, self.width)) for q in range(0, self.width, size)]


# On (CPU, CUDA): bytes of intermediate results that attention and indexer aim at, and the most queries in a block. Longer
# blocks waste products outside the band of the window, shorter ones launch more.
WORKING_SET, QUERY_BLOCK = (256 << 20, 2 << 30), (128, 256)


class Snapshot(NamedTuple):
    lengths: list[int]
    window_start: dict[str, list[int]]
    rings: dict[tuple, Tensor]
    highest: list[int]
    cuts: int
    owner: object          # the cache it belongs to


class Cache:
    """The history of a batch of sequences, stored as the paper says and owned by the caller.

    Global KV, kept for every token: main KV rows (E2M1 nibbles, E4M3 scales) and index keys (E2M1 nibbles, E8M0 scales) of
    each KV source, in storage that grows in steps. Local state, rings of fixed depth: window rows (E4M3 codes, E8M0
    scales) of the last W - 1 + R tokens for every layer (draft stages: W + R), float32 open compression groups of the last
    m - 1 + R, and the last max_ngram - 1 + R compressed token ids for Engram, where R is the longest rollback. Rings are
    replaced, never written in place: a snapshot costs nothing.

    `lengths` are the tokens each row holds. `window_start` is, per part, the first position of the contiguous window
    rows present: skipping decoder layers (bounded prefill) moves it.
    """

    PARTS = ("encoder", "decoder", "draft")

    def __init__(self, config: ModelConfig, num: Numerics, batch_size: int, max_length: int, device: torch.device,
                 rollback: int | None = None) -> None:
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"a cache needs batch_size and max_length of at least 1, not {batch_size} and {max_length}")
        if rollback is not None and rollback < 0:
            raise ValueError(f"rollback = {rollback} is negative")
        c, on = config, num.fake_quant
        self.config, self.num, self.device = config, num, device
        self.batch_size, self.max_length = batch_size, max_length
        self.rollback = c.dspark_block_size if rollback is None else rollback
        self.plans = plan_layers(c)
        self.lengths = [0] * batch_size
        self.window_start = {part: [0] * batch_size for part in self.PARTS}
        self._highest = [0] * batch_size            # the longest that each row's rings have been written to
        self._cuts: list[list[int]] = []            # shortest lengths between snapshots: do those still hold?
        self._cut_since = False                     # whether the last of them is newer than the last snapshot
        self._owner = object()                      # marks the snapshots of this cache
        operand = num.operand(device)
        self.window_rows = RowCodec(c.head_dim, E4M3_E8M0 if on.window_kv else None, operand, device)
        self.main_rows = RowCodec(c.head_dim, E2M1_E4M3 if on.main_kv else None, operand, device)
        self.key_rows = RowCodec(c.index_head_dim, E2M1_E8M0 if on.index_key else None, operand, device)
        self.rings: dict[tuple, Tensor] = {}
        for plan in self.plans:
            # a draft stage looks back over W rows, not W - 1: the token it follows is not part of its block
            depth = max(1, c.sliding_window - (plan.part != "draft") + self.rollback)
            self.rings["window", plan.layer] = self._empty(depth, self.window_rows.bytes)
            if plan.mode == "full" and plan.ratio > 1:
                for what in ("kv", "score"):
                    self.rings[what, plan.layer] = self._empty(plan.ratio - 1 + self.rollback, c.head_dim, dtype=torch.float32)
        if c.engram_layer_ids:
            depth = max(1, c.engram_max_ngram_size - 1 + self.rollback)
            self.rings["ngram",] = torch.zeros(batch_size, depth, dtype=torch.int64)     # on the host, like the tables
        sources = [p.layer for p in self.plans if p.mode == "full"]
        self.main = {i: self._empty(0, self.main_rows.bytes) for i in sources}      # {KV source: [B, capacity, bytes]}
        self.keys = {i: self._empty(0, self.key_rows.bytes) for i in sources}

    def _empty(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(self.batch_size, *shape, dtype=dtype, device=self.device)

    # ------------------------------------------------------------------------------------------------------ appending

    def chunk(self, counts: list[int], width: int, part: str, *, starts: list[int] | None = None,
              appends: bool = True) -> Chunk:
        """The chunk that follows what the rows hold: counts[b] new tokens of row b. ValueError past max_length."""
        starts = self.lengths if starts is None else starts
        for row, (start, count) in enumerate(zip(starts, counts)):
            if start + count > self.max_length:
                raise ValueError(f"row {row} would hold {start + count} tokens, but this cache was made for "
                                 f"max_length = {self.max_length}")
        first = [min(f, s) for f, s in zip(self.window_start[part], starts)]
        return Chunk(list(starts), list(counts), first, width, self.config.sliding_window, self.device, appends)

    def write_compressed(self, source: int, chunk: Chunk, main: Tensor, keys: Tensor) -> None:
        """Store packed rows main [B, G, bytes] and keys [B, G, bytes] of the groups that this chunk completes."""
        ratio = self.plans[source].ratio
        self._grow(source, max(end // ratio for end in chunk.ends))
        for row, (start, end) in enumerate(zip(chunk.starts, chunk.ends)):
            j0, j1 = start // ratio, end // ratio
            if j1 > j0:
                self.main[source][row, j0:j1] = main[row, : j1 - j0]
                self.keys[source][row, j0:j1] = keys[row, : j1 - j0]

    def _grow(self, source: int, rows: int) -> None:
        for store in (self.main, self.keys):
            old = store[source]
            if rows > old.shape[1]:
                limit = -(-self.max_length // self.plans[source].ratio)
                capacity = min(max(-(-rows // 256) * 256, old.shape[1] * 5 // 4), max(limit, rows))
                store[source] = self._empty(capacity, old.shape[2])
                store[source][:, : old.shape[1]] = old

    def commit(self, chunk: Chunk, parts: tuple[str, ...] = PARTS) -> None:
        """Take over the chunk: an interrupted forward leaves the cache as it was. Parts that did not run over it have no
        window rows any more."""
        self.rings.update(chunk.updates)
        self.lengths = list(chunk.ends)
        self._highest = [max(h, e) for h, e in zip(self._highest, chunk.ends)]
        for part in set(self.PARTS) - set(parts):
            self.window_start[part] = [e if e > s else w for w, s, e in zip(self.window_start[part], chunk.starts, chunk.ends)]

    # --------------------------------------------------------------------------------------------- going back, copying

    def truncate(self, length: int | list[int]) -> None:
        """Forget the tokens from `length` on (one for all rows, or one each). ValueError when that is further back than
        the rings reach: `rollback` tokens before the longest length they have held."""
        lengths = [length] * self.batch_size if isinstance(length, int) else list(length)
        if len(lengths) != self.batch_size:
            raise ValueError(f"truncate got {len(lengths)} lengths for {self.batch_size} rows")
        for row, (n, now, highest) in enumerate(zip(lengths, self.lengths, self._highest)):
            if not 0 <= n <= now:
                raise ValueError(f"row {row} holds {now} tokens and cannot be truncated to {n}")
            if 0 < n < highest - self.rollback and n < now:
                raise ValueError(f"row {row} cannot go back to {n} tokens: only the last {self.rollback} of {highest} can be "
                                 f"taken back; keep a snapshot() to go further")
        self._cut(lengths)

    def _cut(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._highest = [0 if n == 0 else h for n, h in zip(lengths, self._highest)]
        last = self._cuts.pop() if self._cut_since else lengths
        self._cuts.append([min(pair) for pair in zip(last, lengths)])
        self._cut_since = True
        for starts in self.window_start.values():
            starts[:] = [min(s, n) for s, n in zip(starts, lengths)]

    def reset(self) -> None:
        """Forget everything; storage is kept."""
        self._cut([0] * self.batch_size)

    def snapshot(self) -> Snapshot:
        """The local state now, so that `restore` can come back to it from any later length."""
        self._cut_since = False
        return Snapshot(list(self.lengths), {k: list(v) for k, v in self.window_start.items()}, dict(self.rings),
                        list(self._highest), len(self._cuts), self._owner)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this cache. ValueError when it is another cache's, or rows it counts on were taken back
        since."""
        if snapshot.owner is not self._owner:
            raise ValueError("this snapshot belongs to another cache")
        for cut in self._cuts[snapshot.cuts:]:
            if any(n < kept for n, kept in zip(cut, snapshot.lengths)):
                raise ValueError("this snapshot no longer holds: the cache has been truncated below it since")
        self._cut(list(snapshot.lengths))
        self.rings = dict(snapshot.rings)
        self.window_start = {k: list(v) for k, v in snapshot.window_start.items()}
        self._highest = list(snapshot.highest)

    def fork(self, to: int | list[int] | Snapshot | None = None, rows: list[int] | None = None) -> Cache:
        """An independent copy of the state now, at an earlier length within the rollback, or at a snapshot; of all rows,
        or of `rows`, which may repeat: any number of continuations of one prompt cost one prefill. Packed rows are
        copied, local state is shared until one of the two moves on. ValueError as truncate and restore."""
        twin = Cache.__new__(Cache)
        twin.__dict__.update(self.__dict__)
        twin.lengths, twin._highest, twin._cuts = list(self.lengths), list(self._highest), [list(c) for c in self._cuts]
        twin.window_start = {k: list(v) for k, v in self.window_start.items()}
        twin.rings = dict(self.rings)
        if isinstance(to, Snapshot):
            twin.restore(to)
        elif to is not None:
            twin.truncate(to)
        twin._owner = object()
        taken = list(range(self.batch_size)) if rows is None else list(rows)
        if not taken or not all(0 <= row < self.batch_size for row in taken):
            raise ValueError(f"fork got rows {taken} of a cache of {self.batch_size}")
        if rows is not None:
            twin.batch_size, index = len(taken), torch.tensor(taken)
            twin.lengths, twin._highest = ([kept[row] for row in taken] for kept in (twin.lengths, twin._highest))
            twin.window_start = {k: [v[row] for row in taken] for k, v in twin.window_start.items()}
            twin._cuts = [[cut[row] for row in taken] for cut in twin._cuts]
            twin.rings = {key: ring.index_select(0, index.to(ring.device)) for key, ring in twin.rings.items()}
        for store in ("main", "keys"):
            held = {i: t[:, : twin._rows_used(i)] for i, t in getattr(self, store).items()}
            setattr(twin, store, {i: t.clone() if rows is None else t[taken] for i, t in held.items()})
        return twin

    def save(self, file: str | Path, model: Transformer, tokens: list[int], **more: Any) -> None:
        """Write one row to a session file, see session.save."""
        from session import save
        save(file, model, self, tokens, **more)

    @staticmethod
    def load(file: str | Path, model: Transformer, **more: Any) -> Any:
        """The session of a file, its `cache` and what goes with it, see session.load."""
        from session import load
        return load(model, file, **more)

    # ------------------------------------------------------------------------------------------------------- accounts

    def _rows_used(self, source: int) -> int:
        return max(self.lengths) // self.plans[source].ratio

    def nbytes(self, what: str = "used") -> int:
        """Bytes of storage: "allocated", "used" (global KV of the tokens held, and all local state) or "global"."""
        stores = [*self.main.items(), *self.keys.items()]
        local = sum(t.nbytes for t in self.rings.values())
        if what == "allocated":
            return local + sum(t.nbytes for _, t in stores)
        held = sum(t[row, : n // self.plans[i].ratio].nbytes for i, t in stores for row, n in enumerate(self.lengths))
        return held if what == "global" else local + held

    def live_state(self, row: int) -> dict[str, Tensor]:
        """Everything of a row that a later token can read, in position order: equal for equal histories, whatever the
        chunks, drafts and rollbacks that led to it."""
        n, state = self.lengths[row], {"length": torch.tensor(self.lengths[row])}
        parts = {p.layer: p.part for p in self.plans}
        for key, ring in self.rings.items():
            depth = ring.shape[1]
            if key[0] == "window":
                reach = self.config.sliding_window - (parts[key[1]] != "draft")
                back = max(min(n - self.window_start[parts[key[1]]][row], reach), 0)
            else:
                back = n % self.plans[key[1]].ratio if len(key) > 1 else min(n, self.config.engram_max_ngram_size - 1)
            slots = torch.arange(n - back, n, device=ring.device) % depth
            state[".".join(map(str, key))] = ring[row, slots]
        for name, store in (("main", self.main), ("index_key", self.keys)):
            state |= {f"{name}.{i}": t[row, : n // self.plans[i].ratio] for i, t in store.items()}
        return state
