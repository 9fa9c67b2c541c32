"""Sentiment: the class of a text, and which words decide it."""
