"""Recurrent encoder and decoder of token sequences. Imports models, nn, core and kernels.

- `encoder`: `RecurrentEncoder`
- `decoder`: `RecurrentDecoder`: Bahdanau's and Luong's order
- `cells`: single steps of GRU and LSTM
- `gru_sequence`: a GRU over whole sequences on the CPU
- `additive_loops`: calls of the hand-written loops, and the decoders that can use them
- `token_embeddings`: embeddings computed once for each distinct token
"""
