"""`regard bench`: what is measured, and the other libraries it is measured beside. Imports every layer below tasks."""
