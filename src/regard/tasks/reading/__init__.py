"""Reading comprehension: a passage and a question in, the span of the passage that answers it out."""
