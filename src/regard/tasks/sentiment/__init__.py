"""Sentiment: the class of a text, with a weight for each word."""
