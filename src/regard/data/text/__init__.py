"""Text: readers and tokenisers. Imports only regard.data.

- `lines`: lines of a text file
- `parallel_text`: pairs of sentences
- `corpus`: parallel text on disk, indexed
- `alignment`: word alignments and their error rate
- `bpe`: byte-level sub-words
- `bpe_dropout`: random segmentations with a seed
- `vocabulary`: whole words as token numbers
- `tokens`: words, characters or sub-words with positions
- `labelled`: texts with labels
- `labelled_parts`: their training, validation and test parts
- `table_columns`: which column of a table is which
- `trees`: labelled parse trees
- `passages`: words with character positions
- `questions`: questions about passages: SQuAD, JSONL
- `babi`: bAbI's files
"""
