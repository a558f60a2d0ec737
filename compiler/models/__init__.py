"""The MODEL argument of commands: configurations of Hugging Face read, built and shrunk; the user's
code as it runs."""
