"""Ollama's API below /api/: chat and generate over the chat route's plan, and what is told about the one model."""
