"""Pictures of where attention looks: pages, drawings and terminal text. Imports core only."""
