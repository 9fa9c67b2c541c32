"""The studio: a local web page over runs and traces. May import every layer below it, never the cli.

- `server`: starts the web server
- `app`: routes
- `request_guard`: checks of requests
- `limits`: limits of a request
- `trace_store`: traces by id
- `trace_descriptions`: the description of a trace
- `map_tiles`: tiles of large maps
- `run_page`: the page of a run
- `metric_curves`: curves of metrics
- `prediction_api`: predictions of any task
- `translation_api`: interactive translation
- `toy_translator`: a translator without training
- `playground`: attention in three stages
- `examples`: example traces
- `picture_examples`: examples with pictures and sound
- `static/`: its JavaScript and CSS
"""
