"""Speech: what is said in a recording, and when each word or letter of it was heard."""
