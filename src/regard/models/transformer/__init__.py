"""The Transformer: encoder, decoder, their layers, and beam search in them. Imports models, nn and core."""
