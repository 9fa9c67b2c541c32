"""Capture of each kind of attention call while a model runs under `regard.watch`. Imports look and core.

- `captured_call`: a captured call, the check of its weights, and its gradient
- `sdpa_calls`: calls of F.scaled_dot_product_attention
- `flex_calls`: calls of FlexAttention
- `multihead_modules`: nn.MultiheadAttention and modules that contain it, such as nn.Transformer
- `softmax_calls`: attention that is written with a softmax
- `score_matrices`: the queries and keys from which hand-written attention computed its scores
- `transformers_calls`: the attention interface of Hugging Face transformers
- `regard_calls`: calls of regard.attention
- `missed_modules`: a report of attention modules in which no call was captured
"""
