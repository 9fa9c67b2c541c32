"""Built-in worlds: seeded generators of examples with gold attention (the inputs that determine each output).

Imports only regard.data.

- `sentence_pairs`: translation: English and Chinese
- `grammar/`: the grammar of these sentences
- `random_choices`: seeded choices, parts of the data, words with their links
- `reviews`: sentiment
- `review_words`: its words and patterns
- `stories`: reading
- `story_events`: its events
- `scenes`: positions and relations of shapes
- `shapes`: drawing of shapes
- `scene_captions`: captioning
- `scene_questions`: visual questions
- `further_questions`: more questions about one scene
- `digits`: glimpses: drawn digits
- `utterances`: speech: formant synthesis
- `phones`: its sounds and words
- `traffic`: driving: the simulator
- `traffic_roads`: its roads and road users
- `traffic_expert`: its expert driver
"""
