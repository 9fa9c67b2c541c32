"""Built-in worlds, one for each task: seeded, unlimited, and with gold attention. Imports only regard.data.

reviews: opinions with negation and contrast; review_words: their words and sentence patterns in two languages.
"""
