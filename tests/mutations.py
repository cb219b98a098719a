"""One-line mistakes of the product, each of which must make a named test fail.

    python tests/mutations.py [--only N, N-M or part of a name] [--jobs J] [--list]

The product is copied to a temporary folder, one mistake is made there, and the named test is run. Exit status 1 when a
mistake survives, no longer applies (its line has changed: bring it up to date), or its test fails without any mistake.
"""
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    name: str
    file: str
    edits: tuple[tuple[str, str], ...]   # (fragment, which occurs once, what takes its place)
    test: str                            # a node below tests/


def m(name: str, file: str, test: str, *edits: str) -> Mutation:
    return Mutation(name, file, tuple(zip(edits[::2], edits[1::2])), test)


GOLDEN = "test_goldens.py::test_golden_text_runs[text-one_shot]"
DECODE = "test_goldens.py::test_golden_text_runs[text-token_by_token]"
IMAGE = "test_goldens.py::test_golden_image_run_with_a_chunk_border_inside_the_span"
MECHANISM, INVARIANT = "test_mechanisms.py::test_", "test_invariants.py::test_"
CASE, QUANT = "test_cases.py::test_", "test_quant.py::test_"
CED, SES, LONG = "test_ced.py::test_", "test_session.py::test_", "test_long_context.py::test_"

MUTATIONS = [
    # number formats
    m("a scale one step too large when amax is exactly 448 * 2^k", "quant.py",
      QUANT + "case_22_nasty_blocks_equal_the_twin[e4m3_e8m0-amax exactly 448 * 2^k]",
      "constant(1.14 * 2.0**-8", "constant(1.15 * 2.0**-8"),
    m("E2M1 tie at 0.75 rounded down", "quant.py", QUANT + "e2m1_midpoints_and_their_neighbours",
      "(v + magic).sub_(magic)", "(v * (1 - 2.0**-23) + magic).sub_(magic)"),
    m("the even column in the high nibble", "quant.py", QUANT + "every_pair_of_e2m1_codes_at_every_scale_is_their_product[dtype1-e2m1_e8m0]",
      "torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)",
      "torch.stack([values.repeat_interleave(16), values.repeat(16)], -1)"),
    m("a power of two for the main KV's scale", "quant.py",
      QUANT + "case_22_every_bf16_value_and_random_blocks_equal_the_twin[e2m1_e4m3]",
      "(amax / _SIX).clamp_max(448).to(torch.float8_e4m3fn).float()",
      "torch.exp2(torch.log2(amax / _SIX).ceil()).clamp_max(256)"),
    m("quotients above 6 not clamped", "quant.py",
      QUANT + "case_22_nasty_blocks_equal_the_twin[e2m1_e4m3-quotient above 6]",
      "(blocks / scale).clamp_(-fmt.largest, fmt.largest), scale", "(blocks / scale) % 6.5, scale"),
    m("a lower floor for FP8 scales", "quant.py", QUANT + "floors_give_zero_blocks_a_scale",
      "448.0, 1e-4)", "448.0, 1e-5)"),
    m("weight scales tiled instead of repeated", "quant.py",
      QUANT + "dequantised_weights_equal_the_twin_and_are_exact_in_bf16",
      "decode_e8m0(scale).repeat_interleave(32, 0)", "decode_e8m0(scale).repeat(32, 1)"),
    m("partial sums of ranks rounded", "quant.py", QUANT + "partial_sums_travel_unrounded",
      "y = self.reduce.sum(y)", "y = self.reduce.sum(to_bf16(y).to(y.dtype))"),
    m("RMSNorm without eps", "quant.py", QUANT + "rms_norm_equals_the_twin",
      "torch.addcmul(eps, norm, norm, value=1 / x.shape[-1])", "(norm * norm / x.shape[-1])"),
    m("index queries not quantised", "model.py", GOLDEN,
      "fake_quantise(q, E2M1_E8M0, operand) if", "q.to(operand) if"),
    m("wo_a takes a quantised activation", "model.py", GOLDEN,
      "cast(o, operand).view(B * S,", "fake_quantise(o, E4M3_E8M0, operand).view(B * S,"),

    # rotary
    m("rotary on the first dims", "model.py", MECHANISM + "rotation_turns_adjacent_pairs_of_the_last_dims_only",
      "y[..., -2 * turn.shape[-1]:]", "y[..., :2 * turn.shape[-1]]"),
    m("rotary in halves instead of adjacent pairs", "model.py",
      MECHANISM + "rotation_turns_adjacent_pairs_of_the_last_dims_only",
      "torch.view_as_complex(last.view(*last.shape[:-1], turn.shape[-1], 2)).mul_(turn)",
      "last.copy_(torch.view_as_real(torch.complex(*last.chunk(2, -1)) * turn).transpose(-1, -2).flatten(-2))"),
    m("a float64 angle", "model.py", MECHANISM + "angles_are_float32_products",
      "(positions.to(torch.float32).unsqueeze(-1) * freqs)", "(positions.to(torch.float64).unsqueeze(-1) * freqs)"),
    m("YaRN ramp the other way round", "model.py", MECHANISM + "case_10_frequencies_of_the_released_layers",
      "freqs / yarn.factor * ramp + freqs * (1 - ramp)", "freqs / yarn.factor * (1 - ramp) + freqs * ramp"),
    m("one theta for window-only layers and others", "model.py",
      MECHANISM + "case_10_every_layer_has_one_table_for_all_it_rotates",
      "key = plan.ratio > 0, id(positions)", "key = plan.ratio >= 0, id(positions)"),
    m("inverse rotation missing", "model.py", GOLDEN,
      "self.project(rotate(o, back))", "self.project(o)"),
    m("attention turned the wrong way back", "model.py", GOLDEN,
      "rotate(o, back)", "rotate(o, turn)"),
    m("pooled group rotated at its last token", "model.py", MECHANISM + "case_3_compressed_rows_and_keys_of_ratio_3",
      "turn, _ = tables.of(self.plan, first)", "turn, _ = tables.of(self.plan, first + self.plan.ratio - 1)"),
    m("index key made from the rotated latent", "model.py", MECHANISM + "case_3_compressed_rows_and_keys_of_ratio_3",
      "self.indexer.key(latent, turn, cache))",
      "self.indexer.key(rotate(latent.unsqueeze(2), turn).squeeze(2), turn, cache))"),

    # window, compressor, cache
    m("window one position too long", "kv_cache.py", MECHANISM + "sparse_attention_equals_the_twin[0-ordinary]",
      "(ahead >= self.window)", "(ahead > self.window)"),
    m("queries see what follows them", "kv_cache.py", GOLDEN,
      "(ahead < 0) |", "(ahead < -1) |"),
    m("window one position too short in decoding", "kv_cache.py", DECODE,
      "(ahead >= self.window)", "(ahead >= self.window - 1)",
      "if q1 - q0 > 1 or max(", "if True or max("),
    m("the window of a batch's longest row for all", "kv_cache.py", INVARIANT + "i2_window_128",
      "min(held))", "max(held))"),
    m("a shorter row of a batch not masked", "kv_cache.py", "test_dspark.py::test_rollback[windows]",
      "or max(held) > back", "or min(held) > back"),
    m("a ring slot kept one token too long", "kv_cache.py",
      INVARIANT + "i1_every_chunking_gives_the_same_bits[thirds-1, 2, 3, 37]",
      "torch.where(latest >= self.start, depth", "torch.where(latest > self.start, depth"),
    m("an open group rounded to bfloat16", "model.py", MECHANISM + "open_groups_are_rounded_to_float32[False]",
      "torch.bfloat16 if plan.ratio == 1 else torch.float32", "torch.bfloat16"),
    m("an open group not rounded", "model.py", MECHANISM + "open_groups_are_rounded_to_float32[False]",
      "torch.bfloat16 if plan.ratio == 1 else torch.float32", "torch.bfloat16 if plan.ratio == 1 else None"),
    m("softmax over channels instead of tokens", "model.py",
      MECHANISM + "case_3_latents_of_every_chunking_equal_the_twin[3-chunks0]",
      "score.softmax(2)", "score.softmax(3)"),
    m("truncation counted from the present length", "kv_cache.py", INVARIANT + "rollbacks_do_not_add_up",
      "if 0 < n < highest - self.rollback and n < now:", "if 0 < n < now - self.rollback:"),
    m("a fork shares storage", "kv_cache.py", INVARIANT + "a_fork_within_a_growing_store",
      "t.clone() if rows is None else t[taken]", "t if rows is None else t[taken]"),
    m("padded tokens reach the embedding", "model.py",
      INVARIANT + "i2_case_25_rows_of_a_ragged_batch_are_as_alone[thirds--1]",
      "input_ids = input_ids.masked_fill(padding.to(input_ids.device), 0)", "pass"),
    m("dead slots are read", "kv_cache.py",
      INVARIANT + "i6_case_6_poison_in_every_dead_slot_changes_nothing[bfloat16-thirds-lengths2]",
      "live = torch.minimum(positions.clamp_min(first), self.end - 1)", "live = positions"),
    m("storage allocated for max_length at once", "kv_cache.py",
      "test_cache.py::test_storage_grows_in_steps_and_keeps_what_it_holds",
      "capacity = min(max(-(-rows // 256) * 256, old.shape[1] * 5 // 4), max(limit, rows))",
      "capacity = max(limit, rows)"),

    # indexer and selection
    m("a block of queries stops one index key short", "model.py", GOLDEN,
      "max(start + q1 for start in chunk.starts)", "max(start + q1 - 1 for start in chunk.starts)"),
    m("index keys as far as the shortest row of a batch", "model.py", INVARIANT + "i2_window_128",
      "max(start + q1 for start in chunk.starts)", "min(start + q1 for start in chunk.starts)"),
    m("blocks of queries padded with row 0", "model.py",
      INVARIANT + "blocks_of_queries_keys_and_experts_change_nothing[thirds]",
      "k - chosen.shape[-1]), value=-1)", "k - chosen.shape[-1]), value=0)"),
    m("scores without ReLU", "model.py", MECHANISM + "case_14_index_scores_are_sums_of_weighted_rectified_products",
      "parts.append(torch.bmm(w.reshape(B * Q, 1, h), dots.relu_())",
      "parts.append(torch.bmm(w.reshape(B * Q, 1, h), dots)"),
    m("scores in the pool without ReLU", "model.py",
      MECHANISM + "case_12_the_newest_block_stays_in_the_pool_and_confines_later_sources",
      "self.ranks.sum(torch.bmm(w.reshape(B * Q, 1, h), dots.relu_())",
      "self.ranks.sum(torch.bmm(w.reshape(B * Q, 1, h), dots)"),
    m("head weights rectified", "model.py", MECHANISM + "case_14_opposite_products_do_not_cancel",
      "self.weights_proj(x).to(self.num.arith)", "self.weights_proj(x).relu().to(self.num.arith)"),
    m("ties to the highest position", "model.py", MECHANISM + "case_13_ties_at_the_cut_go_to_the_lowest_position",
      "equal.cumsum(-1) <= missing", "equal.flip(-1).cumsum(-1).flip(-1) <= missing"),
    m("newest block not pinned", "model.py",
      MECHANISM + "case_12_the_newest_block_stays_in_the_pool_and_confines_later_sources",
      "blocks.masked_fill(pinned, torch.inf)", "blocks"),
    m("candidate mask dropped", "model.py", GOLDEN,
      "confined = plan.uses_pool and", "confined = False and"),
    m("selection of the source before reused", "model.py", GOLDEN,
      "given = self.indexer(x, qr, turn, chunk, cache, None if given is None else given.pool)",
      ("given = self.indexer(x, qr, turn, chunk, cache, None if given is None else given.pool) if "
       "plan.mode == 'full' else given")),
    m("index keys of another source", "model.py", GOLDEN,
      "cache.key_rows.unpack(cache.keys[self.plan.kv_source][:, j",
      "cache.key_rows.unpack(cache.keys[min(cache.keys)].repeat(1, 2, 1)[:, j"),
    m("a group visible before it is closed", "model.py", MECHANISM + "case_13_duplicate_keys_and_keys_out_of_reach",
      "visible = ((chunk.positions[:, q0:q1] + 1) // plan.ratio)",
      "visible = ((chunk.positions[:, q0:q1] + plan.ratio) // plan.ratio)"),
    m("the newest row not yet visible", "model.py", GOLDEN,
      "visible = ((chunk.positions[:, q0:q1] + 1) // plan.ratio)",
      "visible = (chunk.positions[:, q0:q1] // plan.ratio)"),

    # attention
    m("sink scaled like a score", "model.py", MECHANISM + "the_sink_is_in_the_denominator_only_and_not_scaled",
      "sink = cast(sink, self.num.arith)", "sink = cast(sink, self.num.arith) * self.scale"),
    m("row 0 in place of an empty pick", "model.py",
      MECHANISM + "case_8_empty_selections_and_extreme_sinks_stay_finite",
      "if min(chunk.starts) + q0 + 1 <", "if False and min(chunk.starts) + q0 + 1 <"),
    m("a norm of every query head", "model.py", CASE + "case_11_queries_have_no_norm_per_head",
      "torch.cat([q, kv], 2)", "torch.cat([to_bf16(F.rms_norm(q.float(), q.shape[-1:])), kv], 2)"),

    # experts
    m("bias used as weight", "model.py", MECHANISM + "case_20_the_bias_selects_and_never_weighs",
      "weights = scores.gather(-1, experts)", "weights = biased.gather(-1, experts)"),
    m("bias_vl ignored", "model.py", IMAGE,
      "torch.where(in_image.unsqueeze(-1), self.bias_vl.to", "torch.where(in_image.unsqueeze(-1), self.bias.to"),
    m("softplus exact above 20", "model.py", MECHANISM + "case_20_router_logits_from_minus_200_to_200",
      "F.softplus(product(x, self.weight, self.num.arith))",
      "F.softplus(product(x, self.weight, self.num.arith), threshold=1000.0)"),
    m("routing weights not normalised", "model.py", MECHANISM + "case_20_router_logits_from_minus_200_to_200",
      "weights = weights / weights.sum(-1, keepdim=True).add_(self.tiny)", "pass"),
    m("up clamped from above only", "model.py", MECHANISM + "case_21_clamps_up_on_both_sides_and_gate_from_above",
      "up.clamp(-limit, limit)", "up.clamp_max(limit)"),
    m("gate clamped on both sides", "model.py", MECHANISM + "case_21_clamps_up_on_both_sides_and_gate_from_above",
      "gate.clamp_max(limit)", "gate.clamp(-limit, limit)"),
    m("routing weight after w2", "model.py", MECHANISM + "case_21_experts_equal_the_twin[60]",
      "hidden = swiglu(gate, up, self.limit, weights)", "hidden = swiglu(gate, up, self.limit)",
      "w2.transpose(1, 2), self.num))",
      "w2.transpose(1, 2), self.num) * weights)"),
    m("keys of a block scored with the wrong offset", "model.py",
      INVARIANT + "blocks_of_queries_keys_and_experts_change_nothing[thirds]",
      "[:, j : min(j + step, n)]", "[:, max(j - 1, 0) : max(j - 1, 0) + min(step, n - j)]"),
    m("features of an image row given to the row before", "model.py",
      CASE + "case_25_rows_with_and_without_images_are_as_alone",
      "order = (self.types == IMAGE).flatten().cumsum(0).view(self.types.shape) - 1",
      "order = (self.types == 1).cumsum(1) - 1"),
    m("gate and up matrices change places", "model.py", GOLDEN,
      "rows, matrices = [], (self.w1, self.w3, self.w2)", "rows, matrices = [], (self.w3, self.w1, self.w2)"),
    m("expert weights that were assigned are ignored", "model.py",
      MECHANISM + "experts_side_by_side_are_the_parameters_wherever_they_go",
      "if self.rows is not None and self.w1.in_rows and self.w2.in_rows and self.w3.in_rows:", "if self.rows is not None:"),
    m("a rotation overwrites what it is given", "model.py",
      MECHANISM + "rotation_turns_adjacent_pairs_of_the_last_dims_only", "y = y.clone() if y is x else y", "pass"),
    m("routing weight after a rounding of its own", "model.py", MECHANISM + "case_21_experts_equal_the_twin[60]",
      "return to_bf16(y if weight is None else y.mul_(weight))",
      "return to_bf16(y) if weight is None else to_bf16(to_bf16(y) * weight)"),

    # mHC
    m("mixing matrix transposed", "model.py",
      MECHANISM + "case_19_streams_are_mixed_by_columns_of_a_matrix_that_is_not_symmetric",
      "torch.baddbmm(y, comb.transpose(-1, -2), x", "torch.baddbmm(y, comb, x"),
    m("one Sinkhorn step too many", "model.py",
      MECHANISM + "sinkhorn_counts_its_iterations_and_adds_eps_where_the_paper_does",
      "range(self.iters - 1)", "range(self.iters)"),
    m("Sinkhorn begins with columns", "model.py", GOLDEN,
      ".softmax(1).flatten", ".softmax(0).flatten"),
    m("pre without eps", "model.py", MECHANISM + "case_19_hyper_connections_equal_the_twin",
      "np.array([eps, 0, 0])[part]", "np.array([0, 0, 0])[part]"),
    m("experts read with the mix of attention", "model.py", GOLDEN,
      "self.ffn_norm(collapse(x, attn_pre)", "self.ffn_norm(collapse(x, pre)"),
    m("the model may change dtype", "model.py", MECHANISM + "case_19_a_model_keeps_its_dtypes",
      "for kept in (torch.float32, torch.bfloat16)):", "for kept in ()):"),

    # Engram
    m("Engram rows zeroed", "engram.py", GOLDEN,
      "values[begin:end] = dequantise(codes, scales, E4M3_E8M0, torch.bfloat16)", "values[begin:end] = 0"),
    m("look-back goes on beyond an image", "engram.py", CASE + "case_16_look_back_stops_at_image_spans",
      "blocked = (windows < 0).cumsum(-1) > 0", "blocked = windows < 0"),
    m("Engram adds at image tokens", "engram.py", CASE + "case_16_look_back_stops_at_image_spans",
      "return out if shut is None else torch.where(shut[..., None, None], h, out)", "return out"),
    m("look-back before the start finds token class 0", "model.py", DECODE,
      "masked_fill(wanted < 0, -1)", "masked_fill(wanted < 0, 0)"),

    # prefill, head
    m("replay one window too short", "model.py", INVARIANT + "exact_replay_equals_full[4096]",
      "(len(self.layers) - start) * (c.sliding_window - 1) + 1",
      "(len(self.layers) - start - 1) * (c.sliding_window - 1) + 1"),
    m("windows before a gap stay in reach", "model.py", INVARIANT + "second_turns_of_a_bounded_prefill[turns1]",
      "[w if s <= b else s for w, s, b in zip(known[part], starts, begun)]", "list(known[part])"),
    m("a prompt that does not fit fails half way", "model.py",
      CASE + "case_28_a_prompt_too_long_for_the_cache_leaves_it_usable[full]",
      "cache.chunk(counts, ids.shape[1], \"encoder\")   #", "#"),
    m("the last padded token's logits", "model.py", INVARIANT + "logits_of_the_last_token_are_those_of_all",
      "(chunk.end - chunk.start - 1).squeeze(-1).clamp_min(0)",
      "torch.full_like(chunk.end.squeeze(-1), x.shape[1] - 1)"),
    m("argmax to the highest of equal values", "model.py",
      MECHANISM + "case_13_argmax_takes_the_lowest_of_equal_values",
      "torch.where(x == x.amax(-1, keepdim=True), place, x.shape[-1]).amin(-1)",
      "torch.where(x == x.amax(-1, keepdim=True), place, -1).amax(-1)"),
    m("drafts hear of one stream only", "model.py", GOLDEN,
      "to_bf16(x.to(self.num.arith).mean(2))", "x[:, :, 0]"),
    m("an unknown key passes in silence", "config.py",
      "test_config.py::test_case_31_unknown_keys_load_and_are_listed_once",
      "print(f\"{source}: unknown keys", "str(f\"{source}: unknown keys"),
    m("a padded query sees rows that are not there", "model.py",
      INVARIANT + "a_padded_query_near_the_end_of_storage_stays_inside_it", ".clamp_max(n).unsqueeze(-1)", ".unsqueeze(-1)"),
    m("NaN passes as zero", "quant.py", QUANT + "a_nan_stays_visible_whatever_the_size", "amax.mul_(_STRETCH", "amax.nan_to_num_(1.0).mul_(_STRETCH"),
    m("snapshots of another cache accepted", "kv_cache.py", INVARIANT + "a_snapshot_of_another_cache_is_refused",
      "snapshot.owner is not self._owner", "False"),
    m("replay forgets rows without tokens", "model.py", INVARIANT + "a_replay_leaves_rows_without_tokens_alone",
      "[w if n == 0 else b if", "[b if"),
    m("a head that never read counts its windows as present", "model.py", INVARIANT + "a_cache_filled_without_a_draft_head_has_no_draft_windows",
      'cache.commit(chunk, cache.PARTS if self.mtp is not None else ("encoder", "decoder"))', "cache.commit(chunk)"),
    # prefill ways, sessions, long context
    # prefill
    m("a replay one token too short", "model.py", CED+"exact_replay_equals_full_with_images_engram_and_drafts[88-4096]",
      "(len(self.layers) - start) * (c.sliding_window - 1) + 1)", "(len(self.layers) - start) * (c.sliding_window - 1))"),
    m("bounded replay of W - 1 tokens", "model.py", CED+"bounded_equals_the_twin_with_images_engram_and_drafts[88-4096]",
      '"bounded": c.sliding_window}', '"bounded": c.sliding_window - 1}'),
    m("a long second turn reads across the gap", "model.py", CED+"second_turns_keep_valid_window_rows_and_never_read_across_a_gap[turns3-80]",
      "[w if s <= b else s for w, s, b in zip(known[part], starts, begun)]", "[w for w, s, b in zip(known[part], starts, begun)]"),
    m("a short second turn cuts valid window rows", "model.py", CED+"rows_of_a_ragged_prefill_are_as_alone[bounded]",
      "[w if s <= b else s for w, s, b in zip(known[part], starts, begun)]", "list(starts)"),
    m("draft windows keep their old beginning", "model.py", CED+"bounded_equals_the_twin_with_images_engram_and_drafts[88-4096]",
      'for part in ("decoder", "draft"):   # after', 'for part in ("decoder",):   # after'),
    m("the draft head does not see a bounded prefill", "model.py", CED+"exact_replay_equals_full_with_images_engram_and_drafts[88-4096]",
      'self.mtp.observe(hidden, tables, self._part(chunk, cache, "draft"), cache)',
      'logits != "last" and self.mtp.observe(hidden, tables, self._part(chunk, cache, "draft"), cache)'),
    m("images forgotten in the decoder", "model.py", CED+"bounded_equals_the_twin_with_images_engram_and_drafts[70-4096]",
      "None if self.config.vision_config is None else in_image)", "None)"),
    m("global KV made before the border layer's Engram", "model.py", CED+"global_kv_open_groups_and_ngrams_are_the_same_bits_in_all_ways[bounded-4096]",
      "self.layers[start].publish(entered,", "self.layers[start].publish(state.x,"),
    m("the border layer's Engram applied twice", "model.py", CED+"bounded_equals_the_twin_with_images_engram_and_drafts[88-4096]",
      "new = [state.x, state.pre_mix,", "new = [entered, state.pre_mix,"),
    m("the decoder's replay writes global KV", "model.py", CED+"second_turns_keep_valid_window_rows_and_never_read_across_a_gap[turns3-80]",
      "starts=starts, appends=False), self._tables(), []", "starts=[0 for _ in starts], appends=True), self._tables(), []"),
    m("an interrupted bounded prefill stays half done", "model.py", CED+"an_interrupted_prefill_leaves_a_usable_cache[bounded-5-1]",
      'if way != "full":       # the encoder', 'if way == "never":       # the encoder'),
    m("an interrupted full prefill forgets its chunks", "model.py", CED+"an_interrupted_prefill_leaves_a_usable_cache[full-1-3]",
      'if way != "full":       # the encoder', 'if way != "never":       # the encoder'),
    m("n-grams of the tail from the wrong tokens", "model.py", CED+"bounded_equals_the_twin_with_images_engram_and_drafts[88-4096]",
      "tokens = Tokens(ngrams, None if", "tokens = Tokens(ngrams.roll(1, 1), None if"),
    m("all prompt tokens decoded", "model.py", CED+"bounded_prefill_costs_at_most_056_of_full_in_counted_flops",
      '"bounded": c.sliding_window}', '"bounded": 10**9}'),
    # forks
    m("a fork to a length takes the origin back", "kv_cache.py", CED+"a_fork_of_an_earlier_length[4]",
      "            twin.truncate(to)\n        twin._owner", "            self.truncate(to)\n        twin._owner"),
    m("forked rows keep the first row's windows", "kv_cache.py", CED+"forks_of_rows_keep_each_rows_own_past",
      "ring.index_select(0, index.to(ring.device))", "ring.index_select(0, 0 * index.to(ring.device))"),
    # replay, sessions
    m("replay at positions from 0", "model.py", LONG+"a_short_decode_at_the_end_of_a_million_tokens_equals_the_twin[1048571-chunks0]",
      'chunk = cache.chunk(counts, ids.shape[1], "encoder", starts=starts, appends=False)', 'chunk = cache.chunk(counts, ids.shape[1], "encoder", starts=[0 for _ in starts], appends=False)'),
    m("replay reads old window rows", "model.py", SES+"images_among_the_last_tokens_are_replayed_from_their_rows[79]",
      "{part: list(cache.lengths) for part in cache.PARTS}  # none", "{part: [0 for _ in cache.lengths] for part in cache.PARTS}  # none"),
    m("replayed windows said to begin at 0", "model.py", SES+"a_resumed_session_is_approximate_and_what_it_was_given_is_exact",
      "self.mtp is None and part == \"draft\" else s\n", "self.mtp is None and part == \"draft\" else 0\n"),
    m("replay writes compressed rows", "model.py", SES+"the_replay_reads_global_kv_and_writes_none",
      '"encoder", starts=starts, appends=False)', '"encoder", starts=starts, appends=True)'),
    m("Engram look-back missing in a replay", "session.py", SES+"a_replay_long_enough_makes_the_windows_exact[120]",
      "before = model.engram_index.compress(tokens[None, :first]", "before = -1 - 0 * model.engram_index.compress(tokens[None, :first]"),
    m("n-gram ring not restored", "session.py", SES+"with_windows_a_session_goes_on_bit_for_bit[88]",
      'saved["ngram"] = model.engram_index.compress', 'saved["unused"] = model.engram_index.compress'),
    m("image spans not dead after loading", "session.py", SES+"with_windows_a_session_goes_on_bit_for_bit[79]",
      "compress(tokens[back:], types[back:] != TEXT)", "compress(tokens[back:])"),
    m("open groups not saved", "session.py", SES+"with_windows_a_session_goes_on_bit_for_bit[95]",
      'if key[0] != "ngram":                            # which', 'if key[0] == "window":                            # which'),
    m("rows overwritten before a rollback saved as live", "session.py", SES+"tokens_can_be_taken_back_as_far_as_before[3-None-4]",
      'highest = max(n, facts["highest"] - facts["rollback"] + cache.rollback)', "highest = n"),
    m("image rows from the wrong end", "session.py", SES+"images_among_the_last_tokens_are_replayed_from_their_rows[79]",
      "return rows[len(rows) - k :]", "return rows[:k]"),
    m("digest not compared", "session.py", SES+"a_file_with_one_wrong_byte_is_refused",
      '!= envelope["sha256"]', '== ""'),
    m("weights not compared", "session.py", SES+"sessions_of_other_models_are_refused",
      "weights = weights_digest(model.checkpoint)", 'weights = ""'),
    m("configuration not compared", "session.py", SES+"sessions_of_other_models_are_refused",
      '"configuration": config,', '"configuration": "",'),
    m("written in place", "session.py", SES+"saving_is_atomic",
      "write_atomically(file, [serialise(tensors, metadata)])", "file.write_bytes(serialise(tensors, metadata)); write_atomically(file, [serialise(tensors, metadata)])"),
    m("the random stream begins anew in a resumed chat", "generate.py", SES+"a_chat_goes_on_another_day[--session]",
      "        self.sampler.generator.set_state(", "        torch.Generator().set_state("),
    m("a thinking chat saved behind its reasoning", "generate.py", SES+"a_thinking_chat_is_saved_where_its_next_prompt_takes_it_up",
      "if at_prompt and self.snapshots else", "if False else"),
    # long context
    m("Reindex layers score every position", "model.py", LONG+"reindex_layers_gather_the_pools_rows_in_decode",
      "gathered = confined and", "gathered = False and"),
    m("the pool does not confine", "model.py", LONG+"a_needle_far_back_is_selected_and_survives_the_pool[True-decoded]",
      "confined = plan.uses_pool and", "confined = False and"),
    m("positions as float16 before the angle", "model.py", LONG+"a_short_decode_at_the_end_of_a_million_tokens_equals_the_twin[1048571-chunks0]",
      "positions.to(torch.float32)", "positions.to(torch.bfloat16).to(torch.float32)"),
    m("index keys beyond the first block ignored", "model.py", LONG+"a_short_decode_at_the_end_of_a_million_tokens_equals_the_twin[1048571-chunks0]",
      "for j in range(0, n, step):", "for j in (0, max(0, n - step)) if n > 2 * step else range(0, n, step):"),
    m("scan of a ratio-2 layer counted at full length", "session.py", LONG+"decode_cost_equals_a_count_of_the_products_that_are_run[700]",
      "m, held = plan.ratio, context // plan.ratio if plan.ratio else 0", "m, held = plan.ratio, context if plan.ratio else 0"),
    m("pool not counted in Reindex layers", "session.py", LONG+"decode_cost_of_the_released_model",
      "min(held, pool) if plan.uses_pool else held", "held"),
    m("index working set not bounded", "model.py", LONG+"prefill_memory_stays_below_the_stated_bound[70000-20-1048576]",
      "for q0, q1 in chunk.blocks(per_query * arith.itemsize):\n            visible", "for q0, q1 in chunk.blocks(1):\n            visible"),
    # commands and benchmarks
    m("the first prefill counts", "benchmark.py",
      "test_generate.py::test_the_first_prefill_of_a_benchmark_does_not_count", "median(took[1:] or took)", "median(took)"),
    m("Ctrl-C turned on for those who ignore it", "generate.py",
      "test_generate.py::test_ctrl_c_during_the_imports_leaves_no_traceback[SIG_IGN-True-1]",
      "    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:", "    if True:"),
    m("a timer left in place", "benchmark.py",
      "test_generate.py::test_random_models_are_prepared_and_timers_leave_nothing_behind",
      "            del module.dense", "            pass"),
    m("random layers not prepared", "benchmark.py",
      "test_generate.py::test_random_models_are_prepared_and_timers_leave_nothing_behind",
      "            module.prepare()", "            pass"),
    m("a full context refused", "convert.py", "test_generate.py::test_a_context_may_be_filled_to_its_last_token",
      "if tokens + decoded > limit:", "if tokens + decoded >= limit:"),
]


def stale(mutation: Mutation) -> list[str]:
    """Fragments that do not occur exactly once any more."""
    text = (ROOT / mutation.file).read_text()
    return [old for old, _ in mutation.edits if text.count(old) != 1]


def copy_product(target: Path) -> None:
    """The product's modules and tests; the data are linked, not copied."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, target)
    for name in ("config.json", "pyproject.toml"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    (target / "tests").mkdir()
    for path in (ROOT / "tests").iterdir():
        if path.suffix == ".py":
            shutil.copy(path, target / "tests")
        elif path.is_dir() and path.name != "__pycache__":
            (target / "tests" / path.name).symlink_to(path)
    if (ROOT / "tiny").exists():
        (target / "tiny").symlink_to(ROOT / "tiny")


def run_tests(directory: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    nodes = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *nodes]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment)


def survives(mutation: Mutation) -> str | None:
    """None when the named test fails, as it must; else why not."""
    if stale(mutation):
        return f"no longer applies: {stale(mutation)[0]!r} is not in {mutation.file} exactly once"
    with tempfile.TemporaryDirectory() as folder:
        copy_product(Path(folder))
        path = Path(folder) / mutation.file
        text = path.read_text()
        for old, new in mutation.edits:
            text = text.replace(old, new)
        path.write_text(text)
        result = run_tests(Path(folder), [mutation.test])
    if result.returncode == 0:
        return "survived"
    if result.returncode != 1:   # 2 and more: pytest could not run the test, which proves nothing
        return "its test could not run: " + (result.stdout + result.stderr).strip().splitlines()[-1]
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make one-line mistakes and see that the tests notice.")
    parser.add_argument("--only", help="a number, a range such as 40-50, or a part of names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    chosen = list(enumerate(MUTATIONS, 1))
    if options.only is not None:
        first, _, last = options.only.partition("-")
        numbers = range(int(first), int(last or first) + 1) if (first + last).isdigit() and first else None
        chosen = [(i, mutation) for i, mutation in chosen
                  if (options.only in mutation.name if numbers is None else i in numbers)]
    if options.list or not chosen:
        print("\n".join(f"{i:3} {mutation.name}: {mutation.test}" for i, mutation in chosen) or "no such mutation")
        return 0 if chosen else 1
    with tempfile.TemporaryDirectory() as folder:
        copy_product(Path(folder))
        result = run_tests(Path(folder), sorted({mutation.test for _, mutation in chosen}))
    if result.returncode != 0:
        print("\n".join(result.stdout.splitlines()[-15:]))
        print("without any mistake a named test fails: nothing can be said")
        return 1
    failures = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for (i, mutation), outcome in zip(chosen, pool.map(survives, (mutation for _, mutation in chosen))):
            failures += outcome is not None
            print(f"{i:3} {'caught' if outcome is None else outcome.upper():8} {mutation.name}", flush=True)
    print(f"{len(chosen) - failures} of {len(chosen)} caught")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
