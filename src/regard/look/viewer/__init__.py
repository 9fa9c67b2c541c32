"""The standalone HTML page of a trace. Imports look only.

- `page`: the page as one HTML file
- `page_data`: descriptions and maps for the page
- `assets/`: its JavaScript and CSS, also served by the studio
"""
