"""The viewer: a standalone HTML page that displays a trace. Its modules import modules of `regard.look` only.

- `page`: the page as one HTML file
- `page_data`: the data of a trace for the page
- `assets/`: the page's JavaScript and CSS, which the server of `regard.studio` also serves
"""
