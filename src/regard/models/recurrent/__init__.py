"""Recurrent encoder and decoder of token sequences. Of regard, they import `models`, `nn`, `core` and `kernels`.

- `encoder`: `RecurrentEncoder`
- `decoder`: `RecurrentDecoder`, with attention before or after the recurrent cell (Bahdanau's or Luong's order)
- `cells`: single steps of GRU and LSTM
- `gru_sequence`: runs a GRU over whole sequences with hand-written loops, if the loops support the GRU
- `additive_loops`: runs a decoder with additive attention by hand-written loops, if the loops support the decoder
- `token_embeddings`: embeddings computed once for each distinct token
"""
