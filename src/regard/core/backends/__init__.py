"""Ways to compute one attention: each says why it cannot serve a call, what it costs, and serves it. Imports core."""
