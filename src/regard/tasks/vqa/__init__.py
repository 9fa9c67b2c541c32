"""Answering questions about pictures: questions and pictures as numbers, stacked attention, an answer classifier."""
