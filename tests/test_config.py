"""The configuration and the layer plan: what is refused, by which name, and what the released one means."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import accounts
from convert import DTYPES, checkpoint_name, checkpoint_schema
from dspark import DSpark
from golden_data import CHECKPOINT
from model import ModelConfig, Transformer, plan_layers
from quant import Numerics, Ranks
from small_models import THIRDS, WIDE_WINDOW, published

RELEASED = Path(__file__).parent.parent / "config.json"


def tiny_json() -> dict[str, Any]:
    return json.loads((CHECKPOINT / "config.json").read_text())


# ------------------------------------------------------------------------------------------------------------- refusals

REFUSED: list[tuple[dict[str, Any], str]] = [
    # sizes that do not divide the blocks
    ({"hidden_size": 168}, "hidden_size = 168 is not a multiple of 32"),
    ({"q_lora_rank": 100}, "q_lora_rank = 100 is not a multiple of 32"),
    ({"head_dim": 48}, "head_dim = 48 is not a multiple of 32"),
    ({"index_head_dim": 40}, "index_head_dim = 40 is not a multiple of 32"),
    ({"moe_intermediate_size": 80}, "moe_intermediate_size = 80 is not a multiple of 32"),
    ({"o_lora_rank": 30}, r"o_groups \* o_lora_rank = 90 is not a multiple of 32"),
    ({"engram_head_dim": 24}, "engram_head_dim = 24 is not a multiple of 32"),
    ({"o_groups": 4}, "o_groups = 4 does not divide num_attention_heads = 6"),
    ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15 must be even"),
    ({"qk_rope_head_dim": 34}, "qk_rope_head_dim = 34 must be even and at most head_dim and index_head_dim"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 exceeds n_routed_experts = 6"),
    ({"dspark_num_experts_per_tok": 6}, "dspark_num_experts_per_tok = 6 exceeds dspark_n_routed_experts = 5"),
    ({"sliding_window": 0}, "sliding_window = 0 must be at least 1"),
    ({"hc_mult": 0}, "hc_mult = 0 must be at least 1"),
    # sources
    ({"index_source_layer_ids": [2, 7, 9]}, "layer 5 is in kv_source_layer_ids but not in index_source_layer_ids"),
    (
        {"kv_source_layer_ids": [5], "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0]},
        "layer 2 has compress_ratios 2 but no layer up to it is in kv_source_layer_ids",
    ),
    (
        {"kv_source_layer_ids": [2], "index_source_layer_ids": [2, 5, 7, 9]},
        "layer 5 has compress_ratios 1 but its KV source, layer 2, has 2",
    ),
    ({"kv_source_layer_ids": [1, 5]}, "layer 1 is in kv_source_layer_ids but not in index_source_layer_ids"),
    (
        {"kv_source_layer_ids": [1, 2, 5], "index_source_layer_ids": [1, 2, 5, 7, 9]},
        r"layer 1 has compress_ratios 0 \(window only\) but is in kv_source_layer_ids",
    ),
    (
        {"index_source_layer_ids": [1, 2, 5, 7, 9]},
        r"layer 1 has compress_ratios 0 \(window only\) but is in index_source_layer_ids",
    ),
    ({"kv_source_layer_ids": [5, 2]}, r"kv_source_layer_ids = \[5, 2\] must ascend"),
    (
        {"index_source_layer_ids": [2, 5, 5, 7, 9]},
        r"index_source_layer_ids = \[2, 5, 5, 7, 9\] must ascend without repeats",
    ),
    ({"index_source_layer_ids": [2, 5, 7, 10]}, "index_source_layer_ids names layer 10, but there are 10 layers"),
    ({"engram_layer_ids": [1, 11]}, "engram_layer_ids names layer 11, but there are 10 layers"),
    (
        {"dspark_target_layer_ids": [7, 8, -1]},
        "dspark_target_layer_ids = .* must ascend|dspark_target_layer_ids names layer -1",
    ),
    # the pool
    (
        {"candidate_topk_blocks": 3},
        "candidate_topk_blocks = 3: a pool of 8-row blocks can hold fewer reachable rows than index_topk = 24",
    ),
    ({"candidate_source_layer_id": 6}, "candidate_source_layer_id = 6 is not in index_source_layer_ids"),
    (
        {"candidate_source_layer_id": 2},
        "layer 5 draws on the candidate pool of layer 2 but has another KV source, layer 5",
    ),
    # ratios
    (
        {"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1]},
        "compress_ratios has 10 entries; num_hidden_layers \\+ num_nextn_predict_layers = 13 are needed",
    ),
    (
        {"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 1, 0]},
        r"compress_ratios\[11\] = 1: a draft layer attends to its window only",
    ),
    ({"compress_ratios": [0, 0, 2, -2, 2, 1, 1, 1, 1, 1, 0, 0, 0]}, r"compress_ratios\[3\] = -2 is negative"),
    (
        {"compress_ratios": [0, 0, 2, 3, 2, 1, 1, 1, 1, 1, 0, 0, 0]},
        "layer 3 has compress_ratios 3 but its KV source, layer 2, has 2",
    ),
    # Engram, drafts, tokens
    ({"engram_num_embeddings": [1916]}, "engram_num_embeddings has 1 entries for 2 engram_layer_ids"),
    ({"dspark_block_size": 0}, "num_nextn_predict_layers > 0 needs dspark_block_size > 0"),
    (
        {"dspark_target_layer_ids": []},
        "num_nextn_predict_layers > 0 needs dspark_block_size > 0 and dspark_target_layer_ids",
    ),
    ({"dspark_noise_token_id": 640}, "dspark_noise_token_id = 640 is not a token: vocab_size = 640"),
    ({"engram_pad_token_id": -1}, "engram_pad_token_id = -1 is not a token"),
    # kinds of values, and mathematics that this model does not do
    ({"hidden_size": 160.5}, "hidden_size = 160.5 is not of type int"),
    ({"norm_topk_prob": 1}, "norm_topk_prob = 1 is not of type bool"),
    ({"compress_ratios": "two"}, "compress_ratios = 'two' is not a list of integers"),
    ({"swiglu_limit": None}, "swiglu_limit = None is not of type float"),
    ({"num_key_value_heads": 2}, "num_key_value_heads = 2; this model computes 1 only"),
    ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'; this model computes 'sqrtsoftplus' only"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; this model computes 'silu' only"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True; this model computes False only"),
]


@pytest.mark.parametrize("changes, sentence", REFUSED, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(REFUSED)])
def test_case_31_contradictions_are_refused_by_key_and_layer(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = tiny_json()
    config["text_config"] |= changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence) as error:
        ModelConfig.from_json(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key",
    sorted(
        set(tiny_json()["text_config"])
        - {
            "model_type",
            "initializer_range",
            "use_cache",
            "num_key_value_heads",
            "hidden_act",
            "attention_bias",
            "attention_dropout",
            "tie_word_embeddings",
            "n_shared_experts",
            "scoring_func",
            "topk_method",
            "rope_scaling",
        }
    ),
)
def test_case_31_a_missing_key_is_named(key: str) -> None:
    config = tiny_json()
    del config["text_config"][key]
    with pytest.raises(ValueError, match=f"the key {key} is missing"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda c: c.pop("text_config"), "the key text_config is missing"),
        (lambda c: c.pop("quantization_config"), "the key quantization_config is missing"),
        (lambda c: c.pop("eos_token_id"), "the key eos_token_id is missing"),
        (lambda c: c["text_config"].pop("rope_scaling"), "rope_scaling"),
        (lambda c: c["text_config"]["rope_scaling"].pop("factor"), "rope_scaling.factor is missing"),
        (lambda c: c["vision_config"].pop("patch_size"), "vision_config.patch_size is missing"),
        (
            lambda c: c["quantization_config"].update(weight_block_size=[128, 128]),
            r"quantization_config.weight_block_size = \[128, 128\]",
        ),
        (lambda c: c["quantization_config"].update(expert_dtype="fp8"), "quantization_config.expert_dtype = 'fp8'"),
    ],
)
def test_case_31_sections_are_checked_too(change: Callable[[dict[str, Any]], object], sentence: str) -> None:
    config = tiny_json()
    change(config)
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_dict(config)


def test_case_31_unknown_keys_load_and_are_listed_once(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tiny_json()
    config["text_config"]["new_trick"] = 3
    config["extra"], config["vision_config"]["more"] = {}, 1
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert ModelConfig.from_json(path) == ModelConfig.from_json(CHECKPOINT / "config.json")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and all(key in lines[0] for key in ("new_trick", "extra", "vision_config.more", "unknown"))


def test_known_configurations_load_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    for config in (json.loads(RELEASED.read_text()), tiny_json(), published(WIDE_WINDOW), published(THIRDS)):
        ModelConfig.from_dict(config)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "there is no configuration at .*config.json"),
        ("{", "not a readable JSON file"),
        ("[1]", "the key text_config is missing"),
        ("\xff\xfe", "is not a readable JSON file"),
        ('{"text_config": 3}', "the key text_config is missing"),
    ],
)
def test_files_that_are_no_configuration(content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_json(path)


# ---------------------------------------------------------------------------------------------------- the released plan


def test_the_released_plan_is_the_papers() -> None:
    """40 layers: two of windows, encoder to 19, decoder from 20; four KV sources, four more index sources, one pool."""
    config = ModelConfig.from_json(RELEASED)
    plans = plan_layers(config)
    assert len(plans) == 43 and [p.layer for p in plans] == list(range(43))
    modes = {"window": [0, 1, 40, 41, 42], "full": [2, 8, 14, 20], "reindex": [24, 28, 32, 36]}
    for p in plans:
        assert p.mode == next((mode for mode, layers in modes.items() if p.layer in layers), "reuse"), p
        assert p.part == ("encoder" if p.layer < 20 else "decoder" if p.layer < 40 else "draft")
        assert p.ratio == (0 if p.mode == "window" else 2 if p.layer < 20 else 1)
        sources = (
            [s for s in (2, 8, 14, 20) if s <= p.layer],
            [s for s in (2, 8, 14, 20, 24, 28, 32, 36) if s <= p.layer],
        )
        assert (p.kv_source, p.index_source) == (
            (None, None) if p.mode == "window" else (sources[0][-1], sources[1][-1])
        )
        assert p.makes_pool == (p.layer == 20) and p.uses_pool == (p.layer in (24, 28, 32, 36))
        assert p.engram == {1: 0, 14: 1}.get(p.layer)
    assert config.decoder_start == 20 and config.sliding_window == 128 and config.index_topk == 512
    assert config.dspark_target_layer_ids and min(config.dspark_target_layer_ids) >= 20


def test_a_decoder_needs_a_last_source_of_ratio_1() -> None:
    config = ModelConfig.from_dict(published(THIRDS))
    assert config.decoder_start == 3 and [p.part for p in plan_layers(config)] == ["encoder"] * 3 + ["decoder"] * 2
    same = published(THIRDS | dict(compress_ratios=[0, 3, 3, 3, 3], kv_source_layer_ids=[1, 3]))
    assert ModelConfig.from_dict(same).decoder_start is None
    assert {p.part for p in plan_layers(ModelConfig.from_dict(same))} == {"encoder"}
    none = published(
        THIRDS
        | dict(compress_ratios=[0] * 5, kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=-1)
    )
    assert ModelConfig.from_dict(none).decoder_start is None


def test_a_plan_is_made_from_the_configuration_alone() -> None:
    config = tiny_json()
    kept = copy.deepcopy(config)
    assert plan_layers(ModelConfig.from_dict(config)) == plan_layers(ModelConfig.from_dict(config)) and config == kept


# ------------------------------------------------------------------------------------------------ parameters and schema


@pytest.mark.parametrize("path", [RELEASED, CHECKPOINT / "config.json"], ids=["released", "tiny"])
def test_names_shapes_and_dtypes_of_the_model_are_those_of_the_checkpoint(path: Path) -> None:
    """Built on the meta device at full size, with vision and the draft head; experts are stacked."""
    config = ModelConfig.from_json(path)
    num = Numerics()
    with torch.device("meta"):
        model = Transformer(config, num, Ranks(), DSpark(config, num))
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad and parameter.is_meta, name
        if checkpoint_name(name) == name:
            found[name] = tuple(parameter.shape), parameter.dtype
        else:
            for e in range(parameter.shape[0]):
                found[checkpoint_name(name, e)] = tuple(parameter.shape[1:]), parameter.dtype
    wanted = {name: (spec.shape, DTYPES[spec.dtype]) for name, spec in checkpoint_schema(config).items()}
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    if path == RELEASED:
        assert len(found) == 96085


def test_ranks_that_do_not_divide_are_refused_by_name() -> None:
    config = ModelConfig.from_json(CHECKPOINT / "config.json")
    for size, what in ((3, "vocab_size"), (4, "num_attention_heads"), (5, "num_attention_heads")):
        with (
            torch.device("meta"),
            pytest.raises(ValueError, match=f"{what} = .* does not divide over {size} tensor-parallel ranks"),
        ):
            Transformer(config, Numerics(), Ranks(0, size))


@pytest.mark.parametrize("key, value", [
    ("dspark_markov_rank", 0), ("dspark_n_routed_experts", 0), ("engram_max_ngram_size", 1), ("engram_n_heads", 0),
    ("engram_compressed_vocab_size", 0), ("rope_theta", 0), ("rms_norm_eps", -1), ("hc_eps", float("nan")), ("rope_scaling", 3)])
def test_case_31_sizes_that_compute_nothing_are_refused(key: str, value: object) -> None:
    published = json.loads((Path(__file__).parent.parent / "tiny" / "config.json").read_text())
    published["text_config"][key] = value
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_dict(published)


def test_the_accounts_of_the_released_configuration_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert accounts.main([str(RELEASED)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for line in ("  total                                763.2053 B", "  active per decoded token              16.7925 B",
                 "    (layers 0-19 alone, neither embedding nor head)", "  total 890"):
        assert line in out.splitlines()
