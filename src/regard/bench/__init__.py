"""`regard bench`: the measurements, and the libraries compared. This package may import every package of regard
except studio and cli.

- `attention_bench`: `bench attention`
- `attention_cases`: the cases of `bench attention`
- `attention_peers`: attention functions of other libraries, for `bench attention`
- `cold_start`: `bench cold`, the first call of a process
- `decoding_bench`: `bench decoding`
- `decoding_peers`: HF Marian and CTranslate2, for `bench decoding`
- `layers_bench`: `bench layers`
- `layer_kinds`: the layers that `bench layers` compares
- `scaling_bench`: `bench scaling`
- `scaling_costs`: the cost model of `bench scaling`
- `scaling_measurement`: the processes of `bench scaling`
- `sweep/`: `bench sweep`, which measures random calls
- `command_output`: options, progress and tables of all commands
- `measurement`: time, memory and error
- `bar_chart`: SVG bars
- `line_chart`: SVG curves
- `marked_pages`: tables in documentation pages
"""
