"""Recurrent encoder and decoder of token sequences. Imports models, nn and core."""
