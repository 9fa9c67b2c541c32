"""Kernels written in Triton. These modules import Triton at their top, so they are imported where they are launched.

- `additive/`: additive attention, forward and backward;
- `decode_attention`: a few queries against a long memory, additive or dot scores;
- `short_attention`: sequences of at most 64, each head in one tile;
- `window_attention`: a window of keys around each query;
- `range_attention`: a range of keys for each block of queries, from bands, lengths and segments, with any bias;
  `range_pairs`: its masks and scores, tile by tile; `range_sums`: the gradient of a table or bias; `segment_bounds`:
  the ranges of segments;
- `local_windows`: local attention, a window around a centre for each query;
- `score_tiles`: tiles of scores, and sums of their rows, for the next three;
- `weight_summaries`: log-sum-exp, entropy and received weights of softmax, without a value;
- `largest_weights`: the largest weights of softmax and their keys, without a value;
- `full_weights`: all weights of softmax, written tile by tile;
- `linear/`: attention in O(n) with elu or Performer features, in chunks;
- `entmax`: sparsemax and entmax of whole rows, forward and backward;
- `beam_attention`: attention of a beam's hypotheses over one row's keys, and a sum with layer norm;
- `beam_update`, `token_ranking`: the update of a beam search, and the best tokens of each row;
- `gru_step`: the elementwise part of a GRU step;
- `gru_attention_step`: a step of a GRU decoder with additive attention;
- `few_row_products`: float32 products of a few rows;
- `softmax_loss`: loss and gradient of rows of logits;
- `row_norms`: rows divided by their norm;
- `attended_values`: weighted sums in which a masked value of NaN has no effect;
- `relu_dropout`: relu and dropout in one kernel.
"""
