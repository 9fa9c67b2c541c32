"""Ways to compute one attention: each says why it cannot serve a problem, what it costs, and serves it. Imports core."""
