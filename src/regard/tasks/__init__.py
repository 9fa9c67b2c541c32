"""Tasks: data, model, loss, metric and view of each use, put together. Imports every layer below."""
