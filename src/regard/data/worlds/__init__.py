"""Built-in worlds: generators of examples with known gold attention. Imports only regard.data.

reviews, review_words: sentiment; stories, story_events: reading; shapes, scenes, scene_captions, scene_questions,
scene_further: drawn scenes with captions and questions; digits: drawn digits; utterances, phones: synthesised speech.
"""
