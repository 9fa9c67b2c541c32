"""Images: readers. Imports only regard.data.

- `image_files`: decoding to RGB
- `image_folders`: folders of pictures and files of parts
- `image_store`: decoded pictures on disk
- `captions`: pictures with captions
- `image_questions`: questions about pictures
- `idx`: MNIST's format
"""
