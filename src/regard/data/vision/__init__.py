"""Readers of pictures and of data about pictures. Imports only regard.data.

- `image_files`: decodes image files to RGB
- `image_folders`: finds the pictures of a data set, and its files for training, validation and test
- `image_store`: caches decoded pictures on disk
- `captions`: reads pictures with captions
- `image_questions`: reads questions about pictures
- `idx`: reads idx files, the format of MNIST
"""
