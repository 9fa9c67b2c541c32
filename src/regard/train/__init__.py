"""Training: one loop for every model, with checkpoints that survive a crash.

It is independent of models: it takes callables and records. Of regard it imports kernels alone.

- `loop`: `fit`: updates, validation, checkpoints
- `train_settings`: settings of a run
- `updates`: gradients of one update
- `cuda_graph_gradients`: the same by CUDA graph
- `optimizer`: AdamW
- `learning_rate`: schedules
- `weight_averaging`: moving average, mean of checkpoints
- `validation`: figures of held-out data
- `training_state`: counts of a run
- `resumable_batches`: the order of the data
- `random_state`: states of random generators
- `checkpointing`: saves and restores a run
- `checkpoint_files`: checkpoints on disk
- `checkpoint_pieces`: tensors that each worker writes in part
- `weight_files`: weights in safetensors
- `atomic_files`: atomic writes
- `manifest`: checksums
- `run_directory`: a run on disk
- `directory_lock`: one process per directory
- `data_fingerprints`: whether data files have changed
- `metrics_log`: metrics.jsonl
- `model_card`: README.md of a run
- `progress_display`: bar or lines
- `interruption`: signals, and how training ends early
- `memory_check`: whether a model fits the machine
- `distributed`: torchrun: workers and collectives
- `gradient_sums`: gradients over workers
- `sharded_model`: FSDP2
- `sharded_tensors`: gathering and sharding
- `errors`: `RunError`
"""
