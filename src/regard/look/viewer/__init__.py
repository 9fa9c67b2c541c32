"""The standalone HTML page of a trace; its JavaScript is in `assets`. Imports look only."""
