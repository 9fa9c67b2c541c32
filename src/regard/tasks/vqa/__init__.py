"""Visual question answering: the answer to a question about an image, by several hops of attention over its cells."""
