"""Reading comprehension: the span of a passage that answers a question.

Beside the files that every task has (`regard.tasks`):
- `answers`: answers from the output of the pointer
"""
