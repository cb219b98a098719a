"""What a configuration amounts to: its layers, parameters, bytes on disk and bytes of state.

    python model.py [config.json]

Everything is counted on a model built on the meta device, so the names and shapes counted are those that are loaded.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Iterator, Sequence

import torch
from torch import Tensor, nn

from config import ModelConfig, plan_layers
from dspark import DSpark
from model import Cache, Transformer
from quant import Numerics


def parameter_accounts(config: ModelConfig, parameters: Iterator[tuple[str, Tensor]]) -> dict[str, int]:
    """Logical parameters by part, from names and shapes: two for a byte of FP4 codes, none for scales."""
    kinds = (("vision", ("vision.", "aligner.", "image_")), ("draft head", ("mtp.",)), ("embedding", ("embed.",)), ("head", ("head.",)),
             ("Engram tables", (".engram.embed.",)), ("Engram projections", (".engram.",)), ("routed experts", (".ffn.experts.",)),
             ("shared experts", (".shared_experts.",)), ("attention", (".attn.",)), ("router, mHC, norms", ("",)))
    counts = {kind: 0 for kind, _ in kinds}
    for name, tensor in parameters:
        if not name.endswith(".scale"):
            kind = next(k for k, marks in kinds if any(name.startswith(m) if m[:1] != "." else m in name for m in marks))
            counts[kind] += tensor.numel() * (2 if tensor.dtype == torch.int8 else 1)
    return counts


def describe(config: ModelConfig, draft: nn.Module | None) -> str:
    """The layer table and the accounts of a configuration; `draft` is its draft head on the meta device."""
    plans, c = plan_layers(config), config
    lines = ["layer  part     mode     m  KV from  index from  candidate pool  Engram"]
    for p in plans:
        pool = "makes it" if p.makes_pool else "inside it" if p.uses_pool else ""
        lines.append(f"{p.layer:5}  {p.part:7}  {p.mode:7}  {p.ratio or '-'}  {'' if p.kv_source is None else p.kv_source:7}  "
                     f"{'' if p.index_source is None else p.index_source:10}  {pool:14}  {'yes' if p.engram is not None else ''}".rstrip())
    with torch.device("meta"):
        model = Transformer(c, Numerics(), draft=draft)
    cache = Cache(c, Numerics(), 1, 1, torch.device("meta"))
    n = parameter_accounts(c, model.named_parameters())
    total = sum(n.values())
    backbone = total - n["Engram tables"] - n["draft head"] - n["vision"]
    per_expert = 3 * c.hidden_size * c.moe_intermediate_size
    active = backbone - n["routed experts"] + c.num_hidden_layers * c.num_experts_per_tok * per_expert
    start = c.num_hidden_layers if c.decoder_start is None else c.decoder_start
    lower = {f"layers.{i}." for i in range(start)}
    encoder = parameter_accounts(c, (x for x in model.named_parameters() if any(x[0].startswith(m) for m in lower)))
    prefill = sum(encoder.values()) - encoder["Engram tables"] - encoder["routed experts"] + start * c.num_experts_per_tok * per_expert
    lines += ["", "parameters (logical: two to a byte of FP4, scales not counted)"]
    lines += [f"  {kind:34} {count / 1e9:10.4f} B" for kind, count in n.items() if count]
    for text, count, note in (
            ("total", total, ""),
            ("backbone", backbone, "all but Engram tables, draft head and vision"),
            ("active per decoded token", active, "whole embedding, head, Engram projections; the token's routed experts"),
            ("active per token of the prompt", prefill, f"layers 0-{start - 1} alone, neither embedding nor head")):
        lines += [f"  {text:34} {count / 1e9:10.4f} B"] + [f"    ({note})"] * bool(note)
    lines += [f"  {'bytes on disk':34} {sum(t.nbytes for t in model.parameters()):,}", "", "global KV, bytes per token"]
    per_token = 0.0
    for p in plans:
        if p.mode == "full":
            row = cache.main_rows.bytes + cache.key_rows.bytes
            per_token += row / p.ratio
            lines.append(f"  layer {p.layer:2}: ({cache.main_rows.bytes} main KV + {cache.key_rows.bytes} index key) / {p.ratio} = {row / p.ratio:g}")
    lines += [f"  total {per_token:g}", "", f"local state per sequence, bytes (rollback {cache.rollback})"]
    for what in dict.fromkeys(key[0] for key in cache.rings):
        rings = [t for key, t in cache.rings.items() if key[0] == what]
        lines.append(f"  {what:8} {sum(t.nbytes for t in rings):12,}   {len(rings)} rings of {' x '.join(map(str, rings[0].shape[1:]))}")
    return "\n".join(lines + [f"  total    {sum(t.nbytes for t in cache.rings.values()):12,}"])


def main(arguments: Sequence[str]) -> int:
    try:
        config = ModelConfig.from_json(arguments[0] if arguments else Path(__file__).resolve().parent / "config.json")
        with torch.device("meta"):
            draft = DSpark(config, Numerics()) if config.num_nextn_predict_layers else None
        print(describe(config, draft))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
