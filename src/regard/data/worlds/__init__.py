"""Built-in data: seeded generators of synthetic examples with gold attention, the inputs that determine each output.

Imports only regard.data. The modules, with the task that each of them generates data for:

- `sentence_pairs`: pairs of English and Chinese sentences (translation)
- `grammar/`: the grammar of these sentences (translation)
- `random_choices`: seeded random choices, the parts of a data set, aligned words (all tasks)
- `reviews`: reviews with labels (sentiment)
- `review_words`: the words and sentence patterns of the reviews (sentiment)
- `stories`: short stories with questions (reading)
- `story_events`: the events of the stories (reading)
- `scenes`: positions and relations of shapes (captioning, visual questions)
- `shapes`: drawing of coloured shapes (captioning, visual questions)
- `scene_captions`: captions of scenes (captioning)
- `scene_questions`: one question about each scene (visual questions)
- `further_questions`: more questions about one scene (visual questions)
- `digits`: drawn digits (glimpses)
- `utterances`: spoken words from a formant synthesiser (speech)
- `phones`: the sounds and words of the utterances (speech)
- `traffic`: a traffic simulator (driving)
- `traffic_roads`: the roads and road users of the simulator (driving)
- `traffic_expert`: the expert driver of the simulator (driving)
"""
