"""The grammar of the built-in English and Chinese sentences. Imports only regard.data."""
