"""How each kind of attention call is observed while a model runs. Imports look and core."""
