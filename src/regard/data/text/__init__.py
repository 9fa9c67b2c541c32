"""Loaders of text data in the formats people have."""
