"""DSpark: the draft head of DeepSeek-V4.1-Flash, and lossless speculative decoding with it.

    main hidden states -> main_proj -> main KV     DSpark.observe     mtp.0.main_proj, mtp.0.main_norm, mtp.*.attn.wkv
    draft block of 5 positions, bidirectional      DSpark.draft       mtp.*
    Markov head, confidence head                   DSpark.draft       mtp.2.markov_head.*, mtp.2.confidence_head.proj
    draft, verify, accept, roll back               SpeculativeDecoder
    sampling                                       Sampler, probabilities, accept

After the token at position p has been processed and a token chosen for p + 1, the head reads that token and
placeholders for the ones after it as a block, at positions p + 1 .. p + 5, and proposes tokens for p + 2 .. p + 6. Its
layers attend to their own windows of main KV, which are made from the backbone's hidden states of the committed tokens:
nothing that was only drafted is ever kept. The backbone then judges all drafts in one forward.

Letters in shapes as in model.py, and T drafts of a block (dspark_block_size, 5), V vocabulary.
"""
from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import torch
from torch import Tensor, nn

from model import (Block, Cache, Chunk, Embedding, LayerPlan, ModelConfig, Tables, Transformer, argmax_lowest, collapse,
                   plan_layers, rotate)
from quant import Linear, Numerics, Ranks, RMSNorm

# ------------------------------------------------------------------------------------------------------------- sampling


def probabilities(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Logits float32 [..., V] -> the distribution that is sampled, float64 [..., V], on the CPU.

    top_p < 1 keeps the likeliest tokens, as few as reach that probability together (of equal ones the lowest ids
    first). Temperature 0 puts everything on the largest logit, of equal ones the lowest id. ValueError for logits that
    are not finite: sampling from them would choose silently.
    """
    logits = logits.to("cpu", torch.float64)
    if not bool(logits.isfinite().all()):
        raise ValueError("the logits are not finite: there is nothing to sample from")
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, argmax_lowest(logits).unsqueeze(-1), 1.0)
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p < 1:
        order = p.sort(dim=-1, descending=True, stable=True)
        enough = order.values.cumsum(-1) >= top_p
        beyond = torch.cat([torch.zeros_like(enough[..., :1]), enough[..., :-1]], -1)               # enough without it
        p = torch.zeros_like(p).scatter_(-1, order.indices, order.values.masked_fill(beyond, 0))
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(weights: Tensor, uniform: float) -> int:
    """The token that a uniform number in [0, 1) picks from unnormalised weights [V]: the first whose running sum
    exceeds its share, so never one of weight 0."""
    running = weights.cumsum(-1)
    return int(torch.searchsorted(running, uniform * running[-1], right=True))


def accept(drafts: list[int], p: Tensor, q: Tensor, uniform: Callable[[], float]) -> list[int]:
    """Tokens distributed exactly as the target alone would choose them, out of `drafts` that the draft head chose.

    p [n + 1, V]: the target's distribution at each of the n drafts and after them; q [n, V]: the one each draft was
    drawn from. A draft x stays with probability min(1, p(x) / q(x)); the first that does not is replaced by a draw from
    (p - q)+, and when all stay the target adds one. One uniform per draft looked at, then one for the last token.
    """
    for i, token in enumerate(drafts):
        if uniform() * q[i, token] >= p[i, token]:
            residual = (p[i] - q[i]).clamp_min(0)
            # rounding alone can leave nothing of it when p and q are all but equal
            return drafts[:i] + [draw(residual if residual.sum() > 0 else p[i], uniform())]
    return drafts + [draw(p[len(drafts)], uniform())]


def accept_greedy(drafts: list[int], best: list[int]) -> list[int]:
    """The same at temperature 0: the drafts up to the first that is not the target's best token, then that one."""
    n = 0
    while n < len(drafts) and drafts[n] == best[n]:
        n += 1
    return drafts[:n] + [best[n]]


class Sampler:
    """Temperature, top-p and the random stream: one CPU generator, so that a seed means the same on every device.

    Order of draws. Temperature 0 draws nothing. A plain step takes one uniform number for each active row, in order of
    the rows. A speculative step takes one for each active row at draft 1, then at draft 2, to 5; then, row by row, one
    for each submitted draft until the first rejection, and one for the row's last token.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature = {temperature} must be a number >= 0")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p = {top_p} must be above 0 and at most 1")
        self.temperature, self.top_p = temperature, top_p
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.temperature, self.top_p)

    def choose(self, logits: Tensor, active: list[bool] | None = None) -> list[int]:
        """A token for every row of logits [B, V]; 0, and no draw, for rows that are not active."""
        on = [True] * logits.shape[0] if active is None else active
        if self.greedy:
            return [token if a else 0 for token, a in zip(best_tokens(logits), on)]
        p = self.probabilities(logits)
        return [draw(row, self.uniform()) if a else 0 for row, a in zip(p, on)]


def best_tokens(logits: Tensor) -> list[int]:
    """The largest logit's id for every row [n, V], of equal ones the lowest."""
    tokens = argmax_lowest(logits).tolist()
    if max(tokens, default=0) >= logits.shape[-1]:   # nothing equals a maximum that is not a number
        raise ValueError("the logits are not numbers: there is no best token")
    return tokens


# ------------------------------------------------------------------------------------------------------- the draft head

class MarkovHead(nn.Module):
    """A low-rank bias on the next token's logits, from the token before it alone: bias = head(embed(token))."""

    def __init__(self, config: ModelConfig, num: Numerics, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, vocabulary = ranks, ranks.slice(config.vocab_size, "vocab_size")
        self.embed = Embedding(vocabulary, config.dspark_markov_rank, ranks)
        self.head = Linear(config.dspark_markov_rank, vocabulary, "bf16", num, out_dtype=torch.float32)


class ConfidenceHead(nn.Module):
    """How likely a draft is to be accepted when those before it are: a logit, from its position's hidden state and the
    Markov embedding of the token before it."""

    def __init__(self, config: ModelConfig, num: Numerics) -> None:
        super().__init__()
        width = config.hidden_size + config.dspark_markov_rank
        self.proj = Linear(width, 1, "bf16", num, out_dtype=torch.float32)


class Stage(Block):
    """One draft layer. The first also projects the main hidden states, the last also holds the heads; embedding and
    language-model head are the backbone's."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, num: Numerics, ranks: Ranks) -> None:
        super().__init__(config, plan, num, ranks)
        c, j = config, plan.layer - config.num_hidden_layers
        if j == 0:
            self.main_proj = Linear(len(c.dspark_target_layer_ids) * c.hidden_size, c.hidden_size, "fp8", num)
            self.main_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, num)
        if j == c.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, num)
            self.markov_head = MarkovHead(c, num, ranks)
            self.confidence_head = ConfidenceHead(c, num)


class DraftChunk(Chunk):
    """A draft block as the new tokens of a forward, of which nothing is kept. Every draft sees the same rows: the main
    KV of the last W committed positions (the window does not move along with the drafts), and the whole block."""

    def __init__(self, cache: Cache, size: int) -> None:
        first = [min(f, n) for f, n in zip(cache.window_start["draft"], cache.lengths)]
        batch, window = cache.batch_size, cache.config.sliding_window
        super().__init__(list(cache.lengths), [size] * batch, first, size, window, cache.device, appends=False)

    def join(self, ring: Tensor, new: Tensor, key: tuple | None = None) -> Tensor:
        return super().join(ring, new)

    def window_block(self, q0: int, q1: int, depth: int) -> tuple[Tensor, Tensor | None]:
        key = ("draft", depth)
        if key not in self._index:
            wanted = self.start + torch.arange(-self.window, self.width, device=self.start.device)       # [B, W + T]
            hidden = None
            if any(s - self.window < f for s, f in zip(self.starts, self.first_seen)):
                hidden = torch.zeros(wanted.shape, device=wanted.device).masked_fill_(wanted < self.first, -torch.inf)
                hidden = hidden[:, None, None]                                                       # [B, 1, 1, W + T]
            self._index[key] = self.locate(wanted, depth, self.first), hidden
        return self._index[key]


class Draft(NamedTuple):
    ids: Tensor            # int64 [B, 1 + T]: the token given and the drafts after it
    logits: Tensor         # float32 [B, T, V], Markov bias included
    confidence: Tensor     # float32 [B, T], before the sigmoid
    q: Tensor | None       # float64 [B, T, V] on the CPU: what each draft was drawn from; None at temperature 0


class DSpark(nn.ModuleList):
    """The draft layers, children "0", "1", "2". The model calls `observe` with what it appends to a cache; `draft`
    reads the windows that this has filled."""

    def __init__(self, config: ModelConfig, num: Numerics, ranks: Ranks = Ranks()) -> None:
        if not config.num_nextn_predict_layers:
            raise ValueError("num_nextn_predict_layers = 0: this configuration has no draft head")
        plans = plan_layers(config)[config.num_hidden_layers :]
        super().__init__(Stage(config, plan, num, ranks) for plan in plans)
        self.config, self.num, self.ranks = config, num, ranks

    def observe(self, main_hidden: Tensor, tables: Tables, chunk: Chunk, cache: Cache) -> None:
        """Add the tokens of a chunk to the window of every stage: main_hidden bf16 [B, S, targets * D]."""
        main_x = self[0].main_norm(self[0].main_proj(main_hidden))                                       # [B, S, D]
        quantised = self[0].attn.wkv.quantise_input(main_x)          # the stages multiply the same codes
        for stage in self:
            kv = stage.attn.kv_norm(stage.attn.wkv(quantised, True)).unsqueeze(2)                        # [B, S, 1, d]
            kv = rotate(kv, tables.of(stage.plan, chunk.positions)[0]).squeeze(2)
            key = ("window", stage.plan.layer)
            chunk.join(cache.rings[key], cache.window_rows.pack(kv), key)

    @torch.inference_mode()
    def draft(self, backbone: Transformer, tokens: Tensor, cache: Cache, sampler: Sampler | None = None,
              active: list[bool] | None = None) -> Draft:
        """Propose T tokens to follow tokens [B], which stand right after what the cache holds. The cache is only read.

        The sampler chooses each draft (None: greedily); rows that are not active take part without drawing from it.
        """
        c, last, sampler = self.config, self[-1], Sampler() if sampler is None else sampler
        tokens = tokens.to(cache.device, torch.int64)
        block = torch.full((tokens.shape[0], c.dspark_block_size), c.dspark_noise_token_id, device=cache.device)
        block[:, 0] = tokens
        x = backbone.embed(block).unsqueeze(2).expand(-1, -1, c.hc_mult, -1)                             # [B, T, N, D]
        pre_mix = torch.zeros(x.shape[:3], dtype=self.num.arith, device=cache.device)                    # [B, T, N]
        pre_mix[..., 0] = 1
        chunk = DraftChunk(cache, c.dspark_block_size)
        tables = Tables(backbone.plain_freqs, backbone.yarn_freqs, self.num.arith)
        for stage in self:
            x, pre_mix, _ = stage(x, pre_mix, None, tables, chunk, cache, None)
        hidden = collapse(x.to(self.num.arith), pre_mix).squeeze(2)                                        # [B, T, D]
        base = self.ranks.gather(backbone.head(last.norm(hidden)))                                       # [B, T, V]
        ids, logits, confidence, q = [tokens], [], [], []
        for i in range(c.dspark_block_size):    # the block is computed at once, its tokens one after the other
            markov = last.markov_head.embed(ids[i])                                                      # [B, r]
            # base and bias are each float32, and so is their sum: three roundings
            logits.append(base[:, i] + self.ranks.gather(last.markov_head.head(markov)))                 # [B, V]
            features = torch.cat([hidden[:, i], markov], -1)                                             # not normed
            confidence.append(last.confidence_head.proj(features))                                       # [B, 1]
            if sampler.greedy:
                ids.append(argmax_lowest(logits[i]))
            else:
                q.append(sampler.probabilities(logits[i]))
                on = [True] * len(q[i]) if active is None else active
                chosen = [draw(row, sampler.uniform()) if a else 0 for row, a in zip(q[i], on)]
                ids.append(torch.tensor(chosen, device=cache.device))
        drawn_from = torch.stack(q, 1) if q else None
        return Draft(torch.stack(ids, 1), torch.stack(logits, 1), torch.cat(confidence, 1), drawn_from)


# ------------------------------------------------------------------------------------------------------------- decoding

@dataclass
class Statistics:
    """What decoding did and what it took."""
    steps: int = 0                                             # backbone forwards
    row_steps: int = 0                                         # the same, counted for each active row
    tokens: int = 0                                            # chosen, over all rows
    seconds: float = 0.0
    draft_seconds: float = 0.0
    submitted: list[int] = field(default_factory=list)         # drafts put to the backbone, by position in the block
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one row gains from one backbone forward."""
        return self.tokens / self.row_steps if self.row_steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Of the drafts submitted at each position, the share that was accepted."""
        return [a / s if s else 0.0 for a, s in zip(self.accepted, self.submitted)]

    @property
    def draft_share(self) -> float:
        """Share of the decoding time that went into drafting."""
        return self.draft_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        line = f"{self.tokens} tokens in {self.steps} backbone steps, {self.tokens_per_step:.2f} tokens per step"
        if not self.submitted:
            return line
        return (f"{line}; drafts accepted by position: {' '.join(f'{a:.0%}' for a in self.acceptance)}; "
                f"drafting took {self.draft_share:.0%} of the time")


class PlainDecoder:
    """One token per row and step."""

    def __init__(self, model: Transformer, sampler: Sampler) -> None:
        self.model, self.sampler, self.statistics = model, sampler, Statistics()

    def step(self, cache: Cache, pending: list[int], active: list[bool], room: list[int]) -> list[list[int]]:
        """Feed each active row its pending token, the one chosen last, and choose what follows.

        -> the new tokens of every row, none for rows that are not active; the last of them has not been fed: it is the
        row's next pending token. room[b] >= 1: how many tokens row b may still gain.
        """
        began = time.perf_counter()
        tokens = torch.tensor(pending).masked_fill(~torch.tensor(active), 0).unsqueeze(1)                # [B, 1]
        logits = self.model(tokens, cache, [int(on) for on in active], logits="last").logits
        chosen = self.sampler.choose(logits[:, 0], active)
        new = [[token] if on else [] for token, on in zip(chosen, active)]
        self._count(new, began)
        return new

    def _count(self, new: list[list[int]], began: float) -> None:
        s = self.statistics
        s.steps += 1
        s.row_steps += sum(map(bool, new))
        s.tokens += sum(map(len, new))
        s.seconds += time.perf_counter() - began


class SpeculativeDecoder(PlainDecoder):
    """Draft, verify, accept, roll back: one to 1 + T tokens per row and step, chosen as the backbone alone would.

    At temperature 0 the tokens are those of PlainDecoder (in fast mode a product of six rows may round otherwise than
    one of a single row), above it they have the same distribution. `min_survival`: only drafts whose chance of being
    accepted, the product of sigmoid(confidence) up to them, is at least this are submitted; 0 submits all. The
    confidence of a draft depends on the tokens before it and not on the draft: leaving one out favours no token.
    """

    def __init__(self, model: Transformer, sampler: Sampler, min_survival: float = 0.0) -> None:
        super().__init__(model, sampler)
        if model.mtp is None:
            raise ValueError("speculative decoding needs the draft head: load the model with draft=True")
        if not 0 <= min_survival <= 1:
            raise ValueError(f"the draft confidence threshold {min_survival} must be between 0 and 1")
        self.min_survival, size = min_survival, model.config.dspark_block_size
        self.statistics = Statistics(submitted=[0] * size, accepted=[0] * size)

    def step(self, cache: Cache, pending: list[int], active: list[bool], room: list[int]) -> list[list[int]]:
        """As PlainDecoder.step, with up to min(1 + T, room[b]) new tokens for row b. Afterwards the cache holds the
        pending token and all new ones but the last. A caller that ends a row inside its new tokens, at a stop, takes
        the tail back with cache.truncate. ValueError for a cache that cannot take back a block of drafts."""
        size = self.model.config.dspark_block_size
        if cache.rollback < size:
            raise ValueError(f"this cache can take back {cache.rollback} tokens, a block of drafts has {size}: make it "
                             f"with rollback = {size} or more")
        began, starts = time.perf_counter(), list(cache.lengths)
        left = [min(size, r - 1, cache.max_length - n - 1) for r, n in zip(room, starts)]
        most = [max(0, n) if on else 0 for n, on in zip(left, active)]
        drafts: list[list[int]] = [[] for _ in starts]
        q = None
        if max(most):
            proposal = self.propose(cache, pending, active)
            likely = self.worthwhile(proposal)
            drafts = [row[1 : 1 + min(m, n)] for row, m, n in zip(proposal.ids.tolist(), most, likely)]
            q = proposal.q
            self.statistics.draft_seconds += time.perf_counter() - began
        fed = [[token, *row] if on else [] for token, row, on in zip(pending, drafts, active)]
        width = max(1, *map(len, fed))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in fed])                              # [B, 1 + n]
        logits = self.model(ids, cache, [len(row) for row in fed]).logits
        kept = [n + on for n, on in zip(starts, active)]     # should judging be interrupted: no draft stays behind
        try:
            new = self.judge(drafts, active, logits, q)
            kept = [n + len(row) for n, row in zip(starts, new)]
        finally:
            if kept != cache.lengths:
                cache.truncate(kept)
        for row, tokens in zip(drafts, new):
            for i in range(len(row)):
                self.statistics.submitted[i] += 1
                self.statistics.accepted[i] += i < len(tokens) - 1
        self._count(new, began)
        return new

    def propose(self, cache: Cache, pending: list[int], active: list[bool]) -> Draft:
        tokens = torch.tensor(pending).masked_fill(~torch.tensor(active), 0)
        return self.model.mtp.draft(self.model, tokens, cache, self.sampler, active)

    def worthwhile(self, proposal: Draft) -> list[int]:
        """How many drafts of each row are likely enough to survive."""
        survival = proposal.confidence.to("cpu", torch.float64).sigmoid().cumprod(-1)                # [B, T], falling
        return (survival >= self.min_survival).sum(-1).tolist()

    def judge(self, drafts: list[list[int]], active: list[bool], logits: Tensor, q: Tensor | None) -> list[list[int]]:
        """The new tokens of every row: drafts that stand, and one of the backbone's. logits [B, 1 + n, V]: the
        backbone's after the pending token and each draft."""
        new: list[list[int]] = []
        for b, (row, on) in enumerate(zip(drafts, active)):
            if not on:
                new.append([])
            elif self.sampler.greedy:
                new.append(accept_greedy(row, best_tokens(logits[b, : len(row) + 1])))
            else:
                p = self.sampler.probabilities(logits[b, : len(row) + 1])
                new.append(accept(row, p, p[:0] if q is None else q[b], self.sampler.uniform))
        return new
