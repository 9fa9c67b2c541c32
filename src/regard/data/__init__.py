"""Readers of data files, generators of synthetic examples whose correct attention is known, and batches.

Imports nothing else of regard.

- `text/`: tokenisers, readers of parallel text, labelled texts, questions
- `vision/`: image files, captions, questions about images
- `audio/`: sound files and transcripts
- `driving/`: driving logs and traffic scenes
- `worlds/`: generators of synthetic examples with gold attention, the inputs that a correct answer depends on
- `data_files`: opens files, gzipped or not; `DataError`
- `json_records`: JSON and JSONL files
- `checksums`: SHA-256 checksums of a folder's files
- `packed`: sequences of many short texts or lists, stored in a few large arrays
- `token_batches`: batches of a limited number of tokens
- `record_batches`: padded batches of records
"""
