"""Data: readers of files, built-in worlds (generated data with gold attention), and batches. Imports nothing of regard.

- `text/`: tokenisers, parallel text, labelled texts, questions
- `vision/`: image files, captions, questions about images
- `audio/`: sound files and transcripts
- `driving/`: driving logs and traffic scenes
- `worlds/`: generators of examples with gold attention
- `data_files`: files, gzipped or not, and `DataError`
- `json_records`: JSON and JSONL files
- `checksums`: SHA-256 of a folder's files
- `packed`: many small items in few arrays
- `token_batches`: batches of a limited number of tokens
- `record_batches`: padded batches of records
"""
