"""The grammar of the built-in English and Chinese sentences. Imports only regard.data.

- `lexicon`: words of both languages
- `inflection`: forms of English words
- `noun_phrases`: noun phrases
- `verb_groups`: tense, aspect and negation
- `predicates`: verbs with their complements
- `adverbials`: place, time and manner
- `verb_clauses`: clauses with a verb
- `clause_patterns`: copular, existential, passive clauses; questions
- `sentences`: sentences of one or several clauses
"""
