"""Visual question answering: the answer to a question about a picture, by stacked attention."""
