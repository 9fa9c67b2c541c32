"""`regard bench`: what is measured, and the libraries it is compared with. May import every layer but studio and cli.

- `attention_bench`: `bench attention`
- `attention_cases`: its cases
- `attention_peers`: other libraries
- `decoding_bench`: `bench decoding`
- `decoding_peers`: HF Marian and CTranslate2
- `layers_bench`: `bench layers`
- `layer_kinds`: the layers it compares
- `scaling_bench`: `bench scaling`
- `scaling_costs`: its cost model
- `scaling_measurement`: its processes
- `sweep/`: `bench sweep`, random calls
- `measurement`: time, memory and error
- `bar_chart`: SVG bars
- `line_chart`: SVG curves
- `marked_pages`: tables in documentation pages
"""
