"""A load generator for any server with the OpenAI API."""
