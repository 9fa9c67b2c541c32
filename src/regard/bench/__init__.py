"""`regard bench`: the measurements, and the libraries compared. It may import every layer but studio and cli.

- `attention_bench`: `bench attention`
- `attention_cases`: its cases
- `attention_peers`: other libraries
- `cold_start`: `bench cold`, the first call of a process
- `decoding_bench`: `bench decoding`
- `decoding_peers`: HF Marian and CTranslate2
- `layers_bench`: `bench layers`
- `layer_kinds`: the layers it compares
- `scaling_bench`: `bench scaling`
- `scaling_costs`: the cost model of `bench scaling`
- `scaling_measurement`: the processes of `bench scaling`
- `sweep/`: `bench sweep`, random calls
- `command_output`: options, progress and tables of all commands
- `measurement`: time, memory and error
- `bar_chart`: SVG bars
- `line_chart`: SVG curves
- `marked_pages`: tables in documentation pages
"""
