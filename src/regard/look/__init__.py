"""Recording and drawing the attention weights of a model: `watch`, traces, drawings and pages.

The modules of this folder import `regard.core` only. A record holds the attention of one call, a trace holds the
records of a run of a model, and a map is the matrix of weights of one head.

- `watch`: `regard.watch`, which records a model's attention calls
- `capture/`: one module for each function whose attention calls are captured
- `trace`: `regard.Trace`, the records of a run
- `attention_records`: the record of one attention call
- `recomputed_weights`: weights that are recomputed from queries and keys
- `compact_floats`: queries and keys stored in 24 bits per number
- `batch_items`: one sequence of a batch, without its padding
- `labels`: names of the rows and columns of a map
- `labelling`: assigning labels to records
- `token_labels`: labels from tokenizers
- `readable_tokens`: readable text of sub-word pieces
- `trace_files`: traces in files
- `trace_format`: the schema of trace files
- `viewer/`: the standalone HTML page of a trace
- `notebook`: a page in a notebook's frame
- `heatmap`: a matrix as an SVG drawing, a page or terminal text
- `heatmap_png`: a matrix as a PNG picture
- `drawings`: a record as an SVG drawing or a PNG picture
- `image_overlays`: attention maps drawn over a picture
- `pooling`: maps reduced to fewer cells
- `color_scale`: colours of weights
- `fonts`: fonts for PNG pictures
- `layer_names`: readable names of layers from module paths
- `head_mean`: the mean over the heads of a record
- `rollout`: attention rollout through all layers of a stack
- `rollout_records`: rollouts as additional records of a page
- `faithfulness`: deletion and sufficiency curves of a map
"""
