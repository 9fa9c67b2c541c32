"""Observing attention: `watch`, traces, drawings and pages. Imports core only.

- `watch`: `regard.watch`
- `capture/`: how each kind of attention call is captured
- `trace`: `regard.Trace`
- `attention_records`: the record of one call
- `recomputed_weights`: weights from queries and keys
- `compact_floats`: queries and keys in 24 bits
- `batch_items`: one sequence of a batch
- `labels`: names of rows and columns
- `labelling`: assigning labels to records
- `token_labels`: labels from tokenizers
- `readable_tokens`: text of sub-word pieces
- `trace_files`: traces on disk
- `trace_format`: the schema of the file
- `viewer/`: the standalone page
- `notebook`: a page in a notebook's frame
- `heatmap`: a matrix as SVG, page or terminal text
- `heatmap_png`: a matrix as PNG
- `drawings`: a record as SVG or PNG
- `image_overlays`: maps over a picture
- `pooling`: maps in fewer cells
- `color_scale`: colours
- `fonts`: fonts for PNG
- `layer_names`: names of layers from module paths
- `head_mean`: the mean over heads
- `rollout`: attention through all layers
- `rollout_records`: rollouts as records of a page
- `faithfulness`: deletion and sufficiency curves
"""
