"""Machine translation, with attention over the source sentence for each translated word.

This folder has the files that every task has (see `regard.tasks`), and:
- `interactive`: translation with forced prefixes and alternatives, for the studio (`regard studio`)
"""
