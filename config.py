"""The configuration, and what follows from it once: which layer is what.

`ModelConfig` is the published config.json with its names; `plan_layers` says for every layer its mode, ratio, KV source,
index source and pool. Every contradiction of a configuration fails here, in a sentence that names the key and the layer.
"""
from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from vision import VisionConfig


@dataclass(frozen=True)
class RopeScaling:
    """YaRN settings of the layers with compressed rows."""
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The published config.json, its nested text_config laid flat; fields carry the published names."""
    vocab_size: int
    hidden_size: int                    # D
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int            # H
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int                 # W
    compress_ratios: tuple[int, ...]    # m of every layer, draft layers included; 0: window only
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int                        # N, residual streams
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision_config: VisionConfig | None = None

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read a config.json. ValueError names the key that is missing, contradictory or not what the model computes;
        unknown keys are listed once on stderr."""
        path = Path(path)
        try:
            published = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there is no configuration at {path}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
            raise ValueError(f"{path} is not a readable JSON file: {error}") from None
        return cls.from_dict(published, str(path))

    @classmethod
    def from_dict(cls, published: dict[str, Any], source: str = "config") -> ModelConfig:
        if not isinstance(published, dict) or not isinstance(published.get("text_config"), dict):
            raise ValueError(f"{source}: the key text_config is missing")
        if not isinstance(published.get("quantization_config"), dict):
            raise ValueError(f"{source}: the key quantization_config is missing")
        flat = {**published["text_config"], **{k: v for k, v in published.items() if k.endswith("_token_id")}}
        for where, given in (("", flat), ("quantization_config.", published["quantization_config"])):
            for key, wanted in _ONLY.items():
                if key.startswith(where) and "." not in key[len(where):] and given.get(key[len(where):], wanted) != wanted:
                    raise ValueError(f"{source}: {key} = {given[key[len(where):]]!r}; this model computes {wanted!r} only")
        vision = published.get("vision_config")
        if vision is not None and not isinstance(vision, dict):
            raise ValueError(f"{source}: vision_config = {vision!r} is not a section of keys and values")
        if isinstance(flat.get("rope_scaling"), dict) and flat["rope_scaling"].get("rope_type", "yarn") != "yarn":
            raise ValueError(f"{source}: rope_scaling.rope_type = {flat['rope_scaling']['rope_type']!r}; this model computes 'yarn' only")
        known = {f.name for f in fields(cls)}
        unknown = set(flat) - known - {k.split(".")[-1] for k in _ONLY} - _IGNORED
        unknown |= set(published) - _TOP_LEVEL - known
        unknown |= {f"vision_config.{k}" for k in vision or {}} - {f"vision_config.{f.name}" for f in fields(VisionConfig)} - {
            "vision_config.model_type"}
        if unknown:
            print(f"{source}: unknown keys, ignored: {', '.join(sorted(unknown))}", file=sys.stderr)
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name == "vision_config":
                values[f.name] = None if vision is None else _section(VisionConfig, vision, f"{source}: vision_config.")
            elif f.name == "rope_scaling":
                values[f.name] = _section(RopeScaling, flat.get(f.name, {}), f"{source}: rope_scaling.")
            elif f.name not in flat:
                raise ValueError(f"{source}: the key {f.name} is missing")
            else:
                values[f.name] = _typed(f.type, flat[f.name], f"{source}: {f.name}")
        config = cls(**values)
        plan_layers(config)
        return config

    @property
    def decoder_start(self) -> int | None:
        """First layer of the causal decoder: the last KV source, when it is a Full layer of ratio 1; else None."""
        last = self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else None
        return last if last is not None and self.compress_ratios[last] == 1 and last in self.index_source_layer_ids else None


# keys with a single value that this model computes, and keys that say nothing about the mathematics
_ONLY = {"num_key_value_heads": 1, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
         "tie_word_embeddings": False, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
         "quantization_config.quant_method": "fp8", "quantization_config.activation_scheme": "dynamic",
         "quantization_config.weight_block_size": [32, 32], "quantization_config.scale_fmt": "ue8m0",
         "quantization_config.expert_dtype": "fp4"}
_IGNORED = {"model_type", "initializer_range", "use_cache"}
_TOP_LEVEL = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "quantization_config",
              "text_config", "vision_config"}


def _typed(kind: str, value: Any, name: str) -> Any:
    kind = str(kind)
    if kind.startswith("tuple"):
        if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
            raise ValueError(f"{name} = {value!r} is not a list of integers")
        return tuple(value)
    fits = {"int": type(value) is int, "float": type(value) in (int, float), "bool": type(value) is bool}.get(kind, True)
    if not fits:
        raise ValueError(f"{name} = {value!r} is not of type {kind}")
    return float(value) if kind == "float" else value


def _section(kind: type, values: dict[str, Any], name: str) -> Any:
    """A nested section as its dataclass; the error names the key that is missing or of the wrong type."""
    if not isinstance(values, dict):
        raise ValueError(f"{name.rstrip('.')} = {values!r} is not a section of keys and values")
    out = {}
    for f in fields(kind):
        if f.name not in values and f.default is MISSING:
            raise ValueError(f"{name}{f.name} is missing")
        if f.name in values:
            out[f.name] = _typed(f.type, values[f.name], name + f.name)
    return kind(**out)


@dataclass(frozen=True)
class LayerPlan:
    """What one layer is. Everything structural is decided here, once."""
    layer: int
    mode: str                 # "window": sliding window only; "full", "reindex", "reuse": Compressed Sparse Attention 2
    ratio: int                 # m: tokens per compressed row, 0 for window only
    kv_source: int | None      # the layer whose main KV rows this layer attends to
    index_source: int | None   # the layer whose selection of rows it uses
    makes_pool: bool           # candidate source of the hierarchical indexer
    uses_pool: bool            # confined to the candidate pool
    part: str                  # "encoder", "decoder" (causal encoder-decoder) or "draft"
    engram: int | None         # index of its Engram table


def plan_layers(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The backbone's layers, then the draft layers. Every contradiction of a configuration raises a ValueError here that
    names the key and the layer."""
    c = config
    _check_sizes(c)
    n, total = c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) != total:
        raise ValueError(f"compress_ratios has {len(c.compress_ratios)} entries; num_hidden_layers + "
                         f"num_nextn_predict_layers = {total} are needed")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, key)
        if list(ids) != sorted(set(ids)):
            raise ValueError(f"{key} = {list(ids)} must ascend without repeats")
        for i in ids:
            if not 0 <= i < n:
                raise ValueError(f"{key} names layer {i}, but there are {n} layers")
    for i in c.kv_source_layer_ids:
        if i not in c.index_source_layer_ids:
            raise ValueError(f"layer {i} is in kv_source_layer_ids but not in index_source_layer_ids: new rows need an index")
    pool = c.candidate_source_layer_id
    if pool >= 0 and pool not in c.index_source_layer_ids:
        raise ValueError(f"candidate_source_layer_id = {pool} is not in index_source_layer_ids")
    plans, kv_source, index_source = [], None, None
    for i, ratio in enumerate(c.compress_ratios[:n]):
        if ratio < 0:
            raise ValueError(f"compress_ratios[{i}] = {ratio} is negative")
        is_kv, is_index = i in c.kv_source_layer_ids, i in c.index_source_layer_ids
        if ratio == 0 and (is_kv or is_index):
            raise ValueError(f"layer {i} has compress_ratios 0 (window only) but is in "
                             f"{'kv_source_layer_ids' if is_kv else 'index_source_layer_ids'}")
        kv_source = i if is_kv else kv_source
        index_source = i if is_index else index_source
        if ratio > 0:
            if kv_source is None:
                raise ValueError(f"layer {i} has compress_ratios {ratio} but no layer up to it is in kv_source_layer_ids")
            if c.compress_ratios[kv_source] != ratio:
                raise ValueError(f"layer {i} has compress_ratios {ratio} but its KV source, layer {kv_source}, has "
                                 f"{c.compress_ratios[kv_source]}")
        uses_pool = is_index and 0 <= pool < i
        if uses_pool and kv_source != max(s for s in c.kv_source_layer_ids if s <= pool):
            raise ValueError(f"layer {i} draws on the candidate pool of layer {pool} but has another KV source, "
                             f"layer {kv_source}: candidate_source_layer_id does not fit")
        mode = "window" if ratio == 0 else "full" if is_kv else "reindex" if is_index else "reuse"
        start = c.decoder_start
        plans.append(LayerPlan(
            i, mode, ratio, kv_source if ratio else None, index_source if ratio else None, i == pool, uses_pool,
            "decoder" if start is not None and i >= start else "encoder",
            c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None))
    for i in range(n, total):
        if c.compress_ratios[i] != 0:
            raise ValueError(f"compress_ratios[{i}] = {c.compress_ratios[i]}: a draft layer attends to its window only")
        plans.append(LayerPlan(i, "window", 0, None, None, False, False, "draft", None))
    return tuple(plans)


def _check_sizes(c: ModelConfig) -> None:
    for key in ("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts", "num_experts_per_tok",
                "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks",
                "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings"):
        if getattr(c, key) < 1:
            raise ValueError(f"{key} = {getattr(c, key)} must be at least 1")
    blocks = [("hidden_size", c.hidden_size), ("q_lora_rank", c.q_lora_rank), ("head_dim", c.head_dim),
              ("index_head_dim", c.index_head_dim), ("moe_intermediate_size", c.moe_intermediate_size),
              ("o_groups * o_lora_rank", c.o_groups * c.o_lora_rank)]
    if c.engram_layer_ids:
        blocks.append(("engram_head_dim", c.engram_head_dim))
    for key, value in blocks:
        if value % 32:
            raise ValueError(f"{key} = {value} is not a multiple of 32, the block of the quantised formats")
    if c.num_attention_heads % c.o_groups:
        raise ValueError(f"o_groups = {c.o_groups} does not divide num_attention_heads = {c.num_attention_heads}")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        raise ValueError(f"qk_rope_head_dim = {c.qk_rope_head_dim} must be even and at most head_dim and index_head_dim")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ValueError(f"num_experts_per_tok = {c.num_experts_per_tok} exceeds n_routed_experts = {c.n_routed_experts}")
    if c.candidate_source_layer_id >= 0 and (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1 < c.index_topk:
        raise ValueError(f"candidate_topk_blocks = {c.candidate_topk_blocks}: a pool of {c.candidate_block_size}-row blocks "
                         f"can hold fewer reachable rows than index_topk = {c.index_topk}")
    if len(c.engram_layer_ids) != len(c.engram_num_embeddings):
        raise ValueError(f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for "
                         f"{len(c.engram_layer_ids)} engram_layer_ids")
    for key in ("rope_theta", "compress_rope_theta", "routed_scaling_factor"):
        if not getattr(c, key) > 0:
            raise ValueError(f"{key} = {getattr(c, key)} must be greater than 0")
    if not c.rope_scaling.factor > 0:
        raise ValueError(f"rope_scaling.factor = {c.rope_scaling.factor} must be greater than 0")
    for key in ("rms_norm_eps", "hc_eps"):
        if not getattr(c, key) >= 0:
            raise ValueError(f"{key} = {getattr(c, key)} must not be negative")
    if c.engram_layer_ids:
        for key, least in (("engram_max_ngram_size", 2), ("engram_n_heads", 1), ("engram_compressed_vocab_size", 1), ("engram_vocab_size", 1)):
            if getattr(c, key) < least:
                raise ValueError(f"{key} = {getattr(c, key)} must be at least {least}")
    if c.num_nextn_predict_layers:
        for key in ("dspark_n_routed_experts", "dspark_num_experts_per_tok", "dspark_markov_rank"):
            if getattr(c, key) < 1:
                raise ValueError(f"{key} = {getattr(c, key)} must be at least 1")
        if c.dspark_block_size < 1 or not c.dspark_target_layer_ids:
            raise ValueError("num_nextn_predict_layers > 0 needs dspark_block_size > 0 and dspark_target_layer_ids")
        if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
            raise ValueError(f"dspark_num_experts_per_tok = {c.dspark_num_experts_per_tok} exceeds "
                             f"dspark_n_routed_experts = {c.dspark_n_routed_experts}")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id",
                "dspark_noise_token_id"):
        if not 0 <= getattr(c, key) < c.vocab_size:
            raise ValueError(f"{key} = {getattr(c, key)} is not a token: vocab_size = {c.vocab_size}")
