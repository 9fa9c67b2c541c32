"""Machine translation, with attention over the source for each word.

Beside the files that every task has (`regard.tasks`):
- `hypotheses`: the answer of `interactive`
- `interactive`: forced prefixes and alternatives, for the studio
"""
