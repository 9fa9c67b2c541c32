"""A grammar that generates English sentences with Chinese translations and word alignments. Imports only regard.data.

- `lexicon`: the words of both languages
- `inflection`: the forms of English words
- `noun_phrases`: noun phrases
- `verb_groups`: verbs with tense, aspect and negation
- `predicates`: verbs with their complements
- `adverbials`: adverbials of place, time and manner
- `verb_clauses`: clauses with a verb other than "be"
- `clause_patterns`: copular, existential and passive clauses; wh-questions; commands
- `sentences`: sentences of one or several clauses
"""
