"""The product against the arrays recorded from the released code, bit for bit, in exact mode on the CPU.

Everything is read off by ordinary forward hooks on named modules. What each array is: golden_data.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convert import load_model
from golden_data import CHECKPOINT, difference, differences, golden
from model import Cache, Transformer
from quant import FakeQuant
from small_models import images_of


class Recorder:
    """Hooks that collect the arrays of a recording while a model with one row runs; `arrays` joins the chunks."""

    def __init__(self, model: Transformer) -> None:
        self.parts: dict[str, list[Tensor]] = defaultdict(list)
        self.config, self.handles = model.config, []
        for i, layer in enumerate(model.layers):
            self.before(layer, lambda args, i=i: {f"{i}.input": args[0][0], f"{i}.pre_mix": args[1][0]})
            self.after(layer, lambda args, out, i=i: {f"{i}.output": out[0][0]})
            self.after(layer.attn_norm, lambda args, out, i=i: {f"{i}.attn_in": out[0]})
            self.after(layer.attn, lambda args, out, i=i: {f"{i}.attn_out": out[0][0]})
            self.after(layer.ffn_norm, lambda args, out, i=i: {f"{i}.ffn_in": out[0]})
            self.after(layer.ffn, lambda args, out, i=i: {f"{i}.ffn_out": out[0]})
            self.after(
                layer.ffn.gate, lambda args, out, i=i: {f"{i}.route_weights": out[0], f"{i}.route_experts": out[1]}
            )
            if layer.engram is not None:
                self.after(
                    layer.engram,
                    lambda args, out, i=i: {
                        f"{i}.engram_in": args[0][0],
                        f"{i}.engram_rows": args[1][0],
                        f"{i}.engram_out": out[0],
                    },
                )
            if hasattr(layer.attn, "indexer"):
                self.after(layer.attn.indexer, lambda args, out, i=i: self.selection(i, out))

    def before(self, module: torch.nn.Module, names: Any) -> None:
        self.handles.append(module.register_forward_pre_hook(lambda _, args: self.put(names(args))))

    def after(self, module: torch.nn.Module, names: Any) -> None:
        self.handles.append(module.register_forward_hook(lambda _, args, out: self.put(names(args, out))))

    def put(self, arrays: dict[str, Tensor]) -> None:
        for name, value in arrays.items():
            self.parts[f"layers.{name}"].append(value)

    def selection(self, layer: int, out: Any) -> dict[str, Tensor]:
        """Selections -1 padded to a fixed width; the pool as a mask over rows, wide enough for any test."""
        rows = out.rows[0]
        arrays = {f"{layer}.topk": F.pad(rows, (0, self.config.index_topk - rows.shape[1]), value=-1)}
        if layer == self.config.candidate_source_layer_id:
            size, blocks = self.config.candidate_block_size, out.pool[0]
            mask = torch.zeros(blocks.shape[0], 64 + 1, dtype=torch.bool)
            mask[torch.arange(len(blocks)).unsqueeze(1), blocks] = True  # -1, no block, is the last column
            arrays[f"{layer}.candidates"] = mask[:, :-1].repeat_interleave(size, 1)
        return arrays

    def arrays(self) -> dict[str, Tensor]:
        for handle in self.handles:
            handle.remove()
        return {name: torch.cat(parts) for name, parts in self.parts.items()}


def record(
    model: Transformer, tokens: Tensor, chunks: Sequence[int], images: Any = None
) -> tuple[dict[str, Tensor], Cache]:
    recorder, cache, at = Recorder(model), model.new_cache(), 0
    logits, hidden = [], []
    for n in chunks:
        part = None if images is None else images.columns(at, at + n)
        out = model(tokens[None, at : at + n], cache, images=part)
        logits.append(out.logits[0])
        hidden.append(out.main_hidden[0])
        at += n
    arrays = recorder.arrays()
    return arrays | {"tokens": tokens, "logits": torch.cat(logits), "dspark.main_hidden": torch.cat(hidden)}, cache


def backbone(run: str) -> dict[str, Tensor]:
    """The recording without what the draft head and the vision tower made."""
    other = (
        "dspark.tokens",
        "dspark.logits",
        "dspark.confidence",
        "patches",
        "vit",
        "features",
        "types",
        "token_types",
    )
    return {name: value for name, value in golden(run).items() if name not in other}


@pytest.mark.parametrize("way", ["one_shot", "token_by_token"])
@pytest.mark.parametrize("run", ["text", "short"])
def test_golden_text_runs(tiny: Transformer, run: str, way: str) -> None:
    expected = backbone(run)
    total, prompt = len(expected["tokens"]), int(expected["prompt_length"])
    chunks = [total] if way == "one_shot" else [prompt] + [1] * (total - prompt)
    actual, _ = record(tiny, expected["tokens"], chunks)
    assert differences(actual, expected) == []


def test_golden_image_run_with_a_chunk_border_inside_the_span(tiny: Transformer) -> None:
    expected, image = backbone("image"), golden("image")
    grid = (8, 11)
    features = tiny.encode_image(image["patches"], grid)
    assert difference(features, image["features"]) is None
    types = F.pad(image["token_types"], (0, len(expected["tokens"]) - len(image["token_types"])), value=-1)
    images = images_of(types.tolist(), features)
    for chunks in ([84], [25, 9, 44] + [1] * 6):  # the span is 21..37
        actual, _ = record(tiny, expected["tokens"], chunks, images)
        assert differences(actual, expected) == []


def test_golden_arrays_see_every_layer_and_both_pruned_and_filling_selections(golden_text: dict[str, Tensor]) -> None:
    """What the equalities above are worth: selections drop rows, the pool drops blocks, routes use all experts."""
    assert (golden_text["layers.2.topk"][:40, -1] == -1).any() and (golden_text["layers.2.topk"][60:] >= 0).all()
    last = golden_text["layers.5.candidates"][-1]
    assert 0 < int(last.sum()) < len(last)
    for layer in range(10):
        assert set(golden_text[f"layers.{layer}.route_experts"].flatten().tolist()) == set(range(6))
    assert golden_text["logits"].argmax(-1).unique().numel() > 20


@pytest.mark.parametrize("kind", ["activations", "window_kv", "main_kv", "index_key", "index_query"])
def test_each_fake_quantisation_can_be_switched_off(kind: str, golden_text: dict[str, Tensor]) -> None:
    """Off, the run equals the twin without it; and it is not the golden run any more."""
    import twin

    tokens = golden_text["tokens"][:60]
    model = load_model(CHECKPOINT, exact=True, device="cpu", fake_quant=FakeQuant(**{kind: False}))
    actual, cache = record(model, tokens, [51, 9])
    expected = twin.forward(str(CHECKPOINT), tokens.tolist(), off=[kind])
    names = ["logits", *(f"layers.{i}.attn_out" for i in range(10)), *(f"layers.{i}.topk" for i in (2, 5, 7, 9))]
    assert differences(actual, {name: expected[name] for name in names}) == []
    assert difference(actual["logits"], golden_text["logits"][:60]) is not None
    bits = {"window_kv": cache.window_rows, "main_kv": cache.main_rows, "index_key": cache.key_rows}
    for name, codec in bits.items():
        assert (codec.bytes == 2 * codec.width) == (name == kind)  # such rows are stored in bfloat16
