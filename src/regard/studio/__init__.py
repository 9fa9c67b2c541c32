"""The studio: a local web application that displays runs (trained models) and traces of their attention.

Modules of the studio may import every other folder of regard except `cli`.

- `server`: starts the web server
- `app`: routes of the web application
- `request_guard`: checks of requests
- `limits`: limits of a request
- `trace_store`: the traces that the studio holds, by id
- `trace_descriptions`: the JSON description of a trace
- `map_tiles`: tiles of large attention maps
- `run_page`: the page of a run
- `metric_curves`: curves of training metrics
- `prediction_api`: predictions of any task
- `translation_api`: interactive translation
- `toy_translator`: a translator without training
- `playground`: attention in three stages
- `examples`: example traces
- `picture_examples`: example traces with pictures and sound
- `static/`: the JavaScript and CSS of the studio
"""
