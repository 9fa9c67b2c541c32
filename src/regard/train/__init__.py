"""Training: one loop for every model, with checkpoints that survive a crash.

The training code is independent of the models: `fit` takes a model, a loss function and settings. The only other part
of regard that it imports is `regard.kernels`.

- `loop`: `fit`, which runs updates, validation and checkpoints
- `train_settings`: settings of a run
- `updates`: gradients of one update
- `cuda_graph_gradients`: gradients of one update, replayed by a CUDA graph
- `optimizer`: AdamW
- `learning_rate`: schedules
- `weight_averaging`: moving average, mean of checkpoints
- `validation`: validation loss and metrics on held-out data
- `training_state`: counts of steps, epochs and tokens, and the best validation so far
- `resumable_batches`: the order of the data
- `random_state`: states of random generators
- `checkpointing`: saves and restores a run
- `checkpoint_files`: checkpoints on disk
- `checkpoint_pieces`: checkpoints of which each worker writes its own rows
- `weight_files`: weights in safetensors
- `atomic_files`: atomic writes
- `manifest`: checksums of a run's files
- `run_directory`: a run on disk
- `directory_lock`: one process per directory
- `data_fingerprints`: whether data files have changed
- `metrics_log`: metrics.jsonl
- `model_card`: README.md of a run
- `progress_display`: bar or lines
- `interruption`: signals, and how training ends early
- `memory_check`: whether a model fits the machine
- `distributed`: the workers that torchrun starts, and their collectives
- `gradient_sums`: gradients summed over workers
- `sharded_model`: a model sharded among workers by FSDP2
- `sharded_tensors`: gathers and shards tensors
- `errors`: `RunError`
"""
