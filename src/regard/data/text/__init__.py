"""Texts as people have them: files of labelled texts, and texts cut into tokens. Imports only regard.data.

lines: text lines of bounded length; labelled: texts with labels from tables, JSONL, folders and trees;
labelled_parts: training, validation and test; table_columns: which column is which; trees: labelled phrases;
tokens: words, characters and sub-words with their places in the text.
passages, questions, babi: passages with questions about them, of SQuAD, JSONL and bAbI.
"""
