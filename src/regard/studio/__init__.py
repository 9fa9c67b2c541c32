"""The studio: a web page on this machine over live runs and traces. May import every layer below it, never the cli."""
