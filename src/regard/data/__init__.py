"""Data: readers of files, built-in worlds with gold attention, and batches. Imports nothing of regard.

- `text/`: tokenisers, parallel text, labelled texts, questions
- `vision/`: image files, captions, questions about images
- `audio/`: sound files and transcripts
- `driving/`: driving logs and traffic scenes
- `worlds/`: generators of examples with gold attention
- `data_files`: files plain or gzipped, and `DataError`
- `json_records`: JSON and JSONL files
- `checksums`: SHA-256 of a folder's files
- `packed`: many small items in few arrays
- `token_batches`: order of batches by a budget of tokens
- `record_batches`: padded batches of records
"""
