"""Tasks: data, model, loss, metrics and view of each use of attention. May import every layer below.

- `task`: the protocol: `Task` and its records
- `catalog`: the list of tasks
- `config`: settings of every task
- `config_overrides`: `--set key=value`
- `presets`: functions for presets
- `training`: trains any task
- `evaluation`: evaluates any task
- `loading`: `regard.load`
- `inputs`: inputs of a predictor
- `inference`: predictions of a network
- `live_runs`: runs for the studio
- `attention_learning`: penalties and estimators
- `text_generation`: loss and beam search of texts
- `deletion_test`: faithfulness
- `example_files`: the example of a run
- `joined_traces`: several predictions as one trace
- `watched_predictions`: predictions with self-attention
- `image_inputs`: pictures as inputs
- `image_features`: feature maps of frozen networks
- `world_examples`: parts of a world
- `demonstration`: what `regard demo` trains

One folder for each task: translation, sentiment, reading, captioning, vqa, speech, driving, glimpse. They
have the same file names: `task` (the record), `config`, `presets`, `material` (data), `codec`, `network`, `predictor`,
`scoring`.
"""
