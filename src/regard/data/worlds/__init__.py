"""Built-in worlds: generators of examples with known gold attention, one module per task."""
