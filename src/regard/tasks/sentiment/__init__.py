"""Text classification, such as sentiment analysis, with an attention weight for each word."""
