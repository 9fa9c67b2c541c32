"""Machine translation: text in, text out, and where each word came from."""
