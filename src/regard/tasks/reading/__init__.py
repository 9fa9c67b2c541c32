"""Reading comprehension: the span of a passage that answers a question.

This folder has the files that every task has (see `regard.tasks`), and:
- `answers`: answers from the output of the span pointer (`regard.models.span_pointer`)
"""
