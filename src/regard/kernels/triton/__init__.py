"""Kernels written in Triton. These modules import Triton at their top, so they are imported where they are launched.

- `additive/`: additive attention, forward and backward;
- `decode_attention`: attention of a few queries over many keys, with additive or dot scores;
- `short_attention`: attention over sequences of at most 64 positions, each head in one tile;
- `window_attention`: a window of keys around each query;
- `range_attention`: attention of each block of queries over a range of keys, given by bands, lengths and segments, with
  any bias; `range_pairs`: the masks and scores of its tiles; `range_sums`: the gradient of its table or bias;
  `segment_bounds`: the ranges of keys that belong to segments;
- `local_windows`: local attention, a window around a centre for each query; `local_launches`: its launches;
- `score_tiles`: tiles of scores and sums of their rows, for the next three modules;
- `weight_summaries`: log-sum-exp, entropy and received weights of softmax, computed from queries and keys alone;
- `largest_weights`: the largest weights of softmax and their keys, computed from queries and keys alone;
- `full_weights`: all weights of softmax, written tile by tile; `learned_weights`: the same with gradients;
- `linear/`: linear attention, O(n), with elu or Performer features, in chunks;
- `entmax`: sparsemax and entmax of whole rows, forward and backward;
- `beam_attention`: attention of a beam's hypotheses over the keys of their sequence, and a sum with layer norm;
- `beam_update`: the update of a beam search; `token_ranking`: the best tokens of each row;
- `gru_step`: the elementwise part of a GRU step;
- `gru_attention_step`: a step of a GRU decoder with additive attention;
- `few_row_products`: float32 matrix products of a few rows;
- `softmax_loss`: cross-entropy of rows of logits, and its gradient;
- `row_norms`: rows divided by their norm;
- `attended_values`: weighted sums in which a masked value of NaN has no effect;
- `relu_dropout`: relu and dropout in one kernel.
"""
