"""Tasks: the data, model, loss, metrics and attention page of each use of attention, such as translation or speech.

Files of `regard.tasks` may import every package of `regard` except `studio`, `cli` and `bench`.

- `task`: the protocol that every task implements: `Task` and its records
- `catalog`: the list of tasks
- `config`: settings that every task has
- `config_overrides`: changes of settings by `--set key=value`
- `presets`: functions that build presets
- `training`: trains any task
- `evaluation`: evaluates any task
- `loading`: `regard.load`
- `inputs`: checks of the inputs of a predictor
- `inference`: predictions of a network in evaluation mode
- `live_runs`: runs that the studio (`regard studio`) queries, also while they are still training
- `hypotheses`: the answer of the interactive translator of the studio
- `attention_learning`: penalties on attention weights, and gradient estimators of hard attention
- `text_generation`: loss and beam search of tasks that generate text
- `deletion_test`: the faithfulness of attention weights, measured by deleting keys
- `example_files`: the example input that is stored with a run
- `joined_traces`: several predictions as one trace
- `watched_predictions`: predictions with the self-attention of their network
- `image_inputs`: images as inputs
- `image_features`: feature maps of frozen networks
- `world_examples`: generated training, validation and test examples
- `demonstration`: the task and the texts of `regard demo`

Each task has a folder: translation, sentiment, reading, captioning, vqa, speech, driving, glimpse. All folders
have the same file names: `task` (the `Task` record), `config`, `presets`, `material` (data), `codec`, `network`,
`predictor`, `scoring`.
"""
