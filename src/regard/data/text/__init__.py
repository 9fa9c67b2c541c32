"""Readers of text files, and tokenisers. Imports only regard.data.

- `lines`: reads the lines of a text file
- `parallel_text`: reads pairs of sentences, a source and its translation
- `corpus`: stores parallel text on disk with an index, for corpora larger than memory
- `alignment`: word alignments and the alignment error rate
- `bpe`: byte-level BPE sub-words
- `bpe_dropout`: random BPE segmentations that depend only on a seed
- `vocabulary`: maps whole words to token numbers
- `tokens`: splits texts into words, characters or sub-words with positions
- `labelled`: reads texts with class labels
- `labelled_parts`: divides labelled texts into training, validation and test parts
- `table_columns`: finds the columns of a table that hold the texts and the labels
- `trees`: reads parse trees with a label at each phrase
- `passages`: splits a text into words with character positions
- `questions`: reads questions about passages from SQuAD's JSON or JSONL
- `babi`: reads the files of the bAbI tasks
"""
